"""The sparse-MLA kernel in Triton's interpreter: random odd shapes against float64.

Every buffer holds poison wherever the kernel must not read, and every output, scratch buffer and
their surroundings hold poison before. bfloat16 is value-correct here (:mod:`kernelcheck.interpreter`).
"""

from __future__ import annotations

import math
import warnings
from dataclasses import dataclass, replace
from functools import cache
from importlib import import_module
from typing import TYPE_CHECKING, Any, Final

import pytest
import torch
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from kernelcheck.chips import Chip, chip

if TYPE_CHECKING:
    from collections.abc import Callable

RANK: Final = 512
TOLERANCE: Final = {torch.bfloat16: 6e-3, torch.float16: 1.5e-3}
CHIPS: Final = (((9, 0), 5, 227 << 10), ((8, 0), 3, 163 << 10), ((12, 0), 7, 99 << 10))
"""Capability, multiprocessors, shared memory. So few multiprocessors that splits vary in number."""
TILES: Final = ((16, 16, 4, 2), (16, 32, 4, 3), (16, 64, 8, 3), (32, 64, 8, 3), (64, 32, 8, 3))
MOST_TILES: Final = 60
"""Bounds the interpreter's work per example: a tile takes some 10 ms."""


@cache
def vllm_module(name: str) -> Any:
    """Import a module of vLLM; torch itself uses a deprecated function while it is imported."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="`torch.jit", category=DeprecationWarning)
        return import_module(f"vllm.v1.attention.{name}")


@dataclass(frozen=True)
class Shape:
    """One problem; ``tile`` None lets the product choose its configuration."""

    counts: tuple[int, ...]
    heads: int
    width: int
    rope: int
    dtype: torch.dtype
    chip: int
    tile: tuple[int, int, int, int] | None
    splits: int
    blocks: int
    gap: int
    planted: int
    seed: int


@st.composite
def shapes(draw: st.DrawFn) -> Shape:
    """Draw a shape whose cost the interpreter can bear."""
    width = 128 * draw(st.integers(1, 4))
    count = st.one_of(st.integers(0, width), st.sampled_from([0, 1, 31, 32, 33, width - 1, width]))
    shape = Shape(
        counts=tuple(draw(st.lists(count, min_size=1, max_size=5))),
        heads=draw(st.one_of(st.integers(1, 128), st.sampled_from([8, 16, 17, 32, 64, 128]))),
        width=width,
        rope=draw(st.sampled_from([0, 64])),
        dtype=draw(st.sampled_from([torch.bfloat16, torch.float16])),
        chip=draw(st.integers(0, len(CHIPS) - 1)),
        tile=draw(st.sampled_from([None, *TILES])),
        splits=draw(st.integers(1, 9)),
        blocks=draw(st.sampled_from([1, 2, 30])),  # few blocks: many duplicates
        gap=draw(st.sampled_from([0, 3])),
        planted=draw(st.integers(0, 127)),
        seed=draw(st.integers(0, 2**31 - 1)),
    )
    tiles = sum(-(-count // 32) for count in shape.counts)
    assume(tiles * -(-shape.heads // 16) <= MOST_TILES)
    return shape


class Run:
    """The inputs of a shape, and what the kernel made of them."""

    def __init__(self, shape: Shape) -> None:
        self.shape = shape
        self.ops = vllm_module("ops.triton_mla_sparse")
        self.generator = torch.Generator().manual_seed(shape.seed)
        tokens, dim = len(shape.counts), RANK + shape.rope
        # Block 0 belongs to nobody, as in vLLM: its NaN shows a masked entry that was read.
        pages = torch.full((1 + shape.blocks, 16 + shape.gap, dim), math.nan, dtype=shape.dtype)
        pages[1:, :16] = self._normal(shape.blocks, 16, dim)
        utils = vllm_module("backends.mla.sparse_utils")
        self.rows, stride = utils.flat_kv_row_view(pages[:, :16], 16)
        blocks = self._integers(1, 1 + shape.blocks, tokens, shape.width)
        self.indices = (blocks * stride + self._integers(0, 16, tokens, shape.width)).int()
        for token, count in enumerate(shape.counts):
            garbage = self._integers(-(2**31), 2**31 - 1, shape.width - count)
            self.indices[token, count:] = garbage.int()
        self.counts = torch.tensor(shape.counts, dtype=torch.int32)
        self.q = self._normal(tokens, shape.heads, dim).to(shape.dtype)
        self._plant()
        self.q[self.counts == 0] = math.nan

    def _normal(self, *size: int) -> torch.Tensor:
        return torch.randn(size, generator=self.generator)

    def _integers(self, low: int, high: int, *size: int) -> torch.Tensor:
        return torch.randint(low, high, size, generator=self.generator)

    def _plant(self) -> None:
        """Make one entry of the first query dominate one head."""
        count, heads = self.shape.counts[0], self.shape.heads
        if count:
            row = int(self.indices[0, self.shape.planted % count])
            self.rows[row] = self.q[0, self.shape.planted % heads]

    @property
    def scale(self) -> float:
        """A softmax scale as models have it."""
        return float((RANK + self.shape.rope) ** -0.5)

    def config(self) -> Any:
        """The configuration to force, or None."""
        if self.shape.tile is None:
            return None
        block_h, block_n, warps, stages = self.shape.tile
        return self.ops.SparseMLAConfig(block_h, block_n, self.shape.splits, warps, stages)

    def kernel(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Run the product into poisoned buffers and check that their surroundings survive."""
        shape, config = self.shape, self.config()
        tokens, heads = len(shape.counts), shape.heads
        chip = self.ops.SparseMLADeviceInfo(*CHIPS[shape.chip])
        sizes = self.ops.scratch_shapes(tokens, heads, shape.width, RANK, chip)
        needed = 0 if config is None else tokens * heads * config.num_splits
        scratch_rows = max(sizes[0][0][0], needed)
        scratch = torch.full((scratch_rows + 1, RANK), math.nan)
        scratch_lse = torch.full((scratch_rows + 1,), math.nan)
        out = torch.full((tokens + 2, heads, RANK), math.nan, dtype=shape.dtype)
        lse = torch.full((tokens + 2, heads), math.nan)
        self.ops.triton_mla_sparse_fwd(
            self.q[..., :RANK],
            self.q[..., RANK:],
            self.rows,
            self.indices,
            self.counts,
            self.scale,
            out[1:-1],
            lse[1:-1],
            scratch[:-1],
            scratch_lse[:-1],
            device_info=chip,
            config=config,
        )
        for guarded in (out[0], out[-1], lse[0], lse[-1], scratch[-1], scratch_lse[-1]):
            assert bool(guarded.isnan().all())
        return out[1:-1], lse[1:-1]

    def reference(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Attention in float64, one query at a time."""
        tokens, heads = len(self.shape.counts), self.shape.heads
        out = torch.zeros(tokens, heads, RANK, dtype=torch.float64)
        lse = torch.full((tokens, heads), -math.inf, dtype=torch.float64)
        for token, count in enumerate(self.shape.counts):
            if count:
                keys = self.rows[self.indices[token, :count].long()].double()
                scores = self.q[token].double() @ keys.T * self.scale
                lse[token] = torch.logsumexp(scores, -1)
                out[token] = torch.softmax(scores, -1) @ keys[:, :RANK]
        return out, lse

    def decode_kernel(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Upstream's Triton decode kernel, on physical rows as pages of one row."""
        decode = vllm_module("ops.triton_decode_attention")
        tokens, heads = len(self.shape.counts), self.shape.heads
        cache = self.rows.view(-1, 1, 1, RANK + self.shape.rope)
        out = torch.empty(tokens, heads, RANK, dtype=self.shape.dtype)
        lse, logits = torch.empty(tokens, heads), torch.empty(tokens, heads, 2, RANK + 1)
        decode.decode_attention_fwd(
            self.q,
            cache,
            cache[..., :RANK],
            out,
            lse,
            self.indices,
            self.counts,
            logits,
            2,
            self.scale,
            page_size=1,
            is_mla=True,
        )
        return out, lse


def relative_errors(got: torch.Tensor, expected: torch.Tensor) -> torch.Tensor:
    """Return the relative error of every row; 0 where both are zero."""
    difference, size = (got.double() - expected.double()).norm(dim=-1), expected.double().norm(dim=-1)
    return torch.where(size > 0, difference / size, difference)


@given(shapes())
@settings(
    max_examples=32,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
)
def test_every_row_matches_float64(shape: Shape) -> None:
    run = Run(shape)
    out, lse = run.kernel()
    expected, expected_lse = run.reference()
    assert bool((out[run.counts == 0] == 0).all())
    assert float(relative_errors(out, expected).max()) <= TOLERANCE[shape.dtype]
    torch.testing.assert_close(lse.double(), expected_lse, atol=1e-3, rtol=0)


@given(shapes())
@settings(
    max_examples=8,
    deadline=None,
    suppress_health_check=[
        HealthCheck.too_slow,
        HealthCheck.filter_too_much,
        HealthCheck.function_scoped_fixture,
    ],
)
def test_agrees_with_upstreams_decode_kernel(use_chip: Callable[[Chip], None], shape: Shape) -> None:
    """An implementation that shares no line; it has no answer for rows without entries."""
    use_chip(chip(90))  # its launcher asks Triton's driver for the chip's shared memory
    counts = tuple(max(count, 1) for count in shape.counts)
    # With one head upstream takes another kernel, for attention without grouped heads.
    run = Run(replace(shape, counts=counts, heads=max(shape.heads, 2), gap=0))
    out, lse = run.kernel()
    other, other_lse = run.decode_kernel()
    assert float(relative_errors(out, other).max()) <= 2 * TOLERANCE[shape.dtype]
    torch.testing.assert_close(lse, other_lse, atol=2e-3, rtol=0)


@pytest.mark.parametrize("chip", range(len(CHIPS)))
@pytest.mark.parametrize("place", [0, 15, 16, 31, 32, 63, 64, 127, 128, 191, 192, 255])
def test_an_entry_at_an_edge_is_counted_once(chip: int, place: int) -> None:
    """The chosen splits and tiles have edges at these places; the planted key dominates."""
    shape = Shape((256,), 3, 256, 64, torch.bfloat16, chip, None, 1, 30, 3, place, seed=place)
    run = Run(shape)
    run.rows[int(run.indices[0, place])] = 3 * run.q[0, 1]
    out, lse = run.kernel()
    expected, expected_lse = run.reference()
    assert float(relative_errors(out, expected).max()) <= TOLERANCE[shape.dtype]
    torch.testing.assert_close(lse.double(), expected_lse, atol=1e-3, rtol=0)
