"""Processes with FlashInfer absent, installed but unusable, or usable, as vLLM's probes see it.

vLLM never runs FlashInfer while it selects. It looks for the package, for ``flashinfer_cubin``,
for nvcc and ninja, and for a few names; a package of just those names therefore decides the same
as the real one of 62 MB, and decides it on machines that cannot import the real one.
"""

from __future__ import annotations

import os
from enum import StrEnum
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from pathlib import Path

_PACKAGE: Final = {
    "flashinfer/__init__.py": "",
    "flashinfer/autotuner.py": "def autotune(): ...\n",
    "flashinfer/decode.py": """
def trtllm_batch_decode_sparse_mla_dsv4(): ...
def trtllm_batch_decode_with_kv_cache_mla(): ...
""",
    "flashinfer/mla/__init__.py": """
class BatchMLAPagedAttentionWrapper:
    def run(self, *args, ckv_scale_arr=None): ...
""",
}
_CUBINS: Final = {"flashinfer_cubin/__init__.py": ""}
_CUDA_VARIABLES: Final = ("CUDA_HOME", "CUDA_PATH", "VLLM_HAS_FLASHINFER_CUBIN")


class FlashInfer(StrEnum):
    """What a machine has of FlashInfer."""

    ABSENT = "absent"
    UNUSABLE = "installed without nvcc, ninja or cubins"
    USABLE = "usable"


_FILES: Final = {
    FlashInfer.ABSENT: {},
    FlashInfer.UNUSABLE: _PACKAGE,
    FlashInfer.USABLE: _PACKAGE | _CUBINS,
}


def environment(state: FlashInfer, folder: Path, import_first: tuple[Path, ...]) -> dict[str, str]:
    """Return an environment for a process without a GPU in which FlashInfer is in ``state``.

    Args:
        state: What vLLM shall find.
        folder: An empty folder; it becomes the first of the import path.
        import_first: Folders that come next on the import path.
    """
    for name, text in _FILES[state].items():
        target = folder / name
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(text)
    inherited = os.environ.get("PYTHONPATH")
    paths = [folder, *import_first, *([inherited] if inherited else [])]
    kept = {k: v for k, v in os.environ.items() if k not in {*_CUDA_VARIABLES, "TRITON_INTERPRET"}}
    return kept | {"CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": os.pathsep.join(map(str, paths))}
