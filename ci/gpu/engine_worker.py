"""Run one engine in one mode and keep what it gave; one process per mode.

    python engine_worker.py JOB.json

What the engine does is its job's task (`engine_tasks`). Writes JOB.npz with the log-probabilities and
JOB.result.json with everything else; exits 0 only if both are complete. Imports of vLLM stand inside
functions: it reads its environment, and is observed, before they run.
"""

from __future__ import annotations

import faulthandler
import json
import os
import sys
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from engine_jobs import INDEXER, SECOND_RUNNER, TORCH, Job, Task, engine_arguments, environment

TRACE_SECONDS = 240  # writing a trace while Triton compiles can end the process
JOB_FILE = "ENGINE_JOB"  # names the job for the processes of its ranks


def forced_params(job: Job, tokens: list[int]) -> Any:
    """Return sampling parameters that generate exactly these tokens."""
    from forcing import FORCED
    from vllm import SamplingParams

    how: dict[str, Any] = (
        {"trace_decode_token_ids": tokens}
        if job.runner == SECOND_RUNNER
        else {"extra_args": {FORCED: tokens}, "ignore_eos": True}
    )
    return SamplingParams(max_tokens=len(tokens), temperature=0.0, logprobs=1, detokenize=False, **how)


def score(engine: Any, prompts: list[list[int]]) -> list[float]:
    """Return the log-probability of every prompt token but each prompt's first."""
    from vllm import SamplingParams

    params = SamplingParams(max_tokens=1, temperature=0.0, prompt_logprobs=1, detokenize=False)
    outputs = engine.generate([{"prompt_token_ids": p} for p in prompts], params, use_tqdm=False)
    return [
        entry[token].logprob
        for out, prompt in zip(outputs, prompts, strict=True)
        for entry, token in zip(out.prompt_logprobs[1:], prompt[1:], strict=True)
    ]


def decode(
    engine: Any, job: Job, prompts: list[list[int]], continuations: list[list[int]]
) -> tuple[list[float], list[int]]:
    """Return the log-probability of every continuation token and the cached prompt tokens."""
    outputs = engine.generate(
        [{"prompt_token_ids": p} for p in prompts],
        [forced_params(job, tokens) for tokens in continuations],
        use_tqdm=False,
    )
    found: list[float] = []
    for out, tokens in zip(outputs, continuations, strict=True):
        completion = out.outputs[0]
        if list(completion.token_ids) != tokens:
            raise RuntimeError(f"the engine generated {completion.token_ids}, not {tokens}")
        entries = zip(completion.logprobs, tokens, strict=True)
        found += [entry[token].logprob for entry, token in entries]
    return found, [out.num_cached_tokens for out in outputs]


def generate(engine: Any, prompts: list[list[int]], count: int) -> tuple[list[float], list[int]]:
    """Return the log-probabilities and the tokens that the engine chooses itself, `count` a prompt."""
    from vllm import SamplingParams

    params = SamplingParams(max_tokens=count, ignore_eos=True, temperature=0.0, logprobs=1, detokenize=False)
    outputs = engine.generate([{"prompt_token_ids": p} for p in prompts], params, use_tqdm=False)
    completions = [out.outputs[0] for out in outputs]
    tokens = [token for completion in completions for token in completion.token_ids]
    entries = [entry for completion in completions for entry in completion.logprobs]
    return [entry[token].logprob for entry, token in zip(entries, tokens, strict=True)], tokens


def forbid_autotuning() -> None:
    """Let every autotuned Triton kernel take its first configuration.

    These are the linear-attention kernels. Tuning them takes minutes for each process, and each may
    choose differently, which would differ between backends for reasons that are not theirs. Our
    kernels are not autotuned.
    """
    import triton

    autotune = triton.autotune

    def first_only(configs: list[Any], *arguments: Any, **options: Any) -> Any:
        return autotune(configs[:1], *arguments, **options)

    triton.autotune = first_only


def choose_path(job: Job) -> None:
    """Let FLASHMLA_SPARSE prefill an fp8 cache with the kernel that the job names.

    It takes the one or the other by the number of heads; the limit is moved beyond all models.
    """
    from vllm.v1.attention.backends.mla import flashmla_sparse

    if job.path is not None:
        flashmla_sparse.MIN_HEADS_FOR_BF16_PREFILL = {"mixed": 1 << 30, "separate": 0}[job.path]


