"""Time the sparse-MLA kernel against what else could serve the same call, in one run on one GPU.

    python kernel_bench.py --out results/kernel-bench.json [--root DIR] [--budget-s 130]

Compared, as medians of CUDA graph replays: this kernel with the configuration that it chooses
itself, upstream's Triton decode kernel fed with physical rows as a block table of page size 1 (the
floor to beat), and FlashMLA's bf16 sparse kernel where it can be imported; then this kernel and
FlashMLA's on a cache of the fp8_ds_mla layout. Rows are drawn from 64 K windows of a 1 M row cache;
each graph runs over enough sets of rows that they come from memory. Exits 1 if the time did not suffice
for every point.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import standalone
import torch
from tune import CACHE_ROWS, DEVICE, RANK, ROPE, TOPK, Problem, make_cache, time_graph

if TYPE_CHECKING:
    from collections.abc import Callable

HEADS = (8, 16, 32, 64, 128)
TOKENS = (1, 16, 128, 2048)
SPLITS_OF_REUSE = (4, 16, 64)
MOST_REUSE_ROWS = 1 << 15  # queries times splits: bounds its scratch
OURS, REUSE, NATIVE = "triton_mla_sparse", "page_size_1_reuse", "flashmla_bf16"
OURS_FP8, NATIVE_FP8 = "triton_mla_sparse_fp8", "flashmla_fp8"
PAGE = 64  # rows of a page of FlashMLA's fp8 kernel


class Reuse:
    """Upstream's Triton decode kernel on physical rows, with its best of a few split counts."""

    def __init__(self, decode: Any, num_splits: int, problem: Problem) -> None:
        self.decode = decode
        self.num_splits = num_splits
        self.problem = problem
        tokens, heads = problem.q.shape[:2]
        self.logits = torch.empty(tokens, heads, num_splits, RANK + 1, device=DEVICE)
        self.one = torch.ones((), device=DEVICE)

    def __call__(self, index: int) -> None:
        """Launch on one set of rows."""
        problem = self.problem
        cache = problem.kv.view(-1, 1, 1, RANK + ROPE)
        self.decode.decode_attention_fwd(
            problem.q,
            cache,
            cache[..., :RANK],
            problem.out,
            problem.lse,
            problem.indices[index],
            problem.counts,
            self.logits,
            self.num_splits,
            (RANK + ROPE) ** -0.5,
            page_size=1,
            k_scale=self.one,
            v_scale=self.one,
            is_mla=True,
        )


def flash_mla(problem: Problem, index: int) -> None:
    """Launch FlashMLA's sparse bf16 kernel."""
    from vllm.third_party.flashmla.flash_mla_interface import flash_mla_sparse_fwd

    cache = problem.kv.view(-1, 1, RANK + ROPE)
    indices = problem.indices[index].unsqueeze(1)
    flash_mla_sparse_fwd(problem.q, cache, indices, (RANK + ROPE) ** -0.5)


class FlashMLAFp8:
    """FlashMLA's sparse fp8 kernel as vLLM calls it for a mixed batch: one sequence, heads padded."""

    def __init__(self, problem: Problem) -> None:
        from vllm.third_party.flashmla import flash_mla_interface

        self.interface = flash_mla_interface
        self.problem = problem
        tokens, heads = problem.q.shape[:2]
        self.q = torch.zeros(1, tokens, 64 if heads <= 64 else 128, RANK + ROPE, device=DEVICE).bfloat16()
        self.q[0, :, :heads] = problem.q
        self.pages = problem.kv.view(-1, PAGE, 1, problem.kv.shape[1])
        self.block_table = torch.empty(1, 1, dtype=torch.int32, device=DEVICE)  # ignored
        self.lens = torch.full((1,), CACHE_ROWS, dtype=torch.int32, device=DEVICE)
        self.schedule, _ = flash_mla_interface.get_mla_metadata()

    def __call__(self, index: int) -> None:
        """Launch on one set of rows; the first call makes the schedule, which depends on shapes."""
        self.interface.flash_mla_with_kvcache(
            q=self.q,
            k_cache=self.pages,
            block_table=self.block_table,
            head_dim_v=RANK,
            cache_seqlens=self.lens,
            tile_scheduler_metadata=self.schedule,
            is_fp8_kvcache=True,
            indices=self.problem.indices[index].unsqueeze(0),
            softmax_scale=(RANK + ROPE) ** -0.5,
        )


