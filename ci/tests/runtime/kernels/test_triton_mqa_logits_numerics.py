"""The indexer's logits kernels in Triton's interpreter: random odd shapes against float64.

The logits lie in poison between guard rows; keys that nobody may read are NaN codes. e4m3 is
value-correct here (:mod:`kernelcheck.interpreter`), and decoded by the kernel itself as on SM80 and SM86.
"""

from __future__ import annotations

import math
import warnings
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from typing import Any, Final

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

DIM: Final = 128
KEY: Final = DIM + 4
GUARD: Final = 7.0
RELATIVE: Final = 2e-6
"""Of the sum of magnitudes: float32 adds up to 128 heads of 128 products."""
CHIPS: Final = (((9, 0), 2, 227 << 10), ((8, 6), 3, 99 << 10), ((12, 0), 1, 99 << 10))
"""Capability, multiprocessors, shared memory. So few multiprocessors that shares hold several requests."""
SETTINGS: Final = settings(max_examples=24, deadline=None, suppress_health_check=[HealthCheck.too_slow])


@cache
def ops() -> Any:
    """Import the kernels; torch itself uses a deprecated function while it is imported."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="`torch.jit", category=DeprecationWarning)
        return import_module("vllm.v1.attention.ops.triton_mqa_logits")


@dataclass(frozen=True)
class Shape:
    """One problem. ``spans`` are (first key, keys) of each row, or 0 and keys of each request's last row."""

    heads: int
    spans: tuple[tuple[int, int], ...]
    next_n: int
    page: int
    gap: int
    chip: int
    seed: int


@st.composite
def shapes(draw: st.DrawFn, *, paged: bool) -> Shape:
    """Draw a shape whose cost the interpreter can bear."""
    keys = st.one_of(st.integers(0, 300), st.sampled_from([0, 1, 63, 64, 65, 127, 128, 129, 256]))
    start = st.just(0) if paged else st.integers(0, 90)
    return Shape(
        heads=draw(st.one_of(st.integers(1, 128), st.sampled_from([8, 16, 32, 64, 128]))),
        spans=tuple(draw(st.lists(st.tuples(start, keys), min_size=1, max_size=4))),
        next_n=draw(st.integers(1, 6)) if paged else 1,
        page=draw(st.sampled_from([16, 32, 64, 96, 128])),
        gap=16 * draw(st.integers(0, 2)),
        chip=draw(st.integers(0, len(CHIPS) - 1)),
        seed=draw(st.integers(0, 2**31 - 1)),
    )


class Inputs:
    """Queries and weights of a shape, and the kernel's result between guards."""

    def __init__(self, shape: Shape) -> None:
        self.shape = shape
        self.generator = torch.Generator().manual_seed(shape.seed)
        self.chip = ops().SparseMLADeviceInfo(*CHIPS[shape.chip])
        rows = len(shape.spans) * shape.next_n
        self.q = self.e4m3(len(shape.spans), shape.next_n, shape.heads, DIM)
        self.weights = torch.randn(rows, shape.heads, generator=self.generator)

    def e4m3(self, *size: int) -> torch.Tensor:
        """Return normal values rounded to e4m3."""
        return torch.randn(size, generator=self.generator).to(torch.float8_e4m3fn)

    def run(self, function: str, *arguments: object) -> torch.Tensor:
        """Run the product into a poisoned result and check its guards."""
        kept: list[torch.Tensor] = []

        def empty(rows: int, width: int, _device: torch.device) -> torch.Tensor:
            kept.append(torch.full((rows + 2, max(width, 1)), math.nan))
            kept[0][0] = kept[0][-1] = GUARD
            return kept[0][1:-1, :width]

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(ops(), "_empty_logits", empty)
            logits: torch.Tensor = getattr(ops(), function)(*arguments, device_info=self.chip)
        assert bool((kept[0][0] == GUARD).all() and (kept[0][-1] == GUARD).all())
        return logits

    def check(self, row: int, got: torch.Tensor, k: torch.Tensor, scale: torch.Tensor) -> None:
        """Compare one row with float64, and what lies behind it with poison."""
        q, weights = self.q.flatten(0, 1)[row].double(), self.weights[row].double()
        products, sizes = q @ k.double().T, q.abs() @ k.double().abs().T
        expected = (products.relu() * weights[:, None]).sum(0) * scale
        bound = (sizes * weights[:, None].abs()).sum(0) * scale * RELATIVE
        assert bool(((got[: len(k)].double() - expected).abs() <= bound).all())
        assert bool(got[len(k) :].isnan().all())


