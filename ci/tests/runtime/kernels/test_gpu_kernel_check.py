"""The GPU host's check of the fp8_ds_mla kernel finds it right in the interpreter, and damage wrong."""

from __future__ import annotations

import sys
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import pytest
import torch

if TYPE_CHECKING:
    from collections.abc import Iterator

GPU: Final = Path(__file__).parents[3] / "gpu"
CHIPS: Final = {"hardware": 1, "software": 2}
"""Places in `kernel_check.OTHER_CHIPS`, one behind: 12.0, whose Triton has e4m3, and 8.0."""


@pytest.fixture(scope="module")
def check() -> Iterator[Any]:
    """The script, for the CPU and a small cache."""
    sys.path.insert(0, str(GPU))
    try:
        module: Any = import_module("kernel_check")
    finally:
        sys.path.remove(str(GPU))
    module.DEVICE, module.CACHE_ROWS = "cpu", 8 * module.BLOCK_STRIDE
    yield module
    for name in ("kernel_check", "kernel_variants", "fp8_rows", "standalone"):
        sys.modules.pop(name, None)


@pytest.fixture(scope="module")
def checker(check: Any) -> Any:
    """The checker, whose kernel is the one in this process."""
    caches = {(torch.uint8, rope): check.make_cache(torch.uint8, rope, 3) for rope in (0, 64)}
    return check.Checker(check.standalone.load_kernel(), caches)


def _shape(check: Any, chip: int, rope: int) -> Any:
    return check.Shape(
        tokens=3, heads=9, width=128, rope=rope, dtype=torch.bfloat16, chip=chip, counts="zero-heavy",
        high_rows=False, duplicates=False, with_lse=True, graph=False, seed=4, fp8=True,
    )  # fmt: skip


def test_rows_are_read_as_torch_reads_them(check: Any) -> None:
    table = check.fp8_rows.value_table("cpu")
    codes = torch.arange(256, dtype=torch.int32).to(torch.uint8)
    expected = codes.view(torch.float8_e4m3fn).double()
    torch.testing.assert_close(table, expected, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("width", [512, 576])
def test_rows_hold_what_was_written(check: Any, width: int) -> None:
    values = torch.randn(width).bfloat16()
    row = torch.full((check.fp8_rows.ROW_BYTES,), 0xFF, dtype=torch.uint8)
    check.fp8_rows.write_row(row, values)
    read = check.fp8_rows.read_rows(row[None], width - 512)[0]
    # Half a unit of three bits of mantissa, or of the smallest subnormal.
    torch.testing.assert_close(read[:512], values[:512].double(), rtol=2**-4, atol=2**-10 * 2**-6)
    assert torch.equal(read[512:], values[512:].double())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.uint8], ids=["bf16", "fp8"])
def test_a_cache_of_repeated_rows_repeats_what_was_drawn(
    check: Any, monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype
) -> None:
    monkeypatch.setattr(check, "DRAWN_ROWS", 3 * check.BLOCK_STRIDE)
    drawn, repeated = (check.make_cache(dtype, 64, 3, repeated=repeated) for repeated in (False, True))
    blocks = torch.stack([drawn, repeated]).view(2, -1, check.BLOCK_STRIDE, drawn.shape[1])
    drawn_blocks, repeated_blocks = (blocks[:, :, : check.BLOCK]).view(torch.uint8)
    assert torch.equal(drawn_blocks[:3], repeated_blocks[:3])
    assert torch.equal(repeated_blocks[4:6], repeated_blocks[1:3])
    assert torch.equal(repeated_blocks[7], repeated_blocks[1])
    assert not torch.equal(drawn_blocks[4:6], drawn_blocks[1:3])


@pytest.mark.parametrize("chip", CHIPS.values(), ids=CHIPS)
@pytest.mark.parametrize("rope", [0, 64])
def test_the_kernel_passes(check: Any, checker: Any, chip: int, rope: int) -> None:
    outcome = checker.run(_shape(check, chip, rope))
    assert outcome.problems == []
    assert 0 < outcome.worst < check.MAX_ERROR[torch.bfloat16]


@pytest.mark.parametrize("damage", ["code", "scale", "rope", "guard"])
def test_damage_is_found(check: Any, checker: Any, damage: str) -> None:
    shape = _shape(check, CHIPS["hardware"], 64)
    inputs, _, launch = checker.prepare(shape)
    inputs.valid_counts.fill_(5)
    inputs.indices.tensor.copy_(inputs._rows())  # behind the drawn counts are rows that do not exist
    inputs.q_nope.tensor.normal_()
    launch()
    row = inputs.cache[int(inputs.indices.tensor[1, 2])]
    before = row.clone()
    if damage == "code":
        row[:128] ^= 0x80
    elif damage == "scale":
        row[512:528].view(torch.float32)[:] *= 1.5
    elif damage == "rope":
        row[528:].view(torch.bfloat16)[:] += 3
    else:
        inputs.out.storage[check.GUARD - 1] = 0
    outcome = check.Outcome(shape)
    check.compare(inputs, check.scale_of(shape), outcome)
    row.copy_(before)
    assert outcome.problems != []


def test_every_kind_of_shape_is_drawn(check: Any) -> None:
    rng = check.random.Random(1)
    shapes = [check.draw_shape(rng, index) for index in range(340)]
    fp8 = [shape for shape in shapes if shape.fp8]
    assert 80 <= len(fp8) <= 120
    assert {(shape.rope, shape.chip) for shape in fp8} == {(r, c) for r in (0, 64) for c in range(4)}
    assert {shape.dtype for shape in fp8} == {torch.bfloat16}
    assert any(shape.graph for shape in fp8)
    assert any(shape.high_rows for shape in fp8)


def test_every_variant_can_be_sent_to_another_process(check: Any, checker: Any) -> None:
    """The warm-up finds each variant's wrapper and makes its key again out of names."""
    kernels = checker.kernels
    arguments = (24, 256, 512, 64, torch.bfloat16, checker.chips[2], 300)
    variants = set(kernels.iter_variants(*arguments, cache_dtype=torch.uint8))
    sent = [check.kernel_variants.job_of(kernels, variant, None) for variant in variants]
    assert {
        check.kernel_variants.key_of(getattr(kernels, name), fields) for name, fields, _ in sent
    } == variants
    assert {name for name, _, _ in sent} == {"_FP8_SPLIT_KERNEL", "_MERGE_KERNEL"}
