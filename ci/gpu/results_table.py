"""Write results/README.md: the reports in results/ as tables.

python ci/gpu/results_table.py [--check]
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).resolve().parent / "results"
REPORTS = ("kernel-check", "sanitizer", "kernel-bench", "engine", "engine-short")
KERNELS = ("triton_mla_sparse", "page_size_1_reuse", "flashmla_bf16")


def report(name: str) -> dict[str, Any]:
    """Read one report."""
    document: dict[str, Any] = json.loads((RESULTS / f"{name}.json").read_text())
    return document


def provenance() -> list[str]:
    """Return the table of what each report measured."""
    lines = ["| report | result | wheel | wheel sha256 | commit | stack id |", "|---|---|---|---|---|---|"]
    for name in REPORTS:
        document = report(name)
        files = document["wheel_files"]
        wheel, commit, stack = files["wheel"], files["commit"][:12], files["stack_id"][:12]
        cells = (f"{name}.json", document["result"], wheel["name"].split("-")[1], wheel["sha256"][:12])
        lines.append(f"| {' | '.join((*cells, commit, stack))} |")
    return lines


def speeds() -> list[str]:
    """Return the table of the kernels' times."""
    lines = [
        "| heads | rows | ours, us | page-size-1 reuse, us | reuse / ours | FlashMLA bf16, us "
        "| FlashMLA / ours |",
        "|--:|--:|--:|--:|--:|--:|--:|",
    ]
    for point in report("kernel-bench")["points"]:
        ours, reuse, flashmla = (point["us"][kernel] for kernel in KERNELS)
        times = f"{ours:.1f} | {reuse:.1f} | {reuse / ours:.2f} | {flashmla:.1f} | {flashmla / ours:.2f}"
        lines.append(f"| {point['heads']} | {point['tokens']} | {times} |")
    return lines


def render() -> str:
    """Return the whole text."""
    bench = report("kernel-bench")
    lines = [
        "# What a GPU host said",
        "",
        "Written by `ci/gpu/results_table.py` out of the reports beside it; `../README.md` says how they",
        "came about (also why the stack id in engine.json is another: its wheel is named and hashed right).",
        "",
        *provenance(),
        "",
        f"Sparse MLA, bf16, top-k 2048, one {bench['gpu']}, torch {bench['torch']}, Triton "
        f"{bench['triton']}; medians of graph replays in one run.",
        "",
        *speeds(),
    ]
    return "\n".join(lines) + "\n"


def main() -> int:
    """Write the file, or with --check say whether it is what the reports give."""
    path = RESULTS / "README.md"
    if "--check" in sys.argv[1:]:
        return 0 if path.read_text() == render() else 1
    path.write_text(render())
    return 0


if __name__ == "__main__":
    sys.exit(main())
