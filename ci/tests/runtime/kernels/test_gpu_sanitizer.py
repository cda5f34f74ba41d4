"""What the sanitizers are given: all tiles of an SM90 chip, and judgements that can fail."""

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
SM90: Final = ((9, 0), 132, 227 << 10)


@pytest.fixture(scope="module")
def sanitizer() -> Iterator[Any]:
    """The script."""
    sys.path.insert(0, str(GPU))
    try:
        yield import_module("sanitizer")
    finally:
        sys.path.remove(str(GPU))
        for name in ("sanitizer", "kernel_check", "kernel_variants", "fp8_rows", "standalone"):
            sys.modules.pop(name, None)


def _tile(variant: Any) -> tuple[Any, ...]:
    """Return what decides a kernel's memory accesses, whatever it stores and however wide a row is."""
    return variant.block_h, variant.block_n, variant.num_warps, variant.num_stages, variant.is_partial


@pytest.mark.parametrize("cache", [torch.bfloat16, torch.uint8])
def test_every_tile_of_an_sm90_chip_is_launched(sanitizer: Any, cache: torch.dtype) -> None:
    kernels = sanitizer.standalone.load_kernel()
    chip = kernels.SparseMLADeviceInfo(*SM90)
    launched, there = set(), set()
    for shape in sanitizer.SHAPES:
        if shape.chip == 0 and shape.cache[0] == cache:
            sizes = (shape.tokens, shape.heads, shape.width, 512, shape.rope, torch.bfloat16)
            config = kernels.select_config(*sizes, chip, cache)
            launched.add(_tile(kernels.variants_of(config, 512, shape.rope, torch.bfloat16, has_lse=True)[0]))
    for heads in (1, 16, 17, 32, 33, 64, 128):
        found = kernels.iter_variants(heads, 512, 512, 64, torch.bfloat16, chip, 300, cache_dtype=cache)
        there |= {_tile(variant) for variant in found if hasattr(variant, "block_h")}
    assert launched == there


def _results(sanitizer: Any, **changes: Any) -> dict[str, dict[str, Any]]:
    found: dict[str, Any] = {
        "found": 0, "exit_status": 0, "problems": [], "shapes": [{}] * len(sanitizer.SHAPES),
    }  # fmt: skip
    results = {check.name: dict(found, found=3 * check.planted) for check in sanitizer.CHECKS}
    for name, change in changes.items():
        results[name.replace("_", "-")] |= change
    return results


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"memcheck": {"found": 1}}, "memcheck: 1 found"),
        ({"racecheck": {"found": None}}, "racecheck: no summary, exit status 0"),
        ({"racecheck": {"shapes": [{}]}}, "racecheck: 1 of 17 shapes in time"),
        ({"memcheck": {"exit_status": 1}}, "memcheck: exit status 1, see memcheck.log"),
        ({"memcheck": {"problems": ["output is not finite"]}}, "memcheck: output is not finite"),
        ({"memcheck_planted": {"found": 0}}, "memcheck-planted: the planted fault was not found"),
    ],
)
def test_a_finding_or_the_want_of_one_is_told(sanitizer: Any, changes: dict[str, Any], problem: str) -> None:
    assert sanitizer.assess(_results(sanitizer)) == []
    assert sanitizer.assess(_results(sanitizer, **changes)) == [problem]


def test_the_tools_summaries_are_read(sanitizer: Any) -> None:
    count = sanitizer.count_found
    assert count("memcheck", "========= ERROR SUMMARY: 32 errors\n") == 32
    assert count("racecheck", "========= RACECHECK SUMMARY: 20 hazards displayed (20 errors)") == 20
    assert count("memcheck", "killed") is None
