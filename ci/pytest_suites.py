"""Run one test file of a checkout as its authors wrote it, in a process of its own, and count exactly.

A test that stops being collected is as bad as one that fails.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

SECONDS: Final = 1800


def copy_tests(tree: Path, folder: Path) -> Path:
    """Put a tree's tests and settings, and not its package, into ``folder``, and return that."""
    shutil.copytree(tree / "tests", folder / "tests", symlinks=True)
    shutil.copy(tree / "pyproject.toml", folder)
    return folder


def outcomes(report: str) -> dict[str, int]:
    """Return the numbers in the last line of pytest's report, by outcome."""
    last = report.strip().splitlines()[-1]
    return {what: int(number) for number, what in re.findall(r"(\d+) ([a-z]+)", last)}


def require_passes(
    folder: Path, file: str, passes: int, environment: Mapping[str, str], options: Sequence[str] = ()
) -> None:
    """Assert that exactly so many tests of ``folder``/tests/``file`` pass, and that none fails."""
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", *options, "-p", "no:cacheprovider", f"tests/{file}"],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        timeout=SECONDS,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    found = outcomes(done.stdout)
    assert found["passed"] == passes, found
    assert not {"failed", "errors", "error"} & found.keys(), found
