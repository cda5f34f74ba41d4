"""The soak notices an engine that hangs, forgets, or answers differently, and counts what it did."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import soak
import soak_worker
import traffic
from soak import Segment, Watchdog

FINE = """
import faulthandler, pathlib, signal, sys, time
faulthandler.register(signal.SIGUSR1)
for _ in range(3):
    pathlib.Path(sys.argv[1]).touch()
    time.sleep(0.1)
"""
HANGING = FINE + "\ndef stuck():\n    time.sleep(60)\nstuck()\n"


def watch(program: str, folder: Path, *, start: float = 5.0) -> tuple[str | None, str]:
    beat, log = folder / "beat", folder / "log"
    with log.open("wb") as output:
        process = subprocess.Popen([sys.executable, "-c", program, str(beat)], stdout=output, stderr=output)
        error = Watchdog(beat, limit=1.0, start=start).watch(process)
    assert process.poll() is not None
    return error, log.read_text()


def test_an_engine_that_works_is_left_alone(tmp_path: Path) -> None:
    assert watch(FINE, tmp_path) == (None, "")


def test_an_engine_that_fails_is_no_hang(tmp_path: Path) -> None:
    assert watch("import sys; sys.exit(3)", tmp_path)[0] == "exit status 3"


def test_a_hang_is_found_and_the_log_says_where(tmp_path: Path) -> None:
    began = time.monotonic()
    error, log = watch(HANGING, tmp_path)
    assert error == "hung: no step for 1 s"
    assert "stuck" not in HANGING.split("def")[0]
    assert "in stuck" in log
    assert time.monotonic() - began < 30


def test_an_engine_that_never_starts_is_ended(tmp_path: Path) -> None:
    error, _ = watch(
        "import faulthandler, signal, time; faulthandler.register(signal.SIGUSR1); time.sleep(60)",
        tmp_path,
        start=2.0,
    )
    assert error is not None


@pytest.mark.parametrize(
    "words",
    [
        ["run", "--segments", "1", "1", "--seconds", "5"],
        ["run", "--segments", "-1", "--seconds", "5"],
        ["run", "--segments", "1", "--seconds", "0"],
        ["run", "--seconds", "5"],
        ["merge"],
    ],
)
def test_wrong_arguments_are_refused(words: list[str]) -> None:
    with pytest.raises(SystemExit):
        soak.parse_arguments([*words, "--out", "o", *(["--work", "w"] if words[0] == "run" else [])])


def test_segments_take_all_engines_in_turn() -> None:
    jobs = [Segment(number, 1.0, Path()).job for number in range(8)]
    assert jobs == [*soak.ENGINES, *soak.ENGINES]


def found(**what: Any) -> dict[str, Any]:
    return {**dict.fromkeys(traffic.SUMS, 1), **{name: [] for name in traffic.LISTS}, "seconds": 3.0, **what}


@pytest.mark.parametrize("missing", ["preemptions", "cancellations", "replays"])
def test_a_segment_without_what_it_is_for_fails(missing: str) -> None:
    report = soak.report_of(Segment(0, 1.0, Path()), found(**{missing: 0}), None)
    assert (report["passed"], report["problems"]) == (False, [f"no {missing}"])


@pytest.mark.parametrize("kind", ["not_finite", "differing"])
def test_a_segment_with_a_finding_fails(kind: str) -> None:
    assert not soak.report_of(Segment(0, 1.0, Path()), found(**{kind: ["this"]}), None)["passed"]
    assert soak.report_of(Segment(0, 1.0, Path()), found(), None)["result"] == "passed"


def test_a_hang_is_reported() -> None:
    report = soak.report_of(Segment(0, 1.0, Path()), {}, "hung: no step for 60 s")
    assert report["hangs"] == ["hung: no step for 60 s"]
    assert report["result"] == "FAILED"


def test_reports_are_merged_by_the_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    files = {"wheel": {"sha256": "a"}, "stack_id": "b"}
    for number in (0, 1):
        report = soak.report_of(Segment(number, 1.0, Path()), found(), None) | {
            "host": {},
            "wheel_files": files,
        }
        (tmp_path / f"{number}.json").write_text(json.dumps(report))
    words = ["soak", "merge", "--least", "6", "--out", str(tmp_path / "all.json"), str(tmp_path / "0.json")]
    monkeypatch.setattr(sys, "argv", [*words, str(tmp_path / "1.json")])
    assert soak.main() == 0
    assert json.loads((tmp_path / "all.json").read_text())["requests"] == 2
    monkeypatch.setattr(sys, "argv", [*words, str(tmp_path / "0.json")])
    assert soak.main() == 2
    monkeypatch.setattr(sys, "argv", [word for word in words if word not in ("--least", "6")])
    assert soak.main() == 2
    assert "3 s of traffic, not 1800" in capsys.readouterr().err


def test_a_report_is_there_as_soon_as_its_segment_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[bool] = []

    def run_segment(segment: Segment, _: Any) -> dict[str, Any]:
        first = tmp_path / "out" / "soak-4.json"
        if segment.number == 5:
            seen.append(wait_for(first))
        return soak.report_of(segment, found(), None)

    monkeypatch.setattr(soak, "run_segment", run_segment)
    monkeypatch.setattr(soak, "host", lambda *_, **__: {"torch": "2"})
    monkeypatch.setattr("small_models.write_model", lambda *_: None)
    words = ["run", "--segments", "4", "5", "--seconds", "9", "--out", f"{tmp_path / 'out'}", "--work"]
    assert soak.run(soak.parse_arguments([*words, str(tmp_path)]))
    assert seen == [True]
    assert json.loads((tmp_path / "out" / "soak-5.json").read_text())["host"] == {"torch": "2"}


def wait_for(path: Path) -> bool:
    """Return whether a file appears within some seconds."""
    limit = time.monotonic() + 10
    while not path.exists() and time.monotonic() < limit:
        time.sleep(0.05)
    return path.exists()


class FakeEngine:
    """Answers with tokens that depend on the prompt alone; each step gives every request one."""

    def __init__(self, *, wrong: int | None = None) -> None:
        self.llm_engine = self
        self.running: dict[str, tuple[list[int], Any, list[int]]] = {}
        self.added = 0
        self.wrong = wrong
        self.aborted: list[str] = []

    def add_request(self, name: str, prompt: dict[str, list[int]], params: Any) -> None:
        """Take a request."""
        self.added += 1
        self.running[name] = (prompt["prompt_token_ids"], params, [])

    def abort_request(self, names: list[str]) -> None:
        """Drop requests."""
        self.aborted += names
        for name in names:
            del self.running[name]

    def has_unfinished_requests(self) -> bool:
        """Say whether there is work."""
        return bool(self.running)

    def step(self) -> list[Any]:
        """Give every request a token."""
        outputs = []
        for name, (prompt, params, tokens) in list(self.running.items()):
            is_wrong = self.wrong is not None and name == f"again{self.wrong}"
            tokens.append((sum(prompt) + len(tokens)) % 97 + is_wrong)
            entries = [
                {token: SimpleNamespace(logprob=-0.25), 999: SimpleNamespace(logprob=-2.0)}
                for token in tokens
            ]
            scored = None
            if params.prompt_logprobs:
                scored = [None, *({token: SimpleNamespace(logprob=-0.5)} for token in prompt[1:])]
            finished = len(tokens) == params.max_tokens
            if finished:
                del self.running[name]
            outputs.append(
                SimpleNamespace(
                    request_id=name,
                    finished=finished,
                    prompt_token_ids=prompt,
                    prompt_logprobs=scored,
                    outputs=[SimpleNamespace(token_ids=list(tokens), logprobs=entries)],
                )
            )
        return outputs


class Clock:
    """Time that passes by a second each time somebody looks."""

    def __init__(self) -> None:
        self.now = 0.0

    def monotonic(self) -> float:
        """Return the time."""
        self.now += 1.0
        return self.now


def soaked(
    folder: Path, patch: pytest.MonkeyPatch, *, wrong: int | None = None
) -> tuple[dict[str, Any], FakeEngine]:
    patch.setattr(soak_worker, "time", Clock())
    engine = FakeEngine(wrong=wrong)
    segment = Segment(0, 1.0, folder)
    under_test = soak_worker.Soak(segment, engine)
    recorded = under_test.traffic(120.0)
    replayed = under_test.replay(recorded, 1e6)
    assert not under_test.open
    return soak_worker.figures(recorded, replayed), engine


def test_every_request_is_answered_cancelled_or_asked_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    report, engine = soaked(tmp_path, monkeypatch)
    assert report["requests"] > 20
    assert report["cancellations"] == len(engine.aborted) > 0
    assert report["requests"] - report["cancellations"] <= report["replays"] <= report["requests"]
    assert engine.added == report["requests"] + report["replays"]
    assert (report["differing"], report["not_finite"]) == ([], [])
    assert report["logprobs_checked"] >= report["tokens"] > report["requests"]
    assert (tmp_path / "soak-0.beat").exists()


def test_another_answer_to_one_request_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    report, _ = soaked(tmp_path, monkeypatch, wrong=2)
    assert len(report["differing"]) == 1
    assert report["differing"][0].startswith("request 2: token 0")


def test_the_worker_is_told_what_the_segment_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    given = Segment(5, 7.5, tmp_path)
    monkeypatch.setattr(sys, "executable", "/bin/true")
    monkeypatch.setattr(soak, "host", lambda *_, **__: {"torch": "2"})
    report = soak.run_segment(given, {"stack_id": "x"})
    assert (report["passed"], report["segment"], report["wheel_files"]) == (False, 5, {"stack_id": "x"})
    told = json.loads(given.base.with_suffix(".json").read_text())
    assert Segment(folder=Path(told.pop("folder")), **told) == given


def test_prompts_that_begin_alike_do() -> None:
    prompts = soak_worker.Prompts("glm5")
    some = [request for request, _ in zip(traffic.requests(1), range(80), strict=False)]
    shared = [request for request in some if request.prefix and request.prefix[1] > 3]
    assert shared
    first = {request.seed: request for request in some}
    for request in shared[:5]:
        assert request.prefix is not None
        source, length = request.prefix
        text = prompts.of(request)
        assert len(text) == request.length
        if first[source].prefix is None:
            assert text[:length] == prompts.of(first[source])[:length]
