"""Whether the host can run the CuteDSL kernel with which vLLM merges the top-k of context-parallel ranks.

    python dcp_merge.py

The kernel is compiled where it runs first, by Python packages that were carried to the host and never tried
there. Should one of them be missing or of another release, no engine with context parallelism would start,
for a reason that is not the patches'. So it is tried once before the engines, in a process of its own, and
only such an error lets the ranks take vLLM's merge without CuteDSL; the report says so. Any other error is
left for the engines to meet. Engines whose job says so (`Job.merge`) do without CuteDSL in any case.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import traceback
from pathlib import Path
from typing import Any, Final

SECONDS: Final = 100.0
TOPK: Final = 512
WITHOUT_CUTEDSL: Final = "ENGINE_WITHOUT_CUTEDSL_MERGE"  # for the processes of the ranks
PACKAGES: Final = {"cutlass", "cuda", "quack", "tvm_ffi", "nvidia_cutlass_dsl"}
OTHERS: Final = {"torch", "vllm"}  # torch has a folder "cuda", too


def merge_once() -> None:
    """Select the best of two ranks' candidates on the device.

    Raises:
        RuntimeError: Other ones were selected.

    """
    import torch
    from vllm.model_executor.kernels.attention.dsa import dcp_indexer_cutedsl

    gathered = torch.empty(4, 2 * TOPK, 2, device="cuda")
    gathered[..., 0] = torch.randperm(2 * TOPK, device="cuda").float()
    gathered[..., 1] = torch.arange(2 * TOPK, device="cuda").float()
    chosen = dcp_indexer_cutedsl.stable_topk_from_gathered_candidates_cutedsl(gathered, TOPK)
    best = gathered[0, :, 0].topk(TOPK).indices.sort().values
    if not torch.equal(chosen[0].sort().values.long(), best):
        raise RuntimeError(f"{chosen[0].tolist()} were selected, not {best.tolist()}")


def is_of_packages(error: BaseException) -> bool:
    """Tell whether an error is of the host's Python packages: one is missing, or raised it itself.

    What the device or the kernel did wrong is raised by PyTorch or by vLLM.
    """
    if isinstance(error, ImportError):
        return True
    folders = set(Path(traceback.extract_tb(error.__traceback__)[-1].filename).parts)
    return bool(folders & PACKAGES) and not folders & OTHERS


def try_merge() -> dict[str, Any]:
    """Return the error, None if there is none, and whether it is of the host's packages."""
    try:
        merge_once()
    except Exception as error:  # noqa: BLE001 - whatever it is, it is reported
        return {"error": f"{type(error).__name__}: {error}", "of_packages": is_of_packages(error)}
    return {"error": None, "of_packages": False}


def probe(command: tuple[str, ...] = (sys.executable, __file__)) -> dict[str, Any]:
    """Try the merge in a process of its own; have the engines started later do without it if need be.

    Returns:
        For the report: the error, and whether the ranks do without CuteDSL for that.

    """
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS, check=False)
        found = json.loads(done.stdout.splitlines()[-1])
    except subprocess.TimeoutExpired:
        found = {"error": f"stopped after {SECONDS:.0f} s", "of_packages": False}
    except (IndexError, json.JSONDecodeError):
        found = {"error": f"exit status {done.returncode}: {done.stderr[-500:]}", "of_packages": False}
    if found["of_packages"]:
        os.environ[WITHOUT_CUTEDSL] = found["error"]
    return {"error": found["error"], "without_cutedsl": found["of_packages"]}


def do_without() -> None:
    """Let this process take the merge without CuteDSL if the host cannot run it, or the job says so."""
    if WITHOUT_CUTEDSL in os.environ:
        from vllm.model_executor.layers import sparse_attn_indexer

        sparse_attn_indexer.has_cutedsl_dcp_merge = lambda _: False  # before a model's file imports it


if __name__ == "__main__":
    print(json.dumps(try_merge()))
