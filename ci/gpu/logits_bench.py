"""Time the indexer's logits kernels against DeepGEMM, in one run on one GPU.

    python logits_bench.py --out results/logits-bench.json [--root DIR] [--budget-s 100]

Medians of CUDA graph replays, each kernel with the configuration that it chooses itself. Decode graphs
run over enough sets of pages that keys come from memory. DeepGEMM's schedule is made outside the timing,
ours inside. Exits 1 if a ratio exceeds its goal.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any

import logits_problems
import standalone
import torch
from logits_problems import DECODES, PREFILLS, PrefillShape, Shape
from tune import time_graph

OURS, NATIVE = "triton_mqa_logits", "deep_gemm"
PREFILL_GOAL, DECODE_GOAL, SINGLE_GOAL = 1.3, 1.3, 1.5


def goal(shape: Shape) -> float:
    """Return the largest time of ours, in units of DeepGEMM's."""
    if isinstance(shape, PrefillShape):
        return PREFILL_GOAL
    return SINGLE_GOAL if shape.batch == 1 else DECODE_GOAL


def time_shape(kernels: Any, library: Any, shape: Shape) -> dict[str, float]:
    """Time every contender at one shape, in microseconds."""
    problem = logits_problems.make(shape)
    launches = {OURS: partial(problem.run, kernels, None)}
    if library is not None:
        launches[NATIVE] = partial(problem.run_deep_gemm, library)
    result = {}
    for name, launch in launches.items():
        launch(0)
        torch.cuda.synchronize()  # inputs are ready, and all is compiled, before another stream runs it
        result[name] = time_graph(launch, problem.num_sets, float("inf"))
    return result


def main() -> int:
    """Measure, print the table, write the report."""
    parser = argparse.ArgumentParser(description="Time the logits kernels on a GPU.")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--root", type=Path)
    parser.add_argument("--budget-s", type=float, default=100.0)
    args = parser.parse_args()
    started = time.monotonic()
    kernels = standalone.load_logits_kernel(args.root)
    library = logits_problems.deep_gemm()
    rows, misses = [], 0
    shapes: list[Shape] = [*DECODES, *PREFILLS]
    for shape in shapes:
        if time.monotonic() - started > args.budget_s:
            print(f"budget spent: {shape} not measured")
            misses += 1
            continue
        us = time_shape(kernels, library, shape)
        ratio = us[OURS] / us[NATIVE] if library is not None else None
        within = ratio is None or ratio <= goal(shape)
        misses += not within
        rows.append({"shape": str(shape), "us": us, "ratio": ratio, "goal": goal(shape)})
        figures = "  ".join(f"{name} {t:9.1f}" for name, t in us.items())
        compared = "" if ratio is None else f"{ratio:6.3f}"
        print(f"{shape!s:55} {figures} {compared}{'' if within else '  MISSED'}")
    report = {
        **standalone.measured_on(),
        "kernel_sha256": standalone.sha256_of(kernels),
        "deep_gemm": None if library is None else library.__version__,
        "total_s": round(time.monotonic() - started, 1),
        "points": rows,
    }
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.write_text(json.dumps(report, indent=1))
    print(f"written to {args.out}; DeepGEMM {report['deep_gemm']}; {misses} missed")
    return 1 if misses else 0


if __name__ == "__main__":
    sys.exit(main())
