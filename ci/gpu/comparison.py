"""Compare engines that must agree as well as two native ones do.

Two right implementations differ by rounding, which later layers pass on. How much that is depends on the
model, the text and the cache's type, and is measured: it is the mean absolute difference of
log-probabilities between two *native* engines on the same text. Ours may be at most 1.5 times as far from
each of its references. Decoding is also given what the natives differ by in prefill, where the two have
different kernels in every case and positions are a hundred times as many. Short prompts are given what the
natives differ by with the long ones: two natives that serve them by the same dense attention agree to the
bit, while ours, or another number of heads on a rank, may take the kernel. For that reason, too, a native
difference in any part but the long prefill is the largest of the proof's native pairs that round no more:
while GLM-5 decodes after short prompts, with an fp8 cache, natives with the same dense prefills are 0.8e-3
apart, and natives with different ones, by `sparse_mla_force_mqa` or of two backends, 1.6e-3.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import numpy as np
from engine_jobs import FAR_DECODE_TOKENS, FP8_CACHES, Job
from launches import FP8_ROW

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from engine_runner import Run

OURS = "TRITON_MLA_SPARSE"
ALLOWED_RATIO: Final = 1.5
REQUIRED_SHARE: Final = 0.5  # of the tokens that engines with drafts choose alike
ACCEPTED_SHARE: Final = 0.1  # of the drafted tokens; the last of five is rarely right
FEWER_ACCEPTED: Final = 0.1  # a smaller share of them than in a reference; 0.06 was seen
LONG_PARTS = ("prefill", "decode")
SHORT_PARTS = ("short_prefill", "short_decode")


@dataclass(frozen=True)
class Comparison:
    """Which engines are compared in one mode.

    Attributes:
        ours: The engine under test.
        references: What it must agree with.
        pair: Two native engines, whose difference gives the bound.

    """

    ours: Job
    references: tuple[Job, ...]
    pair: tuple[Job, Job]

    @property
    def jobs(self) -> list[Job]:
        """All engines, each once."""
        return list(dict.fromkeys([*self.pair, *self.references, self.ours]))


def common(a: Run, b: Run) -> np.ndarray:
    """Return which generated tokens come before the first that two engines chose differently."""
    tokens = [run.arrays["tokens"].reshape(-1, FAR_DECODE_TOKENS) for run in (a, b)]
    same = tokens[0] == tokens[1]
    return np.logical_and.accumulate(same, axis=1).reshape(-1)


def apart(part: str, a: Run, b: Run) -> tuple[float, float]:
    """Return the mean absolute difference of two engines in a part, and the share of it that was compared."""
    one, other = a.arrays[part], b.arrays[part]
    if part != "decode" or "tokens" not in a.arrays:
        return float(np.abs(one - other).mean()), 1.0
    kept = common(a, b)
    if not kept.any():
        return float("inf"), 0.0
    return float(np.abs(one - other)[kept].mean()), float(kept.mean())


def alike(comparison: Comparison, pairs: Iterable[tuple[Job, Job]]) -> list[tuple[Job, Job]]:
    """Return a comparison's native pair and those of its model that round no more, with its cache or bf16."""
    ours = comparison.ours
    caches = ("auto", ours.cache, comparison.pair[0].cache)
    others = [pair for pair in pairs if pair[0].model == ours.model and pair[0].cache in caches]
    return list(dict.fromkeys([comparison.pair, *others]))


def compare(
    comparison: Comparison, runs: Mapping[Job, Run], pairs: Iterable[tuple[Job, Job]] = ()
) -> dict[str, Any]:
    """Return the differences in every part, and the bounds that they must keep.

    Args:
        comparison: Which engines are compared.
        runs: What they gave.
        pairs: The native pairs of the whole proof; those that failed are left out.

    """
    ours, own = runs[comparison.ours], [runs[job] for job in comparison.pair]
    every = [[runs[job] for job in pair if job in runs] for pair in alike(comparison, pairs)]
    least = 0.0
    found: dict[str, Any] = {}
    for parts in (LONG_PARTS, SHORT_PARTS):
        present = [part for part in parts if all(part in run.arrays for run in (ours, *own))]
        natives = {part: native_difference(part, [own] if part == "prefill" else every) for part in present}
        for part in present:
            against = {job.name: apart(part, ours, runs[job]) for job in comparison.references}
            native = max(natives[part], natives[parts[0]], least)
            found[part] = {
                "native": native,
                "bound": ALLOWED_RATIO * native,
                "ours": {name: value for name, (value, _) in against.items()},
                "share": min(share for _, share in against.values()),
            }
        least = max(natives.values(), default=least)
    return found


