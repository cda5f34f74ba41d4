"""The soak notices an engine that hangs, forgets, or answers differently, and counts what it did."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from dataclasses import replace
from importlib import import_module
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
    lists: dict[str, Any] = {name: [] for name in traffic.LISTS}
    times = {"seconds": 3.5, "traffic_seconds": 3.0, "began": 100.0, "ended": 103.5, "widest_swing": 0.1}
    return {**dict.fromkeys(traffic.SUMS, 1), **lists, **times, **what}


@pytest.mark.parametrize("missing", traffic.NEEDED)
def test_a_segment_without_what_it_is_for_fails(missing: str) -> None:
    report = soak.report_of(Segment(0, 1.0, Path()), found(**{missing: 0}), None)
    assert not report["passed"]
    assert f"no {missing}" in report["problems"]


def test_no_answer_has_to_part() -> None:
    assert soak.report_of(Segment(0, 1.0, Path()), found(parted=0), None)["passed"]


@pytest.mark.parametrize(("part", "whole"), [("replays", "recorded"), ("tokens_compared", "replayed_tokens")])
def test_a_segment_that_compared_too_little_fails(part: str, whole: str) -> None:
    half = soak.report_of(Segment(0, 1.0, Path()), found(**{part: 50, whole: 100}), None)
    less = soak.report_of(Segment(0, 1.0, Path()), found(**{part: 49, whole: 100}), None)
    assert half["passed"]
    assert (less["passed"], less["problems"]) == (False, [f"49 {part} of 100 {whole}, not 50%"])


@pytest.mark.parametrize("kind", ["not_finite", "differing"])
def test_a_segment_with_a_finding_fails(kind: str) -> None:
    assert not soak.report_of(Segment(0, 1.0, Path()), found(**{kind: ["this"]}), None)["passed"]
    assert soak.report_of(Segment(0, 1.0, Path()), found(), None)["result"] == "passed"


@pytest.mark.parametrize(
    ("hit", "seen", "hangs", "passes"),
    [
        (20, 10, [], True),
        (20, 9, [], False),
        (19, 19, [], False),
        (0, 0, [], False),
        (20, 20, ["hung"], False),
    ],
)
def test_planted_damage_must_be_found(hit: int, seen: int, hangs: list[str], *, passes: bool) -> None:
    segment = Segment(0, 1.0, Path(), planted=True)
    given = found(hit=hit, found=seen, hangs=hangs, differing=["request 3: token 0 is 9, not 4"])
    assert soak.report_of(segment, given, None)["passed"] is passes
    died = soak.report_of(segment, {}, "exit status 1")
    assert not died["passed"]
    assert soak.line(died).startswith("planted: 0 of 0 damaged answers found")
    assert (segment.job.graphs, segment.base.name) == (False, "planted-soak")


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
    total = json.loads((tmp_path / "all.json").read_text())
    assert (total["requests"], total["seconds"], total["clock_seconds"]) == (2, 7.0, 3.5)
    assert "7 s, 6 s with arrivals, in 4 s" in capsys.readouterr().out
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


SERVED = 32


class FakeEngine:
    """Answers with tokens that depend on the prompt alone; a step gives the first `SERVED` requests one each.

    Attributes:
        added: Names of all requests, in their order.
        aborted: Names of those that were cancelled.
        steps: For each step, the names of the requests that are there.

    """

    def __init__(self, *, wrong: int | None = None) -> None:
        self.llm_engine = self
        self.damage = "none"
        self.damaged: list[list[str]] = []
        self.stuck: str | None = None
        self.running: dict[str, tuple[int, list[int], Any, list[int]]] = {}
        self.added: list[str] = []
        self.wrong = wrong
        self.aborted: list[str] = []
        self.steps: list[list[str]] = []

    def add_request(self, name: str, prompt: dict[str, list[int]], params: Any) -> None:
        """Take a request."""
        assert name not in self.added
        self.added.append(name)
        ids = prompt["prompt_token_ids"]
        self.running[name] = (sum(ids), ids, params, [])

    def abort_request(self, names: list[str]) -> None:
        """Drop requests."""
        self.aborted += names
        for name in names:
            del self.running[name]

    def has_unfinished_requests(self) -> bool:
        """Say whether there is work."""
        return bool(self.running)

    def step(self) -> list[Any]:
        """Give requests a token."""
        outputs = []
        self.steps.append(list(self.running))
        likely, unlikely = SimpleNamespace(logprob=-0.25), SimpleNamespace(logprob=-2.0)
        if self.damage != "none":
            self.damaged.append(list(self.running)[:SERVED])
        for name, (total, prompt, params, tokens) in list(self.running.items())[:SERVED]:
            if name == self.stuck:
                continue
            is_wrong = self.wrong is not None and name == f"again{self.wrong}"
            is_wrong |= self.damage != "none"
            tokens.append((total + len(tokens)) % 97 + is_wrong)
            entries = [{token: likely, 999: unlikely} for token in tokens]
            scored = None
            if params.prompt_logprobs and len(tokens) == 1:
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


class KeptPrompts(soak_worker.Prompts):
    """Makes the text of a request once."""

    def __init__(self, model: str) -> None:
        super().__init__(model)
        self.kept: dict[traffic.Request, list[int]] = {}

    def of(self, request: traffic.Request) -> list[int]:
        """Return the tokens of a request's prompt."""
        if request not in self.kept:
            self.kept[request] = super().of(request)
        return self.kept[request]


