"""Measure how long each rank takes to load a GGUF file, and how much memory of its own it needs.

    python ci/gpu/gguf_load.py --plugin-tests TREE/tests --out load.json

Writes a file of random blocks with the widths of GLM-5, one dense and some MoE layers (4.8 GB unless told
otherwise), and loads it on a CPU with vLLM's class for CUDA, as all ranks of a tensor-parallel group at once,
each a process; no GPU is needed.
A rank may take its share of the weights and one tensor more; in small files that is `kv_b_proj`, put together
in float32 from halves that are decoded. Its own memory (`RssAnon`) is sampled; pages of the file (`RssFile`)
are shared by all ranks and no copy. Exits 1 if a rank took more.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import sys
import tempfile
import threading
import time
from concurrent.futures import ProcessPoolExecutor
from importlib import import_module
from pathlib import Path
from typing import Any, Final

SAMPLE_SECONDS: Final = 0.02
MEBI: Final = 1 << 20

SLACK: Final = 64 * MEBI
"""What Python and the allocator may take beside weights; a mebibyte here and there was seen."""


def memory(kind: str) -> int:
    """Return a figure of this process's memory in bytes, by its name in /proc."""
    lines = Path("/proc/self/status").read_text().splitlines()
    [line] = [line for line in lines if line.startswith(f"{kind}:")]
    return int(line.split()[1]) << 10


class Peak(threading.Thread):
    """Samples this process's own memory until it is stopped."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.start_bytes = self.peak_bytes = memory("RssAnon")
        self._stopped = threading.Event()

    def run(self) -> None:
        """Sample until stopped."""
        while not self._stopped.wait(SAMPLE_SECONDS):
            self.peak_bytes = max(self.peak_bytes, memory("RssAnon"))

    def stop(self) -> int:
        """Return by how many bytes the memory had grown at its peak."""
        self._stopped.set()
        self.join()
        return self.peak_bytes - self.start_bytes


def load_rank(rank: int, size: int, folder: Path, path: Path) -> dict[str, Any]:
    """Load the file as one rank; return seconds and bytes."""
    import torch
    from vllm.config import set_current_vllm_config

    torch.set_num_threads(1)
    models, classes = import_module("cpu_models"), import_module("glm_dsa_reference")
    config = models.engine_config(path, folder)
    with set_current_vllm_config(config):
        models.join_group(rank, size, folder / "group")
    torch.distributed.barrier()
    peak = Peak()
    peak.start()
    started = time.monotonic()
    model = models.load_model(config, classes.MODEL_CLASSES["CUDA"])
    seconds = time.monotonic() - started
    grown, file_bytes = peak.stop(), memory("RssFile")
    held = sum(p.nbytes for p in model.parameters() if not torch.nn.parameter.is_lazy(p))
    torch.distributed.barrier()
    return {"rank": rank, "seconds": seconds, "peak": grown, "held": held, "file_pages": file_bytes}


def measure(folder: Path, ranks: int, layers: int, experts: int) -> dict[str, Any]:
    """Write a file, load it on all ranks at once, and judge what they took."""
    import gguf
    from gguf_wide import wide_config, write_wide

    started = time.monotonic()
    path = write_wide(folder, wide_config(layers, experts))
    written = time.monotonic() - started
    tensors = gguf.GGUFReader(path).tensors
    largest = max(int(tensor.n_bytes) for tensor in tensors)
    kv_b = sum(
        int(t.n_elements) for t in tensors if t.name in ("blk.0.attn_k_b.weight", "blk.0.attn_v_b.weight")
    )
    transient = max(largest, 3 * 4 * kv_b)
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["glm_dsa_reference"])
    with ProcessPoolExecutor(ranks, mp_context=context) as pool:
        calls = [pool.submit(load_rank, rank, ranks, folder, path) for rank in range(ranks)]
        found = [call.result() for call in calls]
    for rank in found:
        rank["allowed"] = rank["held"] + transient + SLACK
        rank["passed"] = rank["peak"] <= rank["allowed"]
    return {
        "schema": 1,
        "file_bytes": path.stat().st_size,
        "largest_tensor": largest,
        "transient": transient,
        "tensors": len(tensors),
        "write_seconds": written,
        "ranks": found,
        "passed": all(rank["passed"] for rank in found),
    }


def table(report: dict[str, Any]) -> str:
    """Return the figures of all ranks in MiB."""
    size, largest = report["file_bytes"], report["largest_tensor"]
    lines = [f"file {size / MEBI:.0f} MiB, largest tensor {largest / MEBI:.0f}"]
    lines += [
        f"rank {r['rank']}: {r['seconds']:.1f} s, peak {r['peak'] / MEBI:.0f}, holds {r['held'] / MEBI:.0f},"
        f" allowed {r['allowed'] / MEBI:.0f}, file pages {r['file_pages'] / MEBI:.0f}"
        for r in report["ranks"]
    ]
    return "\n".join(lines)


def main() -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--plugin-tests", type=Path, required=True, help="tests of the patched plugin")
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--layers", type=int, default=3)
    parser.add_argument("--experts", type=int, default=96)
    parser.add_argument("--out", type=Path, help="report to write (JSON)")
    arguments = parser.parse_args()
    paths = [str(arguments.plugin_tests.resolve()), str(Path(__file__).resolve().parent)]
    sys.path[:0] = paths
    inherited = os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = os.pathsep.join([*paths, *([inherited] if inherited else [])])
    os.environ.setdefault("VLLM_TARGET_DEVICE", "cpu")
    with tempfile.TemporaryDirectory() as folder:
        report = measure(Path(folder), arguments.ranks, arguments.layers, arguments.experts)
    if arguments.out:
        arguments.out.write_text(json.dumps(report, indent=1))
    print(table(report))
    return 0 if report["passed"] else 1


if __name__ == "__main__":
    sys.exit(main())
