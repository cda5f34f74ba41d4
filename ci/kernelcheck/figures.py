"""What a kernel needs on a chip, as a record that is kept as JSON.

Imports neither torch nor Triton, so that any process can read figures.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from collections.abc import Iterable

KEPT: Final = Path(__file__).with_name("figures")
"""The figures in the repository: a folder for each Triton, a file for each family of kernels."""

SCHEMA: Final = 1
"""Version of the JSON document that :func:`write_figures` makes."""

MAX_TENSOR_MEMORY: Final = 512
"""Columns of tensor memory of one SM of SM100 to SM110."""


@dataclass(frozen=True, slots=True)
class Figures:
    """What one kernel needs on one chip. Sizes are bytes."""

    case: str
    """What was called: the caller's name for it."""
    kernel: str
    """The kernel function's name."""
    capability: int
    triton: str
    constexprs: tuple[tuple[str, str], ...]
    """Names and printed values, in the order of the parameters."""
    divisible_by_16: tuple[str, ...]
    """Parameters that Triton was told to be divisible by 16."""
    num_warps: int
    num_stages: int
    shared_memory: int | None
    """Per block; None if the kernel does not compile."""
    shared_memory_limit: int
    registers: int | None
    """Per thread."""
    local_memory: int | None
    """Per thread: spilled registers and stack. Triton's ``n_spills`` is a quarter of it."""
    tensor_memory: int | None
    """Columns; None where the chip has none or the kernel does not compile."""
    error: str | None
    """First line of the compiler's message, None if it compiles."""

    @property
    def fits(self) -> bool:
        """Whether the kernel compiles and a launch on the chip would be accepted."""
        if self.shared_memory is None:
            return False
        within = self.shared_memory <= self.shared_memory_limit
        return within and (self.tensor_memory or 0) <= MAX_TENSOR_MEMORY

    def to_json(self) -> dict[str, Any]:
        """Return a JSON object; key order and values depend on the fields only."""
        readable = {
            "constexprs": dict(self.constexprs),
            "divisible_by_16": list(self.divisible_by_16),
            "fits": self.fits,
        }
        return asdict(self) | readable

    @classmethod
    def from_json(cls, document: dict[str, Any]) -> Figures:
        """Return the figures that :meth:`to_json` wrote."""
        fields = {name: value for name, value in document.items() if name != "fits"}
        fields["constexprs"] = tuple(fields["constexprs"].items())
        fields["divisible_by_16"] = tuple(fields["divisible_by_16"])
        return cls(**fields)


def _order(figures: Figures) -> tuple[object, ...]:
    return figures.case, figures.kernel, figures.capability, figures.constexprs


def render(figures: Iterable[Figures]) -> str:
    """Return the JSON document of ``figures``, which depends on nothing but their values."""
    kernels = [each.to_json() for each in sorted(figures, key=_order)]
    return json.dumps({"schema": SCHEMA, "kernels": kernels}, indent=1) + "\n"


def read_figures(path: Path) -> list[Figures]:
    """Return the figures of a document that :func:`render` made.

    Raises:
        ValueError: The document has another schema.
    """
    document = json.loads(path.read_text())
    if document["schema"] != SCHEMA:
        raise ValueError(f"{path}: schema {document['schema']}, expected {SCHEMA}")
    return [Figures.from_json(each) for each in document["kernels"]]


def unusable(figures: Iterable[Figures]) -> list[Figures]:
    """Return the kernels that do not fit their chip, or spill."""
    return [each for each in figures if not each.fits or each.local_memory]