PROMPTS = KeptPrompts("glm5")
RECORDED, END = 200.0, 1200.0  # steps of the fake engine


def soaked(
    folder: Path, patch: pytest.MonkeyPatch, *, wrong: int | None = None, end: float = END
) -> tuple[dict[str, Any], FakeEngine]:
    under_test, engine = ran(folder, patch, wrong=wrong, end=end)
    return soak_worker.figures(under_test.closed), engine


def ran(
    folder: Path,
    patch: pytest.MonkeyPatch,
    *,
    wrong: int | None = None,
    end: float = END,
    damages: bool = False,
) -> tuple[soak_worker.Soak, FakeEngine]:
    patch.setattr(soak_worker, "time", Clock())
    patch.setattr(soak_worker, "Prompts", lambda _: PROMPTS)
    engine = FakeEngine(wrong=wrong)
    under_test = soak_worker.Soak(Segment(0, 1.0, folder), engine, engine if damages else None)
    under_test.traffic(RECORDED, end)
    engine.damage = "none"
    under_test.drain()
    assert not under_test.open
    return under_test, engine


def kinds(names: list[str]) -> dict[str, int]:
    """Count the requests of each kind."""
    return {kind: sum(name.startswith(kind) for name in names) for kind in ("first", "later", "again")}


def test_every_request_is_answered_cancelled_or_asked_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    report, engine = soaked(tmp_path, monkeypatch)
    added, aborted = kinds(engine.added), kinds(engine.aborted)
    assert report["requests"] == added["first"] + added["later"] > 60
    assert min(added.values()) > 20
    assert report["cancellations"] == len(engine.aborted)
    assert aborted["first"] > 0 < aborted["later"]
    assert aborted["again"] == 0
    assert added["first"] - aborted["first"] <= report["recorded"] <= added["first"]
    assert report["replays"] == added["again"] == report["recorded"]
    assert (report["differing"], report["not_finite"], report["parted"]) == ([], [], 0)
    assert report["tokens_compared"] == report["replayed_tokens"] > report["replays"]
    assert 0 < report["prompt_logprobs_compared"] < report["logprobs_checked"]
    assert report["logprobs_checked"] >= report["tokens"] > report["replayed_tokens"]
    assert (tmp_path / "soak-0.beat").exists()


def test_replays_are_mixed_into_traffic_that_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _, engine = soaked(tmp_path, monkeypatch)
    order = [kinds([name]) for name in engine.added]
    again = [place for place, kind in enumerate(order) if kind["again"]]
    later = [place for place, kind in enumerate(order) if kind["later"]]
    assert later[0] < again[-1]
    assert later[-1] > again[0]
    together = [kinds(step) for step in engine.steps]
    replaying = [step for step in together if step["again"]]
    assert max(step["again"] for step in replaying) == soak_worker.TOGETHER
    assert sum(step["later"] > 0 for step in replaying) > len(replaying) / 2
    assert any(step["first"] and step["again"] for step in together)  # nothing is drained in between
    assert max(step["later"] for step in together) == soak_worker.LATER_OPEN
    assert soak_worker.MOST_OPEN - 5 < max(sum(step.values()) for step in together) <= soak_worker.MOST_OPEN
    # The series goes on: no number is left out, and each arrives once.
    numbers = [
        int(name.removeprefix("first").removeprefix("later")) for name in engine.added if name[0] != "a"
    ]
    assert numbers == list(range(len(numbers)))


def test_traffic_depends_on_steps_and_the_seed_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (_, one), (_, other) = soaked(tmp_path, monkeypatch), soaked(tmp_path, monkeypatch)
    assert one.steps == other.steps


