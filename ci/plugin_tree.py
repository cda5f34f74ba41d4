"""Where the checkout of the patched plugin is, whose tests run."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Final

REPOSITORY: Final = Path(__file__).resolve().parents[1]
PATCHED_VLLM: Final = Path(os.environ.get("PATCHED_TREE") or REPOSITORY / "upstream" / "vllm")

TREE: Final = Path(os.environ.get("PATCHED_PLUGIN_TREE") or PATCHED_VLLM.with_name("vllm-gguf-plugin"))
"""`$PATCHED_PLUGIN_TREE`, by default beside `$PATCHED_TREE`."""
