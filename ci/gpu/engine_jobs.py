"""What an engine of the proofs is asked to be and to do: jobs, their text, and vLLM's arguments.

Nothing here imports vLLM: a job is chosen and named before the process that runs it exists.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

from dcp_merge import WITHOUT_CUTEDSL

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

PROMPT_LENGTHS = (5, 77, 400, 1100, 2300, 4100, 9000, 16000)
DECODE_TOKENS = 256
# None above index_topk, and around each backend's threshold up to which a request counts as a decode (64,
# 128 or 256): such a request is no prefill, however short its context. The last ones are scored in a batch
# of their own, where nothing is a decode and the indexer is not asked either.
SHORT_LENGTHS = (5, 40, 77, 100, 128, 129, 180, 220, 256, 300, 400, 500, 512)
SHORT_ALONE = 4
SHORT_DECODE_TOKENS = 128
FAR_LENGTHS = (5, 400, 1100, 2300, 4100, 9000, 16000, 32000)  # for the proof of the indexer, and for drafts
FAR_DECODE_TOKENS = 128
# More requests at once than 64: beyond the largest graph of the other proofs, and whole waves of rows.
WIDE_LENGTHS = tuple(range(9, 9 + 96 * 17, 17))
WIDE_DECODE_TOKENS = 48
# Several prefills of many chunks each, so that every stage of a pipeline has one in flight.
LONG_LENGTHS = (12000, 14000, 16000, 18000, 24000, 30000)
LONG_DECODE_TOKENS = 128  # with 32, one to four of a hundred right engines would be too far apart
# Twenty requests with windows of six rows are more than 64 rows until ten have ended. No prompt is short: in
# little context many tokens of the larger vocabulary have no partner to look up, and the choice is a near tie
# then, at which right engines part.
WIDE_DRAFTS_LENGTHS = tuple(range(1000, 1000 + 20 * 260, 260))
SECOND_RUNNER = 2
FP8_CACHES = ("fp8_ds_mla", "fp8", "fp8_e4m3")

TEXTS: Final = {
    "text": (PROMPT_LENGTHS, DECODE_TOKENS, 11),
    "short_text": (SHORT_LENGTHS, SHORT_DECODE_TOKENS, 20011),
    "far_text": (FAR_LENGTHS, FAR_DECODE_TOKENS, 11),
    "wide_text": (WIDE_LENGTHS, WIDE_DECODE_TOKENS, 30011),
    "long_text": (LONG_LENGTHS, LONG_DECODE_TOKENS, 40011),
    "wide_drafts_text": (WIDE_DRAFTS_LENGTHS, FAR_DECODE_TOKENS, 50011),
}
"""By name: lengths of the prompts, tokens that continue each, seed."""


@dataclass(frozen=True)
class Limits:
    """How large an engine's batches are.

    Attributes:
        model_len: Tokens of a request.
        requests: Requests that decode at a time.
        tokens: Tokens of one batch.
        graphs: Requests of the batches that are captured.
        cache: Bytes of the KV cache.

    """

    model_len: int = 16384  # 16,000 + 256 fit
    requests: int = 16
    tokens: int = 4096
    graphs: tuple[int, ...] = (1, 2, 4, 8, 16)
    cache: int = 2 << 30


ATTENTION, INDEXER, DRAFTS, WIDE, LONG = "attention", "indexer", "drafts", "wide", "long"
WIDE_DRAFTS = "wide-drafts"
SYNC, ALLOCATIONS, SOAK = "sync", "allocations", "soak"
SMALL_CACHE = 160 << 20  # some 40,000 tokens in bf16, 70,000 in fp8
WIDE_GRAPHS = (1, 2, 4, 8, 16, 32, 64, 96, 128)
LIMITS: Final = {
    ATTENTION: Limits(),
    INDEXER: Limits(model_len=32768),
    DRAFTS: Limits(model_len=32768),
    WIDE: Limits(model_len=4096, requests=128, graphs=WIDE_GRAPHS),
    LONG: Limits(model_len=32768, tokens=2048),
    WIDE_DRAFTS: Limits(model_len=8192, requests=24, graphs=(1, 2, 4, 8, 16, 24)),
    SYNC: Limits(model_len=8192),
    ALLOCATIONS: Limits(model_len=8192),
    # Holds the longest request and little more, so that requests are preempted.
    SOAK: Limits(model_len=32768, requests=32, graphs=(1, 2, 4, 8, 16, 32), cache=SMALL_CACHE),
}
"""By what an engine does; `engine_tasks.TASKS` does it."""
# The tokens are prescribed: every engine is asked about the same text.
PRESCRIBED = (ATTENTION, INDEXER, WIDE, LONG)
TORCH = "torch"


@dataclass(frozen=True)
class Job:
    """One mode of one engine.

    Attributes:
        model: Key of `small_models.MODELS`.
        backend: Name of an attention backend.
        runner: 1 or 2, the model runner.
        graphs: Whether CUDA graphs are used.
        force_mqa: `attention_config.sparse_mla_force_mqa`.
        indexer: VLLM_SPARSE_INDEXER_LOGITS_BACKEND; None leaves it alone.
        draft: Tokens that multi-token prediction drafts.
        toolkit: Whether the engine may see a CUDA compiler (`without_toolkit.sh`).
        task: Key of `LIMITS`.
        cache: `--kv-cache-dtype`.
        tensor: Ranks of tensor parallelism.
        context: Ranks of decode context parallelism.
        pipeline: Stages of pipeline parallelism.
        path: Which of its two kernels FLASHMLA_SPARSE prefills an fp8 cache with, "mixed" (the fp8 kernel)
            or "separate" (the bf16 kernel, on a copy in bf16); None leaves that to the number of heads.
        merge: What merges the indexer's top-k of the ranks of context parallelism: `TORCH`, PyTorch's
            operations; None leaves that to vLLM, which takes CuteDSL's kernels on SM90.

    """

    model: str
    backend: str
    runner: int
    graphs: bool
    force_mqa: bool = False
    indexer: str | None = None
    draft: int = 0
    toolkit: bool = True
    task: str = ATTENTION
    cache: str = "auto"
    tensor: int = 1
    context: int = 1
    pipeline: int = 1
    path: str | None = None
    merge: str | None = None

    @property
    def ranks(self) -> int:
        """Number of GPUs."""
        return self.tensor * self.pipeline

    @property
    def kind(self) -> tuple[str, str, str, int]:
        """What an engine shares with others that it is like: compiled kernels, and most reasons to fail."""
        return self.model, self.backend, self.cache, self.ranks

    @property
    def is_prescribed(self) -> bool:
        """Whether the engine generates given tokens instead of its own choice."""
        return self.task in PRESCRIBED and not self.draft

    @property
    def mode(self) -> str:
        """Name of what is the same for all backends."""
        parts = [self.model, f"v{self.runner}", "graphs" if self.graphs else "eager"]
        if self.task == ATTENTION:
            parts.append("mqa" if self.force_mqa else "auto")
        elif self.task in (INDEXER, DRAFTS):
            parts.append(f"mtp{self.draft}")
        else:
            parts += [self.task, *([f"mtp{self.draft}"] if self.draft else [])]
        parallel = {"tp": self.tensor, "dcp": self.context, "pp": self.pipeline}
        parts += [f"{name}{ranks}" for name, ranks in parallel.items() if ranks > 1]
        parts += [f"{self.merge}merge"] if self.merge else []
        parts += [self.cache] if self.cache != "auto" else []
        parts += [] if self.toolkit else ["hidden"]
        return "-".join(parts)

    @property
    def name(self) -> str:
        """Name of the job, usable as a file name."""
        choices = [self.indexer, self.path]
        return "-".join([self.mode, self.backend.lower(), *(choice for choice in choices if choice)])


def first_of_each_kind(jobs: Iterable[Job]) -> tuple[list[Job], list[Job]]:
    """Return the first engine of each kind, which fills the compilation caches, and all others, each once."""
    every = list(dict.fromkeys(jobs))
    pilots = {job.kind: job for job in reversed(every)}.values()
    return [job for job in every if job in pilots], [job for job in every if job not in pilots]


@dataclass(frozen=True)
class Task:
    """What one process does."""

    job: Job
    folder: Path
    damages: list[str] = field(default_factory=list)
    texts: dict[str, list[list[int]]] = field(default_factory=dict)


# A program that uses NVLink multicast can put the host's GPUs, which others share, out of service.
WITHOUT_MULTICAST = {
    "NCCL_NVLS_ENABLE": "0",
    "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1",
    "NVSHMEM_DISABLE_NVLS": "1",
    "VLLM_ALLREDUCE_USE_SYMM_MEM": "0",
}


def environment(job: Job) -> dict[str, str]:
    """Return the variables that the engine's process needs."""
    variables = {
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_USE_FLASHINFER_SAMPLER": "0",
        "VLLM_USE_V2_MODEL_RUNNER": str(job.runner - 1),
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
    }
    if job.indexer is not None:
        variables["VLLM_SPARSE_INDEXER_LOGITS_BACKEND"] = job.indexer
    if job.task == SYNC:
        variables["VLLM_GPU_SYNC_CHECK"] = "error"
    if job.merge == TORCH:
        variables[WITHOUT_CUTEDSL] = "the mode says so"
    if job.ranks > 1:  # spawned, so that each rank observes itself from the start (`rank_observer`)
        variables |= {"VLLM_WORKER_MULTIPROC_METHOD": "spawn"} | WITHOUT_MULTICAST
    return variables


