"""What the proofs must notice is noticed when it is planted in what engines gave."""

from __future__ import annotations

from typing import Any

import comparison
import numpy as np
import pytest
from complete_proofs import (
    ContextProof,
    DraftsProof,
    Fp8Proof,
    GroupsProof,
    MergeProof,
    PipelineProof,
    WideDraftsProof,
    WideProof,
)
from engine_jobs import FAR_DECODE_TOKENS, FP8_CACHES, Job
from engine_runner import Run
from health_proofs import AllocationProof, SyncProof

POSITIONS = 4000
NOISE = 1e-3
ROWS = {"auto": ("auto", 1152)} | dict.fromkeys(FP8_CACHES, ("fp8_ds_mla", 656))


def decodes(count: int) -> dict[str, Any]:
    """Return launches of five layers, of which three have an indexer, in 256 steps; the first is too wide."""
    return {"eager": {"decode": 5}, "replayed": {"decode": count - 5}}


def counts(job: Job) -> dict[str, Any]:
    ran = {"eager": {"prefill": 9, "decode": 9}, "replayed": {}}
    one: dict[str, Any] = {"kernels": ran, "graph_replays": 5 if job.graphs else 0}
    if job.model == "glm52":
        one |= {"calls": decodes(1280), "conversions": decodes(5 + 765), "logits": decodes(765)}
    if job.merge:
        one |= {"calls": decodes(770), "merges": {"eager": {"any": 3}, "replayed": {"any": 765}}}
        one["cutedsl_loaded"] = False
    return one | ({"other_ranks": [dict(one)]} if job.ranks > 1 else {})


def dense_rows(job: Job) -> dict[str, int]:
    """Return the rows of short prompts in dense attention, as a right engine has them."""
    return {} if job.force_mqa or job.model == "glm53flash" else {"prefill": 7491}


def figures(job: Job) -> dict[str, Any]:
    dtype, row = ROWS[job.cache]
    cache: dict[str, Any] = {"dtype": dtype, "row_bytes": row, "nccl": job.tensor > 1}
    ours = job.backend == comparison.OURS
    return {
        "launches": {f"{phase}_batch": counts(job) for phase in ("prefill", "decode")}
        | {"short_prefill_batch": {"dense": {"rows": dense_rows(job)}}},
        "variants": ["v"] if ours else [],
        "unannounced_variants": [],
        "cache": cache | ({"other_ranks": [dict(cache)]} if job.ranks > 1 else {}),
        "batches": {"decodes": 96, "windows": 20, "prefills_in_flight": 2},
        "steps": FAR_DECODE_TOKENS // 2,
        "drafts": {"drafted": 1000, "accepted": 400},
    }


def run_of(job: Job, seed: int, noise: float = NOISE) -> Run:
    source = np.random.default_rng(seed)
    parts = ("prefill", "decode") if job.draft else (*comparison.LONG_PARTS, *comparison.SHORT_PARTS)
    length = FAR_DECODE_TOKENS * 8 if job.draft else POSITIONS
    arrays = {part: -1.0 + source.normal(0, noise, length) for part in parts}
    if job.draft:
        arrays["tokens"] = np.arange(length, dtype=np.float64)
    return Run(job, figures(job), arrays)


def runs_of(found: comparison.Comparison) -> dict[Job, Run]:
    return {job: run_of(job, seed) for seed, job in enumerate(found.jobs)}


PROOFS = (
    *(Fp8Proof, DraftsProof, WideProof, WideDraftsProof, GroupsProof),
    *(ContextProof, MergeProof, PipelineProof),
)
EVERY = [(proof, found) for proof in PROOFS for found in proof.comparisons(proof.models)]


@pytest.mark.parametrize(("proof", "found"), EVERY, ids=[found.ours.mode for _, found in EVERY])
def test_engines_that_agree_pass_and_ours_astray_fails(proof: Any, found: comparison.Comparison) -> None:
    runs = runs_of(found)
    for kind in proof.damage_of(found.ours):
        runs[found.ours].arrays[kind] = np.full(POSITIONS, -3.0)
    report = proof.assess([found.ours], runs)
    assert report["passed"], report["modes"][0]["problems"]
    assert list(proof.table(report))[-1] == "passed"
    runs[found.ours].arrays["decode"] = run_of(found.ours, 99, 4 * NOISE).arrays["decode"]
    report = proof.assess([found.ours], runs)
    assert not report["passed"]
    assert "decode" in report["modes"][0]["problems"][0]


