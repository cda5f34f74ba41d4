"""Test-only observation, and deliberate damage, of sparse-MLA backends inside a running engine.

`Observer.install` wraps, before the engine starts:

* `_forward_mqa_kernel` of the backend's class, which tells the phase of what is launched in it and
  where `Damage` is applied;
* `forward_mha` of the backend's class, the dense prefill that launches no sparse kernel;
* the launchers of our kernels, which tell the compiled variant of every launch;
* capture and replay of CUDA graphs, so that a launch inside a graph is counted once for every
  replay of that graph.

`Observer.watch_topk` also counts what layers that share a top-k need only once: its conversion to rows of the
cache, and the indexer's logits. `Observer.watch_merges` counts the merges of the top-k of context-parallel
ranks by PyTorch.

`IndexerObserver.install_indexer` wraps what computes the indexer's logits instead: DeepGEMM's two
functions and Triton's two kernels.

Launches of the product's own warm-up, which only compile, are not counted.
"""

from __future__ import annotations

import inspect
import math
import sys
from collections import Counter
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib import import_module
from typing import TYPE_CHECKING, Any, Literal

import torch
from small_models import KPOOL

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

KERNELS = "vllm.v1.attention.ops.triton_mla_sparse"
MQA_LOGITS = "vllm.v1.attention.ops.triton_mqa_logits"
DEEP_GEMM = "vllm.utils.deep_gemm"
CONVERT = "triton_convert_req_index_to_global_index"
CONVERTING = (  # modules that call it by this name: for a group of layers, and for a single one
    "vllm.v1.attention.backends.mla.index_group",
    "vllm.model_executor.layers.attention.sparse_mla_attention",
)
MERGES = "vllm.model_executor.kernels.attention.dsa.dcp_indexer"
MERGE = "stable_topk_from_gathered_candidates"
CUTEDSL_MERGES = f"{MERGES}_cutedsl"  # imported where it merges, and by nothing else in a rank
ANY_PHASE = "any"
Damage = Literal["none", "zero", "shift", "shift_pool", "scale", "tail", "lse", "sync"]
"""What is done to each call: the output zeroed; every row moved by one, or by a pool; in an fp8 cache the
first scale of each row doubled, or the RoPE values zeroed; the LSE returned in base 2; a host read."""
FP8_ROW, FP8_SCALE, FP8_TAIL = 656, slice(512, 516), slice(528, 656)  # bytes
DISTANCES = {"shift": 1, "shift_pool": KPOOL}  # in rows
Phase = Literal["decode", "prefill"]
LOGITS: tuple[tuple[str, str, Phase], ...] = (
    (DEEP_GEMM, "_deep_gemm_mqa_logits", "prefill"),
    (DEEP_GEMM, "_deep_gemm_paged_mqa_logits", "decode"),
    (MQA_LOGITS, "triton_mqa_logits", "prefill"),
    (MQA_LOGITS, "triton_paged_mqa_logits", "decode"),
)
"""Module, function and phase of what computes the indexer's logits: DeepGEMM's, then Triton's."""


@dataclass
class Launches:
    """Launches since the last `Observer.start`, and what graphs hold.

    Attributes:
        eager: Launches outside graphs, by phase.
        replayed: Launches by replays of graphs, by phase.
        captured: Launches held by all graphs captured so far, by phase.
        replays: Replays of graphs that hold at least one launch.
        rows: Queries of the launches outside graphs, by phase, where they are known.

    """

    eager: Counter[str] = field(default_factory=Counter)
    replayed: Counter[str] = field(default_factory=Counter)
    captured: Counter[str] = field(default_factory=Counter)
    replays: int = 0
    rows: Counter[str] = field(default_factory=Counter)

    def clear(self) -> None:
        """Forget what ran, but not what graphs hold."""
        self.eager.clear()
        self.replayed.clear()
        self.rows.clear()
        self.replays = 0

    def as_json(self) -> dict[str, Any]:
        """Return plain values."""
        return {
            "eager": dict(self.eager),
            "replayed": dict(self.replayed),
            "captured": dict(self.captured),
            "replays": self.replays,
            "rows": dict(self.rows),
        }


def shift_rows(topk_indices: torch.Tensor, block_size: int, stride: int, distance: int) -> torch.Tensor:
    """Move every physical row inside its block: to a row before, or from the first ones on.

    A row before is always written, while a row after may be nobody's yet.
    """
    offset = topk_indices % stride
    onward = distance if block_size > distance else 0
    return torch.where(offset >= distance, topk_indices - distance, topk_indices + onward)


def wrapped(original: Callable[..., Any], observed: Callable[..., Any]) -> Callable[..., Any]:
    """Give a wrapper the signature of what it wraps: vLLM asks by name which arguments functions take."""
    observed.__signature__ = inspect.signature(original)  # type: ignore[attr-defined]
    return observed


