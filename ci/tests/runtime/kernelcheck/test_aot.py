"""The compiling part, in processes of its own: specialisation, figures, failures, JSON."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from kernelcheck.chips import CHIPS, chip
from kernelcheck.figures import Figures, read_figures, render
from kernelcheck.processes import CompileProcessError, compile_cases

if TYPE_CHECKING:
    from pathlib import Path

CASES = "tests.runtime.kernelcheck.cases:every_case"
CHECKED = (86, 90, 100, 120)


@pytest.fixture(scope="module")
def by_case() -> dict[tuple[str, int], Figures]:
    """Figures of every case on some chips of each generation."""
    return {(f.case, f.capability): f for f in compile_cases(CASES, CHECKED, vllm=False)}


@pytest.mark.parametrize("capability", CHECKED)
def test_arguments_are_specialised_as_at_a_launch(
    by_case: dict[tuple[str, int], Figures], capability: int
) -> None:
    """Alignment follows storage offsets; 1 becomes a constant; options are the launch's."""
    figures = by_case["specialised", capability]
    assert figures.kernel == "specialised_kernel"
    assert figures.divisible_by_16 == ("aligned", "many")
    assert figures.constexprs == (("one", "1"), ("FACTOR", "3"))
    assert (figures.num_warps, figures.num_stages) == (2, 3)


@pytest.mark.parametrize("capability", CHECKED)
def test_shared_memory_is_measured(by_case: dict[tuple[str, int], Figures], capability: int) -> None:
    """Three 128 x 128 float32 tiles in flight do not fit 99 KB, and fit 227 KB."""
    figures = by_case["wide dot", capability]
    assert figures.shared_memory is not None
    assert figures.shared_memory >= 3 * 128 * 128 * 4
    assert figures.shared_memory_limit == chip(capability).shared_memory
    assert figures.fits == (capability in {90, 100})
    assert figures.registers is not None
    assert 32 <= figures.registers <= 255


def test_a_kernel_that_does_not_compile_gives_the_reason(
    by_case: dict[tuple[str, int], Figures],
) -> None:
    """e4m3 needs SM89; the figures say so instead of raising."""
    refused = by_case["fp8 copy", 86]
    assert refused.error is not None
    assert "fp8e4nv not supported" in refused.error
    assert not refused.fits
    assert refused.shared_memory is None
    assert by_case["fp8 copy", 120].fits


def test_an_error_of_the_product_is_not_a_figure() -> None:
    """What product code raises ends the process and is reported with its output."""
    with pytest.raises(CompileProcessError, match="KeyError: 'missing'"):
        compile_cases("tests.runtime.kernelcheck.cases:failing_case", [90], vllm=False)


def test_json_is_complete_and_in_a_fixed_order(
    by_case: dict[tuple[str, int], Figures], tmp_path: Path
) -> None:
    """Reading what was written gives the same records, whatever their order was."""
    written = tmp_path / "figures.json"
    written.write_text(render(by_case.values()))
    assert render(reversed(by_case.values())) == written.read_text()
    assert set(read_figures(written)) == set(by_case.values())


def test_another_schema_is_refused(tmp_path: Path) -> None:
    """Figures of a later version are not misread."""
    later = tmp_path / "figures.json"
    later.write_text('{"schema": 2, "kernels": []}')
    with pytest.raises(ValueError, match="schema 2, expected 1"):
        read_figures(later)


def test_chips_are_known() -> None:
    """Limits are NVIDIA's figures; an unknown chip is named with the known ones."""
    limits = {capability: known.shared_memory for capability, known in CHIPS.items()}
    small, large = 101_376, 232_448
    assert limits == {
        80: 166_912,
        86: small,
        89: small,
        90: large,
        100: large,
        103: large,
        110: large,
        120: small,
        121: small,
    }
    with pytest.raises(ValueError, match="no chip of capability 75; known: 80, 86"):
        chip(75)
