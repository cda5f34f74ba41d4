"""The reports of the GPU host in the repository say what they must, and what they say passes."""

from __future__ import annotations

import copy
import importlib
import itertools
import json
import subprocess
import sys
from typing import TYPE_CHECKING, Any

import pytest

from realstacks import ROOT

if TYPE_CHECKING:
    from collections.abc import Callable

RESULTS = ROOT / "ci" / "gpu" / "results"
MODELS = ("glm5", "glm53flash")
FP8 = "fp8_ds_mla"
USUAL = ("v2-graphs-{}", "v2-eager-{}", f"v2-graphs-{{}}-{FP8}", "v1-graphs-{}")


def usual(model: str, graphs: str, eager: str) -> set[str]:
    """Return the modes of a proof that need not try everything: what they end in with graphs and without."""
    return {f"{model}-{how.format(eager if 'eager' in how else graphs)}" for how in USUAL}


MODES = {
    "fp8": {
        *(
            f"{model}-{how}-{FP8}"
            for model in MODELS
            for how in (
                *(f"{how}-{task}" for how in ("v2", "v1") for task in ("graphs-auto", "eager-mqa")),
                *(f"v2-graphs-mtp{draft}" for draft in range(1, 6)),
                *(f"v2-eager-mtp{draft}" for draft in (1, 3, 5)),
            )
        ),
        *(f"glm5-v1-{how}-{FP8}" for how in ("graphs-mtp1", "graphs-mtp3", "graphs-mtp5", "eager-mtp2")),
        *(f"{model}-v2-graphs-auto-{name}" for model in MODELS for name in ("fp8", "fp8_e4m3")),
    },
    "drafts": {
        *(f"{model}-v2-graphs-mtp{draft}" for model in MODELS for draft in (1, 3, 5)),
        "glm5-v1-graphs-mtp3",
    },
    "wide": {
        f"{model}-v2-{how}" for model in MODELS for how in ("graphs-wide", "graphs-wide-" + FP8, "eager-wide")
    },
    "groups": usual("glm52", "auto", "mqa"),
    "dcp": {
        *usual("glm5", "auto-tp2-dcp2", "mqa-tp2-dcp2"),
        *usual("glm53flash", "auto-tp2-dcp2", "mqa-tp2-dcp2") - {"glm53flash-v1-graphs-auto-tp2-dcp2"},
        *(f"{model}-v2-graphs-mtp2-tp2-dcp2" for model in MODELS),
    },
    "pipeline": usual("glm5", "long-pp2", "long-pp2"),
}
"""By report. `ci/tests/runtime/gpu/test_jobs.py` compares the reports with the proofs, which need PyTorch."""
DAMAGES = {
    "glm5-v2-eager-mqa-fp8_ds_mla": {"zero", "shift", "scale", "tail"},
    "glm53flash-v2-eager-mqa-fp8_ds_mla": {"zero", "shift", "scale", "shift_pool"},
    "glm52-v2-eager-mqa": {"zero", "shift"},
    **{f"{model}-v2-eager-mqa-tp2-dcp2": {"rank_zero", "lse", "shift"} for model in MODELS},
}
"""By mode."""


def report(name: str) -> dict[str, Any]:
    document: dict[str, Any] = json.loads((RESULTS / f"{name}.json").read_text())
    return document


@pytest.mark.parametrize("path", sorted(RESULTS.glob("*.json")), ids=lambda path: path.stem)
def test_every_report_names_what_it_measured(path: Any) -> None:
    document = json.loads(path.read_text())
    assert document["result"] == "passed"
    files = document["wheel_files"]
    assert len(files["commit"]) == 40
    assert len(files["stack_id"]) == len(files["wheel"]["sha256"]) == 64
    host = document.get("host", document)
    assert host["torch"]
    assert host["triton"]
    assert "H200" in (host.get("card") or host["gpu"])
    # The members' hashes are those of the wheel, checked on the host.
    assert "vllm/v1/attention/ops/triton_mla_sparse.py" in files["members"]