BASE = next(iter(Fp8Proof.comparisons(["glm5"])))


@pytest.mark.parametrize("name", ["prefill", "short_prefill", "short_decode"])
def test_each_part_has_a_bound(name: str) -> None:
    runs = runs_of(BASE)
    runs[BASE.ours].arrays[name] = runs[BASE.ours].arrays[name] + 3 * NOISE
    problems = comparison.assess(BASE, runs)["problems"]
    assert any(problem.startswith(f"{name}:") for problem in problems)


@pytest.mark.parametrize("noise", [1.0, 3.0])
def test_short_prompts_that_natives_serve_alike_may_differ_as_long_ones(noise: float) -> None:
    runs = runs_of(BASE)
    one, other = BASE.pair
    runs[other].arrays |= {part: runs[one].arrays[part] for part in comparison.SHORT_PARTS}
    seen = runs[one].arrays["short_prefill"]
    ours = seen + np.random.default_rng(5).normal(0, noise * NOISE, POSITIONS)
    runs[BASE.ours].arrays |= dict.fromkeys(comparison.SHORT_PARTS, ours)
    for job in BASE.references:
        runs[job].arrays |= dict.fromkeys(comparison.SHORT_PARTS, seen)
    assert bool(comparison.assess(BASE, runs)["problems"]) == (noise > comparison.ALLOWED_RATIO)


def test_other_native_pairs_say_what_may_differ_but_in_the_long_prefill() -> None:
    """Natives that prefill alike agree too well; those of another mode, which rounds no more, do not."""
    found, other = (
        next(c for c in Fp8Proof.comparisons(["glm5"]) if c.ours.force_mqa == force)
        for force in (False, True)
    )
    runs = runs_of(found) | runs_of(other)
    for part in comparison.SHORT_PARTS:
        runs[found.pair[1]].arrays[part] = runs[found.pair[0]].arrays[part]
    wide = NOISE * 2
    for part in ("prefill", "short_decode"):
        runs[found.ours].arrays[part] = run_of(found.ours, 7, 2.4 * NOISE).arrays[part]
        runs[other.pair[0]].arrays[part] = run_of(other.pair[0], 8, wide).arrays[part]

    def problems(*pairs: Any) -> list[str]:
        return [p.split(":")[0] for p in comparison.assess(found, runs, pairs)["problems"]]

    assert set(problems()) == {"prefill", "short_decode"}
    assert set(problems(found.pair, other.pair)) == {"prefill"}
    row = Fp8Proof.assess([found.ours, other.ours], runs)["modes"][0]
    assert [problem.split(":")[0] for problem in row["problems"]] == ["prefill"] * 2
    foreign = next(c for c in Fp8Proof.comparisons(["glm53flash"])).pair
    runs |= {job: run_of(job, seed, wide) for seed, job in enumerate(foreign)}
    assert set(problems(found.pair, foreign)) == {"prefill", "short_decode"}
    runs[other.pair[1]] = Run(other.pair[1], error="exit status 1")
    assert set(problems(found.pair, other.pair)) == {"prefill", "short_decode"}
    del runs[other.pair[1]]
    assert set(problems(found.pair, other.pair)) == {"prefill", "short_decode"}


def test_a_bf16_cache_has_no_bound_from_a_coarser_one() -> None:
    auto, coarse = (
        next(c for c in WideProof.comparisons(["glm5"]) if c.ours.cache == cache)
        for cache in ("auto", "fp8_ds_mla")
    )
    assert comparison.alike(auto, [auto.pair, coarse.pair]) == [auto.pair]
    assert comparison.alike(coarse, [auto.pair, coarse.pair]) == [coarse.pair, auto.pair]


def planted(**changes: Any) -> list[str]:
    runs = runs_of(BASE)
    runs[BASE.ours].figures |= changes
    problems: list[str] = comparison.assess(BASE, runs)["problems"]
    return problems


