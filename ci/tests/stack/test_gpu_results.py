"""The reports of the GPU host in the repository say what they must, and what they say passes."""

from __future__ import annotations

import copy
import importlib
import itertools
import json
import re
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
    "wide-drafts": {
        f"{model}-v2-graphs-wide-drafts-{how}" for model in MODELS for how in ("mtp5", f"mtp5-{FP8}")
    },
    "groups": usual("glm52", "auto", "mqa"),
    "dcp": {
        *usual("glm5", "auto-tp2-dcp2", "mqa-tp2-dcp2"),
        *usual("glm53flash", "auto-tp2-dcp2", "mqa-tp2-dcp2") - {"glm53flash-v1-graphs-auto-tp2-dcp2"},
        *(f"{model}-v2-graphs-mtp2-tp2-dcp2" for model in MODELS),
    },
    "dcp-merge": {f"{model}-v2-graphs-auto-tp2-dcp2-torchmerge" for model in MODELS},
    "pipeline": usual("glm5", "long-pp2", "long-pp2"),
}
"""By report. `ci/tests/runtime/gpu/test_jobs.py` compares the reports with the proofs, which need PyTorch."""
EXAMINED_MODES = {
    "sync": {
        mode
        for model in MODELS
        for mode in (*usual(model, "sync", "sync"), f"{model}-v2-graphs-sync-mtp3-{FP8}")
    },
    "allocations": {
        f"{model}-v2-{how}-allocations{end}"
        for model in MODELS
        for how in ("graphs", "eager")
        for end in ("", "-" + FP8)
    },
}
"""By report of `health_proofs.py`."""
OURS, NATIVE = "TRITON_MLA_SPARSE", "FLASHMLA_SPARSE"
SYNC_FOUND = "RuntimeError: GPU<->CPU sync detected"
HOOK = re.compile(
    r"\(gpu_sync_debug\.py:\d+, _sync_warning_hook\)$"
)  # finds reads, and raises in their place
LAYERS = 3  # of sparse MLA in both models
ENOUGH_STEPS = 32  # of the 64 that are counted; at least as many calls of each layer, or replays
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
    traffic = importlib.import_module("traffic")
    assert {segment["schema"] for segment in (whole, *segments)} == {traffic.SCHEMA}
    assert whole["traffic_seconds"] >= 1800
    assert len(whole["engines"]) == 4  # two models, two caches
    assert whole["replays"] > 0
    assert whole["segments"] == sorted(segment["segment"] for segment in segments)
    assert whole["engines"] == sorted({segment["engine"] for segment in segments})
    numbers = {name for name, value in whole.items() if type(value) in (int, float)}
    numbers -= {"schema", "clock_seconds", "widest_swing"}
    clock = traffic.union((segment["began"], segment["ended"]) for segment in segments)
    assert whole["clock_seconds"] == pytest.approx(clock)
    for segment in segments:
        assert segment["replays"] >= 0.5 * segment["recorded"] > 0
        assert segment["tokens_compared"] >= 0.5 * segment["replayed_tokens"] > 0
        assert min(segment["cancellations"], segment["preemptions"], segment["logprobs_checked"]) > 0
        assert segment["parted_at_once"] <= segment["parted"] <= segment["replays"]
    swings = [segment["widest_swing"] for segment in segments]
    assert whole["widest_swing"] == max(swings) <= traffic.NEAR_TIE
    for name in numbers:
        assert whole[name] == pytest.approx(sum(segment[name] for segment in segments)), name
    for finding in ("not_finite", "differing", "hangs"):
        assert whole[finding] == []
        assert all(segment[finding] == [] for segment in segments)
    assert all(segment["passed"] for segment in (whole, *segments))
    assert len({segment["wheel_files"]["wheel"]["sha256"] for segment in (whole, *segments)}) == 1


def check_planted(document: dict[str, Any]) -> None:
    """Most of the answers that were damaged on purpose were found to differ."""
    assert (document["passed"], document["hangs"]) == (True, [])
    assert document["hit"] >= 20
    assert 0.5 * document["hit"] <= document["found"] <= document["hit"]


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
    check_batches(mode)
    if "-torchmerge" in name:
        check_merges(mode["launches"])
    if "-mtp" in name:
        accepted = accepted_share(mode["drafts"])
        assert accepted >= 0.1
        others = mode.get("reference_drafts", {}).values()
        assert all(accepted >= accepted_share(other) - 0.1 for other in others)