def test_the_kernel_was_within_its_bounds_everywhere() -> None:
    document = report("kernel-check")
    assert document["shapes"] >= 300
    assert document["problems"] == []
    assert document["variants_launched"] <= document["variants_compiled"]


def check_sanitizer(document: dict[str, Any]) -> None:
    """Both tools saw the same shapes, of each of which a kernel was launched, and found what was planted."""
    checks = document["checks"]
    planted = {name for name in checks if "planted" in name}
    assert planted == {"memcheck-planted", "memcheck-planted-fp8", "racecheck-planted"}
    assert all(checks[name]["found"] > 0 for name in planted)
    assert document["problems"] == []
    for tool in ("memcheck", "racecheck"):
        check = checks[tool]
        assert (check["refused"], check["found"], check["exit_status"], check["problems"]) == (
            False,
            0,
            0,
            [],
        )
        assert len({json.dumps(shape) for shape in check["shapes"]}) == len(check["shapes"]) >= 20
        assert check["shapes"] == checks["memcheck"]["shapes"]
        for shape in check["shapes"]:
            kernel = "SparseMLAFp8SplitKernel" if shape["fp8"] else "SparseMLASplitKernel"
            parts = (f"{kernel}.CompileKey(", f"dtype={shape['dtype']},", f"rope_dim={shape['rope']},")
            assert any(all(part in variant for part in parts) for variant in check["launched"]), parts
        assert {shape["fp8"] for shape in check["shapes"]} == {False, True}


def check_soak(whole: dict[str, Any], segments: list[dict[str, Any]]) -> None:
    """Half an hour of traffic without a finding, which is the sum of its segments."""
    assert whole["traffic_seconds"] >= 1800
    assert len(whole["engines"]) == 4  # two models, two caches
    assert whole["replays"] > 0
    assert whole["segments"] == sorted(segment["segment"] for segment in segments)
    assert whole["engines"] == sorted({segment["engine"] for segment in segments})
    numbers = {name for name, value in whole.items() if type(value) in (int, float)}
    numbers -= {"schema", "clock_seconds"}
    union = importlib.import_module("traffic").union
    clock = union((segment["began"], segment["ended"]) for segment in segments)
    assert whole["clock_seconds"] == pytest.approx(clock)
    for segment in segments:
        assert segment["replays"] >= 0.5 * segment["recorded"] > 0
        assert segment["tokens_compared"] >= 0.5 * segment["replayed_tokens"] > 0
        assert min(segment["cancellations"], segment["preemptions"], segment["logprobs_checked"]) > 0
    for name in numbers:
        assert whole[name] == pytest.approx(sum(segment[name] for segment in segments)), name
    for finding in ("not_finite", "differing", "hangs"):
        assert whole[finding] == []
        assert all(segment[finding] == [] for segment in segments)
    assert all(segment["passed"] for segment in (whole, *segments))
    assert len({segment["wheel_files"]["wheel"]["sha256"] for segment in (whole, *segments)}) == 1


def check_compared(name: str, document: dict[str, Any]) -> None:
    """All modes are there, within their bounds, and all damage was seen."""
    names = [mode["mode"] for mode in document["modes"]]
    assert len(set(names)) == len(names)
    assert set(names) == MODES[name]
    assert document["passed"]
    damaged = [damage["engine"].removesuffix("-triton_mla_sparse") for damage in document["damage"]]
    assert sorted(damaged) == sorted(set(names) & DAMAGES.keys())
    for mode in document["modes"]:
        check_mode(mode)
    for damage in document["damage"]:
        check_damage(damage)