def test_a_cache_of_another_type_is_found() -> None:
    assert planted() == []
    assert "1152 bytes" in planted(cache={"dtype": "fp8_ds_mla", "row_bytes": 1152})[0]
    assert "bfloat16" in planted(cache={"dtype": "bfloat16", "row_bytes": 656})[0]


def test_variants_that_nothing_announced_are_found() -> None:
    assert "variants" in planted(unannounced_variants=["v"])[0]


def test_a_phase_without_our_kernels_is_found() -> None:
    none = counts(BASE.ours) | {"kernels": {"eager": {}, "replayed": {}}}
    launches = figures(BASE.ours)["launches"]
    assert planted(launches={**launches, "prefill_batch": none}) == ["rank 0: no launch in prefill"]


def test_graphs_that_were_not_replayed_are_found() -> None:
    launches = figures(BASE.ours)["launches"]
    idle = launches["decode_batch"] | {"graph_replays": 0}
    assert "0 replays" in planted(launches={**launches, "decode_batch": idle})[0]


def test_a_native_engine_with_our_kernels_is_found() -> None:
    runs = runs_of(BASE)
    runs[BASE.pair[0]].figures["variants"] = ["v"]
    assert "launched our kernels" in comparison.assess(BASE, runs)["problems"][0]


def test_engines_that_failed_or_did_not_run_fail_the_mode() -> None:
    runs = runs_of(BASE)
    del runs[BASE.pair[1]]
    runs[BASE.ours].error = "exit status 1"
    row = comparison.assess(BASE, runs)
    assert not row["passed"]
    assert set(row["errors"].values()) == {"not run", "exit status 1"}
    assert not Fp8Proof.assess([BASE.ours], {})["passed"]
    assert not Fp8Proof.assess([], {})["passed"]


def test_two_ranks_are_both_looked_at() -> None:
    found = next(iter(ContextProof.comparisons(["glm5"])))
    runs = runs_of(found)
    assert runs[found.ours].job.ranks == 2
    figures_of = runs[found.ours].figures
    figures_of["cache"]["other_ranks"][0]["nccl"] = False
    figures_of["launches"]["decode_batch"]["other_ranks"][0]["kernels"] = {"eager": {}, "replayed": {}}
    assert comparison.assess(found, runs)["problems"] == [
        "rank 1: no launch in decode",
        "rank 1: vLLM does without NCCL",
    ]