def check_batches(mode: dict[str, Any]) -> None:
    """As many requests were in a batch at once as the mode needs."""
    name = mode["mode"]
    if "-wide-drafts" in name:
        rows = 1 + int(name.partition("-mtp")[2].partition("-")[0])
        assert rows == 6
        assert rows * mode["batches"]["windows"] > 64
    elif "-wide" in name:
        assert mode["batches"]["decodes"] > 64
    assert "-pp2" not in name or mode["batches"]["prefills_in_flight"] > 1


def check_merges(launches: dict[str, Any]) -> None:
    """PyTorch merged the top-k of both ranks, in graphs for every call of attention, and CuteDSL none."""
    for batch in ("prefill_batch", "decode_batch"):
        ranks = [launches[batch], *launches[batch]["other_ranks"]]
        assert len(ranks) == 2
        for counts in ranks:
            assert counts["cutedsl_loaded"] is False
            assert launched(counts["merges"], "any") > 0
    for counts in ranks:  # while they decoded
        calls = counts["calls"]["replayed"]["decode"]
        assert counts["merges"]["replayed"]["any"] >= calls > 0


def check_examined(name: str, document: dict[str, Any]) -> None:
    """All modes are there, of each both engines lived, and ours did what it must."""
    modes = document["modes"]
    assert sorted(mode["mode"] for mode in modes) == sorted(EXAMINED_MODES[name])
    assert document["passed"]
    engines = {f"{mode['mode']}-{backend.lower()}" for mode in modes for backend in (OURS, NATIVE)}
    assert document["jobs"].keys() == engines
    assert all(job["error"] is None for job in document["jobs"].values())
    for mode in modes:
        assert (mode["passed"], mode["problems"]) == (True, [])
        CHECK_EXAMINED[name](mode)
    if name == "allocations":
        assert all(mode["counts"][OURS]["per_call"] == 0.0 for mode in modes)


def check_sync(mode: dict[str, Any]) -> None:
    """Nothing of ours read the device until a read was planted, which was found where reads are."""
    assert mode["clean"] is None
    assert mode["planted"].startswith(SYNC_FOUND)
    assert HOOK.search(mode["planted"])
    fails = "clean" if mode["native"] is None else "fails"
    assert mode["says"] == f"ours clean, FLASHMLA_SPARSE {fails}"


def check_allocations(mode: dict[str, Any]) -> None:
    """Replays of graphs allocated nothing, the device's memory did not grow, nor did ours allocate more."""
    assert mode["counts"].keys() == {OURS, NATIVE}
    ours, native = mode["counts"][OURS], mode["counts"][NATIVE]
    graphs = "-graphs-" in mode["mode"]
    for counts in (ours, native):  # what is counted was there
        assert counts["calls" if graphs else "replays"] == 0
        assert counts["replays"] >= ENOUGH_STEPS if graphs else counts["calls"] >= LAYERS * ENOUGH_STEPS
    assert graphs or native["per_call"] > 0  # the counter counts
    assert (ours["inside_replays"], ours["device_allocations"], ours["reserved_bytes"]) == (0, 0, 0)
    assert 0 <= ours["per_call"] <= native["per_call"]
    assert 0 < ours["per_step"] <= native["per_step"]
    assert mode["says"] == told(ours, native)


def told(ours: dict[str, Any], native: dict[str, Any]) -> str:
    """Return what the table says of the counts of both engines."""
    both = (f"{name} {ours[name]:.1f} ({native[name]:.1f})" for name in ("per_call", "per_step"))
    return f"{', '.join(both)}; {ours['inside_replays']} in {ours['replays']} replays"


CHECK_EXAMINED = {"sync": check_sync, "allocations": check_allocations}


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


def missing() -> set[str]:
    """Return the reports of the complete backend that are not there."""
    return {name for name in (*MODES, *EXAMINED_MODES) if not (RESULTS / f"{name}.json").exists()}


def test_only_reports_that_no_host_has_given_yet_are_missing() -> None:
    table = importlib.import_module("results_table")
    assert missing() <= table.LATER <= MODES.keys()
    assert {*table.COMPARED} == MODES.keys()
    assert {*table.EXAMINED} == EXAMINED_MODES.keys()


@pytest.mark.parametrize("name", sorted(MODES.keys() - missing()))
def test_the_complete_backend_was_within_its_bounds(name: str) -> None:
    check_compared(name, report(name))


@pytest.mark.parametrize("name", EXAMINED_MODES)
def test_no_read_of_the_device_and_no_more_allocations_than_natively(name: str) -> None:
    check_examined(name, report(name))


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


