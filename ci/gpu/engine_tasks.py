"""What the engines of the proofs do, by the task of their job."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import engine_jobs
from engine_jobs import DECODE_TOKENS, FAR_DECODE_TOKENS, SHORT_ALONE, SHORT_DECODE_TOKENS
from engine_worker import Running, generate, run_batch, score, start
from health_tasks import run_allocations, run_sync
from scheduling import BatchWatch, DraftWatch

if TYPE_CHECKING:
    from collections.abc import Callable

    from engine_jobs import Task

Found = tuple[dict[str, Any], dict[str, Any]]
"""Arrays and figures."""


def run_attention(task: Task) -> Found:
    """Score and continue long prompts, then short ones, then score the long ones with damaged attention.

    The engine first scores prompts of very different lengths in one batch (chunked prefill), then
    decodes given continuations of the same prompts, whose prefixes it finds in its cache. Then it does
    both with a batch of short prompts, whose prefill is dense unless `sparse_mla_force_mqa` is set.
    """
    running = start(task)
    prompts, cached = run_batch(running, "", task.texts["text"], DECODE_TOKENS)
    _, short_cached = run_batch(running, "short_", task.texts["short_text"], SHORT_DECODE_TOKENS, SHORT_ALONE)
    for damage in task.damages:  # requests for prompt log-probabilities read no cached prefix
        running.observer.damage = damage
        running.arrays[damage] = score(running.engine, prompts)
        running.watch.lap(damage)
    figures = {"cached_tokens": cached, "short_cached_tokens": short_cached}
    return running.arrays, figures | observed(running)


def observed(running: Running) -> dict[str, Any]:
    """Return what every task tells of its engine."""
    variants, unannounced = running.observer.variant_names()
    return {
        "seconds": running.watch.laps,
        "launches": running.counts,
        "cache": running.observer.cache,
        "variants": variants,
        # Nothing is compiled ahead where nothing is captured.
        "unannounced_variants": unannounced if running.job.graphs else [],
    }


def score_and_choose(running: Running, prompts: list[list[int]]) -> dict[str, Any]:
    """Score prompts and let the engine continue them with its own choice; return its steps and drafts."""
    steps, drafts = count_steps(running.engine), DraftWatch(running.engine)
    running.observer.start()
    running.arrays["prefill"] = score(running.engine, prompts)
    running.counts["prefill_batch"] = running.observer.snapshot()
    running.watch.lap("prefill")
    running.observer.start()
    steps.clear()
    drafts.clear()
    chosen = generate(running.engine, prompts, FAR_DECODE_TOKENS)
    running.arrays["decode"], running.arrays["tokens"] = chosen
    running.counts["decode_batch"] = running.observer.snapshot()
    running.watch.lap("decode")
    return {"steps": len(steps), "drafts": drafts.as_json()}


def run_drafts(task: Task) -> Found:
    """Score prompts up to 32,000 tokens and continue them with drafts."""
    running = start(task)
    prompts = [tokens[:-FAR_DECODE_TOKENS] for tokens in task.texts["far_text"]]
    return running.arrays, score_and_choose(running, prompts) | observed(running)


def run_wide_drafts(task: Task) -> Found:
    """Score many prompts and continue them with drafts, all at once; tell how full the batches were."""
    running = start(task)
    batches = BatchWatch(running.engine)
    prompts = [tokens[:-FAR_DECODE_TOKENS] for tokens in task.texts["wide_drafts_text"]]
    figures = score_and_choose(running, prompts)
    return running.arrays, figures | {"batches": batches.as_json()} | observed(running)


def run_wide(task: Task) -> Found:
    """Score and continue many prompts at once."""
    return prescribed_batch(task, "wide_text", engine_jobs.WIDE_DECODE_TOKENS)


def run_long(task: Task) -> Found:
    """Score and continue long prompts whose chunks are in flight at the same time."""
    return prescribed_batch(task, "long_text", engine_jobs.LONG_DECODE_TOKENS)


def prescribed_batch(task: Task, text: str, continued: int) -> Found:
    """Score and continue the prompts of one text; tell how full the engine's batches were."""
    running = start(task)
    batches = BatchWatch(running.engine)
    _, cached = run_batch(running, "", task.texts[text], continued)
    return running.arrays, {"cached_tokens": cached, "batches": batches.as_json()} | observed(running)


def run_indexer(task: Task) -> Found:
    """Run the engine for the proof of the indexer."""
    from vllm.utils.mqa_logits_backend import get_mqa_logits_choice

    if not task.job.toolkit:
        keep_torch_from_asking()
    running = start(task)
    text = task.texts["far_text"]
    if task.job.draft:
        figures = score_and_choose(running, [tokens[:-FAR_DECODE_TOKENS] for tokens in text])
    else:
        counted = count_steps(running.engine)
        run_batch(running, "", text, FAR_DECODE_TOKENS)
        running.arrays["tokens"] = [t for tokens in text for t in tokens[-FAR_DECODE_TOKENS:]]
        figures = {"steps": len(counted)}
    choice = get_mqa_logits_choice()
    indexer = {"backend": choice.backend.value, "reason": choice.reason}
    return running.arrays, observed(running) | figures | {"indexer": indexer, "toolkit": toolkit()}


def count_steps(engine: Any) -> list[None]:
    """Return a list that grows by one with each step of the engine."""
    steps: list[None] = []
    step = engine.llm_engine.step

    def counted() -> Any:
        steps.append(None)
        return step()

    engine.llm_engine.step = counted
    return steps


def keep_torch_from_asking() -> None:
    """Take the version of nvcc out of a comment.

    torch.compile writes a program that repeats each compilation, with a comment for which it runs
    `nvcc --version`; without an nvcc it says so there. It would hide what else runs nvcc.
    """
    from importlib import import_module

    for name in ("debug_utils", "repro.after_aot", "repro.aoti"):
        module: Any = import_module(f"torch._dynamo.{name}")
        module._cuda_system_info_comment = lambda: "# not asked\n"


def toolkit() -> dict[str, Any]:
    """Return what this process could have compiled CUDA with, and what of that was run."""
    from vllm.utils.deep_gemm_support import find_nvcc

    log = os.environ.get("EXEC_TRAP_LOG")
    return {
        "nvcc": find_nvcc(),
        "in_path": {name: shutil.which(name) for name in ("nvcc", "ninja", "cicc", "ptxas")},
        "variables": {name: os.environ.get(name) for name in ("CUDA_HOME", "CUDA_PATH")},
        "trapped": Path(log).read_text().splitlines() if log else None,
    }


TASKS: Final[dict[str, Callable[[Task], Found]]] = {
    engine_jobs.ATTENTION: run_attention,
    engine_jobs.INDEXER: run_indexer,
    engine_jobs.DRAFTS: run_drafts,
    engine_jobs.WIDE: run_wide,
    engine_jobs.LONG: run_long,
    engine_jobs.WIDE_DRAFTS: run_wide_drafts,
    engine_jobs.SYNC: run_sync,
    engine_jobs.ALLOCATIONS: run_allocations,
}
