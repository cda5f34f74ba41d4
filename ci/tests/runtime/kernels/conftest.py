"""Let vLLM's launchers believe in a chip while their kernels are interpreted on the CPU."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from triton.runtime.driver import driver

from kernelcheck import platform
from kernelcheck.aot import StandInDriver
from kernelcheck.chips import Chip, chip

if TYPE_CHECKING:
    from collections.abc import Callable

platform.pretend(chip(120))


@pytest.fixture
def use_chip() -> Callable[[Chip], None]:
    """Return a function that makes Triton's driver describe another chip from then on."""
    return lambda described: driver.set_active(StandInDriver(described))
