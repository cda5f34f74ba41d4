"""Let vLLM's launchers believe in a chip while their kernels are interpreted on the CPU."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from triton.runtime.driver import driver

from kernelcheck import platform
from kernelcheck.aot import StandInDriver
from kernelcheck.chips import CHIPS, Chip, chip
from kernelcheck.processes import compile_cases

if TYPE_CHECKING:
    from collections.abc import Callable

    from kernelcheck.figures import Figures

platform.pretend(chip(120))


@pytest.fixture
def use_chip() -> Callable[[Chip], None]:
    """Return a function that makes Triton's driver describe another chip from then on."""
    return lambda described: driver.set_active(StandInDriver(described))


@pytest.fixture(scope="module")
def compiled(request: pytest.FixtureRequest) -> list[Figures]:
    """Return the figures of the module's CASES on every chip."""
    return compile_cases(request.module.CASES, CHIPS)
