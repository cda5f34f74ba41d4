"""Cases for ahead-of-time compilation of the indexer's logits kernels: variants, and real launches."""

from __future__ import annotations

import sys
from functools import partial
from importlib import import_module
from typing import TYPE_CHECKING, Any, Final

import torch

from tests.runtime.kernels.announced import launches, report_unannounced

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from kernelcheck.chips import Chip

MODULE: Final = "vllm.v1.attention.ops.triton_mqa_logits"
HEADS: Final = (8, 32, 64, 128)
DIM: Final = 128
MOST_NEXT_N: Final = 5
#: Page sizes smaller than, equal to and larger than a tile of keys; the first one with every head count.
PAGES: Final = (64, 32, 128)
BATCHES: Final = (1, 3, 129, 700)
"""Both sides of the number of items at which the decode kernel looks at more of them together."""

Case = tuple[str, "Callable[[], object]"]


def device_info() -> Any:
    """Return what the product reads from the pretended chip."""
    return import_module(MODULE).get_device_info(0)


def is_paged(variant: Any) -> bool:
    """Whether a variant belongs to the decode kernel and not to the prefill kernel."""
    return hasattr(variant, "page_size")


def compile_variant(variant: Any) -> None:
    """Take the product's warm-up path for one variant."""
    ops = import_module(MODULE)
    (ops._PAGED_KERNEL if is_paged(variant) else ops._PREFILL_KERNEL).compile(variant)


def variants(pages: tuple[int, ...] = PAGES, heads: tuple[int, ...] = HEADS) -> list[Any]:
    """Return what the warm-up announces on the pretended chip, each variant once."""
    ops = import_module(MODULE)
    found: dict[Any, None] = {}
    for count in heads:
        shape = {"num_heads": count, "head_dim": DIM, "device_info": device_info()}
        found |= dict.fromkeys(ops._PREFILL_KERNEL.get_warmup_keys(**shape))
        for page in pages:
            paged = {"page_size": page, "max_next_n": MOST_NEXT_N}
            found |= dict.fromkeys(ops._PAGED_KERNEL.get_warmup_keys(**shape, **paged))
    return list(found)


def label(variant: Any) -> str:
    """Name a variant in the figures."""
    tile = f"{variant.block_q} rows of {variant.block_h} heads, {variant.block_n} keys"
    if not is_paged(variant):
        return f"prefill {tile}"
    return f"decode {tile}, pages of {variant.page_size}, {variant.block_items} items"


def every_variant() -> Iterator[Case]:
    """Yield every variant of pages of 64 and small batches, and the other kinds with 32 heads."""
    chosen = [v for v in variants(PAGES[:1]) if not is_paged(v) or v.block_items == 128]
    chosen += [v for v in variants(PAGES, (32,)) if is_paged(v) and v.block_q in (1, 4) and v not in chosen]
    for variant in chosen:
        yield label(variant), partial(compile_variant, variant)


def _empty(*size: int, kind: torch.dtype) -> torch.Tensor:
    return torch.empty(*size, dtype=kind, device="meta")


def launch_prefill(rows: int, heads: int) -> None:
    """Call the product's launcher on meta tensors, with strides as odd as it accepts."""
    fp8, f32, i32 = torch.float8_e4m3fn, torch.float32, torch.int32
    import_module(MODULE).triton_mqa_logits(
        (_empty(rows, heads + heads % 3, DIM + 16 * (rows % 3), kind=fp8)[:, :heads, :DIM], None),
        (_empty(77, DIM + 16 * (heads % 5), kind=fp8)[:, :DIM], _empty(78, kind=f32)[1:]),
        _empty(rows, heads + rows % 2, kind=f32)[:, rows % 2 :],
        _empty(rows + 1, kind=i32)[1:],
        _empty(rows, kind=i32),
        70 + rows,
    )


def launch_decode(batch: int, next_n: int, heads: int, page: int) -> None:
    """Call the product's launcher on meta tensors, with strides as odd as it accepts."""
    fp8, f32, i32 = torch.float8_e4m3fn, torch.float32, torch.int32
    size = page * (DIM + 4)
    pages = _empty(5, size + 16 * (batch % 4), kind=torch.uint8)
    cache = pages.as_strided((5, page, 1, DIM + 4), (pages.stride(0), DIM + 4, DIM + 4, 1))
    lengths = _empty(batch, next_n + 1, kind=i32)[:, 1:] if next_n % 2 else _empty(batch, kind=i32)
    import_module(MODULE).triton_paged_mqa_logits(
        (_empty(batch, next_n, heads, DIM, kind=fp8), None),
        cache,
        _empty(batch * next_n, heads + 1, kind=f32)[:, 1:],
        lengths,
        _empty(batch, 7, kind=i32)[:, 1:],
        1000 + batch,
    )


def unannounced(chip: Chip) -> tuple[int, list[str]]:
    """Record warm-up and real launches; return the number of launches and those not warmed up."""
    warm: set[str] = set()
    for variant in variants():
        warm |= launches(chip, partial(compile_variant, variant))
    launched: set[str] = set()
    for rows in (1, 2, 16, 300, 5000):
        for heads in HEADS:
            launched |= launches(chip, partial(launch_prefill, rows, heads))
    for batch in BATCHES:
        for next_n in range(1, MOST_NEXT_N + 1):
            for heads, page in zip(HEADS, (64, 32, 64, 128), strict=True):
                launched |= launches(chip, partial(launch_decode, batch, next_n, heads, page))
    return len(launched), sorted(launched - warm)


if __name__ == "__main__":
    sys.exit(report_unannounced(unannounced))
