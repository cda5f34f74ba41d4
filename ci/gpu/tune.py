"""Time configurations of the sparse-MLA kernel on one GPU and write every figure to a JSON file.

    python tune.py --root DIR --out results/tune.json [--mode native|sm120|sm80] [--fp8] [--budget-s 110]

`--root` holds the kernel file and the JIT warm-up machinery (`standalone.CARRIED_FILES`).

Modes: `native` compiles for the GPU at hand. `sm120` and `sm80` compile through the code path that
Triton takes for those chips (mma.sync and cp.async, no wgmma), assemble that PTX for the GPU at
hand, keep to their shared memory per block, and ask for as much more of it as makes no more blocks
share a multiprocessor than could there. That is as close as a Hopper card comes to those chips; its
ratios of arithmetic to bandwidth stay its own.

With `--fp8` the cache has the fp8_ds_mla layout. `sm80` then decodes e4m3 in software, as below SM89.

All variants are compiled first, in parallel processes. What spills registers or exceeds the shared
memory is recorded and not timed. A timing is the median of CUDA graph replays; each graph runs over
enough different sets of rows that the cache is read from memory, not from L2.

`chosen` in the report is what `select_config` takes at each point, for the chip of the mode with the
multiprocessors of the GPU at hand, and its time over that of the fastest configuration.
"""

from __future__ import annotations

import argparse
import inspect
import itertools
import json
import multiprocessing
import os
import re
import statistics
import time
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import standalone

if TYPE_CHECKING:
    from collections.abc import Callable

DEVICE = "cuda"
RANK, ROPE, TOPK = 512, 64, 2048
FP8_ROW = 656  # bytes
CACHE_ROWS = 1 << 20
WINDOW = 1 << 16
HEADS = (8, 16, 32, 64, 128)
TOKENS = (1, 4, 16, 64, 128, 512, 2048)
HOST_SM_SMEM = 228 * 1024
MAX_SETS, COLD_BYTES = 24, 160 << 20


class Chip(NamedTuple):
    """An emulated chip.

    Attributes:
        block_smem: Bytes of shared memory that a block may use.
        sm_smem: Bytes that a multiprocessor has.
        capability: Compute capability, (major, minor).

    """

    block_smem: int
    sm_smem: int
    capability: tuple[int, int]


CHIPS = {"sm120": Chip(99 << 10, 100 << 10, (12, 0)), "sm80": Chip(163 << 10, 164 << 10, (8, 0))}
NATIVE_SMEM = 227 << 10


class Tile(NamedTuple):
    """Compile-time shape of the split kernel."""

    block_h: int
    block_n: int
    num_warps: int
    num_stages: int


def tiles_of(num_heads: int, mode: str, *, fp8: bool = False) -> list[Tile]:
    """Tiles worth compiling for a head count."""
    heads = [b for b in (16, 32, 64) if b <= max(16, num_heads)]
    if fp8:
        heads = [b for b in heads if b <= 32]  # 64 spills: half the products are narrow
    elif mode == "native":
        heads = [b for b in heads if num_heads < 64 or b >= 32]
    else:
        heads = [b for b in heads if b <= 32]  # 64 spills there
    grid = itertools.product(heads, (16, 32, 64, 128), (4, 8), (1, 2, 3, 4, 5))
    limit = NATIVE_SMEM if mode == "native" else CHIPS[mode].block_smem
    return [Tile(*t) for t in grid if _plausible(Tile(*t), limit, fp8=fp8, software=mode == "sm80")]


def _plausible(tile: Tile, limit: int, *, fp8: bool = False, software: bool = False) -> bool:
    """Leave out what cannot fit or has nothing to gain, before paying for its compilation."""
    if fp8:
        held = tile.block_n * RANK * 2 * software
        buffered = max(1, tile.num_stages - 1) * tile.block_n * FP8_ROW
        return tile.num_stages > 1 and tile.block_h * (RANK + ROPE) * 2 + held + buffered <= limit
    if tile.block_h >= 64 and tile.num_warps == 4:
        return False  # 256 accumulator registers a thread
    if tile.num_stages == 1:
        return tile.block_n <= 32
    buffers = tile.num_stages - 1 if tile.block_h < 64 else tile.num_stages
    return (tile.block_h + buffers * tile.block_n) * (RANK + ROPE) * 2 <= limit