def flash_mla_error() -> str | None:
    """Why FlashMLA cannot be timed here, or None."""
    try:
        import vllm.third_party.flashmla.flash_mla_interface as interface
    except ImportError as error:
        return f"{type(error).__name__}: {error}"
    return None if hasattr(interface, "flash_mla_sparse_fwd") else "no flash_mla_sparse_fwd"


def time_ours(kernels: Any, problem: Problem) -> float:
    """Time this kernel with the configuration that it chooses itself, in microseconds."""
    tokens, heads = problem.q.shape[:2]
    arguments = (tokens, heads, TOPK, RANK, kernels.get_device_info(0), problem.kv.dtype)
    shapes = kernels.scratch_shapes(*arguments)
    scratch = tuple(torch.empty(s, dtype=d, device=DEVICE) for s, d in shapes)
    return time_graph(partial(problem.run, kernels, None, scratch), problem.num_sets, float("inf"))


def time_fp8_point(kernels: Any, problem: Problem, *, with_native: bool) -> dict[str, float]:
    """Time both kernels that read fp8_ds_mla at one point, in microseconds."""
    result = {OURS_FP8: time_ours(kernels, problem)}
    if with_native:
        result[NATIVE_FP8] = time_graph(FlashMLAFp8(problem), problem.num_sets, float("inf"))
    return result


def time_point(kernels: Any, decode: Any, problem: Problem, *, with_native: bool) -> dict[str, float]:
    """Time every contender at one point, in microseconds."""
    tokens = problem.q.shape[0]
    result = {OURS: time_ours(kernels, problem)}

    def timed(launch: Callable[[int], object]) -> float:
        return time_graph(launch, problem.num_sets, float("inf"))

    reuses = [Reuse(decode, s, problem) for s in SPLITS_OF_REUSE if tokens * s <= MOST_REUSE_ROWS]
    result[REUSE] = min(timed(reuse) for reuse in reuses)
    if with_native:
        result[NATIVE] = timed(partial(flash_mla, problem))
    return result


def main() -> int:
    """Measure, print the table, write the report."""
    parser = argparse.ArgumentParser(description="Time the sparse-MLA kernel on a GPU.")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--root", type=Path)
    parser.add_argument("--budget-s", type=float, default=130.0)
    args = parser.parse_args()
    started = time.monotonic()
    kernels = standalone.load_kernel(args.root)
    decode = standalone.load_decode_kernel(args.root)
    native_error = flash_mla_error()
    kv, kv_fp8 = make_cache(torch.bfloat16), make_cache(torch.uint8)
    rows, missing = [], []
    for tokens in TOKENS:
        for heads in HEADS:
            if time.monotonic() - started > args.budget_s:
                missing.append(f"H={heads} T={tokens}")
                continue
            problem = Problem(heads, tokens, kv, seed=tokens * 1000 + heads)
            us = time_point(kernels, decode, problem, with_native=native_error is None)
            problem = Problem(heads, tokens, kv_fp8, seed=tokens * 1000 + heads)
            us |= time_fp8_point(kernels, problem, with_native=native_error is None)
            ratios = {f"{name} / ours": round(t / us[OURS], 2) for name, t in us.items()}
            rows.append({"heads": heads, "tokens": tokens, "us": us, "ratios": ratios})
            figures = "  ".join(f"{name} {t:9.1f}" for name, t in us.items())
            print(f"H={heads:<4} T={tokens:<5} {figures}   {ratios}")
    report = {
        **standalone.measured_on(),
        "flashmla": native_error or "timed",
        "total_s": round(time.monotonic() - started, 1),
        "points": rows,
        "not_measured": missing,
    }
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.write_text(json.dumps(report, indent=1))
    print(f"written to {args.out}; FlashMLA: {report['flashmla']}")
    for point in missing:
        print(f"budget spent: {point} not measured")
    return 1 if missing else 0


if __name__ == "__main__":
    sys.exit(main())