def native_difference(part: str, pairs: Iterable[Sequence[Run]]) -> float:
    """Return the largest difference of native pairs in a part.

    A pair that chose other tokens from early on says nothing of it; the long prefill has a difference always.
    """
    whole = [pair for pair in pairs if len(pair) == 2 and all(part in run.arrays for run in pair)]
    found = [apart(part, *pair) for pair in whole]
    return max((value for value, share in found if share >= REQUIRED_SHARE), default=0.0)


def difference_problems(differences: Mapping[str, Any]) -> Iterator[str]:
    """Yield what is too different."""
    for part, found in differences.items():
        for name, value in found["ours"].items():
            if not value <= found["bound"]:
                yield f"{part}: {value:.2e} from {name} exceeds {found['bound']:.2e}"
        if found["share"] < REQUIRED_SHARE:
            yield f"{part}: {found['share']:.0%} of the tokens in common"


def ranks_of(snapshot: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """Return the counts, or the facts, of every rank."""
    return [snapshot, *snapshot.get("other_ranks", [])]


def launched(counts: Mapping[str, Any], phase: str) -> int:
    """Return how often something ran in a phase, outside and inside graphs."""
    return sum(int(counts[how].get(phase, 0)) for how in ("eager", "replayed"))


def launch_problems(run: Run) -> Iterator[str]:
    """Yield where our kernels did not run, or ran as nothing had announced."""
    for phase in ("prefill", "decode"):
        for rank, counts in enumerate(ranks_of(run.figures["launches"][f"{phase}_batch"])):
            if not launched(counts["kernels"], phase):
                yield f"rank {rank}: no launch in {phase}"
            if phase == "decode" and (counts["graph_replays"] > 0) != run.job.graphs:
                yield f"rank {rank}: {counts['graph_replays']} replays of graphs in decode"
    if run.figures["unannounced_variants"]:
        yield f"variants not announced: {run.figures['unannounced_variants']}"


def cache_problems(run: Run) -> Iterator[str]:
    """Yield what is wrong with the cache that our backend was given, and with NCCL."""
    for rank, cache in enumerate(ranks_of(run.figures["cache"])):
        if run.job.cache in FP8_CACHES and (cache["dtype"], cache["row_bytes"]) != ("fp8_ds_mla", FP8_ROW):
            yield f"rank {rank}: the cache is {cache['dtype']} with {cache['row_bytes']} bytes a row"
        if run.job.tensor > 1 and not cache["nccl"]:
            yield f"rank {rank}: vLLM does without NCCL"


def accepted_share(run: Run) -> float:
    """Return which share of the drafted tokens the engine accepted."""
    drafted, accepted = (run.figures["drafts"][kind] for kind in ("drafted", "accepted"))
    return float(accepted / drafted) if drafted else 0.0


def drafts_of(runs: Iterable[Run]) -> dict[str, Any]:
    """Return how many tokens engines drafted and accepted, by the name of their job."""
    return {run.job.name: run.figures["drafts"] for run in runs}


def draft_problems(run: Run, references: Iterable[Run]) -> Iterator[str]:
    """Yield that drafts were not accepted, or clearly fewer than in an engine with as many."""
    if not run.job.draft:
        return
    drafted, accepted = (run.figures["drafts"][kind] for kind in ("drafted", "accepted"))
    if not accepted_share(run) >= ACCEPTED_SHARE:
        yield f"{run.job.name}: {accepted} of {drafted} drafted tokens accepted"
    for reference in references:
        if accepted_share(run) < accepted_share(reference) - FEWER_ACCEPTED:
            shares = f"{accepted_share(run):.0%} of the drafted tokens accepted"
            yield f"{run.job.name}: {shares}, {accepted_share(reference):.0%} in {reference.job.name}"


def assess(
    comparison: Comparison, runs: Mapping[Job, Run], pairs: Iterable[tuple[Job, Job]] = ()
) -> dict[str, Any]:
    """Judge one mode; the proof's other native pairs have a say in its bounds (`compare`)."""
    errors = {job.name: runs[job].error if job in runs else "not run" for job in comparison.jobs}
    mode = comparison.ours.mode
    if any(errors.values()):
        return {"mode": mode, "errors": {name: e for name, e in errors.items() if e}, "passed": False}
    ours = runs[comparison.ours]
    differences = compare(comparison, runs, pairs)
    problems = [*difference_problems(differences), *launch_problems(ours)]
    problems += cache_problems(ours)
    problems += draft_problems(ours, [runs[job] for job in comparison.references])
    for job in comparison.jobs:
        if job.backend != OURS and runs[job].figures["variants"]:
            problems.append(f"{job.name} launched our kernels")
    kept = ("launches", "variants", "cache", "batches", "steps", "drafts")
    references = [runs[job] for job in comparison.references] if comparison.ours.draft else []
    return {
        "mode": mode,
        "differences": differences,
        **{name: ours.figures[name] for name in kept if name in ours.figures},
        **({"reference_drafts": drafts_of(references)} if references else {}),
        "problems": problems,
        "passed": not problems,
    }


def assess_damage(run: Run, bound: float, required: float) -> dict[str, Any]:
    """Compare damaged attention with intact attention in the same engine.

    Args:
        run: An engine that scored its text again for each kind of damage.
        bound: What engines may differ by.
        required: How many times as much each damage must change.

    """
    kinds = [name for name in run.arrays if name not in (*LONG_PARTS, *SHORT_PARTS)]
    intact = run.arrays.get("prefill")
    if run.error or intact is None or not bound > 0:
        return {"engine": run.job.name, "error": run.error or "no bound", "passed": False}
    changes = {kind: float(np.abs(run.arrays[kind] - intact).mean()) for kind in kinds}
    ratios = {kind: change / bound for kind, change in changes.items()}
    return {
        "engine": run.job.name,
        "bound": bound,
        "mean_absolute_change": changes,
        "ratio": ratios,
        "required_ratio": required,
        "passed": bool(ratios) and min(ratios.values()) >= required,
    }


def table(report: Mapping[str, Any]) -> Iterator[str]:
    """Yield the lines of the short table."""
    yield f"{'mode':40} {'native':>9} {'ours':>9} {'ratio':>6} {'decode':>7} {'share':>6}"
    for row in report["modes"]:
        yield from mode_lines(row)
    for damage in report.get("damage", []):
        ratios = " ".join(f"{kind} {ratio:.0f}" for kind, ratio in damage.get("ratio", {}).items())
        yield f"{damage['engine']}: {damage.get('error') or ratios + ' x bound'}"
    yield "passed" if report["passed"] else "FAILED"


def mode_lines(row: Mapping[str, Any]) -> Iterator[str]:
    """Yield the lines of one mode."""
    if "errors" in row:
        yield f"{row['mode']:40} {row['errors']}"
        return
    prefill, decode = (row["differences"][part] for part in LONG_PARTS)
    yield (
        f"{row['mode']:40} {prefill['native']:9.2e} {max(prefill['ours'].values()):9.2e}"
        f" {ratio_of(prefill):6.2f} {ratio_of(decode):7.2f} {decode['share']:6.0%}"
    )
    for problem in row["problems"]:
        yield f"    {problem}"


def ratio_of(part: Mapping[str, Any]) -> float:
    """Return our largest difference in units of that between the native engines."""
    return max(part["ours"].values()) / part["native"] if part["native"] else float("inf")
