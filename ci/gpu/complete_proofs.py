"""The proofs that compare TRITON_MLA_SPARSE with native engines where `engine_proof` does not look.

`fp8`: the fp8_ds_mla cache, by all of its names, with 0 to 5 draft tokens. FLASHMLA_SPARSE has two ways to
prefill from such a cache, and takes one by the number of heads: its fp8 kernel, or a copy in bf16 and its
bf16 kernel. Both are run, and are the native pair. The bf16 backends' difference would be too tight a bound:
where rounding differs, the next layer's values fall into other bins of e4m3 now and then, and such a step is
wider than the rounding that caused it. (A simulation of these weights in float32 gave 0.57e-3 between two
roundings with a bf16 cache, 0.89e-3 with fp8, and 6.6e-3 between both caches.) Damaged are also the scale of
the first 128 values of every row, and the RoPE values.

`drafts`: 1, 3 and 5 draft tokens with a bf16 cache. Both native backends draft as many and are the native
pair; engines are compared up to the first token that they chose differently.

`wide`: 96 requests decode at once, with both caches.

`wide-drafts`: 20 requests decode at once with 5 draft tokens each, 120 rows, with both caches. The native
pairs are those of `drafts` and of `fp8`, and draft as many.

`dcp`: decode context parallelism over two GPUs against none, both with tensor parallelism, and with drafts.
The last rank's output is zeroed, and the LSE is returned in base 2, as damage.

`dcp-merge`: the same, where PyTorch's operations merge the top-k of the ranks, as on chips and with sizes of
a top-k that CuteDSL's kernels do not serve. Each rank counts them.

`pipeline`: two stages, with the prefills of several long prompts on their way at once, against one GPU.

`groups`: a model whose layers share the top-k of an earlier one, as in GLM-5.2. While it decodes, a top-k
must be selected, and converted to rows of the cache, once for all layers that share it.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any, ClassVar

import comparison
from comparison import OURS, Comparison, launched
from engine_jobs import (
    ATTENTION,
    DRAFTS,
    LONG,
    TEXTS,
    TORCH,
    WIDE,
    WIDE_DRAFTS,
    Job,
    first_of_each_kind,
)
from engine_runner import Run
from launches import ANY_PHASE
from rank_observer import LAST_RANK
from small_models import MODELS

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

FLASHMLA, FLASH_ATTN = "FLASHMLA_SPARSE", "FLASH_ATTN_MLA_SPARSE"
FP8, ALIASES = "fp8_ds_mla", ("fp8", "fp8_e4m3")
MIXED, SEPARATE = "mixed", "separate"
DAMAGE_RATIO = 10.0
PATHS = {"glm5": SEPARATE, "glm53flash": MIXED, "glm52": SEPARATE}  # what FLASHMLA_SPARSE takes itself
# The first runner wants a draft's layers in one group of the KV cache; those of GLM-5.3-Flash are in two.
ONE_GROUP = "glm5"
ENOUGH_REQUESTS = 64
ENOUGH_ROWS = 64
MOST_DRAFTS = 5
# Of what layers that share a top-k can save; the first step of a batch may have too many rows to share one.
SAVED_SHARE = 0.9
USUAL = ((2, True, "auto"), (2, False, "auto"), (2, True, FP8), (1, True, "auto"))
"""Runner, whether there are graphs, and cache, of proofs that need not try everything."""


def native_pair(ours: Job) -> tuple[Job, Job]:
    """Return the two native engines that do what the mode does."""
    if ours.cache == "auto":
        return replace(ours, backend=FLASHMLA), replace(ours, backend=FLASH_ATTN)
    plain = replace(ours, backend=FLASHMLA, cache=FP8)
    own = PATHS[ours.model]
    return replace(plain, path=own), replace(plain, path=SEPARATE if own == MIXED else MIXED)


def against_natives(ours: Job) -> Comparison:
    """Compare with both native engines."""
    pair = native_pair(ours)
    return Comparison(ours, pair, pair)


class Compared:
    """What `engine_proof.main` needs to know of a proof by comparison."""

    models: ClassVar[tuple[str, ...]] = ("glm5", "glm53flash")
    texts: ClassVar[Mapping[str, Any]] = {}
    ranks: ClassVar[int] = 1
    workers: ClassVar[int] = 14  # engines at a time
    # Few engines start together, though some compile the same: two rounds would take twice as long.
    at_once: ClassVar[bool] = False

    @staticmethod
    def comparisons(models: Iterable[str]) -> Iterator[Comparison]:
        """Yield all modes."""
        raise NotImplementedError

    @classmethod
    def modes(cls, models: Iterable[str]) -> Iterator[Job]:
        """Yield our engine of every mode."""
        return (found.ours for found in cls.comparisons(models))

    @classmethod
    def of(cls, chosen: Iterable[Job]) -> list[Comparison]:
        """Return the comparisons of the chosen modes."""
        wanted = set(chosen)
        return [found for found in cls.comparisons(cls.models) if found.ours in wanted]

    @classmethod
    def make_jobs(cls, chosen: list[Job]) -> tuple[list[Job], list[Job]]:
        """Return the first jobs, and all others."""
        jobs = [job for found in cls.of(chosen) for job in found.jobs]
        return (list(dict.fromkeys(jobs)), []) if cls.at_once else first_of_each_kind(jobs)

    @classmethod
    def damage_of(cls, mode: Job) -> tuple[str, ...]:
        """Return how attention is damaged in a mode, if it is."""
        del mode
        return ()

    @classmethod
    def damages(cls, chosen: list[Job]) -> dict[Job, tuple[str, ...]]:
        """Return which engines damage attention, and how."""
        return {mode: kinds for mode in chosen if (kinds := cls.damage_of(mode))}

    @classmethod
    def problems(cls, run: Run) -> Iterator[str]:
        """Yield what else is wrong with our engine."""
        del run
        yield from ()

    @classmethod
    def assess(cls, chosen: list[Job], runs: Mapping[Job, Run]) -> dict[str, Any]:
        """Judge all runs."""
        rows = []
        damage = []
        pairs = [found.pair for found in cls.of(chosen)]
        for found in cls.of(chosen):
            row = comparison.assess(found, runs, pairs)
            if "problems" in row:
                row["problems"] += cls.problems(runs[found.ours])
                row["passed"] = not row["problems"]
            rows.append(row)
            if cls.damage_of(found.ours):
                bound = row.get("differences", {}).get("prefill", {}).get("bound", 0.0)
                run = runs.get(found.ours, Run(found.ours, error="not run"))
                damage.append(comparison.assess_damage(run, bound, DAMAGE_RATIO))
        passed = bool(rows) and all(row["passed"] for row in rows + damage)
        return {"modes": rows, "damage": damage, "passed": passed}

    table = staticmethod(comparison.table)


class Fp8Proof(Compared):
    """The fp8_ds_mla cache."""

    texts: ClassVar = {name: TEXTS[name] for name in ("text", "short_text", "far_text")}
    drafts: ClassVar = (
        *((2, True, draft) for draft in range(1, 6)),
        *((2, False, draft) for draft in (1, 3, 5)),
        *((1, True, draft) for draft in (1, 3, 5)),
        (1, False, 2),
    )

    @staticmethod
    def comparisons(models: Iterable[str]) -> Iterator[Comparison]:
        """Yield all modes: each runner, with and without graphs; the other names; drafts."""
        for model in models:
            for runner, graphs, force in (
                (2, True, False),
                (2, False, True),
                (1, True, False),
                (1, False, True),
            ):
                yield against_natives(Job(model, OURS, runner, graphs, force, cache=FP8))
            for alias in ALIASES:
                yield against_natives(Job(model, OURS, 2, graphs=True, cache=alias))
            for runner, graphs, draft in Fp8Proof.drafts:
                if runner == 1 and model != ONE_GROUP:
                    continue
                ours = Job(model, OURS, runner, graphs, draft=draft, task=DRAFTS, cache=FP8)
                pair = native_pair(Job(model, OURS, 2, graphs=True, cache=FP8))
                reference = replace(ours, backend=FLASHMLA, path=PATHS[model])
                yield Comparison(ours, (reference,), pair)

    @classmethod
    def damage_of(cls, mode: Job) -> tuple[str, ...]:
        """Damage where everything goes through the kernel, outside graphs."""
        if mode.task != ATTENTION or mode.runner == 1 or not mode.force_mqa:
            return ()
        always = ("zero", "shift", "scale")
        return (*always, "shift_pool") if mode.model == "glm53flash" else (*always, "tail")

    @classmethod
    def problems(cls, run: Run) -> Iterator[str]:
        """Yield that dense attention prefilled short prompts where it must be off, or not where it is on.

        Its gather writes the RoPE values too, for which the workspace of GLM-5.3-Flash has no room.
        """
        if run.job.draft:
            return
        rows = sum(
            counts["dense"]["rows"].get("prefill", 0)
            for counts in comparison.ranks_of(run.figures["launches"]["short_prefill_batch"])
        )
        wanted = run.job.model != "glm53flash" and not run.job.force_mqa
        if (rows > 0) != wanted:
            yield f"{rows} rows of short prompts in dense attention"


class DraftsProof(Compared):
    """Drafts with a bf16 cache."""

    texts: ClassVar = {"far_text": TEXTS["far_text"]}
    drafts: ClassVar = ((2, 1), (2, 3), (2, 5), (1, 3))
    """Runner and draft tokens."""

    @staticmethod
    def comparisons(models: Iterable[str]) -> Iterator[Comparison]:
        """Yield all modes."""
        for model in models:
            for runner, draft in DraftsProof.drafts:
                if runner == 2 or model == ONE_GROUP:
                    yield against_natives(Job(model, OURS, runner, graphs=True, draft=draft, task=DRAFTS))


class WideProof(Compared):
    """More than 64 requests that decode at once."""

    texts: ClassVar = {"wide_text": TEXTS["wide_text"]}

    @staticmethod
    def comparisons(models: Iterable[str]) -> Iterator[Comparison]:
        """Yield all modes."""
        for model in models:
            for graphs, cache in ((True, "auto"), (True, FP8), (False, "auto")):
                yield against_natives(Job(model, OURS, 2, graphs, task=WIDE, cache=cache))

    @classmethod
    def problems(cls, run: Run) -> Iterator[str]:
        """Yield that the batches were not wide."""
        if run.figures["batches"]["decodes"] <= ENOUGH_REQUESTS:
            yield f"at most {run.figures['batches']['decodes']} requests decoded at once"


class WideDraftsProof(Compared):
    """Many requests with drafts that decode at once."""

    texts: ClassVar = {"wide_drafts_text": TEXTS["wide_drafts_text"]}
    at_once: ClassVar = True

    @staticmethod
    def comparisons(models: Iterable[str]) -> Iterator[Comparison]:
        """Yield all modes."""
        for model in models:
            for cache in ("auto", FP8):
                ours = Job(model, OURS, 2, graphs=True, draft=MOST_DRAFTS, task=WIDE_DRAFTS, cache=cache)
                yield against_natives(ours)

    @classmethod
    def problems(cls, run: Run) -> Iterator[str]:
        """Yield that no batch of whole windows had enough rows."""
        windows, rows = run.figures["batches"]["windows"], 1 + run.job.draft
        if windows * rows <= ENOUGH_ROWS:
            yield f"at most {windows} requests decoded at once with {rows} rows each"


class GroupsProof(Compared):
    """Layers that share a top-k."""

    models: ClassVar = ("glm52",)
    texts: ClassVar = {name: TEXTS[name] for name in ("text", "short_text")}

    @staticmethod
    def comparisons(models: Iterable[str]) -> Iterator[Comparison]:
        """Yield all modes."""
        for model in models:
            for runner, graphs, cache in USUAL:
                yield against_natives(Job(model, OURS, runner, graphs, force_mqa=not graphs, cache=cache))

    @classmethod
    def damage_of(cls, mode: Job) -> tuple[str, ...]:
        """Damage where everything goes through the kernel, outside graphs."""
        return ("zero", "shift") if mode.force_mqa else ()

    @classmethod
    def problems(cls, run: Run) -> Iterator[str]:
        """Yield that layers decoded without the top-k that others had selected and converted for them.

        Conversions tell: layers that share a top-k have no indexer in these models, so that its logits are
        fewer however the backend does it.
        """
        layers = MODELS[run.job.model].layers
        shared = layers.count("shared") / MODELS[run.job.model].mla_layers
        counts = run.figures["launches"]["decode_batch"]
        calls = launched(counts["calls"], "decode")
        for kind, what in (("conversions", "conversions of a top-k"), ("logits", "logits of an indexer")):
            found = launched(counts[kind], "decode")
            if not 0 < found <= calls * (1 - SAVED_SHARE * shared):
                yield f"{found} {what} for {calls} calls of attention, of which {shared:.0%} share one"


class TwoRanks(Compared):
    """What both GPUs of a host run together."""

    ranks: ClassVar = 2
    # Two processes each, on the 32 cores of a host with two GPUs. So many that all engines of a model but the
    # first ones start at once: those with drafts take 200 s, and none may have to wait for another's end.
    workers: ClassVar = 14


class ContextProof(TwoRanks):
    """Decode context parallelism; the references have tensor parallelism alone, the natives neither."""

    texts: ClassVar = {name: TEXTS[name] for name in ("text", "short_text", "far_text")}

    @staticmethod
    def comparisons(models: Iterable[str]) -> Iterator[Comparison]:
        """Yield all modes."""
        for model in models:
            for runner, graphs, cache in USUAL:
                one = Job(model, OURS, 2, graphs=True, cache=cache)
                two = Job(model, OURS, runner, graphs, not graphs, cache=cache, tensor=2, context=2)
                if runner == 2 or model == ONE_GROUP:
                    yield Comparison(two, (replace(one, tensor=2),), native_pair(one))
            one = Job(model, OURS, 2, graphs=True)
            plain = replace(one, draft=2, task=DRAFTS, tensor=2)
            yield Comparison(replace(plain, context=2), (plain,), native_pair(one))

    @classmethod
    def damage_of(cls, mode: Job) -> tuple[str, ...]:
        """Damage one rank, and what the ranks are merged by."""
        return (LAST_RANK, "lse", "shift") if mode.force_mqa else ()


class MergeProof(TwoRanks):
    """Decode context parallelism whose ranks' top-k PyTorch merges; else what `ContextProof` compares."""

    texts: ClassVar = {name: TEXTS[name] for name in ("text", "short_text")}
    at_once: ClassVar = True

    @staticmethod
    def comparisons(models: Iterable[str]) -> Iterator[Comparison]:
        """Yield all modes."""
        for model in models:
            one = Job(model, OURS, 2, graphs=True)
            two = replace(one, tensor=2)
            yield Comparison(replace(two, context=2, merge=TORCH), (two,), native_pair(one))

    @classmethod
    def problems(cls, run: Run) -> Iterator[str]:
        """Yield that a rank's top-k was merged by anything else, or not at all.

        A graph holds a merge for each call of attention, as each layer has an indexer. Outside graphs there
        may be fewer: attention may take one batch in two calls, what it counts as decodes and the rest.
        """
        for phase in ("prefill", "decode"):
            for rank, counts in enumerate(comparison.ranks_of(run.figures["launches"][f"{phase}_batch"])):
                yield from (f"rank {rank}: {problem}" for problem in cls.merge_problems(counts, phase))

    @staticmethod
    def merge_problems(counts: Mapping[str, Any], phase: str) -> Iterator[str]:
        """Yield what is wrong with the merges of one rank."""
        if "merges" not in counts:
            yield f"merges were not counted in {phase}"
            return
        merges, calls = counts["merges"], sum(counts["calls"]["replayed"].values())
        if counts["cutedsl_loaded"]:
            yield "CuteDSL's merge was loaded"
        if not launched(merges, ANY_PHASE):
            yield f"PyTorch merged nothing in {phase}"
        held = merges["replayed"].get(ANY_PHASE, 0)
        if held < calls:
            yield f"{held} merges in graphs for {calls} calls of attention"


class PipelineProof(TwoRanks):
    """Two stages of a pipeline; GLM-5.3-Flash does not support them."""

    models: ClassVar = ("glm5",)
    texts: ClassVar = {"long_text": TEXTS["long_text"]}

    @staticmethod
    def comparisons(models: Iterable[str]) -> Iterator[Comparison]:
        """Yield all modes."""
        for model in models:
            for runner, graphs, cache in USUAL:
                plain = Job(model, OURS, 2, graphs=True, task=LONG, cache=cache)
                staged = replace(plain, runner=runner, graphs=graphs, pipeline=2)
                yield Comparison(staged, (plain,), native_pair(plain))

    @classmethod
    def problems(cls, run: Run) -> Iterator[str]:
        """Yield that no two prefills were on their way at once."""
        if run.figures["batches"]["prefills_in_flight"] <= 1:
            yield "never two batches with a prefill at once"
