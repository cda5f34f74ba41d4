"""Where the checkout of the patched plugin is, whose tests run, and how its test modules are used."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Final

REPOSITORY: Final = Path(__file__).resolve().parents[1]
PATCHED_VLLM: Final = Path(os.environ.get("PATCHED_TREE") or REPOSITORY / "upstream" / "vllm")

TREE: Final = Path(os.environ.get("PATCHED_PLUGIN_TREE") or PATCHED_VLLM.with_name("vllm-gguf-plugin"))
"""`$PATCHED_PLUGIN_TREE`, by default beside `$PATCHED_TREE`."""


def run_python(*arguments: str | Path, extra_path: str | None = None) -> subprocess.CompletedProcess[str]:
    """Run Python where the plugin's test modules, and those in another folder, can be imported."""
    paths = [str(TREE / "tests"), extra_path, os.environ.get("PYTHONPATH")]
    variables = {
        "CUDA_VISIBLE_DEVICES": "",
        "HF_HUB_OFFLINE": "1",
        "PYTHONPATH": os.pathsep.join(path for path in paths if path),
        "VLLM_TARGET_DEVICE": "cpu",
    }
    return subprocess.run(
        [sys.executable, *arguments],
        env=os.environ | variables,
        capture_output=True,
        text=True,
        timeout=900,
        check=False,
    )
