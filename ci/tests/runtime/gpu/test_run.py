"""A call for a GPU host is refused when it cannot end in time, and shares its time among what it runs."""

from __future__ import annotations

import subprocess
import tarfile
from itertools import pairwise
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import engine_proof
import pytest
import run
import wheel_files

if TYPE_CHECKING:
    from pathlib import Path

WORDS = ["--files", "f", "--site", "s", "--out", "o"]


@pytest.mark.parametrize(
    ("steps", "seconds"),
    [
        (["fp8"], 399), (["drafts"], 299), (["wide", "groups"], 419), (["soak"], 280), (["dcp"], 379),
        (["pipeline"], 219), (["wide-drafts"], 149), (["dcp-merge"], 189),
        (["kernel-bench", "fp8"], 474), (["kernel-check", "sanitizer", "kernel-bench"], 224),
        (["kernel-check"], 89), (["logits-check"], 44),
    ],
)  # fmt: skip
def test_what_does_not_fit_is_refused(
    steps: list[str], seconds: int, capsys: pytest.CaptureFixture[str]
) -> None:
    words = [*WORDS, "--steps", *steps, "--seconds"]
    with pytest.raises(SystemExit):
        run.parse_arguments([*words, str(seconds)])
    assert "need some" in capsys.readouterr().err
    assert run.parse_arguments([*words, "560"]).steps == steps


def test_chosen_modes_may_take_less() -> None:
    found = run.parse_arguments(
        [*WORDS, "--steps", "fp8", "--seconds", "100", "--modes", "glm5-v2-graphs-mtp1-fp8_ds_mla"]
    )
    assert found.modes == ["glm5-v2-graphs-mtp1-fp8_ds_mla"]


def test_what_is_left_of_a_proof_may_take_less(tmp_path: Path) -> None:
    session = Started(tmp_path, "fp8", "--reuse", "--seconds", "150")
    session.start = lambda step, *options: session.started.append((step, {"last": options[-1]}))  # type: ignore[method-assign]
    session.start_proof(["fp8"], 0.0)
    assert session.started == [("fp8", {"last": "--reuse"})]


def test_results_of_another_wheel_are_not_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def install(name: str, *words: str) -> None:
        monkeypatch.setattr(wheel_files, "install", lambda *_: {"wheel": {"name": name}})
        Started(tmp_path, "fp8", *words).install(tmp_path)

    install("old", "--reuse")  # nothing is there yet
    with pytest.raises(wheel_files.WheelFilesError, match="holds results of old"):
        install("new", "--reuse")
    install("old", "--reuse")
    install("new")


def test_every_proof_is_a_step_with_its_cards() -> None:
    assert {proof.name for proof in run.PROOFS.values()} == set(engine_proof.PROOFS)
    for proof in run.PROOFS.values():
        assert engine_proof.PROOFS[proof.name].ranks == proof.cards
    assert not {"indexer", "soak", "fp8", "drafts", "dcp"} & set(run.DEFAULT_STEPS)


class Started(run.Session):
    """Notes what would be started."""

    def __init__(self, folder: Path, *words: str) -> None:
        super().__init__(
            run.parse_arguments([*WORDS, "--work", str(folder), "--seconds", "560", "--steps", *words])
        )
        self.started: list[tuple[str, dict[str, str]]] = []

    def start(self, step: str, *options: str) -> Any:
        """Start nothing."""
        self.started.append((step, dict(pairwise(options))))
        return SimpleNamespace(wait=lambda _: 0)

    def finish(self, step: str, process: Any) -> None:
        """Pass."""
        del process
        self.results[step] = "passed"


def test_proofs_run_one_after_the_other_within_the_time(tmp_path: Path) -> None:
    session = Started(tmp_path, "allocations", "sync", "soak")
    session.run(["allocations", "sync", "soak"])
    assert [step for step, _ in session.started] == ["soak", "allocations", "sync"]
    assert set(session.results) == {"allocations", "sync", "soak"}
    soak, first, last = (float(options["--seconds"]) for _, options in session.started)
    assert 490 < soak <= 560 - run.SOAK_END
    assert first == pytest.approx((560 - 10) * 140 / 290, abs=5)
    assert 540 < last <= 550  # nothing was used of the first one's share


def test_the_default_is_what_it_was(tmp_path: Path) -> None:
    session = Started(tmp_path, *run.DEFAULT_STEPS)
    session.run(run.DEFAULT_STEPS)
    assert [step for step, _ in session.started] == [
        "engine", "kernel-check", "logits-check", "sanitizer", "kernel-bench", "logits-bench",
    ]  # fmt: skip


class Clock:
    """Time that passes only while somebody waits."""

    def __init__(self) -> None:
        self.now = 0.0

    def monotonic(self) -> float:
        """Return the time."""
        return self.now


@pytest.mark.parametrize(("seconds", "waits", "has"), [("240", 90, 40), ("300", 130, 60), ("600", 430, 60)])
def test_the_sanitizers_wait_for_binaries_as_long_as_they_keep_their_time(
    seconds: str, waits: float, has: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = Clock()
    monkeypatch.setattr(run, "time", clock)
    steps = ["kernel-check", "sanitizer", "kernel-bench"]
    session = Started(tmp_path, *steps)
    session.deadline = float(seconds)

    def never(limit: float) -> None:
        clock.now += limit
        raise subprocess.TimeoutExpired("kernel_check.py", limit)

    start = session.start
    session.start = lambda step, *options: (start(step, *options), SimpleNamespace(wait=never))[1]  # type: ignore[method-assign]
    session.run(steps)
    assert clock.now == waits
    assert {step: options.get("--seconds") for step, options in session.started} == {
        "kernel-check": None, "sanitizer": f"{has}", "kernel-bench": None,
    }  # fmt: skip


def test_logs_and_log_probabilities_are_kept_apart(tmp_path: Path) -> None:
    session = Started(tmp_path, "fp8", "soak")
    session.out = tmp_path / "out"
    for name in (
        "out/x",
        "fp8/a.log",
        "fp8/a.npz",
        "fp8/a.result.json",
        "fp8/host.json",
        "soak/soak-0.log",
        "wide/b.npz",
        "wide.txt",
        "sanitizer/a.log",
        "fp8.txt",
    ):
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(name)
    session.results = {"fp8": "passed", "soak": "passed"}  # wide: by an earlier call
    session.keep_logs()
    held = {}
    for archive in session.out.glob("*.tar.gz"):
        with tarfile.open(archive) as opened:
            held[archive.name] = set(opened.getnames())
    assert held == {
        "logs.tar.gz": {"fp8.txt", "fp8/a.log", "fp8/a.result.json", "fp8/host.json", "soak/soak-0.log"},
        "arrays.tar.gz": {"fp8/a.npz"},
    }
