"""Time configurations of the indexer's logits kernels on one GPU; write every figure to a JSON file.

    python logits_tune.py --root DIR --out results/logits-tune.json [--mode native|sm120|sm80]

`--root` holds `standalone.CARRIED_FILES`. Modes, compilation in parallel processes and timing are those
of `tune.py`. Every configuration's logits are compared with DeepGEMM's (`native`) or with those of the
first configuration before it is timed.
"""

from __future__ import annotations

import argparse
import inspect
import itertools
import json
import multiprocessing
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import standalone
import tune


class Job(NamedTuple):
    """One variant to compile: its configuration without what only the launch sees."""

    kind: str
    heads: int
    config: tuple[Any, ...]


def prefill_configs(heads: int, mode: str) -> list[tuple[Any, ...]]:
    """(block_q, block_n, columns, num_warps, num_stages, max_registers, keys per program)."""
    found: list[tuple[Any, ...]] = []
    if mode != "native":
        for width, block_n, columns, warps, stages, registers in itertools.product(
            (64, 128, 256), (64, 128, 256), (16, 32, 64), (2, 4, 8), (2, 3), (None, 128, 168)
        ):
            if width < heads or block_n not in (16 * warps, 32 * warps, 64 * warps):
                continue
            if registers and (stages == 2 or columns == 64):
                continue
            found.append((width // heads, block_n, columns, warps, stages, registers, 2048))
        return found
    sizes = (64, 128, 256)
    for width, block_n, warps, stages in itertools.product(sizes, sizes, (4, 8, 16), (2, 3, 4)):
        accumulators = width * block_n // (32 * warps)
        if width < heads or not 32 <= accumulators <= (64 if warps == 16 else 128):
            continue
        if warps > 4 and (block_n // 64) * (width // 128) < warps // 4:
            continue
        bounds = (None, 128) if accumulators == 64 and warps < 16 else (None,)
        found += [(width // heads, block_n, width, warps, stages, bound, 2048) for bound in bounds]
    return found


def decode_configs(heads: int, next_n: int, mode: str) -> list[tuple[Any, ...]]:
    """(block_q, block_n, columns, num_warps, num_stages, max_registers, blocks per multiprocessor)."""
    rows = max(1, min(next_n, 256 // heads))
    if mode == "native":
        grid = itertools.product((64, 128), (rows * heads,), (4, 8), (2, 3, 4, 5, 6))
    else:
        grid = itertools.product((64, 128), (16, 32, rows * heads), (2, 4, 8), (2, 3, 4))
    return [
        (rows, block_n, columns, warps, stages, None, 4)
        for block_n, columns, warps, stages in dict.fromkeys(grid)
        if block_n >= 16 * warps
    ]


def compile_job(task: tuple[Job, str, str, str]) -> dict[str, Any]:
    """Compile one variant in a worker process; return its resources."""
    job, mode, cache_dir, root = task
    tune.prepare(mode, cache_dir)
    from triton.compiler.errors import CompilationError
    from triton.runtime.errors import OutOfResources, PTXASError

    kernels = standalone.load_logits_kernel(Path(root))
    info = device_info(kernels, mode)
    if job.kind == "prefill":
        config = kernels.MQALogitsConfig(*job.config)
        owner, key = kernels._PREFILL_KERNEL, kernels._prefill_key(job.heads, 128, config, info)
    else:
        config = kernels.PagedMQALogitsConfig(*job.config)
        owner = kernels._PAGED_KERNEL
        key = kernels._paged_key(job.heads, 128, 64, 1, config.block_q, config, info)
    inputs = owner.warmup_inputs(key)
    spec = inspect.unwrap(type(owner).__call__)(owner, **inputs)
    kwargs = owner._prepare_launch_kwargs(tuple(inputs), tuple(inputs.values()), dict(spec[1]))
    result: dict[str, Any] = {"kind": job.kind, "heads": job.heads, "config": config._asdict()}
    try:
        compiled = owner.kernel.warmup(grid=(1,), **kwargs)
        compiled._init_handles()
    except (CompilationError, OutOfResources, PTXASError, RuntimeError) as error:
        # One bad variant must not end the sweep; it is in the report.
        return result | {"error": f"{type(error).__name__}: {error}"[:300]}
    return result | {
        "smem": getattr(compiled.metadata, "unpadded_shared", compiled.metadata.shared),
        "registers": compiled.n_regs,
        "spills": compiled.n_spills,
    }


#: Small shapes that make DeepGEMM compile what the large ones run.
NATIVE_WARM_UPS = (
    *((heads, 256, 1024) for heads in (32, 64)),
    *((heads, 2, next_n, 1024) for heads in (32, 64) for next_n in (1, 2)),
)


def compile_native(values: tuple[int, ...]) -> None:
    """Make DeepGEMM compile for a shape, into its cache on disk."""
    import logits_problems
    import torch

    kind = logits_problems.PrefillShape if len(values) == 3 else logits_problems.DecodeShape
    logits_problems.make(kind(*values)).run_deep_gemm(logits_problems.deep_gemm(), 0)
    torch.cuda.synchronize()


def device_info(kernels: Any, mode: str) -> Any:
    """Return the properties of the GPU at hand, or of the chip that a mode stands for."""
    info = kernels.get_device_info(0)
    if mode == "native":
        return info
    capability = {"sm120": (12, 0), "sm80": (8, 0)}[mode]
    return info._replace(capability=capability, max_shared_mem=tune.CHIPS[mode].block_smem)


class Sweep:
    """Timings of one shape after another."""

    def __init__(self, kernels: Any, mode: str, deadline: float) -> None:
        import logits_problems

        self.problems = logits_problems
        self.kernels = kernels
        self.mode = mode
        self.deadline = deadline
        self.library = logits_problems.deep_gemm() if mode == "native" else None
        self.results: list[dict[str, Any]] = []

    def shape(self, shape: Any, configs: list[tuple[Any, ...]]) -> None:
        """Check and time every configuration at one shape; print the best."""
        import torch

        problem = self.problems.make(shape)
        is_prefill = isinstance(shape, self.problems.PrefillShape)
        kind = self.kernels.MQALogitsConfig if is_prefill else self.kernels.PagedMQALogitsConfig
        torch.cuda.synchronize()  # timings run on a stream of their own
        reference = None
        here: list[dict[str, Any]] = []
        native = float("inf")
        if self.library is not None:
            reference = problem.run_deep_gemm(self.library, 0)
            torch.cuda.synchronize()
            launch = partial(problem.run_deep_gemm, self.library)
            native = tune.time_graph(launch, problem.num_sets, float("inf"))
        best = float("inf")
        for values in configs:
            if time.time() > self.deadline:
                break
            config = kind(*values)
            ours = problem.run(self.kernels, config, 0)
            reference = ours if reference is None else reference
            error = self.problems.difference(problem, ours, reference)
            del ours
            us = tune.time_graph(partial(problem.run, self.kernels, config), problem.num_sets, best)
            best = min(best, us)
            here.append({"shape": str(shape), "us": round(us, 2), "error": error} | config._asdict())
        self.results += [*here, {"shape": str(shape), "deep_gemm_us": native}]
        worst = max((r["error"] for r in here), default=0.0)
        print(f"{shape}: DeepGEMM {native:.1f} us, worst relative difference {worst:.1e}")
        for r in sorted(here, key=lambda r: r["us"])[:6]:
            tile = tuple(r[f] for f in kind._fields)
            print(f"  {r['us']:9.1f} us  {r['us'] / native:5.2f}  {tile}")
        sys.stdout.flush()
        del reference
        torch.cuda.empty_cache()


def parse_arguments() -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description="Time configurations of the logits kernels.")
    parser.add_argument("--root", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--mode", choices=("native", *tune.CHIPS), default="native")
    parser.add_argument("--budget-s", type=float, default=110.0, help="seconds for both phases")
    parser.add_argument("--processes", type=int, default=16)
    parser.add_argument("--only", choices=("prefill", "decode"))
    parser.add_argument(
        "--tile", action="append", help="block_n,columns,warps,stages: only these; may be repeated"
    )
    return parser.parse_args()


def jobs_of(args: argparse.Namespace) -> list[Job]:
    """Return the variants to compile."""
    jobs = [Job("prefill", h, c) for h in (32, 64) for c in prefill_configs(h, args.mode)]
    for heads, next_n in itertools.product((32, 64), (1, 2)):
        jobs += [Job("decode", heads, c) for c in decode_configs(heads, next_n, args.mode)]
    tiles = {tuple(map(int, text.split(","))) for text in args.tile or ()}
    jobs = [job for job in dict.fromkeys(jobs) if args.only in (None, job.kind)]
    return [job for job in jobs if not tiles or (job.config[1:5] in tiles and job.config[5] is None)]


def compile_all(jobs: list[Job], args: argparse.Namespace, cache_dir: str) -> dict[Job, dict[str, Any]]:
    """Compile in parallel; return the resources of what can run without spilling."""
    tasks = [(job, args.mode, cache_dir, str(args.root)) for job in jobs]
    with multiprocessing.get_context("spawn").Pool(args.processes) as pool:
        # DeepGEMM compiles with nvcc, which takes longest: first in the queue.
        native = pool.map_async(compile_native, NATIVE_WARM_UPS if args.mode == "native" else (), chunksize=1)
        compiled = pool.map(compile_job, tasks, chunksize=1)
        native.get()
    for result in compiled:
        if "error" in result:
            print("ERROR", result)
    limit = tune.NATIVE_SMEM if args.mode == "native" else tune.CHIPS[args.mode].block_smem
    return {
        job: result
        for job, result in zip(jobs, compiled, strict=True)
        if "error" not in result and not result["spills"] and result["smem"] <= limit
    }


def sweep_shapes(sweep: Sweep, args: argparse.Namespace, good: dict[Job, dict[str, Any]]) -> None:
    """Time what compiled at every shape."""
    problems, native = sweep.problems, args.mode == "native"
    if args.only != "prefill":
        for shape in problems.DECODES:
            configs = decode_configs(shape.heads, shape.next_n, args.mode)
            wanted = [c for c in configs if Job("decode", shape.heads, c) in good]
            sweep.shape(shape, [(*c[:-1], blocks) for c in wanted for blocks in (2, 3, 4, 6, 8)])
    if args.only != "decode":
        # The code path of other chips is several times slower here: the smallest shape of each head count.
        for shape in problems.PREFILLS if native else problems.PREFILLS[::3]:
            configs = prefill_configs(shape.heads, args.mode)
            wanted = [c for c in configs if Job("prefill", shape.heads, c) in good]
            sweep.shape(shape, [(*c[:-1], k) for c in wanted for k in ((2048, 8192) if native else (2048,))])


def main() -> None:
    """Compile, sweep, write the report."""
    args = parse_arguments()
    started = time.time()
    cache_dir = f"/tmp/logits-tune-cache-{args.mode}-{args.root.resolve().name}"
    jobs = jobs_of(args)
    good = compile_all(jobs, args, cache_dir)
    print(f"{len(jobs)} variants compiled in {time.time() - started:.0f} s, {len(good)} usable")
    tune.prepare(args.mode, cache_dir)

    kernels: Any = standalone.load_logits_kernel(args.root)
    info = device_info(kernels, args.mode)
    kernels.get_device_info = lambda _index=0: info
    sweep = Sweep(kernels, args.mode, started + args.budget_s)
    sweep_shapes(sweep, args, good)
    report = {
        **standalone.measured_on(),
        "kernel_sha256": standalone.sha256_of(kernels),
        "mode": args.mode,
        "total_s": round(time.time() - started, 1),
        "compiled": list(good.values()),
        "timings": sweep.results,
    }
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.write_text(json.dumps(report))
    print(f"{len(sweep.results)} timings, {report['total_s']} s in all, written to {args.out}")


if __name__ == "__main__":
    main()