def test_drafts_are_compared_up_to_the_first_other_token_and_must_be_accepted() -> None:
    found = next(found for found in Fp8Proof.comparisons(["glm5"]) if found.ours.draft)
    runs = runs_of(found)
    ours = runs[found.ours]
    ours.arrays["tokens"] = ours.arrays["tokens"].copy()
    ours.arrays["tokens"][FAR_DECODE_TOKENS // 2] = -1  # of the first of eight requests
    ours.arrays["decode"][FAR_DECODE_TOKENS // 2 : FAR_DECODE_TOKENS] = -50.0
    row = comparison.assess(found, runs)
    assert row["passed"], row["problems"]
    assert row["differences"]["decode"]["share"] == pytest.approx(15 / 16)
    ours.arrays["tokens"][::FAR_DECODE_TOKENS] = -1
    ours.figures["drafts"] = {"drafted": 1000, "accepted": 5}
    problems = comparison.assess(found, runs)["problems"]
    assert any("in common" in problem for problem in problems)
    assert any("5 of 1000 drafted tokens accepted" in problem for problem in problems)
    ours.figures["drafts"] = {"drafted": 0, "accepted": 0}
    assert any("0 of 0 drafted" in problem for problem in comparison.assess(found, runs)["problems"])


@pytest.mark.parametrize(("accepted", "passes"), [(310, True), (500, True), (290, False)])
def test_fewer_accepted_drafts_than_in_the_reference_are_found(accepted: int, *, passes: bool) -> None:
    found = next(found for found in Fp8Proof.comparisons(["glm5"]) if found.ours.draft)
    runs = runs_of(found)
    runs[found.ours].figures["drafts"] = {"drafted": 1000, "accepted": accepted}
    (reference,) = found.references
    runs[reference].figures["drafts"] = {"drafted": 1000, "accepted": 400}
    problems = comparison.assess(found, runs)["problems"]
    assert [problem.split(": ")[1] for problem in problems] == (
        [] if passes else [f"29% of the drafted tokens accepted, 40% in {reference.name}"]
    )


@pytest.mark.parametrize("model", ["glm5", "glm53flash"])
@pytest.mark.parametrize("force", [False, True])
def test_dense_prefill_of_an_fp8_cache_is_where_it_belongs(model: str, *, force: bool) -> None:
    found = next(c for c in Fp8Proof.comparisons([model]) if c.ours.force_mqa == force)
    runs = runs_of(found)
    for kind in Fp8Proof.damage_of(found.ours):
        runs[found.ours].arrays[kind] = np.full(POSITIONS, -3.0)
    assert Fp8Proof.assess([found.ours], runs)["passed"]
    right = dense_rows(found.ours)
    wrong = {} if right else {"prefill": 3}
    runs[found.ours].figures["launches"]["short_prefill_batch"] = {"dense": {"rows": wrong}}
    (row,) = Fp8Proof.assess([found.ours], runs)["modes"]
    assert row["problems"] == [f"{wrong.get('prefill', 0)} rows of short prompts in dense attention"]


def test_requests_that_did_not_decode_together_are_found() -> None:
    wide = next(iter(WideProof.comparisons(["glm5"])))
    runs = runs_of(wide)
    runs[wide.ours].figures["batches"] = {"decodes": 64}
    assert not WideProof.assess([wide.ours], runs)["passed"]
    staged = next(iter(PipelineProof.comparisons(["glm5"])))
    runs = runs_of(staged)
    runs[staged.ours].figures["batches"] = {"prefills_in_flight": 1}
    assert not PipelineProof.assess([staged.ours], runs)["passed"]


@pytest.mark.parametrize(("windows", "passes"), [(0, False), (10, False), (11, True), (20, True)])
def test_windows_that_are_not_many_at_once_are_found(windows: int, *, passes: bool) -> None:
    for found in WideDraftsProof.comparisons(["glm5"]):
        runs = runs_of(found)
        runs[found.ours].figures["batches"]["windows"] = windows
        (row,) = WideDraftsProof.assess([found.ours], runs)["modes"]
        assert row["batches"]["windows"] == windows
        said = f"at most {windows} requests decoded at once with 6 rows each"
        assert row["problems"] == ([] if passes else [said])


def test_many_windows_are_compared_as_few_are() -> None:
    found = {one.ours.mode: one for one in WideDraftsProof.comparisons(WideDraftsProof.models)}
    assert len(found) == 4
    for one in found.values():
        assert one.references == one.pair
        assert {job.draft for job in one.jobs} == {5}
    few = {(one.ours.model, one.ours.draft): one for one in DraftsProof.comparisons(DraftsProof.models)}
    for model in WideDraftsProof.models:
        kinds = [(job.backend, job.cache, job.path) for job in few[model, 5].pair]
        many = found[f"{model}-v2-graphs-wide-drafts-mtp5"]
        assert [(job.backend, job.cache, job.path) for job in many.pair] == kinds
        fp8 = found[f"{model}-v2-graphs-wide-drafts-mtp5-fp8_ds_mla"]
        assert {(job.backend, job.path) for job in fp8.pair} == {
            ("FLASHMLA_SPARSE", "mixed"),
            ("FLASHMLA_SPARSE", "separate"),
        }


NOTHING: dict[str, dict[str, int]] = {"eager": {}, "replayed": {}}
GRAPHS_WITHOUT = "{} merges in graphs for 765 calls of attention"


@pytest.mark.parametrize(
    ("phase", "counts_of_rank", "said"),
    [
        ("decode", {"cutedsl_loaded": True}, ["CuteDSL's merge was loaded"]),
        ("prefill", {"merges": NOTHING}, ["PyTorch merged nothing in prefill", GRAPHS_WITHOUT.format(0)]),
        ("decode", {"merges": {"eager": {}, "replayed": {"any": 764}}}, [GRAPHS_WITHOUT.format(764)]),
        ("decode", {"merges": {"eager": {}, "replayed": {"any": 770}}}, []),
    ],
)  # fmt: skip
@pytest.mark.parametrize("rank", [0, 1])
def test_ranks_whose_topk_pytorch_does_not_merge_are_found(
    phase: str, counts_of_rank: dict[str, Any], said: list[str], rank: int
) -> None:
    found = next(iter(MergeProof.comparisons(["glm5"])))
    runs = runs_of(found)
    assert MergeProof.assess([found.ours], runs)["passed"]
    ranks = comparison.ranks_of(runs[found.ours].figures["launches"][f"{phase}_batch"])
    ranks[rank].update(counts_of_rank)  # type: ignore[attr-defined]
    (row,) = MergeProof.assess([found.ours], runs)["modes"]
    assert row["problems"] == [f"rank {rank}: {problem}" for problem in said]


def test_ranks_that_did_not_count_merges_prove_nothing() -> None:
    found = next(iter(MergeProof.comparisons(["glm5"])))
    runs = runs_of(found)
    del runs[found.ours].figures["launches"]["decode_batch"]["other_ranks"][0]["merges"]
    (row,) = MergeProof.assess([found.ours], runs)["modes"]
    assert row["problems"] == ["rank 1: merges were not counted in decode"]


def test_damage_must_be_seen() -> None:
    run = run_of(BASE.ours, 0)
    run.arrays |= {"zero": run.arrays["prefill"] + 1.0, "scale": run.arrays["prefill"] + 1e-2}
    assert comparison.assess_damage(run, 1e-3, 10.0)["passed"]
    assert not comparison.assess_damage(run, 2e-3, 10.0)["passed"]
    assert not comparison.assess_damage(run, 0.0, 10.0)["passed"]
    assert not comparison.assess_damage(run_of(BASE.ours, 0), 1e-3, 10.0)["passed"]


def test_the_proofs_cover_what_they_name() -> None:
    found = [mode for mode in Fp8Proof.modes(Fp8Proof.models) if mode.model == "glm5"]
    assert {mode.draft for mode in found} == set(range(6))
    assert {(mode.runner, mode.graphs) for mode in found if not mode.draft} == {
        (2, True),
        (2, False),
        (1, True),
        (1, False),
    }
    assert {(mode.runner, mode.graphs) for mode in found if mode.draft} == {
        (2, True),
        (2, False),
        (1, True),
        (1, False),
    }
    assert {mode.cache for mode in found} == {"fp8", "fp8_e4m3", "fp8_ds_mla"}
    every = list(Fp8Proof.modes(Fp8Proof.models))
    assert set(Fp8Proof.damages(every)) == {mode for mode in every if Fp8Proof.damage_of(mode)}
    assert {mode.model for mode in Fp8Proof.damages(every)} == {"glm5", "glm53flash"}


def test_drafts_with_a_bf16_cache_are_compared_with_both_native_backends() -> None:
    found = list(DraftsProof.comparisons(DraftsProof.models))
    modes = {(one.ours.model, one.ours.runner, one.ours.draft) for one in found}
    assert modes == {
        *(("glm5", runner, draft) for runner, draft in ((2, 1), (2, 3), (2, 5), (1, 3))),
        *(("glm53flash", 2, draft) for draft in (1, 3, 5)),
    }
    for one in found:
        assert (one.ours.cache, one.ours.graphs) == ("auto", True)
        assert one.references == one.pair
        assert {job.backend for job in one.pair} == {"FLASHMLA_SPARSE", "FLASH_ATTN_MLA_SPARSE"}
        assert {(job.draft, job.cache, job.runner) for job in one.pair} == {
            (one.ours.draft, "auto", one.ours.runner)
        }


def test_natives_that_chose_other_tokens_give_no_bound() -> None:
    found = next(iter(DraftsProof.comparisons(["glm5"])))
    runs = runs_of(found)
    bound = comparison.compare(found, runs)["decode"]["bound"]
    one, other = (runs[job] for job in found.pair)
    wide = run_of(found.pair[0], 77, 50 * NOISE).arrays["decode"]
    one.arrays["decode"] = wide
    assert comparison.compare(found, runs)["decode"]["bound"] > 20 * bound
    other.arrays["tokens"] = np.full_like(other.arrays["tokens"], -1.0)
    differences = comparison.compare(found, runs)
    assert differences["decode"]["bound"] == differences["prefill"]["bound"]
    assert not comparison.assess(found, runs)["passed"]


def test_the_drafts_of_the_references_are_kept() -> None:
    found = next(iter(DraftsProof.comparisons(["glm5"])))
    runs = runs_of(found)
    drafts = [{"drafted": 1000, "accepted": accepted} for accepted in (410, 420)]
    for job, counted in zip(found.references, drafts, strict=True):
        runs[job].figures["drafts"] = counted
    names = [job.name for job in found.references]
    row = comparison.assess(found, runs)
    assert row["reference_drafts"] == dict(zip(names, drafts, strict=True))
    assert "reference_drafts" not in comparison.assess(BASE, runs_of(BASE))


@pytest.mark.parametrize(
    ("kind", "count", "passes"),
    [
        ("conversions", 1280, False), ("conversions", 900, False), ("conversions", 768, True),
        ("conversions", 0, False), ("logits", 1280, False), ("logits", 768, True), ("logits", 0, False),
    ],
)  # fmt: skip
def test_layers_that_do_not_share_a_topk_are_found(kind: str, count: int, *, passes: bool) -> None:
    found = next(iter(GroupsProof.comparisons(["glm52"])))
    runs = runs_of(found)
    ran = {"eager": {}, "replayed": {"decode": count}}
    runs[found.ours].figures["launches"]["decode_batch"][kind] = ran
    (row,) = GroupsProof.assess([found.ours], runs)["modes"]
    assert row["passed"] == passes
    assert all(str(count) in problem and "of which 40% share one" in problem for problem in row["problems"])


def sync(clean: str | None, planted_read: str | None, native: str | None = None) -> dict[str, Any]:
    mode = next(iter(SyncProof.modes(["glm5"])))
    runs = {mode: Run(mode, {"clean": clean, "planted": planted_read})}
    runs |= {job: Run(job, {"clean": native, "planted": None}) for job in SyncProof.others(mode)}
    return SyncProof.assess([mode], runs)


def test_reads_of_the_device_are_found() -> None:
    message = "RuntimeError: GPU<->CPU sync detected - avoid it"
    assert sync(None, message)["passed"]
    assert sync(None, message, native=message)["passed"]
    assert not sync(message, None)["passed"]
    assert not sync(message, None, native=f"{message} (elsewhere.py:7, read)")["modes"][0]["passed"]
    assert not sync(None, None)["passed"]
    assert not sync(None, "RuntimeError: another")["passed"]


def test_a_read_in_which_the_native_engine_dies_too_is_told_and_proves_nothing() -> None:
    message = "RuntimeError: GPU<->CPU sync detected (runner.py:7, step)"
    report = sync(message, None, native=message)
    row = report["modes"][0]
    assert (row["passed"], row["problems"]) == (True, [])
    assert row["says"] == f"NOT SHOWN, both engines fail in the same place: {message}"
    assert not report["passed"]  # nothing else was shown
    mode, other = list(SyncProof.modes(["glm5"]))[:2]
    runs = {job: Run(job, {"clean": message, "planted": None}) for job in (mode, *SyncProof.others(mode))}
    runs[other] = Run(other, {"clean": None, "planted": "GPU<->CPU sync detected"})
    runs |= {job: Run(job, {"clean": None, "planted": None}) for job in SyncProof.others(other)}
    assert SyncProof.assess([mode, other], runs)["passed"]


COUNTS = {
    "replays": 30, "inside_replays": 0, "calls": 10, "per_call": 0.0, "per_step": 40.0,
    "device_allocations": 0, "reserved_bytes": 0,
}  # fmt: skip


@pytest.mark.parametrize(
    "worse",
    [
        {"inside_replays": 1}, {"per_call": 0.1}, {"per_call": 4.1}, {"per_step": 42.0},
        {"device_allocations": 1}, {"reserved_bytes": 512}, {"replays": 0},
    ],
)  # fmt: skip
def test_more_allocations_are_found(worse: dict[str, Any]) -> None:
    mode = next(iter(AllocationProof.modes(["glm5"])))
    natives = {
        job: Run(job, COUNTS | {"per_call": 4.0, "per_step": 41.0}) for job in AllocationProof.others(mode)
    }
    assert AllocationProof.assess([mode], {mode: Run(mode, dict(COUNTS)), **natives})["passed"]
    assert not AllocationProof.assess([mode], {mode: Run(mode, COUNTS | worse), **natives})["passed"]
