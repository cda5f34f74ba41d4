"""Running the tool on the real stacks and the real pinned files."""

from __future__ import annotations

import json
import os
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
TARGETS = ("vllm", "vllm-gguf-plugin")


def run_tool(*words: str | Path, cwd: Path = ROOT, code: int = 0) -> dict[str, Any]:
    """Run tools/vllm-stack, expect its exit code, and return its report."""
    command = [ROOT / "tools" / "vllm-stack", *words, "--json", "-"]
    done = subprocess.run(command, cwd=cwd, capture_output=True, text=True, check=False)
    assert done.returncode == code, f"exit code {done.returncode}\n{done.stdout}\n{done.stderr}"
    report: dict[str, Any] = json.loads(done.stdout)
    assert report["ok"] == (code == 0)
    return report


@dataclass(frozen=True)
class AppliedCheckout:
    """A checkout of a real stack, apart from the one that somebody may work in."""

    folder: Path
    base: str
    commits: tuple[str, ...]

    def git(self, *words: str) -> str:
        """Run git in the checkout."""
        environment = {**os.environ, "GIT_CONFIG_GLOBAL": os.devnull, "GIT_CONFIG_NOSYSTEM": "1"}
        done = subprocess.run(
            ["git", *words], cwd=self.folder, env=environment, capture_output=True, text=True, check=True
        )
        return done.stdout

    def changed(self, first: str, last: str) -> list[str]:
        """Return the files that differ between two commits and exist in the later one."""
        return self.git("diff", "--name-only", "--no-renames", "--diff-filter=d", first, last).splitlines()
