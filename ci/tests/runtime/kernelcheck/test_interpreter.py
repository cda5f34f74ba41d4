"""The interpreter shim against torch's conversions and exact arithmetic."""

from __future__ import annotations

from fractions import Fraction
from typing import TYPE_CHECKING

import numpy as np
import pytest
import torch
import triton.language as tl
from hypothesis import given, settings
from hypothesis import strategies as st

from kernelcheck import interpreter

from . import kernels

if TYPE_CHECKING:
    from collections.abc import Callable

FP8 = [torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz]
NARROW = [torch.bfloat16, *FP8]
BLOCK = 4096


def bits(tensor: torch.Tensor) -> torch.Tensor:
    """Reinterpret as integers, so that equal NaNs and signed zeros compare."""
    return tensor.view({1: torch.uint8, 2: torch.int16, 4: torch.int32}[tensor.itemsize])


def copied(source: torch.Tensor, target_type: torch.dtype) -> torch.Tensor:
    """Convert through a kernel; lanes that it forgets would keep the poison value."""
    target = torch.full(source.shape, 77, dtype=torch.uint8).float().to(target_type)
    grid = (-(-source.numel() // BLOCK),)
    kernels.copy_kernel[grid](source, target, source.numel(), BLOCK=BLOCK)
    return target


def every_code(kind: torch.dtype) -> torch.Tensor:
    """All values of a narrow type, NaNs and infinities included."""
    if kind.itemsize == 1:
        return torch.arange(256, dtype=torch.int32).to(torch.uint8).view(kind)
    return torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(kind)


@pytest.fixture(scope="module")
def awkward_floats() -> torch.Tensor:
    """Random float32 bit patterns, and every tie and its neighbours of the narrow types."""
    generator = torch.Generator().manual_seed(torch.seed() % 2**31)
    random = torch.randint(-(2**31), 2**31 - 1, (30_000,), generator=generator).to(torch.int32)
    bf16 = torch.arange(0, 2**16, 7, dtype=torch.int32) << 16
    ties = torch.cat([bf16 + 0x7FFF, bf16 + 0x8000, bf16 + 0x8001])
    codes = [every_code(kind).float() for kind in FP8]
    finite = torch.cat([each[each.isfinite()] for each in codes]).sort().values
    middles = (finite[1:] + finite[:-1]) / 2
    near = [middles, middles.nextafter(torch.tensor(1e9)), middles.nextafter(torch.tensor(-1e9))]
    return torch.cat([random.view(torch.float32), ties.view(torch.float32), *near])


@pytest.mark.parametrize("kind", NARROW)
def test_every_code_survives_a_copy(kind: torch.dtype) -> None:
    """A load and a store of each pattern that is not NaN give the same bits."""
    codes = every_code(kind)
    result = copied(codes, kind)
    is_nan = codes.float().isnan()
    assert torch.equal(bits(result)[~is_nan], bits(codes)[~is_nan])
    assert bool(result.float().isnan()[is_nan].all())


@pytest.mark.parametrize("kind", NARROW)
@pytest.mark.parametrize("wide", [torch.float32, torch.float16])
def test_every_code_widens_as_in_torch(kind: torch.dtype, wide: torch.dtype) -> None:
    """Widening gives torch's value, infinities included."""
    codes = every_code(kind)
    torch.testing.assert_close(copied(codes, wide), codes.to(wide), rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("kind", NARROW)
def test_narrowing_is_torchs(kind: torch.dtype, awkward_floats: torch.Tensor) -> None:
    """float32 to a narrow type gives torch's code in every case, ties and overflow included."""
    result, expected = copied(awkward_floats, kind), awkward_floats.to(kind)
    assert torch.equal(result.float().isnan(), expected.float().isnan())
    is_number = ~expected.float().isnan()
    assert torch.equal(bits(result)[is_number], bits(expected)[is_number])


@given(st.floats(-(2.0**127), 2.0**127, width=32))
@settings(max_examples=200, deadline=None)
def test_bfloat16_rounds_to_nearest_even(value: float) -> None:
    """Checked with exact fractions, independently of torch: no neighbour is nearer."""
    code = int(interpreter.encode(np.array([value]), tl.bfloat16)[0])
    chosen, below, above = (
        Fraction(float(torch.tensor([pattern], dtype=torch.uint16).view(torch.bfloat16)))
        for pattern in (code, max(code - 1, code & 0x8000), code + 1)
    )
    distance = abs(Fraction(value) - chosen)
    others = [abs(Fraction(value) - other) for other in (below, above) if other != chosen]
    assert distance <= min(others)
    assert distance < min(others) or code % 2 == 0


@pytest.mark.parametrize("kind", FP8)
def test_bytes_bitcast_to_fp8(kind: torch.dtype) -> None:
    """A cache of bytes is read as fp8: every code, bit for bit, in both directions."""
    codes = torch.arange(256, dtype=torch.int32).to(torch.uint8)
    there, back = torch.zeros(256, dtype=kind), torch.zeros(256, dtype=torch.uint8)
    kernels.bitcast_kernel[(1,)](codes, there, 256, BLOCK=256)
    kernels.bitcast_kernel[(1,)](there, back, 256, BLOCK=256)
    assert torch.equal(bits(there), codes)
    assert torch.equal(back, codes)


def test_bfloat16_bitcasts_through_its_pattern() -> None:
    """uint16 to bfloat16 and back keeps the bits of every number."""
    numbers = every_code(torch.bfloat16)
    numbers = numbers[~numbers.isnan()]
    there, back = torch.zeros(len(numbers), dtype=torch.int16), torch.zeros_like(numbers)
    grid = (-(-len(numbers) // BLOCK),)
    kernels.bitcast_kernel[grid](numbers, there, len(numbers), BLOCK=BLOCK)
    kernels.bitcast_kernel[grid](there, back, len(numbers), BLOCK=BLOCK)
    assert torch.equal(there, bits(numbers))
    assert torch.equal(bits(back), bits(numbers))


OPERATIONS: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "add": torch.add,
    "multiply": torch.mul,
    "maximum": torch.maximum,
    "where": torch.minimum,
    "negate": lambda a, b: -a,
    "constant": lambda a, b: a + 0.5,
    "absolute": lambda a, b: a.abs(),
}


@pytest.mark.parametrize("operation", OPERATIONS)
def test_bfloat16_arithmetic_rounds_after_each_operation(operation: str) -> None:
    """Each operation gives torch's bfloat16 result, bit for bit."""
    left, right = torch.randn(2, 333).to(torch.bfloat16)
    out = torch.full_like(left, torch.nan)
    kernels.arithmetic_kernel[(1,)](left, right, out, 333, OPERATION=operation, BLOCK=512)
    assert torch.equal(bits(out), bits(OPERATIONS[operation](left, right)))


@pytest.mark.parametrize(
    ("kind", "tolerance"),
    # A product of two 8-bit significands is exact in float32, so only the sum of 64 rounds.
    [(torch.bfloat16, 1e-6), (torch.float16, 1e-6), *((kind, 1e-6) for kind in FP8)],
)
def test_dot_against_float64(kind: torch.dtype, tolerance: float) -> None:
    """A matrix product of narrow operands is that of their values."""
    left, right = torch.randn(16, 64).to(kind), torch.randn(64, 32).to(kind)
    out = torch.full((16, 32), torch.nan)
    kernels.dot_kernel[(1,)](left, right, out, M=16, N=32, K=64)
    exact = left.double() @ right.double()
    scale = left.double().abs() @ right.double().abs()
    assert float(((out - exact).abs() / scale).max()) < tolerance


def test_reductions_see_values() -> None:
    """Sums and maxima of bfloat16 rows are those of the values, negative ones included."""
    source, out = (torch.randn(8, 32) - 3).to(torch.bfloat16), torch.full((8,), torch.nan)
    kernels.row_sum_kernel[(1,)](source, out, M=8, N=32)
    expected = source.double().sum(1) + source.double().amax(1)
    torch.testing.assert_close(out.double(), expected, rtol=1e-6, atol=0)


def test_atomics_on_bfloat16_are_refused() -> None:
    """What would add 16-bit integers raises instead."""
    with pytest.raises(Exception, match="atomic operation on bfloat16"):
        kernels.exchange_kernel[(1,)](torch.zeros(1, dtype=torch.bfloat16))


def test_installing_twice_changes_nothing() -> None:
    """The stock functions are kept from the first time."""
    interpreter.install()
    interpreter.install()
    test_bfloat16_arithmetic_rounds_after_each_operation("add")


def test_positions_of_compile_time_arguments() -> None:
    """Launchers of vLLM count them, as a compiled function tells them."""
    assert kernels.copy_kernel.constexprs == [3]
    assert kernels.dot_kernel.constexprs == [3, 4, 5]