def merging() -> dict[str, Any]:
    """Return a mode as `dcp-merge` gives it, of one of `dcp`."""
    mode = first(report("dcp"), "v2-graphs-auto")
    mode["mode"] += "-torchmerge"
    for batch in mode["launches"].values():
        for counts in (batch, *batch["other_ranks"]):
            calls = sum(counts["calls"]["replayed"].values())
            merges = {"eager": {"any": 27}, "replayed": {"any": calls}, "captured": {"any": 15}}
            counts.update(merges=merges, cutedsl_loaded=False)
    return mode


def crowded() -> dict[str, Any]:
    """Return a mode as `wide-drafts` gives it, of one of `drafts`."""
    mode = first(report("drafts"), "v2-graphs-mtp5")
    counts = {"requests": 20, "decodes": 20, "windows": 20, "prefills_in_flight": 2, "preemptions": 0}
    mode.update(mode=mode["mode"].replace("-mtp5", "-wide-drafts-mtp5"), batches=counts)
    return mode


def last_rank(mode: dict[str, Any], batch: str = "decode_batch") -> dict[str, Any]:
    """Return the counts of the last rank."""
    found: dict[str, Any] = mode["launches"][batch]["other_ranks"][-1]
    return found


MODE_DAMAGES: dict[str, tuple[Callable[[], dict[str, Any]], Callable[[dict[str, Any]], object]]] = {
    "a rank loaded CuteDSL's merge": (merging, lambda m: last_rank(m).update(cutedsl_loaded=True)),
    "the first rank did": (merging, lambda m: m["launches"]["decode_batch"].update(cutedsl_loaded=True)),
    "it is not told": (merging, lambda m: last_rank(m).pop("cutedsl_loaded")),
    "no merge in prefill": (
        merging,
        lambda m: last_rank(m, "prefill_batch")["merges"].update(eager={}, replayed={}),
    ),
    "fewer merges in graphs": (merging, lambda m: last_rank(m)["merges"]["replayed"].update(any=764)),
    "none in graphs": (merging, lambda m: last_rank(m)["merges"]["replayed"].clear()),
    "merges were not counted": (merging, lambda m: last_rank(m).pop("merges")),
    "one rank": (merging, lambda m: m["launches"]["decode_batch"].update(other_ranks=[])),
    "ten windows": (crowded, lambda m: m["batches"].update(windows=10)),
    "windows were not counted": (crowded, lambda m: m["batches"].pop("windows")),
    "fewer drafts": (crowded, lambda m: m.update(mode=m["mode"].replace("mtp5", "mtp3"))),
    "no drafts": (crowded, lambda m: m.update(drafts={"drafted": 0, "accepted": 0})),
    "drafts that were not accepted": (crowded, lambda m: m["drafts"].update(accepted=1)),
}


@pytest.mark.parametrize("what", MODE_DAMAGES)
def test_a_damaged_mode_of_a_proof_that_no_host_has_run_is_found(what: str) -> None:
    make, damage = MODE_DAMAGES[what]
    mode = make()
    assert mode["mode"] in MODES["dcp-merge"] | MODES["wide-drafts"]
    check_mode(mode)
    damage(mode)
    with pytest.raises((AssertionError, KeyError)):
        check_mode(mode)


def ours(document: dict[str, Any], word: str) -> dict[str, Any]:
    """Return what was counted of our engine in the first mode whose name has a word."""
    found: dict[str, Any] = first(document, word)["counts"][OURS]
    return found


def native(document: dict[str, Any], word: str) -> dict[str, Any]:
    """Return what was counted of the other one."""
    found: dict[str, Any] = first(document, word)["counts"][NATIVE]
    return found


def not_shown(document: dict[str, Any]) -> None:
    """Let both engines of a mode die in the same place."""
    error = f"{SYNC_FOUND} (runner.py:7, step)"
    says = f"NOT SHOWN, both engines fail in the same place: {error}"
    first(document).update(clean=error, planted=None, native=error, says=says)


ANOTHER_ERROR = "RuntimeError: CUDA error (gpu_sync_debug.py:81, _sync_warning_hook)"


def died(document: dict[str, Any]) -> None:
    """Let an engine die."""
    next(iter(document["jobs"].values())).update(error="exit status 1")