def check_mode(mode: dict[str, Any]) -> None:
    """One mode kept its bounds, and our kernels ran."""
    assert (mode["passed"], mode["problems"]) == (True, [])
    name = mode["mode"]
    short = {"short_prefill", "short_decode"} if "-auto" in name or "-mqa" in name else set()
    assert mode["differences"].keys() == {"prefill", "decode"} | short
    for part in mode["differences"].values():
        assert 0 < part["native"] < 0.1
        assert part["bound"] == pytest.approx(1.5 * part["native"])
        assert part["ours"]
        assert all(value <= part["bound"] for value in part["ours"].values()), name
        assert part["share"] >= 0.5
    for phase in ("prefill", "decode"):
        assert launched(mode["launches"][f"{phase}_batch"]["kernels"], phase) > 0
    if name.startswith("glm52"):
        decode = mode["launches"]["decode_batch"]
        conversions, calls = (launched(decode[kind], "decode") for kind in ("conversions", "calls"))
        assert 0 < conversions <= 0.64 * calls, "five layers share three top-k"
    assert "-wide" not in name or mode["batches"]["decodes"] > 64
    assert "-pp2" not in name or mode["batches"]["prefills_in_flight"] > 1
    if "-mtp" in name:
        accepted = accepted_share(mode["drafts"])
        assert accepted >= 0.1
        others = mode.get("reference_drafts", {}).values()
        assert all(accepted >= accepted_share(other) - 0.1 for other in others)


def launched(counts: dict[str, dict[str, int]], phase: str) -> int:
    """Return how often something ran in a phase, replays of graphs included."""
    return sum(counts[how].get(phase, 0) for how in ("eager", "replayed"))


def accepted_share(drafts: dict[str, int]) -> float:
    """Return which share of the drafted tokens was accepted."""
    assert 0 < drafts["accepted"] <= drafts["drafted"]
    return drafts["accepted"] / drafts["drafted"]


def check_damage(damage: dict[str, Any]) -> None:
    """Each kind of damage changed as much as it must."""
    mode = damage["engine"].removesuffix("-triton_mla_sparse")
    assert damage["passed"]
    assert damage["ratio"].keys() == damage["mean_absolute_change"].keys() == DAMAGES[mode]
    assert damage["required_ratio"] >= 10
    for kind, ratio in damage["ratio"].items():
        assert ratio >= damage["required_ratio"]
        assert ratio == pytest.approx(damage["mean_absolute_change"][kind] / damage["bound"])


def check_tune(document: dict[str, Any]) -> None:
    """Every tile compiled, and every point was timed."""
    tune = importlib.import_module("tune")
    points = set(itertools.product(tune.HEADS, tune.TOKENS))
    assert not [tile for tile in document["compiled"] if "error" in tile]
    assert document["compiled"]
    assert {(time["heads"], time["tokens"]) for time in document["timings"]} == points
    assert all(time["us"] > 0 for time in document["timings"])
    if "chosen" in document:
        assert {(one["heads"], one["tokens"]) for one in document["chosen"]} == points
        assert all((one["ratio"] or 0.0) >= 1.0 for one in document["chosen"])


def segments() -> list[dict[str, Any]]:
    """Return the reports of the soak's segments."""
    return [json.loads(path.read_text()) for path in RESULTS.glob("soak-*.json")]