@contextmanager
def spoiled_cache(kv_cache: torch.Tensor, damage: Damage) -> Iterator[None]:
    """Change every row of an fp8_ds_mla cache in place while the block runs."""
    if damage not in ("scale", "tail"):
        yield
        return
    if kv_cache.shape[-1] * kv_cache.element_size() != FP8_ROW:
        raise ValueError(f"{damage} damages fp8_ds_mla rows, not {kv_cache.dtype} {tuple(kv_cache.shape)}")
    part = kv_cache.view(torch.uint8)[..., FP8_SCALE if damage == "scale" else FP8_TAIL]
    kept = part.clone(memory_format=torch.contiguous_format)
    spoiled = (kept.view(torch.float32) * 2).view(torch.uint8) if damage == "scale" else kept * 0
    part.copy_(spoiled)
    try:
        yield
    finally:
        part.copy_(kept)


class Observer:
    """Counts launches, collects variants, and can damage what the backend computes."""

    def __init__(self) -> None:
        self.damage: Damage = "none"  # takes effect outside graphs
        self.calls = Launches()  # of `_forward_mqa_kernel`, any backend that has it
        self.dense = Launches()  # of `forward_mha`, any backend
        self.kernels = Launches()  # of our kernels
        self.conversions = Launches()  # of a top-k, by the phase of the call of attention that follows
        self.logits = Launches()  # of indexers
        self.merges = Launches()  # of the ranks' top-k by PyTorch, as one phase: the merge knows of none
        self.watches_topk = False
        self.watches_merges = False
        self.variants: set[Any] = set()
        self.announced: set[Any] = set()  # variants that the warm-up compiles; none without graphs
        self.cache: dict[str, Any] = {}  # the backend's name of the cache's type, and bytes of a row
        self.graph_replays = 0  # of any graph, whatever it holds
        self.phase: Phase = "prefill"
        self._graph: int | None = None
        self._held: dict[int, tuple[Counter[str], ...]] = {}
        self._converted = 0  # since the last call of `_forward_mqa_kernel`

    def install(self, impl_class: Any) -> None:
        """Wrap the backend's class, our kernels if this vLLM has them, and CUDA graphs."""
        self._watch_graphs()
        self._watch_impl(impl_class)
        self._watch_dense(impl_class)
        if impl_class.__name__.startswith("TritonMLASparse"):
            self._watch_kernels(import_module(KERNELS))

    def attach(self, engine: Any) -> None:
        """Do nothing: the engine runs in this process."""

    def snapshot(self) -> dict[str, Any]:
        """Return the counts so far."""
        return {
            "calls": self.calls.as_json(),
            "kernels": self.kernels.as_json(),
            "dense": self.dense.as_json(),
            "graph_replays": self.graph_replays,
            **self._topk_counts(),
            **self._merge_counts(),
        }

    def _topk_counts(self) -> dict[str, Any]:
        if not self.watches_topk:
            return {}
        return {"conversions": self.conversions.as_json(), "logits": self.logits.as_json()}

    def _merge_counts(self) -> dict[str, Any]:
        if not self.watches_merges:
            return {}
        return {"merges": self.merges.as_json(), "cutedsl_loaded": CUTEDSL_MERGES in sys.modules}

    def variant_names(self) -> tuple[list[str], list[str]]:
        """Return the variants that were launched, and those of them that nothing announced."""
        return sorted(map(str, self.variants)), sorted(map(str, self.variants - self.announced))

    def start(self) -> None:
        """Forget what ran so far, but not what graphs hold."""
        for counts in (*self._counted(), self.dense):
            counts.clear()
        self.graph_replays = 0

    def _counted(self) -> tuple[Launches, ...]:
        """Return what graphs hold; the `kind` of a count is its place here."""
        return self.calls, self.kernels, self.conversions, self.logits, self.merges

    def _count(self, counts: Launches, kind: int, phase: str | None = None) -> None:
        phase = phase or self.phase
        if torch.cuda.is_current_stream_capturing():
            counts.captured[phase] += 1
            if self._graph is not None:
                self._held[self._graph][kind][phase] += 1
        else:
            counts.eager[phase] += 1

    def _watch_graphs(self) -> None:
        observer = self
        graph_class: Any = torch.cuda.CUDAGraph
        begin, replay = graph_class.capture_begin, graph_class.replay

        def capture_begin(graph: Any, *args: Any, **kwargs: Any) -> None:
            observer._graph = id(graph)
            observer._held[id(graph)] = tuple(Counter() for _ in observer._counted())
            begin(graph, *args, **kwargs)

        def counted_replay(graph: Any) -> None:
            replay(graph)
            observer.graph_replays += 1
            for counts, launches in zip(observer._counted(), observer._held.get(id(graph), ()), strict=False):
                counts.replayed.update(launches)
                counts.replays += bool(launches)

        graph_class.capture_begin = capture_begin
        graph_class.replay = counted_replay

    def _watch_kernels(self, module: Any) -> None:
        for wrapper in vars(module).values():
            # vLLM's platform, which modules import, answers None for every attribute that it lacks.
            announces = callable(getattr(wrapper, "get_warmup_keys", None))
            if announces and not isinstance(wrapper, type):
                self._watch_kernel(wrapper)
                self._watch_announcements(wrapper)

    def _watch_kernel(self, wrapper: Any) -> None:
        launch: Callable[..., Any] = wrapper.launch

        def counted(spec: Any, inputs: Any) -> Any:
            if not wrapper._warming:
                self.variants.add(inputs["compile_key"])
                self._count(self.kernels, 1)
            return launch(spec, inputs)

        wrapper.launch = counted

    def _watch_impl(self, impl_class: Any) -> None:
        observer, original = self, impl_class._forward_mqa_kernel

        def observed(
            impl: Any,
            q: Any,
            kv_cache: torch.Tensor,
            topk_indices: torch.Tensor,
            valid_counts: torch.Tensor,
            **how: Any,
        ) -> tuple[torch.Tensor, torch.Tensor | None]:
            observer.phase = "decode" if how["is_decode"] else "prefill"
            observer._count(observer.calls, 0)
            observer._count_conversions()
            if not torch.cuda.is_current_stream_capturing():
                observer.calls.rows[observer.phase] += len(topk_indices)
            row = kv_cache.shape[-1] * kv_cache.element_size()
            observer.cache = {"dtype": impl.kv_cache_dtype, "row_bytes": row}
            distance = DISTANCES.get(observer.damage, 0)
            if distance:
                topk_indices = observer._shifted(kv_cache, topk_indices, how["block_size"], distance)
            with spoiled_cache(kv_cache, observer.damage):
                out, lse = original(impl, q, kv_cache, topk_indices, valid_counts, **how)
            return observer._damaged(out, lse)

        impl_class._forward_mqa_kernel = observed

    def watch_topk(self) -> None:
        """Count the conversions of a top-k, and the indexer's logits."""
        self.watches_topk = True
        for name in CONVERTING:
            self._watch_conversion(import_module(name))
        for module, function, phase in LOGITS:
            self._watch_function(import_module(module), function, phase, self.logits, 3)

    def watch_merges(self) -> None:
        """Count the merges of the ranks' top-k by PyTorch; vLLM imports the function anew for each."""
        self.watches_merges = True
        observer, module = self, import_module(MERGES)
        original = getattr(module, MERGE)

        def observed(*arguments: Any, **options: Any) -> Any:
            observer._count(observer.merges, 4, ANY_PHASE)
            return original(*arguments, **options)

        setattr(module, MERGE, wrapped(original, observed))

    def _watch_conversion(self, module: Any) -> None:
        observer, original = self, getattr(module, CONVERT)

        def observed(*arguments: Any, **options: Any) -> Any:
            observer._converted += 1
            return original(*arguments, **options)

        setattr(module, CONVERT, wrapped(original, observed))

    def _count_conversions(self) -> None:
        """Count what was converted since the last call of attention; only this call knows the phase."""
        for _ in range(self._converted):
            self._count(self.conversions, 2)
        self._converted = 0

    def _watch_function(
        self, module: Any, name: str, phase: Phase, counts: Launches | None, kind: int = 0
    ) -> None:
        observer, original = self, getattr(module, name)

        def observed(*args: Any, **kwargs: Any) -> Any:
            observer.phase = phase
            if counts is not None:
                observer._count(counts, kind)
            return original(*args, **kwargs)

        setattr(module, name, observed)

    def _damaged(
        self, out: torch.Tensor, lse: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        if self.damage == "sync":
            out[:1].abs().max().item()
        elif self.damage == "lse" and lse is not None:
            lse = lse * math.log2(math.e)
        elif self.damage != "none":
            out = torch.zeros_like(out) if self.damage == "zero" else out.nan_to_num()
        return out, lse

    def _watch_dense(self, impl_class: Any) -> None:
        observer, original = self, impl_class.forward_mha

        def observed(impl: Any, q: torch.Tensor, *arguments: Any, **options: Any) -> Any:
            observer.dense.eager["prefill"] += 1
            observer.dense.rows["prefill"] += len(q)
            return original(impl, q, *arguments, **options)

        impl_class.forward_mha = observed

    @staticmethod
    def _shifted(kv_cache: torch.Tensor, rows: torch.Tensor, block_size: int, distance: int) -> torch.Tensor:
        utils = import_module("vllm.v1.attention.backends.mla.sparse_utils")
        _, stride = utils.flat_kv_row_view(kv_cache, block_size)
        return shift_rows(rows, block_size, stride, distance)

    def _watch_announcements(self, wrapper: Any) -> None:
        observer, original = self, wrapper.get_warmup_keys

        def observed(*args: Any, **kwargs: Any) -> Any:
            keys = original(*args, **kwargs)
            observer.announced.update(keys)
            return keys

        wrapper.get_warmup_keys = wrapped(original, observed)


class IndexerObserver(Observer):
    """Counts what computes the indexer's logits: `calls` are DeepGEMM's, `kernels` Triton's."""

    def install_indexer(self) -> None:
        """Wrap both implementations, and CUDA graphs."""
        self._watch_graphs()
        for module, function, phase in LOGITS:
            self._watch_function(
                import_module(module), function, phase, self.calls if module == DEEP_GEMM else None
            )
        self._watch_kernels(import_module(MQA_LOGITS))
