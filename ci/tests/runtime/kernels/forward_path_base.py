"""What the cases of :mod:`forward_path` are made of: tensors that pretend, and shapes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from typing import Any, Final
from unittest.mock import patch

import torch
import triton

from kernelcheck.platform import skip_package_init

Case = tuple[str, Callable[[], object]]

V32: Final = "vllm.models.deepseek_v32.common.kernels"
GLM: Final = "vllm.models.glm5next"
MLA: Final = "vllm.v1.attention.backends.mla"
KPOOL: Final = f"{GLM}.nvidia.ops.kpool_compress"
CHEAPEST_CHIP: Final = 80
"""The chip whose launches are listed; the kernels are the same on all."""
TOKENS: Final = 5
TOPK: Final = 2048
EPS: Final = 1e-6
KPOOL_SIZE: Final = 4
BF16: Final = torch.bfloat16
FP32: Final = torch.float32
INT32: Final = torch.int32
INT64: Final = torch.int64
BYTE: Final = torch.uint8


def module(name: str) -> Any:
    """Import a module of the product."""
    if name.startswith(GLM):
        skip_package_init(GLM)
    return import_module(name)


class OnGpu(torch.Tensor):
    """A CPU tensor that says that it is a CUDA tensor, for launchers that ask."""

    is_cuda = True


def empty(*shape: int, kind: torch.dtype = BF16) -> torch.Tensor:
    """Return a tensor that a launcher takes for one on a GPU."""
    return torch.empty(*shape, dtype=kind).as_subclass(OnGpu)


@dataclass(frozen=True)
class Queries:
    """The queries of one rank of a model."""

    heads: int = 16
    index_heads: int = 64
    """0 in a layer that shares its top-k."""
    interleave: bool = False
    """Whether the indexer's RoPE takes neighbours."""
    rope: torch.dtype = FP32
    """Of the angles."""

    def __str__(self) -> str:
        return f"{self.heads} and {self.index_heads} heads, interleaved {self.interleave}, {self.rope} angles"


def fused_q(queries: Queries, *, quantized: bool) -> None:
    """Launch the fused RoPE and quantization of both queries."""
    angles, heads, index_heads = empty(4096, 64, kind=queries.rope), queries.heads, queries.index_heads
    module(V32).fused_q(
        empty(TOKENS, kind=INT64),
        empty(TOKENS, heads, 192)[..., 128:],
        angles,
        empty(TOKENS, index_heads, 128) if index_heads else None,
        angles if index_heads else None,
        empty(TOKENS, heads, 512),
        empty(1, kind=FP32),
        empty(TOKENS, 128 + index_heads)[:, 128:] if index_heads else None,
        1.0,
        1.0,
        has_indexer=bool(index_heads),
        index_rope_interleave=queries.interleave,
        quantize_mqa=quantized,
    )


def by_key_scales(name: str, call: Callable[[], object]) -> Iterator[Case]:
    """Yield a launch for each form of the scales of the indexer's keys that the chip can meet.

    On SM100 DeepGEMM wants MX scales; whether it is used depends on this machine's compilers, which must not
    decide what is compiled here.
    """
    yield name, partial(_with_key_scales, call, mx=False)
    if import_module("vllm.platforms").current_platform.is_device_capability_family(100):
        yield f"{name}, MX scales", partial(_with_key_scales, call, mx=True)


def _with_key_scales(call: Callable[[], object], *, mx: bool) -> None:
    deep_gemm = import_module("vllm.utils.deep_gemm")
    with patch.object(deep_gemm, "_use_deep_gemm_mqa_logits", lambda: mx):
        deep_gemm.mqa_logits_use_mx_scales.cache_clear()
        call()
    deep_gemm.mqa_logits_use_mx_scales.cache_clear()


@contextmanager
def cheapest_configuration() -> Iterator[None]:
    """Let autotuned kernels launch the configuration that asks for least, without timing any.

    On a GPU the tuner tries all and drops those that a chip has no room for; one must remain.
    """
    tuner = triton.runtime.autotuner.Autotuner
    original = tuner.run

    def cost(config: Any) -> tuple[int, ...]:
        tile = 1
        for size in config.kwargs.values():
            tile *= size
        return config.num_stages, tile, config.num_warps

    def run(self: Any, *args: Any, **named: Any) -> Any:
        chosen = min(self.configs, key=cost)
        return self.fn.run(*args, **{**named, **chosen.all_kwargs()})

    tuner.run = run
    try:
        yield
    finally:
        tuner.run = original


def compile_variant(name: str, kernel: str, **named: object) -> None:
    """Compile one variant through the product's own warm-up."""
    instance = getattr(module(name), kernel)
    instance.compile(instance.dispatch(**named))