@pytest.fixture(autouse=True)
def scripts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the scripts of the host be imported."""
    monkeypatch.syspath_prepend(ROOT / "ci" / "gpu")


def test_the_sanitizers_found_nothing_and_could_have() -> None:
    check_sanitizer(report("sanitizer"))


def test_the_soak_was_half_an_hour_without_a_finding() -> None:
    check_soak(report("soak"), segments())


@pytest.mark.parametrize("name", MODES)
def test_the_complete_backend_was_within_its_bounds(name: str) -> None:
    check_compared(name, report(name))


@pytest.mark.parametrize("path", sorted((RESULTS / "tune").glob("*.json")), ids=lambda path: path.stem)
def test_the_sweeps_over_tiles_are_whole(path: Any) -> None:
    check_tune(json.loads(path.read_text()))


def first(document: dict[str, Any], word: str = "") -> dict[str, Any]:
    """Return the first mode whose name has a word."""
    found: dict[str, Any] = next(mode for mode in document["modes"] if word in mode["mode"])
    return found


def prefill(document: dict[str, Any]) -> dict[str, Any]:
    """Return the differences of the first mode in prefill."""
    found: dict[str, Any] = first(document)["differences"]["prefill"]
    return found


def too_far(document: dict[str, Any]) -> None:
    """Put the first mode beyond its bound, and one reference after it within."""
    part = prefill(document)
    part["ours"] = {"beyond": 1.01 * part["bound"], "within": 0.0}


COMPARED_DAMAGES: dict[str, tuple[str, Callable[[dict[str, Any]], object]]] = {
    "a mode is missing": ("fp8", lambda d: d["modes"].remove(first(d, "mtp4"))),
    "a mode is there twice": ("wide", lambda d: d["modes"].append(first(d))),
    "a mode is called otherwise": ("dcp", lambda d: first(d).update(mode="glm5-v2-graphs-auto")),
    "a mode failed": ("groups", lambda d: first(d).update(passed=False)),
    "a mode has a problem": ("pipeline", lambda d: first(d)["problems"].append("")),
    "an engine died": ("wide", lambda d: first(d).pop("differences")),
    "a part is missing": ("fp8", lambda d: first(d)["differences"].pop("short_decode")),
    "too far": ("dcp", too_far),
    "not a number": ("dcp", lambda d: prefill(d).update(ours={"a": float("nan")})),
    "no reference": ("dcp", lambda d: prefill(d).update(ours={})),
    "another bound": ("wide", lambda d: prefill(d).update(bound=2 * prefill(d)["bound"])),
    "no bound": ("wide", lambda d: prefill(d).update(native=float("inf"), bound=float("inf"))),
    "little compared": ("fp8", lambda d: first(d, "mtp3")["differences"]["decode"].update(share=0.49)),
    "a top-k is not shared": (
        "groups",
        lambda d: first(d)["launches"]["decode_batch"].update(
            conversions=first(d)["launches"]["decode_batch"]["calls"]
        ),
    ),
    "conversions were not counted": (
        "groups",
        lambda d: first(d)["launches"]["decode_batch"].pop("conversions"),
    ),
    "no launch": ("groups", lambda d: first(d)["launches"]["prefill_batch"]["kernels"].update(eager={})),
    "no drafts": ("fp8", lambda d: first(d, "mtp3").update(drafts={"drafted": 0, "accepted": 0})),
    "few drafts": ("dcp", lambda d: first(d, "mtp2").update(drafts={"drafted": 100, "accepted": 9})),
    "fewer drafts than a reference": (
        "dcp",
        lambda d: first(d, "mtp2").update(reference_drafts={"a": {"drafted": 100, "accepted": 99}}),
    ),
    "not wide": ("wide", lambda d: first(d)["batches"].update(decodes=64)),
    "one prefill at a time": ("pipeline", lambda d: first(d)["batches"].update(prefills_in_flight=1)),
    "damage is missing": ("dcp", lambda d: d["damage"].pop()),
    "damage was not seen": ("fp8", lambda d: d["damage"][1].update(passed=False)),
    "a kind of damage is missing": ("fp8", lambda d: d["damage"][0]["ratio"].pop("tail")),
    "little damage": ("groups", lambda d: d["damage"][0]["ratio"].update(shift=9.9)),
    "another ratio": ("groups", lambda d: d["damage"][0]["ratio"].update(shift=1e4)),
    "little is required": ("dcp", lambda d: d["damage"][0].update(required_ratio=1.0)),
    "the report failed": ("pipeline", lambda d: d.update(passed=False)),
}


@pytest.mark.parametrize("what", COMPARED_DAMAGES)
def test_a_damaged_comparison_is_found(what: str) -> None:
    name, damage = COMPARED_DAMAGES[what]
    document = report(name)
    damage(document)
    with pytest.raises((AssertionError, KeyError)):
        check_compared(name, document)


SANITIZER_DAMAGES: dict[str, Callable[[dict[str, Any]], object]] = {
    "something was found": lambda checks: checks["memcheck"].update(found=1),
    "the fault was not found": lambda checks: checks["memcheck-planted"].update(found=0),
    "nor the one in the other cache": lambda checks: checks["memcheck-planted-fp8"].update(found=0),
    "no fault was planted": lambda checks: checks.pop("racecheck-planted"),
    "refused": lambda checks: checks["racecheck"].update(refused=True),
    "a shape is missing": lambda checks: [checks[tool]["shapes"].pop() for tool in ("memcheck", "racecheck")],
    "a shape is there twice": lambda checks: checks["memcheck"]["shapes"].append(
        checks["memcheck"]["shapes"][0]
    ),
    "one tool had another shape": lambda checks: checks["racecheck"]["shapes"][0].update(seed=99),
    "no fp8 kernel": lambda checks: checks["memcheck"].update(
        launched=[variant for variant in checks["memcheck"]["launched"] if "Fp8" not in variant]
    ),
    "the tool failed": lambda checks: checks["memcheck"].update(exit_status=1),
}


@pytest.mark.parametrize("what", SANITIZER_DAMAGES)
def test_a_damaged_report_of_the_sanitizers_is_found(what: str) -> None:
    document = report("sanitizer")
    SANITIZER_DAMAGES[what](document["checks"])
    with pytest.raises((AssertionError, KeyError)):
        check_sanitizer(document)


SOAK_DAMAGES: dict[str, Callable[[dict[str, Any], list[dict[str, Any]]], object]] = {
    "too short": lambda whole, parts: [
        one.update(seconds=1.0, traffic_seconds=1.0) for one in (whole, *parts)
    ],
    "few requests while it ran": lambda whole, parts: [
        one.update(traffic_seconds=one["traffic_seconds"] / 2) for one in (whole, *parts)
    ],
    "another time by the clock": lambda whole, _: whole.update(clock_seconds=1800.0),
    "few replays": lambda _, parts: parts[0].update(recorded=3 * parts[0]["replays"]),
    "little compared": lambda _, parts: parts[0].update(replayed_tokens=3 * parts[0]["tokens_compared"]),
    "no preemption in a segment": lambda whole, parts: (
        whole.update(preemptions=whole["preemptions"] - parts[0]["preemptions"]),
        parts[0].update(preemptions=0),
    ),
    "a segment is missing": lambda _, parts: parts.pop(),
    "another sum": lambda whole, _: whole.update(requests=whole["requests"] + 1),
    "a finding": lambda whole, _: whole["differing"].append("x"),
    "a finding of a segment": lambda _, parts: parts[0]["hangs"].append("x"),
    "a segment failed": lambda _, parts: parts[0].update(passed=False),
    "another wheel": lambda _, parts: parts[0]["wheel_files"]["wheel"].update(sha256="0" * 64),
    "an engine is missing": lambda whole, _: whole["engines"].pop(),
}


@pytest.mark.parametrize("what", SOAK_DAMAGES)
def test_a_damaged_soak_is_found(what: str) -> None:
    whole, parts = report("soak"), segments()
    SOAK_DAMAGES[what](whole, parts)
    with pytest.raises((AssertionError, KeyError)):
        check_soak(whole, parts)


def test_a_damaged_sweep_is_found() -> None:
    tune = importlib.import_module("tune")
    points = [{"heads": heads, "tokens": rows} for heads, rows in itertools.product(tune.HEADS, tune.TOKENS)]
    whole: dict[str, Any] = {
        "compiled": [{"spills": 0}],
        "timings": [point | {"us": 1.0} for point in points],
        "chosen": [point | {"ratio": 1.0} for point in points],
    }
    check_tune(whole)
    damages: list[Callable[[dict[str, Any]], object]] = [
        lambda d: d["timings"].pop(),
        lambda d: d["timings"][0].update(us=0.0),
        lambda d: d["compiled"][0].update(error="OutOfResources"),
        lambda d: d["compiled"].clear(),
        lambda d: d["chosen"].pop(),
        lambda d: d["chosen"][0].update(ratio=0.5),
    ]
    for damage in damages:
        document = copy.deepcopy(whole)
        damage(document)
        with pytest.raises(AssertionError):
            check_tune(document)


def test_the_table_is_what_the_reports_give() -> None:
    script = ROOT / "ci" / "gpu" / "results_table.py"
    assert subprocess.run([sys.executable, script, "--check"], check=False).returncode == 0