def test_another_answer_to_one_request_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    report, _ = soaked(tmp_path, monkeypatch, wrong=2)
    assert len(report["differing"]) == 1
    assert report["differing"][0].startswith("request 2: token 0")
    assert report["tokens_compared"] < report["replayed_tokens"]


def test_damaged_steps_are_found_in_the_answers_that_they_hit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    under_test, engine = ran(tmp_path, monkeypatch, damages=True)
    assert len(engine.damaged) > 5
    assert len(engine.steps) >= (len(engine.damaged) - 1) * soak_worker.DAMAGED_STEPS
    assert any(kinds(step)["again"] for step in engine.damaged)
    assert not any(kinds(step)["first"] for step in engine.damaged)  # what is recorded is right
    again = {name for step in engine.damaged for name in step if name.startswith("again")}
    assert {f"again{name}" for name in under_test.hit} <= again
    told = soak_worker.planted(under_test)
    assert told["hit"] == len(under_test.hit) > 10
    assert told["found"] == told["hit"]
    undamaged, _ = ran(tmp_path, monkeypatch)
    assert soak_worker.planted(undamaged) == {"hit": 0, "found": 0}


def test_steps_without_a_token_are_no_sign_of_life(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(soak_worker, "Prompts", lambda _: PROMPTS)
    engine = FakeEngine()
    under_test = soak_worker.Soak(Segment(0, 1.0, tmp_path), engine)
    request = next(traffic.requests(1))
    under_test.add(replace(request, cancel_after=None), soak_worker.FIRST)
    [engine.stuck] = under_test.open
    for _ in range(5):
        under_test.step()
    assert not under_test.beat.exists()
    engine.stuck = None
    under_test.step()
    assert under_test.beat.exists()


def test_what_only_fills_the_engine_keeps_no_ranks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    under_test, _ = ran(tmp_path, monkeypatch)
    assert not any(asked.answer.ranked for asked in under_test.closed[soak_worker.LATER])
    for kind in (soak_worker.FIRST, soak_worker.AGAIN):
        assert all(len(one.answer.ranked) == len(one.answer.tokens) for one in under_test.closed[kind])


def test_a_segment_that_asks_too_few_again_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def judged(end: float) -> list[str]:
        report, _ = soaked(tmp_path, monkeypatch, end=end)
        given = found(**report)
        problems: list[str] = soak.report_of(Segment(0, 1.0, tmp_path), given, None)["problems"]
        return problems

    assert judged(END) == []
    [problem] = judged(RECORDED + 60)
    assert "replays of" in problem


@pytest.mark.parametrize("lost", [False, True])
def test_the_worker_writes_what_passes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, lost: bool
) -> None:
    segment = Segment(0, 4.0, tmp_path)
    path = segment.base.with_suffix(".json")
    path.write_text(json.dumps({"number": 0, "seconds": 4.0, "folder": str(tmp_path)}))
    # Imported here: the kernels' tests have to pretend a GPU before. And without importing the real class.
    monkeypatch.setitem(vars(import_module("vllm")), "LLM", lambda **_: FakeEngine())
    monkeypatch.setattr(
        soak_worker,
        "BatchWatch",
        lambda _: SimpleNamespace(preemptions=3, as_json=lambda: {"preemptions": 3}),
    )
    monkeypatch.setattr(soak_worker, "Prompts", lambda _: PROMPTS)
    monkeypatch.setattr(soak_worker, "environment", lambda _: {})
    monkeypatch.setattr(soak_worker, "forbid_autotuning", lambda: None)
    monkeypatch.setattr(sys, "argv", ["soak_worker", str(path)])
    if lost:  # the engine forgets a request
        monkeypatch.setattr(soak_worker.Soak, "drain", lambda soaking: soaking.open.update(first7="x"))
    began = time.time()
    soak_worker.main()
    result = json.loads(path.with_suffix(".result.json").read_text())
    if lost:
        assert "first7: it never ended" in result["differing"]
        return
    assert soak.report_of(segment, result, None)["problems"] == []
    assert began <= result["began"] < result["ended"] <= time.time()
    assert (
        3.0
        < result["traffic_seconds"]
        <= result["seconds"]
        == pytest.approx(result["ended"] - result["began"], abs=0.5)
    )
    records = json.loads(path.with_suffix(".records.json").read_text())
    assert sum(bool(record["answer"]["tokens"]) for record in records) == result["recorded"]


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
