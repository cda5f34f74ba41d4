"""Run one engine in one mode and keep the log-probabilities of given text; one process per mode.

    python engine_worker.py JOB.json

The engine first scores prompts of very different lengths in one batch (chunked prefill), then
decodes given continuations of the same prompts, whose prefixes it finds in its cache. Then it does
both with a batch of short prompts, whose prefill is dense unless `sparse_mla_force_mqa` is set. The
tokens are always prescribed, so that every backend is asked about the same text. Writes JOB.npz with
the log-probabilities and JOB.result.json with everything else; exits 0 only if both are complete.
Imports of vLLM stand inside functions: it reads its environment, and is observed, before they run.
"""

from __future__ import annotations

import faulthandler
import json
import os
import shutil
import sys
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

PROMPT_LENGTHS = (5, 77, 400, 1100, 2300, 4100, 9000, 16000)
DECODE_TOKENS = 256
# None above index_topk, and around each backend's threshold up to which a request counts as a decode (64,
# 128 or 256): such a request is no prefill, however short its context. The last ones are scored in a batch
# of their own, where nothing is a decode and the indexer is not asked either.
SHORT_LENGTHS = (5, 40, 77, 100, 128, 129, 180, 220, 256, 300, 400, 500, 512)
SHORT_ALONE = 4
SHORT_DECODE_TOKENS = 128
MAX_MODEL_LEN = 16384  # 16,000 + 256 fit
FAR_LENGTHS = (5, 400, 1100, 2300, 4100, 9000, 16000, 32000)  # for the proof of the indexer
FAR_DECODE_TOKENS = 128
FAR_MODEL_LEN = 32768
MAX_BATCHED_TOKENS = 4096
GRAPH_SIZES = (1, 2, 4, 8, 16)
KV_CACHE_BYTES = 2 << 30
TEXT_SEED, SHORT_TEXT_SEED = 11, 20011
TRACE_SECONDS = 100
SECOND_RUNNER = 2


@dataclass(frozen=True)
class Job:
    """One mode of one engine.

    Attributes:
        model: Key of `small_models.MODELS`.
        backend: Name of an attention backend.
        runner: 1 or 2, the model runner.
        graphs: Whether CUDA graphs are used.
        force_mqa: `attention_config.sparse_mla_force_mqa`.
        indexer: VLLM_SPARSE_INDEXER_LOGITS_BACKEND; None for the proof of attention, which leaves it alone.
        draft: Tokens that multi-token prediction drafts.
        toolkit: Whether the engine may see a CUDA compiler (`without_toolkit.sh`).

    """

    model: str
    backend: str
    runner: int
    graphs: bool
    force_mqa: bool
    indexer: str | None = None
    draft: int = 0
    toolkit: bool = True

    @property
    def mode(self) -> str:
        """Name of what is the same for all backends."""
        execution = "graphs" if self.graphs else "eager"
        if self.indexer is not None:
            name = f"{self.model}-v{self.runner}-{execution}-mtp{self.draft}"
            return name if self.toolkit else f"{name}-hidden"
        return f"{self.model}-v{self.runner}-{execution}-{'mqa' if self.force_mqa else 'auto'}"

    @property
    def name(self) -> str:
        """Name of the job, usable as a file name."""
        parts = [self.mode, self.backend.lower()]
        if self.indexer is not None:
            parts.append(self.indexer)
        return "-".join(parts)


@dataclass(frozen=True)
class Task:
    """What one process does."""

    job: Job
    folder: Path
    text: list[list[int]]
    damages: list[str]
    short_text: list[list[int]] = field(default_factory=list)


def environment(job: Job) -> dict[str, str]:
    """Return the variables that the engine's process needs."""
    forced = {} if job.indexer is None else {"VLLM_SPARSE_INDEXER_LOGITS_BACKEND": job.indexer}
    return forced | {
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_USE_FLASHINFER_SAMPLER": "0",
        "VLLM_USE_V2_MODEL_RUNNER": str(job.runner - 1),
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
    }


def engine_arguments(job: Job, folder: Path) -> dict[str, Any]:
    """Return the arguments of `vllm.LLM`."""
    arguments: dict[str, Any] = {
        "model": str(folder),
        "skip_tokenizer_init": True,
        "enforce_eager": not job.graphs,
        "max_model_len": MAX_MODEL_LEN if job.indexer is None else FAR_MODEL_LEN,
        "max_num_seqs": 16,
        "max_num_batched_tokens": MAX_BATCHED_TOKENS,
        "enable_prefix_caching": True,
        "enable_chunked_prefill": True,
        "gpu_memory_utilization": 0.05,
        "kv_cache_memory_bytes": KV_CACHE_BYTES,
        "seed": 0,
        "disable_log_stats": True,
        "attention_backend": job.backend,
        "attention_config": {"sparse_mla_force_mqa": job.force_mqa},
        # Needs packages that a host without network does not have.
        "kernel_config": {"enable_cutedsl_warmup": False},
        # FlashKDA is a module of its own, and no part of what is proven here.
        "additional_config": {"kda_prefill_backend": "triton"},
    }
    if job.graphs:
        arguments["compilation_config"] = {"cudagraph_capture_sizes": list(GRAPH_SIZES)}
    if job.draft:  # prescribes nothing: drafts are verified
        arguments["speculative_config"] = speculation(job, folder)
    elif job.runner == SECOND_RUNNER:
        arguments["enable_trace_replay"] = True
    else:
        arguments["logits_processors"] = ["forcing:Forcing"]
        # The processor reads the tokens generated so far, which run late otherwise.
        arguments["async_scheduling"] = False
    return arguments