def padded_smem(smem: int, chip: Chip) -> int:
    """Shared memory to ask for so that as many blocks fit here as `smem` allows on the chip."""
    blocks = chip.sm_smem // (smem + 1024)
    too_little_for_one_more = HOST_SM_SMEM // (blocks + 1) - 1024 + 128
    return max(smem, too_little_for_one_more // 128 * 128)


def emulate(mode: str) -> None:
    """Assemble an overridden architecture's PTX for the GPU at hand and limit its occupancy."""
    import torch
    from triton.backends.nvidia import compiler

    major, minor = torch.cuda.get_device_capability()
    original = compiler.CUDABackend.make_cubin

    def make_cubin(self: Any, src: str, metadata: Any, opt: Any, _capability: int) -> Any:
        src = re.sub(r"\.target sm_\w+", f".target sm_{major}{minor}a", src)
        metadata["unpadded_shared"] = metadata["shared"]
        if metadata["shared"] <= CHIPS[mode].block_smem:
            metadata["shared"] = padded_smem(metadata["shared"], CHIPS[mode])
        return original(self, src, metadata, opt, major * 10 + minor)

    compiler.CUDABackend.make_cubin = make_cubin


def prepare(mode: str, cache_dir: str) -> None:
    """Set what must be set before Triton is imported."""
    os.environ["TRITON_CACHE_DIR"] = cache_dir
    if mode != "native" and "TRITON_OVERRIDE_ARCH" not in os.environ:
        os.environ["TRITON_OVERRIDE_ARCH"] = mode
        emulate(mode)


def words_of(mode: str) -> Any:
    """Return how the kernel reads e4m3: in words that it decodes itself, or that the GPU converts."""
    import torch

    return torch.int32 if mode == "sm80" else torch.int16


def compile_tile(job: tuple[Tile, bool, str, str, str, bool]) -> dict[str, Any]:
    """Compile one variant in a worker process; return its resources."""
    tile, is_partial, mode, cache_dir, root, fp8 = job
    prepare(mode, cache_dir)
    import torch
    from triton.compiler.errors import CompilationError
    from triton.runtime.errors import OutOfResources, PTXASError

    kernels = standalone.load_kernel(Path(root))
    wrapper = kernels._FP8_SPLIT_KERNEL if fp8 else kernels._SPLIT_KERNEL
    config = kernels.SparseMLAConfig(tile.block_h, tile.block_n, 1 + is_partial, *tile[2:])
    words = words_of(mode) if fp8 else None
    key = kernels.variants_of(config, RANK, ROPE, torch.bfloat16, has_lse=True, fp8_words=words)[0]
    inputs = wrapper.warmup_inputs(key)
    spec = inspect.unwrap(type(wrapper).__call__)(wrapper, **inputs)
    kwargs = wrapper._prepare_launch_kwargs(tuple(inputs), tuple(inputs.values()), dict(spec[1]))
    started = time.time()
    result: dict[str, Any] = {"tile": tile, "partial": is_partial}
    try:
        compiled = wrapper.kernel.warmup(grid=(1,), **kwargs)
        compiled._init_handles()
    except (CompilationError, OutOfResources, PTXASError, RuntimeError) as error:
        # One bad variant must not end the sweep; it is in the report.
        return result | {"error": f"{type(error).__name__}: {error}"[:300]}
    return result | {
        "smem": getattr(compiled.metadata, "unpadded_shared", compiled.metadata.shared),
        "smem_asked": compiled.metadata.shared,
        "registers": compiled.n_regs,
        "spills": compiled.n_spills,
        "seconds": round(time.time() - started, 1),
    }


class Problem:
    """Inputs of one (heads, tokens) point: several sets of rows over one shared cache."""

    def __init__(self, num_heads: int, num_tokens: int, kv: Any, seed: int) -> None:
        import torch

        generator = torch.Generator(DEVICE).manual_seed(seed)
        per_set = num_tokens * TOPK * kv.shape[1] * kv.itemsize
        self.num_sets = max(1, min(MAX_SETS, -(-COLD_BYTES // per_set)))
        shape = (self.num_sets, num_tokens, TOPK)
        start = torch.randint(0, CACHE_ROWS - WINDOW, (*shape[:2], 1), generator=generator, device=DEVICE)
        rows = torch.randint(0, WINDOW, shape, generator=generator, device=DEVICE)
        self.indices = (start + rows).int()
        self.q = torch.randn(
            num_tokens, num_heads, RANK + ROPE, generator=generator, device=DEVICE
        ).bfloat16()
        self.counts = torch.full((num_tokens,), TOPK, dtype=torch.int32, device=DEVICE)
        self.out = torch.empty(num_tokens, num_heads, RANK, dtype=torch.bfloat16, device=DEVICE)
        self.lse = torch.empty(num_tokens, num_heads, device=DEVICE)
        self.kv = kv

    def run(self, kernels: Any, config: Any, scratch: Any, index: int, device_info: Any = None) -> None:
        """Launch on one set of rows."""
        kernels.triton_mla_sparse_fwd(
            self.q[..., :RANK],
            self.q[..., RANK:],
            self.kv,
            self.indices[index],
            self.counts,
            (RANK + ROPE) ** -0.5,
            self.out,
            self.lse,
            *scratch,
            device_info=device_info,
            config=config,
        )


def make_cache(dtype: Any) -> Any:
    """Return random rows, with uint8 of the fp8_ds_mla layout."""
    import fp8_rows
    import torch

    if dtype != torch.uint8:
        return torch.randn(CACHE_ROWS, RANK + ROPE, device=DEVICE, dtype=dtype)
    kv = torch.empty(CACHE_ROWS, FP8_ROW, device=DEVICE, dtype=dtype)
    generator = torch.Generator(DEVICE).manual_seed(1)
    for part in kv.split(1 << 18):
        fp8_rows.fill_random(part, ROPE, generator)
    return kv


def time_graph(launch: Callable[[int], object], num_sets: int, best: float) -> float:
    """Time a launch on each of `num_sets` sets of rows, captured in one CUDA graph.

    Args:
        launch: Launches on the set of rows with the given number.
        num_sets: Number of sets.
        best: A first replay far above this many microseconds ends the measurement.

    Returns:
        Median microseconds of one launch.

    """
    import torch

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())  # rows are drawn there; before that, they lie anywhere
    with torch.cuda.stream(stream):
        for index in range(num_sets):
            launch(index)
    stream.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for index in range(num_sets):
            launch(index)
    graph.replay()
    times: list[float] = []
    for repeat in range(7):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) * 1e3 / num_sets)
        if repeat == 0 and times[0] > 1.6 * best:
            break
    return statistics.median(times)


def split_candidates(num_tokens: int, num_heads: int, tile: Tile, sms: int) -> list[int]:
    """Powers of two that put between a third of and eight blocks on each multiprocessor."""
    programs = num_tokens * -(-num_heads // tile.block_h)
    most = min(64, TOPK // tile.block_n)
    counts = [s for s in (1, 2, 4, 8, 16, 32, 64) if s <= most]
    fitting = [s for s in counts if sms / 3 <= programs * s <= 8 * sms]
    return fitting or [counts[-1] if programs * counts[-1] < sms else 1]


def device_info_of(kernels: Any, mode: str) -> Any:
    """Return what a configuration is chosen by: the mode's chip, with as many multiprocessors as here."""
    here = kernels.get_device_info(0)
    if mode == "native":
        return here
    return here._replace(capability=CHIPS[mode].capability, max_shared_mem=CHIPS[mode].block_smem)


def select(kernels: Any, num_heads: int, num_tokens: int, device_info: Any, *, fp8: bool) -> Any:
    """Return the configuration that the product takes at a point."""
    import torch

    cache = torch.uint8 if fp8 else torch.bfloat16
    return kernels.select_config(num_tokens, num_heads, TOPK, RANK, ROPE, torch.bfloat16, device_info, cache)


def choice(config: Any, num_heads: int, num_tokens: int, timings: list[dict[str, Any]]) -> dict[str, Any]:
    """Return a configuration at a point with its time there over the best one; None where it has no time."""
    point = {"heads": num_heads, "tokens": num_tokens}
    here = [t for t in timings if point.items() <= t.items()]
    us = next((t["us"] for t in here if config._asdict().items() <= t.items()), None)
    ratio = None if us is None else round(us / min(t["us"] for t in here), 3)
    return point | config._asdict() | {"us": us, "ratio": ratio}


def sweep(
    kernels: Any, usable: set[Tile], mode: str, deadline: float, *, fp8: bool
) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Time every usable tile at every point until the deadline; also return what is chosen at each point."""
    import torch

    sms = torch.cuda.get_device_properties(0).multi_processor_count
    kv = make_cache(torch.uint8 if fp8 else torch.bfloat16)
    device_info = device_info_of(kernels, mode)  # also decides how e4m3 is read
    results: list[dict[str, Any]] = []
    chosen: list[dict[str, Any]] = []
    points = sorted(itertools.product(TOKENS, HEADS), key=lambda p: p[0] * p[1])
    for num_tokens, num_heads in points:
        problem = Problem(num_heads, num_tokens, kv, seed=num_tokens * 1000 + num_heads)
        rows = 16 * sms * 64 + num_tokens * num_heads
        scratch = (torch.empty(rows, RANK, device=DEVICE), torch.empty(rows, device=DEVICE))
        best = float("inf")
        selected = select(kernels, num_heads, num_tokens, device_info, fp8=fp8)
        for config in configs_of(kernels, usable, (num_heads, num_tokens), selected, mode, fp8=fp8):
            if time.time() > deadline or num_tokens * config.num_splits * num_heads > rows:
                continue
            run = partial(problem.run, kernels, config, scratch, device_info=device_info)
            us = time_graph(run, problem.num_sets, best)
            best = min(best, us)
            results.append({"heads": num_heads, "tokens": num_tokens, "us": round(us, 2)} | config._asdict())
        report_best(results, num_heads, num_tokens)
        chosen.append(choice(selected, num_heads, num_tokens, results))
    return results, chosen


def configs_of(
    kernels: Any, usable: set[Tile], point: tuple[int, int], selected: Any, mode: str, *, fp8: bool
) -> list[Any]:
    """Return what to time at a point, (heads, tokens): usable tiles with splits, the selected one last."""
    num_heads, num_tokens = point
    sms = kernels.get_device_info(0).sm_count
    found = [
        kernels.SparseMLAConfig(tile.block_h, tile.block_n, splits, tile.num_warps, tile.num_stages)
        for tile in tiles_of(num_heads, mode, fp8=fp8)
        if tile in usable
        for splits in split_candidates(num_tokens, num_heads, tile, sms)
    ]
    tile = Tile(selected.block_h, selected.block_n, selected.num_warps, selected.num_stages)
    return [config for config in found if config != selected] + [selected] * (tile in usable)


def report_best(results: list[dict[str, Any]], num_heads: int, num_tokens: int) -> None:
    """Print the three best configurations of a point."""
    here = [r for r in results if (r["heads"], r["tokens"]) == (num_heads, num_tokens)]
    for r in sorted(here, key=lambda r: r["us"])[:3]:
        shape = (r["block_h"], r["block_n"], r["num_splits"], r["num_warps"], r["num_stages"])
        print(f"H={num_heads:<4} T={num_tokens:<5} {r['us']:>9.1f} us  (h,n,splits,w,s)={shape}")


def main() -> None:
    """Compile, sweep, write the report."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--root", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--mode", choices=("native", *CHIPS), default="native")
    parser.add_argument("--fp8", action="store_true", help="a cache of the fp8_ds_mla layout")
    parser.add_argument("--budget-s", type=float, default=110.0, help="seconds for both phases")
    parser.add_argument("--processes", type=int, default=16)
    parser.add_argument("--tile", action="append", help="h,n,warps,stages: sweep only these; may be repeated")
    args = parser.parse_args()
    started = time.time()
    cache_dir = f"/tmp/tune-triton-cache-{args.mode}-{args.root.resolve().name}"
    tiles = sorted({tile for heads in HEADS for tile in tiles_of(heads, args.mode, fp8=args.fp8)})
    if args.tile:
        wanted = {Tile(*map(int, text.split(","))) for text in args.tile}
        tiles = sorted(wanted.intersection(tiles))
    common = (args.mode, cache_dir, str(args.root), args.fp8)
    jobs = [(t, p, *common) for t in tiles for p in (False, True)]
    with multiprocessing.get_context("spawn").Pool(args.processes) as pool:
        compiled = pool.map(compile_tile, jobs, chunksize=1)
    compile_s = time.time() - started
    prepare(args.mode, cache_dir)

    kernels = standalone.load_kernel(args.root)
    limit = NATIVE_SMEM if args.mode == "native" else CHIPS[args.mode].block_smem
    bad = {c["tile"] for c in compiled if "error" in c or c["spills"] or c["smem"] > limit}
    usable = set(tiles) - bad
    print(f"{len(jobs)} variants compiled in {compile_s:.0f} s, {len(usable)}/{len(tiles)} usable")
    results, chosen = sweep(kernels, usable, args.mode, started + args.budget_s, fp8=args.fp8)
    report = {
        **standalone.measured_on(),
        "kernel_sha256": standalone.sha256_of(kernels),
        "mode": args.mode,
        "fp8": args.fp8,
        "compile_s": round(compile_s, 1),
        "total_s": round(time.time() - started, 1),
        "compiled": [c | {"tile": c["tile"]._asdict()} for c in compiled],
        "timings": results,
        "chosen": chosen,
    }
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.write_text(json.dumps(report))
    print(f"{len(results)} timings, {report['total_s']} s in all, written to {args.out}")


if __name__ == "__main__":
    main()
