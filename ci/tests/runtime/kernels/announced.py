"""Whether a kernel's warm-up announces all that is launched, as recorded on a pretended chip."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from kernelcheck.chips import CHIPS, Chip

if TYPE_CHECKING:
    from collections.abc import Callable


def launches(chip: Chip, call: Callable[[], object]) -> set[str]:
    """Return a key for each distinct specialization that a call launches or compiles."""
    from kernelcheck import aot  # noqa: PLC0415 - loads Triton, which comes after pretend()

    return {
        repr((each.name, dict(each.signature), each.constexprs, each.attributes, each.options))
        for each in aot.record(chip, call)
    }


def report_unannounced(unannounced: Callable[[Chip], tuple[int, list[str]]]) -> int:
    """Print launches of the chip in the first argument that the warm-up misses; see the tests."""
    from kernelcheck import platform  # noqa: PLC0415 - a compiling process only

    chip = CHIPS[int(sys.argv[1])]
    platform.pretend(chip)
    count, missing = unannounced(chip)
    sys.stdout.write("\n".join([f"{count} distinct launches", *missing]) + "\n")
    return 1 if missing or not count else 0
