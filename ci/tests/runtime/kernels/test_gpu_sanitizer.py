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


def _launched(sanitizer: Any, cache: torch.dtype, rope: tuple[int, ...] = (0, 64)) -> set[tuple[Any, ...]]:
    """Return the tiles that the shapes launch on an SM90 chip, with these numbers of RoPE values."""
    kernels = sanitizer.standalone.load_kernel()
    launched = set()
    for shape in sanitizer.SHAPES:
        if shape.chip == 0 and shape.cache[0] == cache and shape.rope in rope:
            sizes = (shape.tokens, shape.heads, shape.width, 512, shape.rope, torch.bfloat16)
            config = kernels.select_config(*sizes, kernels.SparseMLADeviceInfo(*SM90), cache)
            launched.add(_tile(kernels.variants_of(config, 512, shape.rope, torch.bfloat16, has_lse=True)[0]))
    return launched


@pytest.mark.parametrize("cache", [torch.bfloat16, torch.uint8])
def test_every_tile_of_an_sm90_chip_is_launched(sanitizer: Any, cache: torch.dtype) -> None:
    kernels = sanitizer.standalone.load_kernel()
    chip = kernels.SparseMLADeviceInfo(*SM90)
    there = set()
    for heads in (1, 16, 17, 32, 33, 64, 128):
        found = kernels.iter_variants(heads, 512, 512, 64, torch.bfloat16, chip, 300, cache_dtype=cache)
        there |= {_tile(variant) for variant in found if hasattr(variant, "block_h")}
    assert _launched(sanitizer, cache) == there


def test_every_fp8_tile_is_launched_with_rope(sanitizer: Any) -> None:
    assert _launched(sanitizer, torch.uint8, (64,)) == _launched(sanitizer, torch.uint8)


def test_the_far_row_is_read_from_both_caches(sanitizer: Any) -> None:
    """An entry counts only below the number of valid ones, which must not be drawn."""
    for fp8, shape in sanitizer.FAULTY.items():
        assert (shape.fp8, shape.counts, shape.chip) == (fp8, "full", 0)
    planted = [check for check in sanitizer.CHECKS if check.planted and check.tool == sanitizer.MEMCHECK]
    assert [(check.name, check.fp8) for check in planted] == [
        ("memcheck-planted", False),
        ("memcheck-planted-fp8", True),
    ]


class _StoppedError(Exception):
    """Nothing more is done."""


@pytest.mark.parametrize("fp8", [False, True])
def test_a_planted_process_reads_the_far_row_from_its_cache(
    sanitizer: Any, fp8: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The command of each check is one that `work` takes; the cache made is that of the faulty shape."""
    commands: dict[str, list[str]] = {}
    monkeypatch.setattr(sanitizer.subprocess, "Popen", lambda command, **_: commands.update({"it": command}))
    running = sanitizer.parse_arguments(
        ["run", "--out", "o", "--root", "r", "--work", str(tmp_path), "--seconds", "1"]
    )
    sanitizer.Process(sanitizer.Check(sanitizer.MEMCHECK, planted=True, fp8=fp8), "tool", running)
    words = commands["it"]
    working = sanitizer.parse_arguments(words[words.index("work") :])
    asked: list[Any] = []

    def make_cache(*kind: Any, **_: Any) -> None:
        asked.append(kind)
        raise _StoppedError

    monkeypatch.setattr(sanitizer, "make_cache", make_cache)
    monkeypatch.setattr(sanitizer.Guarded, "exact", sanitizer.Guarded.exact)
    with pytest.raises(_StoppedError):
        sanitizer.work(working)
    assert asked == [(torch.uint8 if fp8 else torch.bfloat16, 64)]


def test_checks_have_names_and_ports_of_their_own(sanitizer: Any) -> None:
    assert len({check.name for check in sanitizer.CHECKS}) == len(sanitizer.CHECKS) == 5


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
        ({"racecheck": {"shapes": [{}]}}, "racecheck: 1 of 20 shapes in time"),
        ({"memcheck": {"exit_status": 1}}, "memcheck: exit status 1, see memcheck.log"),
        ({"memcheck": {"problems": ["output is not finite"]}}, "memcheck: output is not finite"),
        ({"memcheck_planted": {"found": 0}}, "memcheck-planted: the planted fault was not found"),
        ({"memcheck_planted_fp8": {"found": 0}}, "memcheck-planted-fp8: the planted fault was not found"),
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
