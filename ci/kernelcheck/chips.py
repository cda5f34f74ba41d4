"""The chips that kernels are compiled for, and what each of them offers a thread block.

Shared memory is the opt-in maximum of one block, from the table "Technical Specifications per
Compute Capability" of NVIDIA's CUDA programming guide. Names, units and memory are those of one
product of that capability; code under test may only use them as any product's values.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

_KIB: Final = 1024
_GIB: Final = 1024**3


@dataclass(frozen=True, slots=True)
class Chip:
    """One compute capability with the figures of a product that has it."""

    capability: int
    """Major times ten plus minor: 120 for SM120."""
    name: str
    shared_memory: int
    """Bytes that one thread block may use after opting in."""
    compute_units: int
    """Streaming multiprocessors."""
    total_memory: int
    """Bytes of device memory."""
    integrated: bool = False
    """Whether the GPU shares its memory with the host."""

    @property
    def major(self) -> int:
        """First part of the compute capability."""
        return self.capability // 10

    @property
    def minor(self) -> int:
        """Second part of the compute capability."""
        return self.capability % 10


_ALL: Final = (
    Chip(80, "NVIDIA A100-SXM4-80GB", 163 * _KIB, 108, 80 * _GIB),
    Chip(86, "NVIDIA RTX A6000", 99 * _KIB, 84, 48 * _GIB),
    Chip(89, "NVIDIA L40S", 99 * _KIB, 142, 48 * _GIB),
    Chip(90, "NVIDIA H100 80GB HBM3", 227 * _KIB, 132, 80 * _GIB),
    Chip(100, "NVIDIA B200", 227 * _KIB, 148, 180 * _GIB),
    Chip(103, "NVIDIA B300", 227 * _KIB, 148, 270 * _GIB),
    Chip(110, "NVIDIA Thor", 227 * _KIB, 20, 128 * _GIB, integrated=True),
    Chip(120, "NVIDIA RTX PRO 6000 Blackwell Workstation Edition", 99 * _KIB, 188, 96 * _GIB),
    Chip(121, "NVIDIA GB10", 99 * _KIB, 48, 128 * _GIB, integrated=True),
)

CHIPS: Final[dict[int, Chip]] = {chip.capability: chip for chip in _ALL}
"""Every known chip by its capability (80 to 121)."""


def chip(capability: int) -> Chip:
    """Return the chip of ``capability`` (such as 120).

    Raises:
        ValueError: No figures are known for it.
    """
    try:
        return CHIPS[capability]
    except KeyError:
        known = ", ".join(map(str, CHIPS))
        raise ValueError(f"no chip of capability {capability}; known: {known}") from None
