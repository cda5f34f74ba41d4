"""Check the sparse-MLA kernel against float64 on one GPU, over hundreds of random shapes.

    python kernel_check.py --out results/kernel-check.json [--root DIR] [--shapes 340] [--seed N]

Without `--root` the installed vLLM is tested; with it, the kernel file of a checkout
(`standalone.CARRIED_FILES`). Every shape gets fresh inputs. Outputs, scratch, cache rows between
blocks, and index entries behind the valid ones hold poison; every buffer lies between guard bytes
that are compared afterwards. Every variant that the kernel may launch is compiled first through the
product's own warm-up, and nothing may be compiled after that. A quarter of the shapes has a cache of the
fp8_ds_mla layout, decoded by the GPU or in software as the chip that is pretended does. Exits 1 if any check
fails.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import secrets
import sys
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import fp8_rows
import kernel_variants
import standalone
import torch

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

DEVICE = "cuda"
RANK = 512
BLOCK, BLOCK_STRIDE = 64, 96  # rows of a block and from block to block; NaN lies between
FIRST_INT32_OVERFLOW = 3_728_271  # row times 576 passes 2**31
CACHE_ROWS = 4_300_800  # row times 512 passes 2**31 as well
DRAWN_ROWS = 1 << 17  # at once: drawing fp8 rows takes 16 KB a row for the moment
GUARD = 4096
MOST_GRAPH_TOKENS = 512
POISON_BYTE = 0x7F  # a large number in float32, NaN-like in bfloat16 and float16
MAX_ERROR = {torch.bfloat16: 6e-3, torch.float16: 1.5e-3}
MAX_MEAN_ERROR = {torch.bfloat16: 3e-3, torch.float16: 6e-4}
MAX_LSE_ERROR = 1e-3
HEADS = (
    1,
    2,
    3,
    5,
    7,
    8,
    11,
    15,
    16,
    17,
    24,
    31,
    32,
    33,
    40,
    48,
    63,
    64,
    65,
    80,
    96,
    100,
    127,
    128,
)
# (capability, multiprocessors, shared memory): None is the GPU itself.
OTHER_CHIPS = (((12, 0), 188, 99 << 10), ((8, 0), 108, 163 << 10), ((10, 0), 148, 227 << 10))
COMPILE_TOKENS = 8192
FP8 = "fp8_ds_mla"

Kind = tuple[torch.dtype, int]
"""Of a cache: its dtype, uint8 for fp8_ds_mla, and the number of RoPE values."""


@dataclass(frozen=True)
class Shape:
    """One random problem."""

    tokens: int
    heads: int
    width: int
    rope: int
    dtype: torch.dtype
    chip: int
    counts: str
    high_rows: bool
    duplicates: bool
    with_lse: bool
    graph: bool
    seed: int
    fp8: bool = False

    @property
    def cache(self) -> Kind:
        """The kind of cache."""
        return (torch.uint8 if self.fp8 else self.dtype), self.rope

    @property
    def kind(self) -> str:
        """Name of the cache's format."""
        return FP8 if self.fp8 else str(self.dtype).removeprefix("torch.")


@dataclass
class Outcome:
    """What a shape gave."""

    shape: Shape
    worst: float = 0.0
    mean: float = 0.0
    lse: float = 0.0
    config: Any = None
    problems: list[str] = field(default_factory=list)


