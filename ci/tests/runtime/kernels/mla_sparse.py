"""Cases for ahead-of-time compilation of the sparse-MLA kernels: variants, and real launches."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from functools import partial
from importlib import import_module
from typing import TYPE_CHECKING, Any, Final

import torch

from tests.runtime.kernels.announced import launches, report_unannounced

if TYPE_CHECKING:
    from kernelcheck.chips import Chip

MODULE: Final = "vllm.v1.attention.ops.triton_mla_sparse"
RANK: Final = 512
HEADS: Final = (1, 8, 16, 17, 32, 33, 64, 128)
"""Both sides of every head count at which a configuration may change."""
ROPE: Final = (0, 64)
WIDTH: Final = 2048
MOST_TOKENS: Final = 1024
TOKENS: Final = (1, 2, 3, 7, 8, 16, 17, 50, 64, 66, 67, 128, 133, 189, 400, 1000)

Case = tuple[str, Callable[[], object]]


def device_info() -> Any:
    """Return what the product reads from the pretended chip."""
    return import_module(MODULE).get_device_info(0)


def is_split(variant: Any) -> bool:
    """Whether a variant belongs to the split kernel and not to the merge kernel."""
    return hasattr(variant, "block_h")


def is_fp8(variant: Any) -> bool:
    """Whether a variant belongs to the split kernel for fp8_ds_mla rows."""
    return hasattr(variant, "fp8_words")


def compile_variant(variant: Any) -> None:
    """Take the product's warm-up path for one variant."""
    ops = import_module(MODULE)
    split = ops._FP8_SPLIT_KERNEL if is_fp8(variant) else ops._SPLIT_KERNEL
    (split if is_split(variant) else ops._MERGE_KERNEL).compile(variant)


def variants(
    dtype: torch.dtype, *, return_lse: bool | None, cache_dtype: torch.dtype | None = None
) -> list[Any]:
    """Return all variants of all head counts on the pretended chip, each once."""
    ops = import_module(MODULE)
    found: dict[Any, None] = {}
    for heads in HEADS:
        for rope in ROPE:
            arguments = (heads, WIDTH, RANK, rope, dtype, device_info(), MOST_TOKENS)
            found |= dict.fromkeys(ops.iter_variants(*arguments, return_lse, cache_dtype))
    return list(found)


def label(variant: Any) -> str:
    """Name a variant in the figures."""
    dtype = str(variant.dtype).removeprefix("torch.")
    if not is_split(variant):
        return f"merge of {variant.block_n}-row tiles, {dtype}"
    kind = "split" if variant.is_partial else "direct"
    tile = f"{variant.block_h} heads, {variant.block_n} rows"
    cache = "fp8_ds_mla" if is_fp8(variant) else dtype
    return f"{kind} {tile}, {cache}, rope {variant.rope_dim}"


def every_variant() -> Iterator[Case]:
    """Yield every variant that returns the log-sum-exp, through the product's warm-up.

    One that does not return it lacks a store of one number per head, and is left out.
    """
    for dtype in (torch.bfloat16, torch.float16):
        for variant in variants(dtype, return_lse=True):
            yield label(variant), partial(compile_variant, variant)


def every_fp8_variant() -> Iterator[Case]:
    """Yield what the fp8_ds_mla cache adds to :func:`every_variant`: its split kernel."""
    for variant in variants(torch.bfloat16, return_lse=True, cache_dtype=torch.uint8):
        if is_split(variant):
            yield label(variant), partial(compile_variant, variant)


def launch(tokens: int, heads: int, rope: int, dtype: torch.dtype, *, lse: bool, fp8: bool = False) -> None:
    """Call the product's launcher on meta tensors, with strides as odd as it accepts."""
    ops = import_module(MODULE)
    cache_dtype = torch.uint8 if fp8 else dtype
    row, vector = (656, 16) if fp8 else (RANK + rope, 8)

    def empty(*size: int, kind: torch.dtype = dtype) -> torch.Tensor:
        return torch.empty(*size, dtype=kind, device="meta")

    q = empty(tokens, heads, RANK + rope + 8 * (heads % 3))
    sizes = ops.scratch_shapes(tokens, heads, WIDTH, RANK, device_info(), cache_dtype)
    ops.triton_mla_sparse_fwd(
        q[..., :RANK],
        q[..., RANK : RANK + rope],
        empty(5, row + vector * (tokens % 2), kind=cache_dtype)[:, :row],
        empty(tokens, WIDTH + tokens % 5, kind=torch.int32)[:, :WIDTH],
        empty(tokens + 1, kind=torch.int32)[1:],
        0.1 if tokens % 2 else 1.0,
        empty(heads, tokens, RANK).transpose(0, 1),
        empty(tokens, heads + 1, kind=torch.float32)[:, 1:] if lse else None,
        *(empty(*size, kind=kind) for size, kind in sizes),
    )


def unannounced(chip: Chip) -> tuple[int, list[str]]:
    """Record warm-up and real launches; return the number of launches and those not warmed up."""
    kinds = [(dtype, lse) for dtype in (torch.bfloat16, torch.float16) for lse in (False, True)]
    warm: set[str] = set()
    for dtype, cache_dtype in ((torch.bfloat16, None), (torch.float16, None), (torch.bfloat16, torch.uint8)):
        for variant in variants(dtype, return_lse=None, cache_dtype=cache_dtype):
            warm |= launches(chip, partial(compile_variant, variant))
    launched: set[str] = set()
    for tokens in TOKENS:
        for heads in HEADS:
            for rope in ROPE:
                dtype, lse = kinds[(tokens + heads + rope // 64) % len(kinds)]
                launched |= launches(chip, partial(launch, tokens, heads, rope, dtype, lse=lse))
                fp8 = partial(launch, tokens, heads, rope, torch.bfloat16, lse=lse, fp8=True)
                launched |= launches(chip, fp8)
    return len(launched), sorted(launched - warm)


if __name__ == "__main__":
    sys.exit(report_unannounced(unannounced))