EXAMINED_DAMAGES: dict[str, tuple[str, Callable[[dict[str, Any]], object]]] = {
    "a mode is missing": ("sync", lambda d: d["modes"].remove(first(d, "mtp3"))),
    "a mode is there twice": ("sync", lambda d: d["modes"].append(first(d))),
    "a mode is called otherwise": ("allocations", lambda d: first(d).update(mode="glm5-v2-graphs-sync")),
    "a mode failed": ("allocations", lambda d: first(d).update(passed=False)),
    "a mode has a problem": ("sync", lambda d: first(d)["problems"].append("")),
    "the report failed": ("sync", lambda d: d.update(passed=False)),
    "an engine died": ("sync", died),
    "an engine did not run": ("allocations", lambda d: d["jobs"].popitem()),
    "ours reads": ("sync", lambda d: first(d).update(clean=f"{SYNC_FOUND} (runner.py:7, step)")),
    "not shown": ("sync", not_shown),
    "nothing was planted": ("sync", lambda d: first(d).update(planted="")),
    "another error": ("sync", lambda d: first(d).update(planted=ANOTHER_ERROR)),
    "found elsewhere": ("sync", lambda d: first(d).update(planted=f"{SYNC_FOUND} (launches.py:3, f)")),
    "the other one fails, which is not told": ("sync", lambda d: first(d).update(native=SYNC_FOUND)),
    "another tale": ("sync", lambda d: first(d).update(says="ours fails, FLASHMLA_SPARSE clean")),
    "an allocation inside a replay": ("allocations", lambda d: ours(d, "graphs").update(inside_replays=1)),
    "no replay": ("allocations", lambda d: ours(d, "graphs").update(replays=0)),
    "a replay without graphs": ("allocations", lambda d: ours(d, "eager").update(replays=1)),
    "the device allocated": ("allocations", lambda d: ours(d, "eager").update(device_allocations=1)),
    "memory grew": ("allocations", lambda d: ours(d, "graphs").update(reserved_bytes=512)),
    "more in a call than natively": (
        "allocations",
        lambda d: [native(d, "eager").update(per_call=1.0), ours(d, "eager").update(per_call=1.9)],
    ),
    # Where the top-k went, and how many there were, before patch 0556.
    "two in a call": ("allocations", lambda d: ours(d, "eager").update(per_call=2.0)),
    "more in a step": ("allocations", lambda d: ours(d, "graphs").update(per_step=15.0)),
    "nothing in a step": ("allocations", lambda d: ours(d, "graphs").update(per_step=0.0)),
    "no call": ("allocations", lambda d: ours(d, "eager").update(calls=0, per_call=0.0)),
    "a call outside graphs": ("allocations", lambda d: ours(d, "graphs").update(calls=3)),
    "not a number": ("allocations", lambda d: ours(d, "eager").update(per_call=float("nan"))),
    "the counter did not count": (
        "allocations",
        lambda d: [counts.update(per_call=0.0) for counts in (ours(d, "eager"), native(d, "eager"))],
    ),
    "a third one": ("allocations", lambda d: first(d)["counts"].update(other=ours(d, "graphs"))),
}


def retell(document: dict[str, Any]) -> None:
    """Let modes say what their counts are, so that these alone are damaged."""
    for mode in document["modes"]:
        if "counts" in mode:
            mode["says"] = told(mode["counts"][OURS], mode["counts"][NATIVE])


@pytest.mark.parametrize("what", EXAMINED_DAMAGES)
def test_a_damaged_report_of_reads_and_allocations_is_found(what: str) -> None:
    name, damage = EXAMINED_DAMAGES[what]
    document = report(name)
    damage(document)
    retell(document)
    with pytest.raises((AssertionError, KeyError)):
        check_examined(name, document)


def test_counts_that_are_told_otherwise_are_found() -> None:
    document = report("allocations")
    first(document, "eager").update(says="per_call 0.0 (3.0), per_step 88.7 (91.6); 0 in 0 replays")
    with pytest.raises(AssertionError):
        check_examined("allocations", document)


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
    "another schema": lambda _, parts: parts[0].update(schema=2),
    "parted by too much": lambda whole, parts: [one.update(widest_swing=0.51) for one in (whole, *parts)],
    "parted by more than is told": lambda whole, parts: parts[0].update(
        widest_swing=whole["widest_swing"] + 0.01
    ),
    "more parted than asked again": lambda whole, parts: [
        one.update(parted=one["parted"] + parts[0]["replays"]) for one in (whole, parts[0])
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


def test_damage_in_a_soak_was_found() -> None:
    document = report("planted-soak")
    check_planted(document)
    assert document["wheel_files"]["wheel"] == report("soak")["wheel_files"]["wheel"]
    damages: list[dict[str, Any]] = [{"hit": 0, "found": 0}, {"found": document["hit"] // 2 - 1}]
    for damage in (*damages, {"found": document["hit"] + 1}, {"hangs": ["hung"]}, {"passed": False}):
        with pytest.raises(AssertionError):
            check_planted(document | damage)


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