@given(shapes(paged=False))
@SETTINGS
def test_prefill_matches_float64(shape: Shape) -> None:
    inputs = Inputs(shape)
    total = max(first + keys for first, keys in shape.spans) + 1
    k, scale = inputs.e4m3(total, DIM), torch.rand(total, generator=inputs.generator) + 0.1
    starts, lengths = torch.tensor(shape.spans, dtype=torch.int32).T.contiguous()
    logits = inputs.run(
        "triton_mqa_logits",
        (inputs.q.flatten(0, 1), None),
        (k, scale),
        inputs.weights,
        starts,
        starts + lengths,
        max(keys for _, keys in shape.spans),
    )
    for row, (first, keys) in enumerate(shape.spans):
        part = slice(first, first + keys)
        inputs.check(row, logits[row], k[part], scale[part])


@given(shapes(paged=True), st.booleans())
@SETTINGS
def test_paged_decode_matches_float64(shape: Shape, per_request: bool) -> None:
    inputs = Inputs(shape)
    most = max(keys for _, keys in shape.spans)
    pages = -(-most // shape.page) or 1
    size = shape.page * KEY
    storage = torch.full((len(shape.spans) * pages + 1, size + shape.gap), 0xFF, dtype=torch.uint8)
    order = torch.randperm(len(storage) - 1, generator=inputs.generator) + 1  # page 0 belongs to nobody
    tables = order.view(len(shape.spans), pages)
    keys, scales = inputs.e4m3(len(order), shape.page, DIM), torch.rand(len(order), shape.page) + 0.1
    storage[order, : shape.page * DIM] = keys.view(torch.uint8).flatten(1)
    storage[order, shape.page * DIM : size] = scales.view(torch.uint8)
    cache = storage.as_strided((len(storage), shape.page, 1, KEY), (size + shape.gap, KEY, KEY, 1))
    last = torch.tensor([keys for _, keys in shape.spans], dtype=torch.int32)
    lengths = (last[:, None] + torch.arange(1 - shape.next_n, 1)).clamp(min=0).int()
    logits = inputs.run(
        "triton_paged_mqa_logits",
        (inputs.q, None),
        cache,
        inputs.weights,
        last if per_request else lengths,
        tables.int(),
        most + 3,
    )
    for row, length in enumerate(lengths.flatten().tolist()):
        part = slice(row // shape.next_n * pages, (row // shape.next_n + 1) * pages)
        k, scale = keys[part].flatten(0, 1)[:length], scales[part].flatten()[:length]
        inputs.check(row, logits[row], k, scale)


def test_the_tests_see_a_key_too_many_and_a_key_too_few() -> None:
    """What is compared and what must stay poison meet exactly at a row's length."""
    inputs = Inputs(Shape(8, ((0, 65),), 1, 64, 0, 0, 1))
    k, scale = inputs.e4m3(66, DIM), torch.ones(66)
    arguments = ((inputs.q.flatten(0, 1), None), (k, scale), inputs.weights)
    starts, ends = torch.zeros(1, dtype=torch.int32), torch.tensor([65], dtype=torch.int32)
    logits = inputs.run("triton_mqa_logits", *arguments, starts, ends, 66)
    inputs.check(0, logits[0], k[:65], scale[:65])
    for wrong in (64, 66):
        with pytest.raises(AssertionError):
            inputs.check(0, logits[0], k[:wrong], scale[:wrong])
