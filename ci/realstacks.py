"""Running the tool on the real stacks and the real pinned files."""

from __future__ import annotations

import json
import os
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vllm_stack.pins import PinnedFile, load_pin
from vllm_stack.sources import base_of
from vllm_stack.workspace import Workspace

if TYPE_CHECKING:
    from vllm_stack.base import Base

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


def release_base(release: str) -> Base:
    """Return the base of a release of vLLM that ``ci/matrix.json`` has the sdist of."""
    workspace = Workspace.locate(ROOT)
    pin = load_pin(workspace.pin_file("vllm"))
    rows = json.loads((ROOT / "ci" / "matrix.json").read_text())["targets"]
    (sdist,) = (
        PinnedFile(**kept["sdist"])
        for row in rows
        for kept in row["releases"]
        if (row["target"], kept["release"]) == ("vllm", release)
    )
    return base_of(workspace, pin.model_copy(update={"release": release, "sdist": sdist}), offline=False)


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
