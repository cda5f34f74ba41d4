"""What the processes of an engine's ranks need on the host of the GGUF proof, and what they are asked.

vLLM imports `GgufRank` in each rank's process before NCCL starts there (`worker_extension_cls`).
"""

from __future__ import annotations

import multiprocessing
from typing import Any

from rank_observer import allow_older_nccl, nccl_reduces

if multiprocessing.parent_process() is not None:
    allow_older_nccl()


class GgufRank:
    """Methods of each rank's worker."""

    def gguf_reduces(self) -> bool:
        """Return whether NCCL reduces over the tensor parallel ranks."""
        return nccl_reduces()


def require_nccl(engine: Any) -> None:
    """Ask all ranks whether NCCL reduces.

    Raises:
        RuntimeError: If it does not in one of them.

    """
    answers = engine.collective_rpc("gguf_reduces")
    if not answers or not all(answers):
        raise RuntimeError(f"ranks do without NCCL: {answers}")
