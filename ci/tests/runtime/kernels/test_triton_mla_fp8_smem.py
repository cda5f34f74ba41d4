"""Topic triton-mla-fp8-smem: TRITON_MLA's decode kernels fit every chip, and stay right.

Upstream's configuration for an fp8 cache needs 102,400 bytes of shared memory and a block of SM89,
SM120 and SM121 may use 101,376. The patch chooses the configuration from the chip's limit.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest
import torch
import triton
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from kernelcheck.chips import Chip, chip
from kernelcheck.figures import KEPT, Figures, read_figures, render
from kernelcheck.processes import compile_cases

from . import mla_decode
from .mla_decode import SHAPES, Shape

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

CASES = "tests.runtime.kernels.mla_decode:every_case"
STAGE_1 = "_fwd_grouped_kernel_stage1"
SMALL, LARGE = (89, 120, 121), (90, 100)
TOO_LARGE = {shape.name for shape in SHAPES if shape.head_dim == 576 and shape.is_mla} - {
    "DeepSeek, bf16 cache"
}

Key = tuple[str, str, int]


@pytest.fixture(scope="module")
def compiled() -> list[Figures]:
    """Every launch of every case, before and after, on every chip."""
    return compile_cases(CASES, sorted(SMALL + LARGE))


@pytest.fixture(scope="module")
def figures(compiled: list[Figures]) -> dict[Key, Figures]:
    """The same by case, kernel and chip."""
    return {(f.case, f.kernel, f.capability): f for f in compiled}


def tile(figures: Figures) -> tuple[str, int]:
    """Return BLOCK_N and the number of stages."""
    return dict(figures.constexprs)["BLOCK_N"], figures.num_stages


@pytest.mark.parametrize("capability", SMALL)
def test_upstream_does_not_fit(figures: dict[Key, Figures], capability: int) -> None:
    """The fault: 1 KiB too much for DeepSeek with an fp8 cache, more with float32."""
    reported = figures["before: DeepSeek, fp8 cache", STAGE_1, capability]
    assert reported.shared_memory == 102_400
    assert reported.shared_memory_limit == 101_376
    before = {
        k[0].removeprefix("before: "): f
        for k, f in figures.items()
        if "before" in k[0] and k[2] == capability and k[1] == STAGE_1
    }
    assert {name for name, each in before.items() if not each.fits} == TOO_LARGE


def test_every_launch_fits(compiled: list[Figures]) -> None:
    """After the patch each kernel compiles and may be launched, on every chip."""
    after = [each for each in compiled if each.case.startswith("after")]
    assert len(after) == 2 * len(SHAPES) * len(SMALL + LARGE)
    assert [each for each in after if not each.fits] == []


@pytest.mark.parametrize("capability", SMALL)
@pytest.mark.parametrize("name", sorted(TOO_LARGE))
def test_the_smaller_tile_does_not_spill(figures: dict[Key, Figures], name: str, capability: int) -> None:
    """Where the configuration changed it has 16 rows and two stages, all in registers."""
    changed = figures[f"after: {name}", STAGE_1, capability]
    assert tile(changed) == ("16", 2)
    assert changed.local_memory == 0


def test_what_fitted_is_unchanged(figures: dict[Key, Figures]) -> None:
    """A launch that upstream could do keeps every argument, and needs exactly as much."""
    fitted = {key: each for key, each in figures.items() if "before" in key[0] and each.fits}
    chips = {key[2] for key in fitted}
    assert chips == set(SMALL + LARGE)
    for (case, kernel, capability), before in fitted.items():
        after = figures[case.replace("before", "after"), kernel, capability]
        assert replace(after, case=case) == before


@pytest.mark.parametrize("capability", LARGE)
def test_every_launch_fitted_large_chips(figures: dict[Key, Figures], capability: int) -> None:
    """So nothing changes on SM90 and SM100."""
    before = [f for f in figures.values() if "before" in f.case and f.capability == capability]
    assert len(before) == 2 * len(SHAPES)
    assert all(each.fits for each in before)


def test_the_estimate_is_what_the_compiler_takes(compiled: list[Figures]) -> None:
    """The patch's arithmetic: exact for MLA, at most P's buffer too much without."""
    patched = mla_decode.patched_module()

    shapes = {shape.name: shape for shape in SHAPES}
    grouped = [each for each in compiled if each.kernel == STAGE_1]
    assert len({each.case for each in grouped}) == 2 * (len(SHAPES) - 1)
    for each in grouped:
        shape, sizes = shapes[each.case.partition(": ")[2]], dict(each.constexprs)
        rows, heads, *tiles = (
            int(sizes[name]) for name in ("BLOCK_N", "BLOCK_H", "BLOCK_DMODEL", "BLOCK_DPE", "BLOCK_DV")
        )
        estimate = patched._grouped_stage1_shared_mem(
            rows, each.num_stages, heads, *tiles, shape.query, shape.cache, shape.is_mla
        )
        assert each.shared_memory is not None
        slack = 0 if shape.is_mla else heads * rows * shape.query.itemsize
        assert 0 <= estimate - each.shared_memory <= slack


def test_kept_figures_are_what_compiling_gives(compiled: list[Figures]) -> None:
    """The file in the repository is generated; ``python -m kernelcheck.processes`` writes it."""
    kept = KEPT / f"triton-{triton.__version__}" / "mla_decode.json"
    assert render(compiled) == kept.read_text()


@pytest.mark.parametrize("path", sorted(KEPT.glob("*/mla_decode.json")), ids=str)
def test_kept_figures_of_every_triton_fit(path: Path) -> None:
    """Other versions of Triton, for which CI does not compile, gave launches that fit too."""
    after = [each for each in read_figures(path) if each.case.startswith("after")]
    assert len(after) == 2 * len(SHAPES) * len(SMALL + LARGE)
    assert all(each.fits for each in after)
    assert {f"triton-{each.triton}" for each in after} == {path.parent.name}


def shapes() -> st.SearchStrategy[Shape]:
    """Draw small and odd shapes of every path through the launcher."""
    dims = st.sampled_from([(80, 64), (64, 64), (288, 256), (72, 64), (96, 96)])
    groups = st.sampled_from([(1, 1), (5, 1), (16, 1), (33, 1), (12, 4), (7, 7)])
    caches = st.sampled_from(
        [(q, c) for q in (torch.bfloat16, torch.float16) for c in (q, torch.float8_e4m3fn)]
    )
    pages = st.sampled_from([1, 3, 16])
    return st.tuples(dims, groups, pages, caches).map(
        lambda drawn: Shape("drawn", *drawn[0], *drawn[1], drawn[2], *drawn[3])
    )


def check(shape: Shape, lengths: list[int], splits: int) -> None:
    """Compare: the output is rounded to its type once, and P once, to the type of V.

    An error of e in each logit moves their log-sum-exp by at most e and each weight by a factor exp(2 e).
    """
    problem = mla_decode.draw_problem(shape, lengths)
    (out, lse), (expected_out, expected_lse) = problem.run(splits), problem.reference()
    logits_error = problem.logits_error()
    tolerance = {torch.bfloat16: 2.0**-7, torch.float16: 2.0**-10}[shape.query]
    largest = expected_out.abs().amax().clamp(min=1.0)
    moved = math.expm1(2 * logits_error) * problem.largest_value()
    assert float((out.double() - expected_out).abs().max()) < tolerance * largest + moved
    torch.testing.assert_close(lse.double(), expected_lse, rtol=1e-5, atol=logits_error)


@given(
    shape=shapes(),
    lengths=st.lists(st.integers(1, 70), min_size=1, max_size=3),
    splits=st.integers(1, 4),
    limit=st.sampled_from([1, 101_376]),
    seed=st.integers(0, 2**32),
)
@example(Shape("", 80, 64, 5, 1, 3, torch.bfloat16, torch.float8_e4m3fn), [1, 33, 65], 3, 1, 0)
@settings(
    max_examples=25,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
def test_numbers_with_either_tile(
    use_chip: Callable[[Chip], None],
    shape: Shape,
    lengths: list[int],
    splits: int,
    limit: int,
    seed: int,
) -> None:
    """Odd heads, pages, lengths and splits, with the default tile and (limit 1) the smallest."""
    patched = mla_decode.patched_module()

    patched._max_shared_mem.cache_clear()
    use_chip(replace(chip(120), shared_memory=limit))
    torch.manual_seed(seed)
    check(shape, lengths, splits)


@pytest.mark.parametrize(("capability", "rows"), [(90, 32), (120, 16)])
@pytest.mark.parametrize("cache", [torch.bfloat16, torch.float8_e4m3fn])
def test_numbers_of_deepseek_on_two_chips(
    use_chip: Callable[[Chip], None], capability: int, rows: int, cache: torch.dtype
) -> None:
    """The reported shape itself, with the tile that each chip gets."""
    patched = mla_decode.patched_module()

    patched._max_shared_mem.cache_clear()
    use_chip(chip(capability))
    limit = patched._max_shared_mem(capability)
    fp8 = patched._grouped_stage1_config(
        limit, 16, 512, 64, 512, torch.bfloat16, torch.float8_e4m3fn, is_mla=True
    )
    assert fp8 == (rows, 2)
    check(Shape("", 576, 512, 17, 1, 16, torch.bfloat16, cache), [41, 3], 2)
