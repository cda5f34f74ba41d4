"""What the proof of the Triton indexer runs and demands; `engine_proof.py --proof indexer` runs it.

The logits that select the keys come from Triton instead of DeepGEMM, everything else is the same: text
up to 32,000 tokens, both model runners, eager and CUDA graphs, multi-token prediction of 1 and 3
tokens. The log-probabilities may differ from those with DeepGEMM by at most 1.5 times the difference
between the two native attention backends in the same mode, each with DeepGEMM. The reference leaves
the choice to vLLM, which must be DeepGEMM because its kernels work.

With drafts the engine chooses the tokens itself, so engines are compared as far as all chose the same.

The modes that end in "hidden" run where no CUDA compiler can be found (`without_toolkit.sh`), with
TRITON_MLA_SPARSE and the choice left to vLLM, which must be Triton, for want of a compiler. Nothing that
the engine tries to start may be one.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import small_models
from comparison import draft_problems, drafts_of, launched
from engine_jobs import FAR_DECODE_TOKENS, FAR_LENGTHS, INDEXER, TEXTS, Job

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from engine_runner import Run

ATTENTION, OTHER_ATTENTION = "FLASHMLA_SPARSE", "FLASH_ATTN_MLA_SPARSE"
OURS = "TRITON_MLA_SPARSE"
ALLOWED_RATIO = 1.5
REQUIRED_SHARE = 0.5  # of positions that engines with drafts must have in common
VARIANTS = ((2, True, 0), (2, False, 0), (1, True, 0), (2, True, 1), (2, True, 3), (1, True, 3))
# The first runner wants a draft's layers in one group of the KV cache; those of GLM-5.3-Flash are in two.
WITHOUT_DRAFTS = {("glm53flash", 1)}
PARTS = ("prefill", "decode")


def modes(models: Iterable[str]) -> Iterator[Job]:
    """Yield every mode, as the job whose indexer is Triton."""
    for model in models:
        for runner, graphs, draft in VARIANTS:
            if not (draft and (model, runner) in WITHOUT_DRAFTS):
                yield Job(model, ATTENTION, runner, graphs, task=INDEXER, indexer="triton", draft=draft)
        yield Job(model, OURS, 2, graphs=True, task=INDEXER, indexer="auto", toolkit=False)


def reference(mode: Job) -> Job:
    """Return the job that leaves the choice to vLLM, on a machine with a compiler."""
    return replace(mode, backend=ATTENTION, indexer="auto", toolkit=True)


def other_native(mode: Job) -> Job:
    """Return the job with the other native attention, which gives the bound."""
    return replace(mode, backend=OTHER_ATTENTION, indexer="deep_gemm", toolkit=True)


def jobs_of(mode: Job) -> list[Job]:
    """Return all jobs of a mode."""
    return [reference(mode), other_native(mode), mode]


def make_jobs(chosen: list[Job]) -> tuple[list[Job], list[Job]]:
    """Return the jobs that fill the compilation caches, or have empty ones, and all others."""
    every = list(dict.fromkeys(job for mode in chosen for job in jobs_of(mode)))
    first = [job for job in every if not job.toolkit or job in jobs_of(chosen[0])]
    return first, [job for job in every if job not in first]


def common(runs: Sequence[Run]) -> np.ndarray:
    """Return which generated tokens come before the first that the engines chose differently."""
    tokens = np.stack([run.arrays["tokens"].reshape(-1, FAR_DECODE_TOKENS) for run in runs])
    same = (tokens == tokens[0]).all(0)
    return np.logical_and.accumulate(same, axis=1).reshape(-1)


def compare(ours: Run, native: Run, other: Run) -> dict[str, Any]:
    """Return the differences in both phases and the bounds that they must keep."""
    kept = common([ours, native, other])
    found: dict[str, Any] = {"common_share_of_decode": float(kept.mean())}
    for part in PARTS:
        chosen = kept if part == "decode" else slice(None)
        values = {run.job.name: run.arrays[part][chosen] for run in (ours, native, other)}
        ours_values, native_values, other_values = values.values()
        natives = float(np.abs(native_values - other_values).mean())
        found[part] = {
            "positions": len(native_values),
            "native": natives,
            "bound": ALLOWED_RATIO * natives,
            "ours": float(np.abs(ours_values - native_values).mean()),
        }
    return found


def assess_mode(mode: Job, runs: Mapping[Job, Run]) -> dict[str, Any]:
    """Judge one mode."""
    errors = {job.name: runs[job].error if job in runs else "not run" for job in jobs_of(mode)}
    if any(errors.values()):
        return {"mode": mode.mode, "errors": errors, "passed": False}
    ours, native, other = runs[mode], runs[reference(mode)], runs[other_native(mode)]
    differences = compare(ours, native, other)
    problems = [*difference_problems(differences), *choice_problems(ours, native, other)]
    problems += launch_problems(ours, is_triton=True)
    problems += [*draft_problems(ours, [native]), *draft_problems(native, [])]
    problems += [p for run in (native, other) for p in launch_problems(run, is_triton=False)]
    problems += [] if mode.toolkit else toolkit_problems(ours)
    return {
        "mode": mode.mode,
        "differences": differences,
        "indexer": {run.job.name: run.figures["indexer"] for run in (ours, native, other)},
        "launches": {run.job.name: run.figures["launches"] for run in (ours, native)},
        "steps": ours.figures["steps"],
        "drafts": ours.figures.get("drafts"),
        "reference_drafts": drafts_of([native]) if mode.draft else None,
        "toolkit": ours.figures["toolkit"],
        "variants": ours.figures["variants"],
        "problems": problems,
        "passed": not problems,
    }


def difference_problems(differences: Mapping[str, Any]) -> Iterator[str]:
    """Yield what is too different."""
    for part in PARTS:
        found = differences[part]
        if not found["ours"] <= found["bound"]:
            yield f"{part}: {found['ours']:.2e} exceeds {found['bound']:.2e}"
    share = differences["common_share_of_decode"]
    if share < REQUIRED_SHARE:
        yield f"the engines have {share:.0%} of their tokens in common"


def choice_problems(ours: Run, native: Run, other: Run) -> Iterator[str]:
    """Yield which engine took another implementation than it should, or for another reason."""
    expected = [
        (native, "deep_gemm", "its kernels work here"),
        (other, "deep_gemm", "requested"),
    ]
    if ours.job.toolkit:  # else `toolkit_problems` looks at the reason
        expected.append((ours, "triton", "VLLM_SPARSE_INDEXER_LOGITS_BACKEND=triton"))
    for run, backend, reason in expected:
        if run.figures["indexer"] != {"backend": backend, "reason": reason}:
            yield f"{run.job.name} chose {run.figures['indexer']}"


def launch_problems(run: Run, *, is_triton: bool) -> Iterator[str]:
    """Yield what is wrong with what computed the logits of one engine."""
    for phase in PARTS:
        batch = run.figures["launches"][f"{phase}_batch"]
        wanted, unwanted = ("kernels", "calls") if is_triton else ("calls", "kernels")
        if not launched(batch[wanted], phase):
            yield f"{run.job.name}: nothing computed logits in {phase}"
        if launched(batch[unwanted], "prefill") + launched(batch[unwanted], "decode"):
            yield f"{run.job.name}: the other implementation ran in {phase}"
    # Nothing is compiled ahead where nothing is captured.
    if run.job.graphs and run.figures["unannounced_variants"]:
        yield f"{run.job.name}: variants not announced: {run.figures['unannounced_variants']}"
    replays = run.figures["launches"]["decode_batch"]["graph_replays"]
    if (replays > 0) != run.job.graphs:
        yield f"{run.job.name}: {replays} replays of graphs in decode"


def toolkit_problems(hidden: Run) -> list[str]:
    """Return what shows that a compiler was there, or was tried."""
    return list(_toolkit_problems(hidden))


def _toolkit_problems(hidden: Run) -> Iterator[str]:
    choice, toolkit = hidden.figures["indexer"], hidden.figures["toolkit"]
    if choice["backend"] != "triton" or "compiles its kernels with nvcc" not in choice["reason"]:
        yield f"{hidden.job.name} chose {choice}"
    seen = [toolkit["nvcc"], *toolkit["in_path"].values(), *toolkit["variables"].values()]
    if any(seen):
        yield f"{hidden.job.name} saw a compiler: {toolkit}"
    if toolkit["trapped"] != []:
        yield f"{hidden.job.name} ran {toolkit['trapped']}"


class IndexerProof:
    """What `engine_proof.main` needs to know of this proof."""

    models: ClassVar = ("glm5", "glm53flash")
    texts: ClassVar = {"far_text": TEXTS["far_text"]}
    ranks: ClassVar = 1
    workers: ClassVar = 14
    modes = staticmethod(modes)
    make_jobs = staticmethod(make_jobs)

    @staticmethod
    def damages(_: list[Job]) -> dict[Job, tuple[str, ...]]:
        """Return nothing: the other proof shows what wrong rows do."""
        return {}

    @staticmethod
    def assess(chosen: list[Job], runs: Mapping[Job, Run]) -> dict[str, Any]:
        """Judge all runs."""
        rows = [assess_mode(mode, runs) for mode in chosen]
        names = sorted({mode.model for mode in chosen})
        return {
            "configs": {name: small_models.config(small_models.MODELS[name]) for name in names},
            "prompt_lengths": list(FAR_LENGTHS),
            "modes": rows,
            "passed": all(row["passed"] for row in rows),
        }

    @staticmethod
    def table(report: Mapping[str, Any]) -> Iterator[str]:
        """Yield the lines of the short table."""
        yield f"{'mode':28} {'native':>9} {'ours':>9} {'ratio':>6} {'decode':>7} {'common':>7} {'steps':>6}"
        for row in report["modes"]:
            yield from mode_lines(row)
        yield "passed" if report["passed"] else "FAILED"


def mode_lines(row: Mapping[str, Any]) -> Iterator[str]:
    """Yield the lines of one mode."""
    if "errors" in row:
        yield f"{row['mode']:28} {row['errors']}"
        return
    prefill, decode = row["differences"]["prefill"], row["differences"]["decode"]
    share = row["differences"]["common_share_of_decode"]
    yield (
        f"{row['mode']:28} {prefill['native']:9.2e} {prefill['ours']:9.2e} {ratio(prefill):6.2f}"
        f" {ratio(decode):7.2f} {share:7.0%} {row['steps']:6}"
    )
    for problem in row["problems"]:
        yield f"    {problem}"


def ratio(part: Mapping[str, float]) -> float:
    """Return our difference in units of that between the native backends."""
    return part["ours"] / part["native"] if part["native"] else float("inf")