def observe(job: Job) -> Any:
    """Install what observes the backend's class, or the indexer; ranks observe themselves."""
    if job.ranks > 1:
        from rank_observer import EveryRank

        return EveryRank()
    if job.task == INDEXER:
        from launches import IndexerObserver

        indexer_observer = IndexerObserver()
        indexer_observer.install_indexer()
        return indexer_observer
    return observe_backend(job)


def observe_backend(job: Job) -> Any:
    """Install what observes the backend's class in this process."""
    from comparison import OURS
    from launches import Observer
    from small_models import MODELS
    from vllm.v1.attention.backends.registry import AttentionBackendEnum

    choose_path(job)
    observer = Observer()
    observer.install(AttentionBackendEnum[job.backend].get_class().get_impl_cls())
    if job.backend == OURS and "shared" in MODELS[job.model].layers:
        observer.watch_topk()
    if job.merge == TORCH:
        observer.watch_merges()
    return observer


def start(task: Task) -> Running:
    """Start the engine of a task, observed."""
    watch = Stopwatch()
    from vllm import LLM

    observer = observe(task.job)
    watch.lap("import")
    engine = LLM(**engine_arguments(task.job, task.folder))
    observer.attach(engine)
    watch.lap("start")
    return Running(task.job, engine, observer, watch)


def run_batch(
    run: Running, prefix: str, text: list[list[int]], continued: int, alone: int = 0
) -> tuple[list[list[int]], list[int]]:
    """Score the prompts of a text, then decode their continuations.

    Args:
        run: The engine, and where figures go.
        prefix: What the names of this batch begin with.
        text: Prompts with their continuations.
        continued: Tokens of each continuation.
        alone: How many of the last prompts are scored in a batch of their own.

    Returns:
        The prompts, and how many tokens of each were found in the cache when decoding.

    """
    prompts = [tokens[:-continued] for tokens in text]
    run.observer.start()
    first = len(prompts) - alone
    batches = [batch for batch in (prompts[:first], prompts[first:]) if batch]
    run.arrays[f"{prefix}prefill"] = [p for batch in batches for p in score(run.engine, batch)]
    run.counts[f"{prefix}prefill_batch"] = run.observer.snapshot()
    run.watch.lap(f"{prefix}prefill")
    run.observer.start()
    continuations = [tokens[-continued:] for tokens in text]
    run.arrays[f"{prefix}decode"], cached = decode(run.engine, run.job, prompts, continuations)
    run.counts[f"{prefix}decode_batch"] = run.observer.snapshot()
    run.watch.lap(f"{prefix}decode")
    return prompts, cached


class Stopwatch:
    """Seconds between laps, also printed, so that the log of a job that was stopped says where."""

    def __init__(self) -> None:
        self.laps: dict[str, float] = {}
        self._last = time.monotonic()

    def lap(self, name: str) -> None:
        """Note the seconds since the last lap."""
        now = time.monotonic()
        self.laps[name] = now - self._last
        self._last = now
        print(f"lap {name}: {self.laps[name]:.1f} s", flush=True)


@dataclass
class Running:
    """An engine with its observer, and what it gave so far."""

    job: Job
    engine: Any
    observer: Any
    watch: Stopwatch
    arrays: dict[str, Any] = field(default_factory=dict)
    counts: dict[str, Any] = field(default_factory=dict)


def main() -> None:
    """Run the job in the file that the command line names."""
    import numpy as np

    path = Path(sys.argv[1]).resolve()
    task = read_task(path)
    os.environ.update(environment(task.job) | {JOB_FILE: str(path)})
    forbid_autotuning()
    faulthandler.dump_traceback_later(TRACE_SECONDS, repeat=True)  # says where a stuck engine is
    from engine_tasks import TASKS

    arrays, figures = TASKS[task.job.task](task)
    bad = [name for name, values in arrays.items() if not np.isfinite(values).all()]
    if bad:
        raise RuntimeError(f"log-probabilities are not finite: {bad}")
    stored: dict[str, Any] = {name: np.asarray(v, np.float32) for name, v in arrays.items()}
    with path.with_suffix(".npz").open("wb") as file:
        np.savez_compressed(file, **stored)
    path.with_suffix(".result.json").write_text(json.dumps({"job": asdict(task.job), **figures}))


def read_task(path: Path) -> Task:
    """Read what the process has to do."""
    given = json.loads(path.read_text())
    return Task(job=Job(**given.pop("job")), folder=Path(given.pop("folder")), **given)


if __name__ == "__main__":
    main()
