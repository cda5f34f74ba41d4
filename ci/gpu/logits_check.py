"""Check the indexer's logits kernels on one GPU, over hundreds of random shapes.

    python logits_check.py --out results/logits-check.json [--root DIR] [--shapes 240] [--seed N]

Without `--root` the installed vLLM is tested; with it, the kernel files of a checkout
(`standalone.CARRIED_FILES`). Every shape gets fresh inputs and is compared with float64; the logits'
buffer holds poison and lies between guard bytes, and nothing past a row's length may change. Some shapes
run as two replays of a captured graph with other lengths and pages. Every variant is compiled first
through the product's own warm-up, and nothing may be compiled after that. At larger shapes the logits are
compared with DeepGEMM's where it can be imported: values, and the sets of the largest 2048 but for ties.
Exits 1 if any check fails.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import random
import secrets
import sys
import time
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import logits_problems
import standalone
import torch
from kernel_check import Guarded
from kernel_variants import compile_here
from logits_problems import DEVICE, HEAD_DIM, KEY_BYTES, DecodeShape, PrefillShape

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

POISON = torch.tensor([0x7F7F7F7F], dtype=torch.int32).view(torch.float32).item()
HEADS = (8, 24, 32, 64, 128)
PAGES = (32, 64, 192)
MOST_NEXT_N = 5
# (capability, multiprocessors, shared memory): None is the GPU itself. They differ in their tiles, and
# SM80 in decoding e4m3 in software; the code is compiled for the GPU at hand.
OTHER_CHIPS = (((12, 0), 188, 99 << 10), ((8, 0), 108, 163 << 10))
# Hopper's matrix instruction keeps fewer bits of the products that it adds than float32 has.
RELATIVE_BOUND = 2.0**-12
AGREEMENT = 2e-6  # with DeepGEMM, of the largest logit: the order of additions differs
TOP_K = 2048
WIDE_STRIDE = 480 * 576  # bytes from page to page (bug report B10): 2**31 is passed at page 7,768
WIDE_PAGES = 8192
NATIVE_SHAPES: tuple[logits_problems.Shape, ...] = (
    PrefillShape(32, 777, 9001),
    PrefillShape(64, 513, 20000),
    DecodeShape(32, 5, 1, 20011),
    DecodeShape(64, 3, 2, 9999),
    DecodeShape(32, 2, 4, 130),
)


@dataclass(frozen=True)
class Shape:
    """One random problem; `page` 0 makes it a prefill of `rows` rows, else a decode of `rows` requests."""

    page: int
    heads: int
    rows: int
    next_n: int
    longest: int
    chip: int
    wide: bool
    graph: bool
    flat_lengths: bool
    seed: int


@dataclass
class Outcome:
    """What a shape gave: the largest error in units of the bound, and what was wrong."""

    shape: Shape
    worst: float = 0.0
    problems: list[str] = field(default_factory=list)


def draw_shape(rng: random.Random, index: int) -> Shape:
    """Draw a shape; the index makes every kind appear."""
    paged = index % 3 != 0
    longest = round(2 ** rng.uniform(0, 13))
    most = max(1, (1 << 20) // longest)  # logits: keeps the float64 reference affordable
    return Shape(
        page=rng.choice(PAGES) if paged else 0,
        heads=rng.choice(HEADS),
        rows=min(most, round(2 ** rng.uniform(0, 8 if paged else 9))),
        next_n=rng.choice((1, 1, 2, 3, 4, MOST_NEXT_N)) if paged else 1,
        longest=longest,
        chip=index % 3 if index % 2 else 0,
        wide=paged and index % 8 == 1,
        graph=index % 5 == 2,
        flat_lengths=paged and index % 7 == 0,
        seed=rng.getrandbits(31),
    )


class Inputs:
    """Inputs of one shape whose values can be drawn anew in place, and their launch."""

    def __init__(self, shape: Shape, wide: torch.Tensor) -> None:
        self.shape = shape
        self.generator = torch.Generator(DEVICE).manual_seed(shape.seed)
        columns = shape.rows * shape.next_n
        self.q = self._e4m3(shape.rows, shape.next_n, shape.heads, HEAD_DIM)
        self.weights = self._normal(columns, shape.heads + 1)[:, 1:]
        self.row_lengths = torch.zeros(columns, dtype=torch.int32, device=DEVICE)
        self._make_keys(wide)
        self.refill()

    def _normal(self, *size: int) -> torch.Tensor:
        return torch.randn(size, generator=self.generator, device=DEVICE)

    def _integers(self, low: int, high: int, *size: int) -> torch.Tensor:
        return torch.randint(low, high, size, generator=self.generator, device=DEVICE)

    def _e4m3(self, *size: int) -> torch.Tensor:
        return self._normal(*size).to(torch.float8_e4m3fn)

    def _make_keys(self, wide: torch.Tensor) -> None:
        shape = self.shape
        if not shape.page:
            self.k = self._e4m3(shape.longest + 7, HEAD_DIM)
            self.k_scale = self._normal(shape.longest + 8)[1:].abs() + 0.1
            self.starts = torch.zeros(shape.rows, dtype=torch.int32, device=DEVICE)
            return
        self.per_request = -(-shape.longest // shape.page)
        total = shape.rows * self.per_request
        size = shape.page * KEY_BYTES
        if shape.wide:
            self.pages = wide[:, :size]
        else:
            storage = torch.full((total + 3, size + 16), 0xFF, dtype=torch.uint8, device=DEVICE)
            self.pages = storage[:, :size]
        self.tables = torch.zeros(shape.rows, self.per_request + 2, dtype=torch.int32, device=DEVICE)

    def refill(self) -> None:
        """Draw lengths, keys and pages in place, as between two replays of a captured graph."""
        if self.shape.page:
            self._refill_pages()
        else:
            self._refill_ranges()

    def _refill_ranges(self) -> None:
        rows, keys = self.shape.rows, len(self.k)
        starts = self._integers(0, keys, rows).sort().values
        lengths = self._integers(0, self.shape.longest + 1, rows)
        self.starts.copy_(starts)
        self.row_lengths.copy_(torch.minimum(lengths, keys - starts))

    def _refill_pages(self) -> None:
        shape = self.shape
        total = shape.rows * self.per_request
        chosen = torch.randperm(len(self.pages), generator=self.generator, device=DEVICE)[:total]
        if shape.wide:
            # The last pages lie past 2**31 bytes; a request may share pages with another.
            chosen = self._integers(len(self.pages) - 64, len(self.pages), total)
        for page in torch.unique(chosen).split(1024):
            values = self._e4m3(len(page), shape.page * HEAD_DIM).view(torch.uint8)
            scales = (self._normal(len(page), shape.page).abs() + 0.1).view(torch.uint8)
            self.pages[page] = torch.cat([values, scales], 1)
        self.tables[:, : self.per_request] = chosen.view(shape.rows, -1).int()
        last = self._integers(0, shape.longest + 1, shape.rows)
        last[0] = shape.longest
        steps = torch.arange(1 - shape.next_n, 1, device=DEVICE)
        self.last_lengths = last.int()
        self.row_lengths.copy_((last[:, None] + steps).clamp(min=0).flatten())

    @property
    def width(self) -> int:
        """Columns of the result."""
        return self.shape.longest + (5 if self.shape.page else 0)

    def launch(self, kernels: Any, chip: Any) -> torch.Tensor:
        """Run the kernel."""
        shape = self.shape
        if not shape.page:
            keys = (self.k, self.k_scale[: len(self.k)])
            ends = self.starts + self.row_lengths
            q = (self.q.flatten(0, 1), None)
            flat = (q, keys, self.weights, self.starts, ends, shape.longest)
            return kernels.triton_mqa_logits(*flat, device_info=chip)  # type: ignore[no-any-return]
        strides = (self.pages.stride(0), KEY_BYTES, KEY_BYTES, 1)
        cache = self.pages.as_strided((len(self.pages), shape.page, 1, KEY_BYTES), strides)
        lengths = self.row_lengths.view(shape.rows, shape.next_n)
        if shape.flat_lengths:
            lengths = lengths[:, -1].contiguous()
        paged = ((self.q, None), cache, self.weights, lengths, self.tables, self.width)
        return kernels.triton_paged_mqa_logits(*paged, device_info=chip)  # type: ignore[no-any-return]

    def keys_of(self, row: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the keys that a row sees, [n, 128], and their scales, in float64."""
        length = int(self.row_lengths[row])
        if not self.shape.page:
            part = slice(int(self.starts[row]), int(self.starts[row]) + length)
            return self.k[part].double(), self.k_scale[part].double()
        used = self.tables[row // self.shape.next_n, : self.per_request].long()
        pages = self.pages[used]
        split = self.shape.page * HEAD_DIM
        values = pages[:, :split].contiguous().view(torch.float8_e4m3fn).view(-1, HEAD_DIM)
        scales = pages[:, split:].contiguous().view(torch.float32).flatten()
        return values[:length].double(), scales[:length].double()


def compare(inputs: Inputs, logits: torch.Tensor, outcome: Outcome, rng: random.Random) -> None:
    """Compare rows with float64 and look for writes behind every row."""
    columns = torch.arange(logits.shape[1], device=DEVICE)
    behind = columns >= inputs.row_lengths[:, None]
    if bool((logits[behind] != POISON).any()):
        outcome.problems.append("written past a row's length")
    queries = inputs.q.flatten(0, 1)
    for row in rng.sample(range(len(logits)), min(len(logits), 24)):
        k, scale = inputs.keys_of(row)
        weights = inputs.weights[row].double()
        products = queries[row].double() @ k.T
        sizes = queries[row].double().abs() @ k.T.abs()
        expected = (products.relu() * weights[:, None]).sum(0) * scale
        bound = (sizes * weights[:, None].abs()).sum(0) * scale * RELATIVE_BOUND
        error = (logits[row, : len(k)].double() - expected).abs() / bound.clamp(min=1e-30)
        if len(k):
            outcome.worst = max(outcome.worst, float(error.nan_to_num(1e9).max()))
    if outcome.worst > 1.0:
        outcome.problems.append(f"error {outcome.worst:.2e} times the bound")


class Checker:
    """Runs shapes through the kernels and keeps what they launched."""

    def __init__(self, kernels: Any) -> None:
        self.kernels = kernels
        self.launched: set[Any] = set()
        self.buffers: list[Guarded] = []
        self.wide = torch.full((WIDE_PAGES, WIDE_STRIDE), 0xFF, dtype=torch.uint8, device=DEVICE)
        self.chips = [kernels.get_device_info(0)]
        self.chips += [kernels.SparseMLADeviceInfo(*chip) for chip in OTHER_CHIPS]
        kernels._empty_logits = self._poisoned
        for wrapper in (kernels._PREFILL_KERNEL, kernels._PAGED_KERNEL):
            standalone.record_launches(wrapper, self.launched)

    def _poisoned(self, num_rows: int, width: int, _device: torch.device) -> torch.Tensor:
        buffer = Guarded((num_rows, max(width, 1)), torch.float32, pad=-max(width, 1) % 256)
        self.buffers.append(buffer)
        return buffer.tensor[:, :width]

    def run(self, shape: Shape) -> Outcome:
        """Run one shape, directly or as two replays of a captured graph."""
        self.buffers.clear()
        inputs, outcome = Inputs(shape, self.wide), Outcome(shape)
        launch = lambda: inputs.launch(self.kernels, self.chips[shape.chip])  # noqa: E731
        for logits in self._executions(launch, inputs):
            compare(inputs, logits, outcome, random.Random(shape.seed))
        if not all(buffer.is_intact() for buffer in self.buffers):
            outcome.problems.append("guard bytes were overwritten")
        return outcome

    def _executions(self, launch: Callable[[], torch.Tensor], inputs: Inputs) -> Iterator[torch.Tensor]:
        if not inputs.shape.graph:
            yield launch()
            return
        captured = torch.cuda.CUDAGraph()
        with torch.cuda.graph(captured):
            logits = launch()
        for _ in range(2):
            inputs.refill()
            for buffer in self.buffers:
                buffer.storage.fill_(0x7F)
            captured.replay()
            yield logits

    def allowed(self) -> set[Any]:
        """Every variant that the product's warm-up announces for the shapes that are drawn."""
        found: set[Any] = set()
        for chip in self.chips:
            for heads in HEADS:
                keys = {"num_heads": heads, "head_dim": HEAD_DIM, "device_info": chip}
                found |= set(self.kernels._PREFILL_KERNEL.get_warmup_keys(**keys))
                for page in PAGES:
                    paged = keys | {"page_size": page, "max_next_n": MOST_NEXT_N}
                    found |= set(self.kernels._PAGED_KERNEL.get_warmup_keys(**paged))
        return found


def compile_variant(job: tuple[str, dict[str, Any], str | None]) -> None:
    """Compile one variant into the disk cache, in a worker process."""
    wrapper_name, fields, root = job
    kernels = standalone.load_logits_kernel(None if root is None else Path(root))
    compile_here(getattr(kernels, wrapper_name), fields)


def warm_up(
    kernels: Any, variants: set[Any], root: Path | None, processes: int, meanwhile: Callable[[], object]
) -> None:
    """Compile all variants in parallel, do something else meanwhile, then load them here."""
    jobs = []
    for variant in variants:
        paged = isinstance(variant, kernels.PagedMQALogitsKernel.CompileKey)
        fields = asdict(variant) | {"dtype": str(variant.dtype).removeprefix("torch.")}
        name = "_PAGED_KERNEL" if paged else "_PREFILL_KERNEL"
        jobs.append((name, fields, None if root is None else str(root)))
    with multiprocessing.get_context("spawn").Pool(processes) as pool:
        compiling = pool.map_async(compile_variant, jobs, chunksize=4)
        meanwhile()
        compiling.get()
    for name, fields, _ in jobs:
        compile_here(getattr(kernels, name), fields)


def compiled_count(kernels: Any) -> int:
    """Number of binaries that Triton holds for the two kernels."""
    wrappers = (kernels._PREFILL_KERNEL, kernels._PAGED_KERNEL)
    return sum(len(w.kernel.device_caches[torch.cuda.current_device()][0]) for w in wrappers)


def differing_choices(ours: torch.Tensor, theirs: torch.Tensor, lengths: torch.Tensor) -> int:
    """Return how many of the largest logits are chosen in one and not in the other, ties aside.

    A choice counts as a tie when both give it a value within rounding of the smallest chosen one.
    """
    count = 0
    for row, length in enumerate(lengths.tolist()):
        a, b = ours[row, :length], theirs[row, :length]
        k = min(TOP_K, length)
        chosen = torch.zeros(2, length, dtype=torch.bool, device=DEVICE)
        for which, values in enumerate((a, b)):
            chosen[which, values.topk(k).indices] = True
        edge = b[chosen[1]].min()
        tie = (b - edge).abs() <= AGREEMENT * b.abs().max()
        count += int(((chosen[0] != chosen[1]) & ~tie).sum())
    return count


def against_native(kernels: Any, rows: list[dict[str, Any]], problems: list[Any]) -> None:
    """Compare with DeepGEMM; note what disagrees."""
    library = logits_problems.deep_gemm()
    for index, shape in enumerate(NATIVE_SHAPES if library is not None else ()):
        problem = logits_problems.make(shape, seed=index)
        theirs = problem.run_deep_gemm(library, 0)
        ours = problem.run(kernels, None, 0)
        difference = logits_problems.difference(problem, ours, theirs)
        differing = differing_choices(ours, theirs, problem.lengths())
        rows.append({"shape": str(shape), "difference": difference, "differing_choices": differing})
        if not difference <= AGREEMENT or differing:
            problems.append((str(shape), rows[-1]))
        print(f"{shape}: difference from DeepGEMM {difference:.1e}, {differing} other choices")


def main() -> int:
    """Run everything; return the exit code."""
    parser = argparse.ArgumentParser(description="Check the logits kernels on a GPU.")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--root", type=Path)
    parser.add_argument("--shapes", type=int, default=240)
    parser.add_argument("--seed", type=int, default=secrets.randbits(31))
    parser.add_argument("--processes", type=int, default=16)
    parser.add_argument(
        "--exact", action="store_true", help="no guard bytes, no warm-up, for compute-sanitizer's memcheck"
    )
    args = parser.parse_args()
    started = time.monotonic()
    kernels = standalone.load_logits_kernel(args.root)
    problems: list[Any] = []
    native: list[dict[str, Any]] = []
    Guarded.exact = args.exact
    checker = Checker(kernels)
    allowed = checker.allowed()
    if not args.exact:
        compare_native = partial(against_native, kernels, native, problems)
        warm_up(kernels, allowed, args.root, args.processes, compare_native)
    warm_s, compiled = time.monotonic() - started, compiled_count(kernels)
    checker.launched.clear()
    rng = random.Random(args.seed)
    shapes = [draw_shape(rng, index) for index in range(args.shapes)]
    if args.exact:  # without PyTorch's caching allocator nothing can be allocated during capture
        shapes = [replace(shape, graph=False) for shape in shapes]
    outcomes = [checker.run(shape) for shape in shapes]
    problems += [(asdict(o.shape), o.problems) for o in outcomes if o.problems]
    if not checker.launched <= allowed:
        problems.append(({}, [f"launched unannounced {checker.launched - allowed}"]))
    if compiled_count(kernels) != compiled and not args.exact:
        problems.append(({}, [f"{compiled_count(kernels) - compiled} compiled after warm-up"]))
    report = {
        **standalone.measured_on(),
        "kernel_sha256": standalone.sha256_of(kernels),
        "seed": args.seed,
        "shapes": len(outcomes),
        "rows": sum(o.shape.rows * o.shape.next_n for o in outcomes),
        "worst": max(o.worst for o in outcomes),
        "deep_gemm": native,
        "variants_compiled": len(allowed),
        "binaries": compiled,
        "variants_launched": len(checker.launched),
        "warm_up_s": round(warm_s, 1),
        "total_s": round(time.monotonic() - started, 1),
        "problems": problems,
        "outcomes": [asdict(o.shape) | {"worst": o.worst} for o in outcomes],
    }
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.write_text(json.dumps(report, indent=1))
    shown = ("shapes", "rows", "seed", "worst", "variants_compiled", "variants_launched", "total_s")
    print({key: report[key] for key in shown})
    print(f"{len(problems)} problems", *problems[:8], sep="\n")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
