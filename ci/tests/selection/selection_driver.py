"""Ask vLLM's own platform code what it selects on one chip, for many requests.

``python selection_driver.py CAPABILITY``: each line of the standard input is a JSON list of objects
with the fields of :class:`Request`, each line of the standard output a JSON list of
:class:`Answer` in the same order. One process serves one chip and one state of FlashInfer, because
vLLM caches what a device can do.
"""

from __future__ import annotations

import json
import os
import sys
from dataclasses import asdict, dataclass
from importlib import import_module
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, TextIO

import torch
from torch.overrides import TorchFunctionMode

from kernelcheck.chips import chip
from kernelcheck.platform import pretend

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

HF_CONFIGS = {
    576: {
        "model_type": "deepseek_v32",
        "q_lora_rank": 1536,
        "kv_lora_rank": 512,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "v_head_dim": 128,
    },
    512: {
        "model_type": "glm5_next_text",
        "q_lora_rank": 2048,
        "kv_lora_rank": 512,
        "qk_nope_head_dim": 256,
        "qk_rope_head_dim": 0,
        "v_head_dim": 256,
        "index_kpool": 4,
    },
}
"""Text configurations of the models with these head sizes (DeepSeek-V3.2, GLM-5.3-Flash)."""


@dataclass(frozen=True, slots=True)
class Request:
    """What a user asks for, and the model."""

    head_size: int = 576
    kv_cache_dtype: str = "auto"
    dtype: str = "bfloat16"
    num_heads: int = 16
    index_topk: int = 2048
    backend: str | None = None
    backend_per_kind: dict[str, str] | None = None
    block_size: int | None = None
    decode_context_parallel_size: int = 1
    prefill_context_parallel_size: int = 1
    batch_invariant: bool = False
    hisparse: bool = False
    architecture: str | None = None
    """What ``vllm.model_executor.models.config`` adjusts the configuration by first, if it does."""


@dataclass(frozen=True, slots=True)
class Answer:
    """What vLLM made of a request."""

    backend: str | None
    """Name of the selected backend, None if there is none."""
    cache: str | None
    """KV cache dtype that the layer then uses."""
    error: str | None


class OnMeta(TorchFunctionMode):
    """Allocates on ``meta`` what is asked for on the GPU."""

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Call ``func`` with ``device="meta"`` where it says ``"cuda"``."""
        named = dict(kwargs or {})
        if named.get("device") == "cuda":
            named["device"] = "meta"
        return func(*args, **named)


def _vllm_config(request: Request) -> Any:
    settings = import_module("vllm.config")
    sharded = request.decode_context_parallel_size * request.prefill_context_parallel_size
    config = settings.VllmConfig(
        attention_config=settings.AttentionConfig(
            backend=request.backend, backend_per_kind=request.backend_per_kind or {}
        ),
        cache_config=settings.CacheConfig(block_size=request.block_size, cache_dtype=request.kv_cache_dtype),
        parallel_config=settings.ParallelConfig(
            distributed_executor_backend="mp" if sharded > 1 else None,
            tensor_parallel_size=request.decode_context_parallel_size,
            decode_context_parallel_size=request.decode_context_parallel_size,
            prefill_context_parallel_size=request.prefill_context_parallel_size,
        ),
    )
    if request.hisparse:  # set afterwards: the constructor wants the second model runner
        config.attention_config.hisparse_config = settings.HiSparseConfig()
    hf_config = SimpleNamespace(index_topk=request.index_topk, **HF_CONFIGS[request.head_size])
    config.model_config = SimpleNamespace(
        hf_config=hf_config,
        hf_text_config=hf_config,
        dtype=getattr(torch, request.dtype),
        rswa_window=None,
        get_num_attention_heads=lambda _: request.num_heads,
    )
    return config


def _select(request: Request) -> Answer:
    mla_attention = import_module("vllm.model_executor.layers.attention.mla_attention")
    model_hooks = import_module("vllm.model_executor.models.config")
    selector = import_module("vllm.v1.attention.selector")

    selector._cached_get_attn_backend.cache_clear()
    config = _vllm_config(request)
    os.environ["VLLM_BATCH_INVARIANT"] = str(int(request.batch_invariant))
    if hook := model_hooks.MODELS_CONFIG_MAP.get(request.architecture):
        hook.verify_and_update_config(config)
    cache = config.cache_config.cache_dtype
    with import_module("vllm.config").set_current_vllm_config(config):
        backend = selector.get_attn_backend(
            request.head_size,
            config.model_config.dtype,
            cache,
            use_mla=True,
            use_sparse=True,
            num_heads=request.num_heads,
        )
    used = mla_attention._canonicalize_sparse_mla_kv_cache_dtype(backend, cache)
    return Answer(backend.get_name(), used, None)


def answer(request: Request) -> Answer:
    """Select for ``request``; an error that vLLM raises for its user is part of the answer."""
    try:
        return _select(request)
    except ValueError as error:
        return Answer(None, None, str(error))


def _take_standard_output() -> TextIO:
    """Return the standard output and leave vLLM, which logs there, the standard error."""
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "w")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    return answers


def main(capability: str) -> None:
    """Answer lists of requests until the input ends."""
    answers = _take_standard_output()
    described = chip(int(capability))
    pretend(described)
    # The stubs' compiler was on the path; what vLLM looks for there is ninja and nvcc.
    os.environ["PATH"] = ""
    if described.major == 10:
        # It allocates its 128 MB workspace on the GPU while it is imported.
        with OnMeta():
            import_module("vllm.v1.attention.backends.mla.cutlass_mla")
    for line in sys.stdin:
        told = [asdict(answer(Request(**fields))) for fields in json.loads(line)]
        print(json.dumps(told), file=answers, flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
