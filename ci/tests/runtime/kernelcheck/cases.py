"""Launches that the tests of the compiling part record: no vLLM, meta tensors only."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from . import kernels

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


def _empty(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.empty(*shape, dtype=dtype, device="meta")


def _specialised() -> None:
    aligned, shifted = _empty(64, dtype=torch.bfloat16), _empty(64)[3:]
    kernels.specialised_kernel[(2,)](aligned, shifted, 1, 48, 7, FACTOR=3, num_warps=2)


def _wide_dot() -> None:
    left, right = _empty(8, 16, 128), _empty(8, 128, 128)
    kernels.wide_dot_kernel[(1,)](left, right, _empty(16, 128), 8, N=128, num_stages=4)


def _fp8_copy() -> None:
    source = _empty(64, dtype=torch.float8_e4m3fn)
    kernels.copy_kernel[(1,)](source, _empty(64), 64, BLOCK=64)


def every_case() -> Iterator[tuple[str, Callable[[], object]]]:
    """Yield the name and the call of each case."""
    yield "specialised", _specialised
    yield "wide dot", _wide_dot
    yield "fp8 copy", _fp8_copy


def failing_case() -> Iterator[tuple[str, Callable[[], object]]]:
    """Yield a call that raises as product code may."""
    settings: dict[str, object] = {}
    yield "raises", lambda: settings["missing"]
