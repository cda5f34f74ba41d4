"""What CuTeDSL compiles is measured for the chip that was meant, and judged."""

from __future__ import annotations

import pytest

from kernelcheck import cutedsl
from kernelcheck.cutedsl import Built
from kernelcheck.processes import CompileProcessError


@pytest.mark.parametrize(
    ("threads", "registers", "local_memory", "fits"),
    [(512, 128, 0, True), (512, 136, 0, False), (128, 255, 0, True), (128, 40, 8, False)],
)
def test_a_block_has_the_registers_of_one_sm(
    threads: int, registers: int, local_memory: int, fits: bool
) -> None:
    built = Built("case", "cutedsl", "kernel", 120, threads, registers, local_memory)
    assert built.fits == fits


def test_a_kernel_for_another_chip_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cutedsl, "architecture", lambda _: "sm_100a")
    with pytest.raises(CompileProcessError, match="compiled for sm_100a instead of sm_120a"):
        cutedsl.compile_cases("tests.runtime.kernels.cutedsl_cases:merges", [120])
