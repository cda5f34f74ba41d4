"""Compile cases for one chip in this process: ``python -m kernelcheck --help``."""

from __future__ import annotations

import argparse
import sys
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING

from kernelcheck import platform
from kernelcheck.chips import CHIPS, chip
from kernelcheck.figures import render

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m kernelcheck",
        description="Compile what a launcher launches for a chip that is not there.",
        epilog="example: python -m kernelcheck tests.cases:decode --chip 120 --json figures.json",
    )
    parser.add_argument(
        "cases",
        help="MODULE:FUNCTION; it yields (name, call), each call launches on meta tensors",
    )
    parser.add_argument("--chip", type=int, choices=CHIPS, required=True, help="capability")
    parser.add_argument("--json", type=Path, required=True, help="where the figures go")
    parser.add_argument("--no-vllm", action="store_true", help="the cases do not use vLLM")
    return parser


def main(arguments: list[str] | None = None) -> int:
    """Run the command line and return its exit code."""
    options = _parser().parse_args(arguments)
    target = chip(options.chip)
    if not options.no_vllm:
        platform.pretend(target)
    from kernelcheck import aot  # After pretend(): it loads Triton.

    module, _, function = options.cases.partition(":")
    cases: Callable[[], Iterable[tuple[str, Callable[[], object]]]]
    cases = getattr(import_module(module), function)
    figures = [aot.measure(launch, name) for name, call in cases() for launch in aot.record(target, call)]
    options.json.write_text(render(figures))
    return 0


if __name__ == "__main__":
    sys.exit(main())