def engine_arguments(job: Job, folder: Path) -> dict[str, Any]:
    """Return the arguments of `vllm.LLM`."""
    limits = LIMITS[job.task]
    arguments: dict[str, Any] = {
        "model": str(folder),
        "skip_tokenizer_init": True,
        "enforce_eager": not job.graphs,
        "max_model_len": limits.model_len,
        "max_num_seqs": limits.requests,
        "max_num_batched_tokens": limits.tokens,
        "enable_prefix_caching": True,
        "enable_chunked_prefill": True,
        "gpu_memory_utilization": 0.05,
        "kv_cache_memory_bytes": limits.cache,
        "kv_cache_dtype": job.cache,
        "seed": 0,
        "disable_log_stats": True,
        "attention_backend": job.backend,
        "attention_config": {"sparse_mla_force_mqa": job.force_mqa},
        # Needs packages that a host without network does not have.
        "kernel_config": {"enable_cutedsl_warmup": False},
        # FlashKDA is a module of its own, and no part of what is proven here.
        "additional_config": {"kda_prefill_backend": "triton"},
    }
    if job.graphs:  # of as many rows as the requests have with their drafts
        sizes = [requests * (1 + job.draft) for requests in limits.graphs]
        arguments["compilation_config"] = {"cudagraph_capture_sizes": sizes}
    if job.draft:  # prescribes nothing: drafts are verified
        arguments["speculative_config"] = speculation(job, folder)
    return arguments | prescription(job) | parallelism(job)