def speculation(job: Job, folder: Path) -> dict[str, Any]:
    """Return `speculative_config`."""
    from small_models import DRAFT_FOLDER

    how: dict[str, Any] = {"method": "mtp", "num_speculative_tokens": job.draft}
    draft = folder / DRAFT_FOLDER
    return how | ({"model": str(draft)} if draft.exists() else {})


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


def observe(job: Job) -> Any:
    """Install the observer on the backend's class, or on the indexer."""
    from launches import IndexerObserver, Observer
    from vllm.v1.attention.backends.registry import AttentionBackendEnum

    if job.indexer is not None:
        indexer_observer = IndexerObserver()
        indexer_observer.install_indexer()
        return indexer_observer
    backend = AttentionBackendEnum[job.backend].get_class()
    observer = Observer()
    observer.install(backend.get_impl_cls())
    return observer


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
    run.counts[f"{prefix}prefill_batch"] = snapshot(run.observer)
    run.watch.lap(f"{prefix}prefill")
    run.observer.start()
    continuations = [tokens[-continued:] for tokens in text]
    run.arrays[f"{prefix}decode"], cached = decode(run.engine, run.job, prompts, continuations)
    run.counts[f"{prefix}decode_batch"] = snapshot(run.observer)
    run.watch.lap(f"{prefix}decode")
    return prompts, cached


def run(task: Task) -> tuple[dict[str, Any], dict[str, Any]]:
    """Run the engine; return arrays and figures."""
    watch = Stopwatch()
    from vllm import LLM

    observer = observe(task.job)
    watch.lap("import")
    engine = LLM(**engine_arguments(task.job, task.folder))
    watch.lap("start")
    running = Running(task.job, engine, observer, watch)
    prompts, cached = run_batch(running, "", task.text, DECODE_TOKENS)
    _, short_cached = run_batch(running, "short_", task.short_text, SHORT_DECODE_TOKENS, SHORT_ALONE)
    for damage in task.damages:  # requests for prompt log-probabilities read no cached prefix
        observer.damage = damage
        running.arrays[damage] = score(engine, prompts)
        watch.lap(damage)
    variants = observer.variants
    figures = {
        "seconds": watch.laps,
        "launches": running.counts,
        "cached_tokens": cached,
        "short_cached_tokens": short_cached,
        "variants": sorted(str(variant) for variant in variants),
        "unannounced_variants": sorted(str(v) for v in variants - announced(task.job, observer)),
    }
    return running.arrays, figures


def run_indexer(task: Task) -> tuple[dict[str, Any], dict[str, Any]]:
    """Run the engine for the proof of the indexer; return arrays and figures."""
    watch = Stopwatch()
    from vllm import LLM
    from vllm.utils.mqa_logits_backend import get_mqa_logits_choice

    observer = observe(task.job)
    watch.lap("import")
    engine = LLM(**engine_arguments(task.job, task.folder))
    watch.lap("start")
    running = Running(task.job, engine, observer, watch)
    prompts = [tokens[:-FAR_DECODE_TOKENS] for tokens in task.text]
    steps = count_steps(engine)
    if task.job.draft:
        observer.start()
        running.arrays["prefill"] = score(engine, prompts)
        running.counts["prefill_batch"] = snapshot(observer)
        watch.lap("prefill")
        observer.start()
        steps.clear()
        chosen = generate(engine, prompts, FAR_DECODE_TOKENS)
        running.arrays["decode"], running.arrays["tokens"] = chosen
        running.counts["decode_batch"] = snapshot(observer)
        watch.lap("decode")
    else:
        run_batch(running, "", task.text, FAR_DECODE_TOKENS)
        running.arrays["tokens"] = [t for tokens in task.text for t in tokens[-FAR_DECODE_TOKENS:]]
    choice = get_mqa_logits_choice()
    return running.arrays, {
        "seconds": watch.laps,
        "launches": running.counts,
        "indexer": {"backend": choice.backend.value, "reason": choice.reason},
        "steps": len(steps),
        "variants": sorted(str(variant) for variant in observer.variants),
        "unannounced_variants": sorted(str(v) for v in observer.variants - observer.announced),
        "toolkit": toolkit(),
    }


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


def announced(job: Job, observer: Any) -> set[Any]:
    """Return the variants our backend announces; none for others, which launch none of ours."""
    found: set[Any] = set()
    if job.backend == "TRITON_MLA_SPARSE":
        found = observer.announced_variants()
    return found


def snapshot(observer: Any) -> dict[str, Any]:
    """Return the counts so far."""
    return {
        "calls": observer.calls.as_json(),
        "kernels": observer.kernels.as_json(),
        "dense": observer.dense.as_json(),
        "graph_replays": observer.graph_replays,
    }


def main() -> None:
    """Run the job in the file that the command line names."""
    import numpy as np

    path = Path(sys.argv[1])
    given = json.loads(path.read_text())
    job = Job(**given.pop("job"))
    task = Task(job=job, folder=Path(given.pop("folder")), **given)
    os.environ.update(environment(job))
    forbid_autotuning()
    if not job.toolkit:
        keep_torch_from_asking()
    faulthandler.dump_traceback_later(TRACE_SECONDS, repeat=True)  # says where a stuck engine is
    arrays, figures = run(task) if job.indexer is None else run_indexer(task)
    bad = [name for name, values in arrays.items() if not np.isfinite(values).all()]
    if bad:
        raise RuntimeError(f"log-probabilities are not finite: {bad}")
    stored: dict[str, Any] = {name: np.asarray(v, np.float32) for name, v in arrays.items()}
    with path.with_suffix(".npz").open("wb") as file:
        np.savez_compressed(file, **stored)
    path.with_suffix(".result.json").write_text(json.dumps({"job": asdict(job), **figures}))


if __name__ == "__main__":
    main()
