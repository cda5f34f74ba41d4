"""Inputs for the indexer's logits kernels on a GPU, and the two contenders on them."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

if TYPE_CHECKING:
    from types import ModuleType

DEVICE = "cuda"
HEAD_DIM = 128
PAGE = 64
KEY_BYTES = HEAD_DIM + 4
MAX_SETS, COLD_BYTES = 24, 160 << 20


class PrefillShape(NamedTuple):
    """The last `rows` queries of one request of `keys` tokens."""

    heads: int
    rows: int
    keys: int

    def __str__(self) -> str:
        return f"prefill {self.heads} heads, {self.rows} x {self.keys}"


class DecodeShape(NamedTuple):
    """`batch` requests of `context` tokens with `next_n` query rows each."""

    heads: int
    batch: int
    next_n: int
    context: int

    def __str__(self) -> str:
        return f"decode {self.heads} heads, batch {self.batch}, next_n {self.next_n}, context {self.context}"


Shape = PrefillShape | DecodeShape

PREFILLS = (
    PrefillShape(32, 4096, 8192),
    PrefillShape(32, 4096, 65536),
    PrefillShape(32, 512, 131072),
    PrefillShape(64, 4096, 32768),
)
DECODES = tuple(
    DecodeShape(heads, *rest)
    for heads in (32, 64)
    for rest in ((1, 1, 65536), (8, 1, 65536), (32, 2, 32768), (64, 1, 131072))
)


def deep_gemm() -> ModuleType | None:
    """Import DeepGEMM: vLLM's own copy, or one that lies on the path."""
    for name in ("vllm.third_party.deep_gemm", "deep_gemm"):
        try:
            return importlib.import_module(name)
        except ImportError:
            continue
    return None


def e4m3(*size: int, generator: torch.Generator) -> torch.Tensor:
    """Return normal values rounded to e4m3."""
    values = torch.randn(size, generator=generator, device=DEVICE, dtype=torch.bfloat16)
    return values.to(torch.float8_e4m3fn)


class Prefill:
    """One causal prefill; `run` and `run_deep_gemm` return logits [rows, keys]."""

    num_sets = 1

    def __init__(self, shape: PrefillShape, seed: int = 0) -> None:
        generator = torch.Generator(DEVICE).manual_seed(seed)
        self.shape = shape
        heads, rows, keys = shape
        self.q = e4m3(rows, heads, HEAD_DIM, generator=generator)
        self.k = e4m3(keys, HEAD_DIM, generator=generator)
        self.k_scale = torch.rand(keys, generator=generator, device=DEVICE) + 0.5
        self.weights = torch.randn(rows, heads, generator=generator, device=DEVICE)
        self.starts = torch.zeros(rows, dtype=torch.int32, device=DEVICE)
        self.ends = torch.arange(keys - rows + 1, keys + 1, dtype=torch.int32, device=DEVICE)

    @property
    def arguments(self) -> tuple[Any, ...]:
        """What both contenders take."""
        tensors = ((self.q, None), (self.k, self.k_scale), self.weights, self.starts, self.ends)
        return (*tensors, self.shape.keys)

    def lengths(self) -> torch.Tensor:
        """Valid columns of each row."""
        return self.ends - self.starts

    def run(self, kernels: Any, config: Any, index: int) -> torch.Tensor:
        """Launch our kernel."""
        del index
        return kernels.triton_mqa_logits(*self.arguments, config=config)  # type: ignore[no-any-return]

    def run_deep_gemm(self, library: Any, index: int) -> torch.Tensor:
        """Launch DeepGEMM's kernel."""
        del index
        return library.fp8_fp4_mqa_logits(*self.arguments)  # type: ignore[no-any-return]


class Decode:
    """Paged decode over several sets of pages, so that keys come from memory and not from L2."""

    def __init__(self, shape: DecodeShape, seed: int = 0) -> None:
        generator = torch.Generator(DEVICE).manual_seed(seed)
        self.shape = shape
        heads, batch, next_n, context = shape
        pages = -(-context // PAGE)
        per_set = batch * pages * PAGE * KEY_BYTES
        self.num_sets = max(1, min(MAX_SETS, -(-COLD_BYTES // per_set)))
        total = self.num_sets * batch * pages
        self.cache = torch.empty(total, PAGE, 1, KEY_BYTES, dtype=torch.uint8, device=DEVICE)
        flat = self.cache.view(total, PAGE * KEY_BYTES)
        for first in range(0, total, 4096):
            some = flat[first : first + 4096]
            values = e4m3(len(some), PAGE * HEAD_DIM, generator=generator).view(torch.uint8)
            scales = torch.rand(len(some), PAGE, generator=generator, device=DEVICE) + 0.5
            some[:, : PAGE * HEAD_DIM] = values
            some[:, PAGE * HEAD_DIM :] = scales.view(torch.uint8)
        order = torch.randperm(total, generator=generator, device=DEVICE).int()
        self.tables = order.view(self.num_sets, batch, pages)
        self.q = e4m3(batch, next_n, heads, HEAD_DIM, generator=generator)
        self.weights = torch.randn(batch * next_n, heads, generator=generator, device=DEVICE)
        steps = torch.arange(1 - next_n, 1, dtype=torch.int32, device=DEVICE)
        self.context_lens = (steps + context).expand(batch, next_n).contiguous()
        self.schedule: Any = None

    def lengths(self) -> torch.Tensor:
        """Valid columns of each row."""
        return self.context_lens.flatten()

    def run(self, kernels: Any, config: Any, index: int) -> torch.Tensor:
        """Launch our kernel on one set of pages."""
        return kernels.triton_paged_mqa_logits(  # type: ignore[no-any-return]
            (self.q, None),
            self.cache,
            self.weights,
            self.context_lens,
            self.tables[index],
            self.shape.context,
            config=config,
        )

    def run_deep_gemm(self, library: Any, index: int) -> torch.Tensor:
        """Launch DeepGEMM's kernel on one set of pages; its schedule is made once, outside."""
        if self.schedule is None:
            slots = torch.cuda.get_device_properties(0).multi_processor_count
            slots //= 2 if self.shape.next_n == 4 else 1
            self.schedule = library.get_paged_mqa_logits_metadata(self.context_lens, PAGE, slots)
        return library.fp8_fp4_paged_mqa_logits(  # type: ignore[no-any-return]
            (self.q, None),
            self.cache,
            self.weights,
            self.context_lens,
            self.tables[index],
            self.schedule,
            self.shape.context,
        )


Problem = Prefill | Decode


def make(shape: Shape, seed: int = 0) -> Problem:
    """Make the inputs of a shape."""
    return Prefill(shape, seed) if isinstance(shape, PrefillShape) else Decode(shape, seed)


def difference(problem: Problem, ours: torch.Tensor, theirs: torch.Tensor) -> float:
    """Return the largest difference of valid logits, relative to the largest valid logit."""
    worst = torch.zeros((), device=DEVICE)
    largest = torch.zeros((), device=DEVICE)
    lengths = problem.lengths()
    columns = torch.arange(ours.shape[1], device=DEVICE)
    for first in range(0, len(ours), 64):
        rows = slice(first, first + 64)
        valid = columns < lengths[rows, None]
        off = (ours[rows] - theirs[rows]).abs().nan_to_num(1e30)
        worst = torch.maximum(worst, off.where(valid, 0.0).max())
        largest = torch.maximum(largest, theirs[rows].abs().where(valid, 0.0).max())
    return float(worst / largest)