def prescription(job: Job) -> dict[str, Any]:
    """Return the arguments with which requests can say what is generated."""
    if not job.is_prescribed:
        return {}
    if job.runner == SECOND_RUNNER:
        return {"enable_trace_replay": True}
    # The processor reads the tokens generated so far, which run late otherwise.
    return {"logits_processors": ["forcing:Forcing"], "async_scheduling": False}


def parallelism(job: Job) -> dict[str, Any]:
    """Return the arguments that spread an engine over several GPUs."""
    if job.ranks == 1:
        return {}
    from small_models import KPOOL, MODELS

    # A rank has whole pools of an indexer only if as many tokens in a row are its own.
    pooled = job.context > 1 and MODELS[job.model].is_pooled
    return ({"cp_kv_cache_interleave_size": KPOOL} if pooled else {}) | {
        "tensor_parallel_size": job.tensor,
        "decode_context_parallel_size": job.context,
        "pipeline_parallel_size": job.pipeline,
        "distributed_executor_backend": "mp",
        "worker_extension_cls": "rank_observer.RankObserver",
    }


def speculation(job: Job, folder: Path) -> dict[str, Any]:
    """Return `speculative_config`."""
    from small_models import DRAFT_FOLDER

    # The first runner chooses the draft's backend anew, whatever the model's is.
    backend = {"attention_backend": job.backend} if job.runner != SECOND_RUNNER else {}
    how: dict[str, Any] = {"method": "mtp", "num_speculative_tokens": job.draft} | backend
    draft = folder / DRAFT_FOLDER
    return how | ({"model": str(draft)} if draft.exists() else {})