def draw_shape(rng: random.Random, index: int) -> Shape:
    """Draw a shape; the index makes every kind appear."""
    tokens = 0 if index % 40 == 0 else round(2 ** rng.uniform(0, 12))
    budget = 3 << 20  # entries: keeps the float64 reference affordable
    width = 128 * rng.randint(1, max(1, min(32, budget // max(tokens, 1) // 128)))
    fp8 = index % 7 in (1, 4)
    return Shape(
        tokens=tokens,
        heads=rng.choice(HEADS) if index % 3 else rng.choice((8, 16, 32, 64, 128)),
        width=width,
        rope=64 if index % 3 else 0,
        dtype=torch.float16 if index % 5 == 0 and not fp8 else torch.bfloat16,
        chip=index % 4,
        counts=rng.choice(("full", "random", "random", "short", "zero-heavy")),
        high_rows=index % 4 == 1,
        duplicates=rng.random() < 0.3,
        with_lse=rng.random() < 0.8,
        graph=index % 8 == 2 and tokens <= MOST_GRAPH_TOKENS,
        seed=rng.getrandbits(31),
        fp8=fp8,
    )


class Guarded:
    """A tensor view inside a larger poisoned storage, with proof that the rest stays untouched.

    Attributes:
        exact: Let the storage end where the tensor ends, for tools that know a storage's bounds.

    """

    exact: ClassVar[bool] = False

    def __init__(self, shape: tuple[int, ...], dtype: torch.dtype, *, pad: int = 0) -> None:
        guard, pad = (0, 0) if self.exact else (GUARD, pad)
        inner = (*shape[:-1], shape[-1] + pad)
        size = math.prod(inner) * dtype.itemsize
        self.storage = torch.full((size + 2 * guard,), POISON_BYTE, dtype=torch.uint8, device=DEVICE)
        self.tensor = self.storage[guard : guard + size].view(dtype).view(inner)[..., : shape[-1]]
        outside = torch.ones(size + 2 * guard, dtype=torch.bool, device=DEVICE)
        as_bytes = outside[guard : guard + size].view(*inner[:-1], inner[-1] * dtype.itemsize)
        as_bytes[..., : shape[-1] * dtype.itemsize] = False
        self.outside = outside

    def is_intact(self) -> bool:
        """Whether every byte outside the view still is poison."""
        return bool((self.storage[self.outside] == POISON_BYTE).all())


class Inputs:
    """Device inputs of one shape."""

    def __init__(self, shape: Shape, cache: torch.Tensor) -> None:
        self.shape = shape
        self.cache = cache
        self.generator = torch.Generator(DEVICE).manual_seed(shape.seed)
        t, h = shape.tokens, shape.heads
        self.q_nope = Guarded((t, h, RANK), shape.dtype, pad=64)
        self.q_pe = Guarded((t, h, shape.rope), shape.dtype, pad=24) if shape.rope else None
        self.indices = Guarded((t, shape.width), torch.int32, pad=3)
        self.counts = Guarded((t + 1,), torch.int32)  # sliced: starts off a 16-byte boundary
        self.out = Guarded((t, h, RANK), shape.dtype, pad=8)
        self.lse = Guarded((t, h), torch.float32, pad=1) if shape.with_lse else None
        self.refill()

    @property
    def valid_counts(self) -> torch.Tensor:
        """The counts, misaligned by one element."""
        return self.counts.tensor[1:]

    def buffers(self) -> list[Guarded]:
        """Every guarded buffer."""
        some = (self.q_nope, self.q_pe, self.indices, self.counts, self.out, self.lse)
        return [b for b in some if b is not None]

    def refill(self) -> None:
        """Draw new values in place, as between two replays of a captured graph."""
        for part in (self.q_nope, self.q_pe):
            if part is not None:
                part.tensor.copy_(self._normal(part.tensor.shape))
        self.valid_counts.copy_(self._counts())
        entries = self._rows()
        behind = torch.arange(self.shape.width, device=DEVICE) >= self.valid_counts[:, None]
        garbage = torch.randint(-(2**31), 2**31 - 1, entries.shape, generator=self.generator, device=DEVICE)
        self.indices.tensor.copy_(torch.where(behind, garbage, entries))
        self._plant()
        empty = self.valid_counts == 0
        self.q_nope.tensor[empty] = float("nan")  # a padded row of a captured graph
        self.out.tensor.fill_(float("nan"))
        if self.lse is not None:
            self.lse.tensor.fill_(float("nan"))

    def _normal(self, shape: torch.Size) -> torch.Tensor:
        return torch.randn(shape, generator=self.generator, device=DEVICE)

    def _integers(self, low: int, high: int, shape: tuple[int, ...]) -> torch.Tensor:
        return torch.randint(low, high, shape, generator=self.generator, device=DEVICE)

    def _counts(self) -> torch.Tensor:
        shape = self.shape
        most = {"full": shape.width, "short": min(70, shape.width)}.get(shape.counts, shape.width)
        counts = self._integers(0, most + 1, (shape.tokens,))
        if shape.counts == "full":
            counts.fill_(shape.width)
        if shape.counts == "zero-heavy":
            counts *= self._integers(0, 2, (shape.tokens,))
        return counts

    def _rows(self) -> torch.Tensor:
        shape = self.shape
        blocks = self.cache.shape[0] // BLOCK_STRIDE
        low = FIRST_INT32_OVERFLOW // BLOCK_STRIDE if shape.high_rows else 1
        span = (shape.tokens, shape.width)
        block = self._integers(low, blocks, span)
        if shape.duplicates:
            block = low + block % 2
        return block * BLOCK_STRIDE + self._integers(0, BLOCK, span)

    def _plant(self) -> None:
        """Give some queries one dominant key, at the places where an error would hide."""
        shape = self.shape
        for token in range(min(shape.tokens, 6)):
            count = int(self.valid_counts[token])
            places = {0, count - 1, 15, 16, 31, 32, 63, 64, count // 2, (count - 1) // 64 * 64}
            for place in sorted(p for p in places if 0 <= p < count)[token % 3 :: 3]:
                head = place % shape.heads
                row = int(self.indices.tensor[token, place])
                parts = [self.q_nope.tensor[token, head]]
                parts += [self.q_pe.tensor[token, head]] if self.q_pe is not None else []
                if shape.fp8:
                    fp8_rows.write_row(self.cache[row], torch.cat(parts))
                else:
                    self.cache[row] = torch.cat(parts)


def scale_of(shape: Shape) -> float:
    """Return the softmax scale of a shape."""
    return float((RANK + shape.rope) ** -0.5)


def reference(inputs: Inputs, scale: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Return output and natural log-sum-exp in float64, a few queries at a time."""
    shape = inputs.shape
    out = torch.zeros(shape.tokens, shape.heads, RANK, dtype=torch.float64, device=DEVICE)
    lse = torch.full((shape.tokens, shape.heads), -math.inf, dtype=torch.float64, device=DEVICE)
    step = max(1, (1 << 18) // shape.width)
    for first in range(0, shape.tokens, step):
        part = slice(first, first + step)
        counts = inputs.valid_counts[part]
        valid = torch.arange(shape.width, device=DEVICE) < counts[:, None]
        rows = torch.where(valid, inputs.indices.tensor[part], 0)
        keys = inputs.cache[rows.long()]
        keys = fp8_rows.read_rows(keys, shape.rope) if shape.fp8 else keys.double()
        keys[~valid] = 0.0
        q = inputs.q_nope.tensor[part].double()
        if inputs.q_pe is not None:
            q = torch.cat([q, inputs.q_pe.tensor[part].double()], -1)
        scores = q @ keys.transpose(1, 2) * scale
        scores.masked_fill_(~valid[:, None, :], -math.inf)
        scores[counts == 0] = -math.inf
        lse[part] = torch.logsumexp(scores, -1)
        weights = torch.exp(scores - lse[part][..., None].nan_to_num(neginf=0.0))
        out[part] = weights @ keys[..., :RANK]
    return out, lse


def compare(inputs: Inputs, scale: float, outcome: Outcome) -> None:
    """Compare the outputs with the reference and note every violated bound."""
    shape = inputs.shape
    expected, expected_lse = reference(inputs, scale)
    got, live = inputs.out.tensor.double(), inputs.valid_counts > 0
    if not bool(torch.isfinite(got).all()):
        outcome.problems.append("output is not finite")
    if bool((got[~live] != 0).any()):
        outcome.problems.append("a row without entries is not zero")
    if bool(live.any()):
        error = (got - expected)[live].norm(dim=-1) / expected[live].norm(dim=-1)
        outcome.worst = max(outcome.worst, float(error.max()))
        outcome.mean = max(outcome.mean, float(error.mean()))
    if outcome.worst > MAX_ERROR[shape.dtype] or outcome.mean > MAX_MEAN_ERROR[shape.dtype]:
        outcome.problems.append(f"relative error {outcome.worst:.2e}, mean {outcome.mean:.2e}")
    if inputs.lse is not None:
        compare_lse(inputs.lse.tensor, expected_lse, live, outcome)
    if not all(buffer.is_intact() for buffer in inputs.buffers()):
        outcome.problems.append("guard bytes were overwritten")


def compare_lse(got: torch.Tensor, expected: torch.Tensor, live: torch.Tensor, outcome: Outcome) -> None:
    """Compare the log-sum-exp; a row without entries must have minus infinity."""
    if bool((got[~live] != -math.inf).any()):
        outcome.problems.append("a row without entries has a finite log-sum-exp")
    if bool(live.any()):
        outcome.lse = max(outcome.lse, float((got.double() - expected)[live].abs().max()))
    if not outcome.lse <= MAX_LSE_ERROR:
        outcome.problems.append(f"log-sum-exp error {outcome.lse:.2e}")


class Checker:
    """Runs shapes through the kernel and keeps what it launched."""

    def __init__(self, kernels: Any, caches: dict[Kind, torch.Tensor]) -> None:
        self.kernels = kernels
        self.caches = caches
        self.launched: set[Any] = set()
        self.chips = [kernels.get_device_info(0)]
        self.chips += [kernels.SparseMLADeviceInfo(*chip) for chip in OTHER_CHIPS]
        for name in standalone.WRAPPERS:
            standalone.record_launches(getattr(kernels, name), self.launched)

    def prepare(self, shape: Shape) -> tuple[Inputs, list[Guarded], Callable[[], None]]:
        """Return the inputs of a shape, the scratch, and what launches the kernel on them."""
        inputs = Inputs(shape, self.caches[shape.cache])
        chip = self.chips[shape.chip]
        arguments = (shape.tokens, shape.heads, shape.width, RANK, chip, shape.cache[0])
        sizes = self.kernels.scratch_shapes(*arguments)
        scratch = [Guarded(size, dtype) for size, dtype in sizes]
        for buffer in scratch:
            buffer.tensor.fill_(float("nan"))

        def launch() -> None:
            self.kernels.triton_mla_sparse_fwd(
                inputs.q_nope.tensor,
                None if inputs.q_pe is None else inputs.q_pe.tensor,
                inputs.cache,
                inputs.indices.tensor,
                inputs.valid_counts,
                scale_of(shape),
                inputs.out.tensor,
                None if inputs.lse is None else inputs.lse.tensor,
                *(buffer.tensor for buffer in scratch),
                device_info=chip,
            )

        return inputs, scratch, launch

    def run(self, shape: Shape) -> Outcome:
        """Run one shape, directly or as two replays of a captured graph."""
        inputs, scratch, launch = self.prepare(shape)
        outcome = Outcome(shape)
        for _ in self._executions(launch, inputs, graph=shape.graph):
            compare(inputs, scale_of(shape), outcome)
        if not all(buffer.is_intact() for buffer in scratch):
            outcome.problems.append("guard bytes of scratch were overwritten")
        return outcome

    def _executions(self, launch: Any, inputs: Inputs, *, graph: bool) -> Iterator[None]:
        if not graph:
            launch()
            yield
            return
        captured = torch.cuda.CUDAGraph()
        with torch.cuda.graph(captured):
            launch()
        for _ in range(2):
            inputs.refill()
            captured.replay()
            yield

    def allowed(self) -> set[Any]:
        """Every variant that `iter_variants` announces for the shapes that are drawn."""
        found: set[Any] = set()
        for chip in self.chips:
            for heads in HEADS:
                for rope in (0, 64):
                    for cache in (torch.bfloat16, torch.float16, torch.uint8):
                        dtype = torch.float16 if cache == torch.float16 else torch.bfloat16
                        args = (heads, 4096, RANK, rope, dtype, chip, COMPILE_TOKENS)
                        found |= set(self.kernels.iter_variants(*args, cache_dtype=cache))
        return found


def make_cache(dtype: torch.dtype, rope: int, seed: int, *, repeated: bool = False) -> torch.Tensor:
    """Return a cache of random values; block 0 and the rows between blocks are NaN.

    If `repeated`, only the first `DRAWN_ROWS` are drawn and the others repeat them.
    """
    generator = torch.Generator(DEVICE).manual_seed(seed)
    is_fp8 = dtype == torch.uint8
    width = fp8_rows.ROW_BYTES if is_fp8 else RANK + rope
    cache = torch.empty(CACHE_ROWS, width, dtype=dtype, device=DEVICE)
    first, *others = cache.split(DRAWN_ROWS)
    for part in (first, *others):
        if repeated and part is not first:
            part.copy_(first[: part.shape[0]])
        elif is_fp8:
            fp8_rows.fill_random(part, rope, generator)
        else:
            part.copy_(torch.randn(part.shape, generator=generator, device=DEVICE))
    nan = fp8_rows.NAN_BYTE if is_fp8 else float("nan")
    cache.view(-1, BLOCK_STRIDE, width)[:, BLOCK:] = nan
    cache[:BLOCK] = nan  # block 0 belongs to nobody, and masked entries point there
    return cache


def describe(shape: Shape) -> dict[str, Any]:
    """Return a shape as JSON values."""
    return asdict(shape) | {"dtype": str(shape.dtype)}


def summarise(outcomes: list[Outcome]) -> list[str]:
    """Return the table of worst figures by cache and head count class."""
    lines = [f"{'cache':>10} {'heads':>8} {'shapes':>6} {'worst':>9} {'mean':>9} {'lse':>9}"]
    for kind in ("bfloat16", "float16", FP8):
        for low, high in ((1, 16), (17, 32), (33, 64), (65, 128)):
            some = [o for o in outcomes if o.shape.kind == kind and low <= o.shape.heads <= high]
            worst, mean, lse = (
                max((getattr(o, name) for o in some), default=0.0) for name in ("worst", "mean", "lse")
            )
            lines.append(f"{kind:>10} {low:>3}-{high:<4} {len(some):>6} {worst:9.2e} {mean:9.2e} {lse:9.2e}")
    return lines


def main() -> int:
    """Run everything; return the exit code."""
    parser = argparse.ArgumentParser(description="Check the sparse-MLA kernel on a GPU.")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--root", type=Path)
    parser.add_argument("--shapes", type=int, default=340)
    parser.add_argument("--seed", type=int, default=secrets.randbits(31))
    parser.add_argument("--processes", type=int, default=16)
    args = parser.parse_args()
    started = time.monotonic()
    kernels = standalone.load_kernel(args.root)
    pairs = [(d, r) for d in (torch.bfloat16, torch.float16, torch.uint8) for r in (0, 64)]
    caches = {pair: make_cache(*pair, seed=args.seed + n) for n, pair in enumerate(pairs)}
    checker = Checker(kernels, caches)
    allowed = checker.allowed()
    kernel_variants.warm_up(kernels, allowed, args.root, args.processes)
    warm_s, compiled = time.monotonic() - started, kernel_variants.compiled_count(kernels)
    checker.launched.clear()
    rng = random.Random(args.seed)
    outcomes = [checker.run(draw_shape(rng, index)) for index in range(args.shapes)]
    problems = [(describe(o.shape), o.problems) for o in outcomes if o.problems]
    if not checker.launched <= allowed:
        problems.append(({}, [f"launched unannounced {checker.launched - allowed}"]))
    if kernel_variants.compiled_count(kernels) != compiled:
        problems.append(
            ({}, [f"{kernel_variants.compiled_count(kernels) - compiled} compiled after warm-up"])
        )
    report = {
        **standalone.measured_on(),
        "seed": args.seed,
        "shapes": len(outcomes),
        "rows": sum(o.shape.tokens for o in outcomes),
        "variants_compiled": len(allowed),
        "binaries": compiled,
        "variants_launched": len(checker.launched),
        "warm_up_s": round(warm_s, 1),
        "total_s": round(time.monotonic() - started, 1),
        "problems": problems,
        "outcomes": [describe(o.shape) | {"worst": o.worst, "mean": o.mean, "lse": o.lse} for o in outcomes],
    }
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.write_text(json.dumps(report, indent=1))
    print("\n".join(summarise(outcomes)))
    shown = ("shapes", "rows", "seed", "variants_compiled", "variants_launched", "total_s")
    print({key: report[key] for key in shown})
    print(f"{len(problems)} problems", *problems[:8], sep="\n")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
