"""Run a worker process whose output goes to a file, for a limited time."""

from __future__ import annotations

import subprocess
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path


def run_logged(
    command: Sequence[str], log: Path, environment: Mapping[str, str], folder: Path, seconds: float
) -> str | None:
    """Run a command in ``folder``; return how it failed, None if it did not."""
    with log.open("wb") as output:
        try:
            done = subprocess.run(
                command, stdout=output, stderr=subprocess.STDOUT, env=environment,
                cwd=folder, timeout=seconds, check=False,
            )  # fmt: skip
        except subprocess.TimeoutExpired:
            return f"stopped after {seconds:.0f} s"
    return None if done.returncode == 0 else f"exit status {done.returncode}"
