"""What watches and damages attention in an engine, on the CPU with a backend that is none."""

from __future__ import annotations

import ast
import ctypes
import inspect
import re
import sys
from collections import deque
from importlib import import_module
from types import SimpleNamespace
from typing import Any

import launches
import pytest
import rank_observer
import torch
from health_tasks import failure
from scheduling import BatchWatch, DraftWatch

from kernelcheck.platform import vllm_folder


@pytest.fixture(autouse=True)
def no_capture(monkeypatch: pytest.MonkeyPatch) -> None:
    """Say that nothing is captured; without CUDA PyTorch cannot be asked."""
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)


class Impl:
    """The parts of a backend that are observed."""

    kv_cache_dtype = "fp8_ds_mla"

    def _forward_mqa_kernel(self, _: Any, kv_cache: torch.Tensor, *_rows: Any, **_how: Any) -> Any:
        scales = kv_cache[..., 512:528].clone().view(torch.float32)
        return scales.clone(), kv_cache[..., 528:].float().sum(-1)

    def forward_mha(self, q: torch.Tensor) -> torch.Tensor:
        """Return the queries."""
        return q


def observed() -> tuple[launches.Observer, Any]:
    class Fresh(Impl):
        """Wrapped once."""

        _forward_mqa_kernel = Impl._forward_mqa_kernel
        forward_mha = Impl.forward_mha

    observer = launches.Observer()
    observer._watch_impl(Fresh)
    observer._watch_dense(Fresh)
    return observer, Fresh()


def rows(blocks: int = 3) -> torch.Tensor:
    """Return a cache whose blocks lie apart, as other layers' pages lie between."""
    whole = torch.randint(0, 100, (blocks, 2, 64, 656), dtype=torch.uint8)
    cache = whole[:, 0]
    cache[..., 512:528] = torch.full((blocks, 64, 4), 0.5).view(torch.uint8)
    return cache


def call(impl: Any, cache: torch.Tensor) -> Any:
    topk = torch.zeros(5, 128, dtype=torch.int32)
    return impl._forward_mqa_kernel(None, cache, topk, topk[:, 0], layer=None, block_size=64, is_decode=True)


def test_calls_are_counted_and_the_cache_is_described() -> None:
    observer, impl = observed()
    out, _ = call(impl, rows())
    assert bool((out == 0.5).all())
    assert observer.snapshot()["calls"]["rows"] == {"decode": 5}
    assert observer.cache == {"dtype": "fp8_ds_mla", "row_bytes": 656}
    impl.forward_mha(torch.zeros(7, 1))
    assert observer.snapshot()["dense"]["rows"] == {"prefill": 7}
    observer.start()
    assert observer.snapshot()["calls"]["rows"] == {}


def test_a_damaged_cache_is_whole_again_afterwards() -> None:
    observer, impl = observed()
    cache = rows()
    before = cache.clone()
    observer.damage = "scale"
    out, _ = call(impl, cache)
    assert out[..., 0].eq(1.0).all()
    assert out[..., 1:].eq(0.5).all()
    observer.damage = "tail"
    _, tail = call(impl, cache)
    assert tail.eq(0).all()
    assert torch.equal(cache, before)


def test_rows_of_another_cache_are_not_damaged() -> None:
    with (
        pytest.raises(ValueError, match="fp8_ds_mla rows"),
        launches.spoiled_cache(torch.zeros(2, 4, 576), "scale"),
    ):
        pass


def test_outputs_are_damaged_as_named() -> None:
    observer = launches.Observer()
    out, lse = torch.tensor([[1.0, torch.nan]]), torch.tensor([1.0])
    observer.damage = "zero"
    assert observer._damaged(out, lse)[0].eq(0).all()
    observer.damage = "lse"
    damaged = observer._damaged(out, lse)[1]
    assert damaged is not None
    assert damaged.item() == pytest.approx(1.4426950)
    observer.damage = "shift"
    assert observer._damaged(out, None)[0].isfinite().all()


def test_variants_are_told_from_announced_ones() -> None:
    observer = launches.Observer()
    observer.variants, observer.announced = {"a", "b"}, {"b", "c"}
    assert observer.variant_names() == (["a", "b"], ["a"])


class Kernel:
    """Launches nothing."""

    _warming = False

    def get_warmup_keys(self, *, width: int) -> list[str]:
        """Announce one variant."""
        return [f"width {width}"]

    def launch(self, spec: Any, inputs: Any) -> Any:
        """Return what would be launched."""
        return spec, inputs


class Platform:
    """Answers as vLLM's platform does."""

    def __getattr__(self, name: str) -> None:
        """Return None for every attribute that it lacks."""


def test_every_kernel_of_a_module_is_watched() -> None:
    module = SimpleNamespace(
        first=Kernel(), second=Kernel(), kind=Kernel, other=7, current_platform=Platform()
    )
    observer = launches.Observer()
    observer._watch_kernels(module)
    assert str(inspect.signature(module.second.get_warmup_keys)) == "(*, width: 'int') -> 'list[str]'"
    module.second.get_warmup_keys(width=3)
    for number, kernel in enumerate((module.first, module.second)):
        assert kernel.launch("s", {"compile_key": f"width {3 + number}"})[0] == "s"
    module.first._warming = True
    module.first.launch("s", {"compile_key": "warm-up"})
    assert observer.variant_names() == (["width 3", "width 4"], ["width 4"])
    assert observer.snapshot()["kernels"]["eager"] == {"prefill": 2}


def test_a_topk_that_a_layer_shares_is_not_converted_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """One graph holds three layers, of which two share a top-k; a prefill converts in each of its layers."""
    capturing = [False]
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: capturing[0])

    class Graph:
        """Runs nothing."""

        def capture_begin(self) -> None:
            """Begin."""

        def replay(self) -> None:
            """Replay."""

    monkeypatch.setattr(torch.cuda, "CUDAGraph", Graph)
    observer, impl = observed()
    observer._watch_graphs()
    assert "conversions" not in observer.snapshot()
    module = SimpleNamespace(**{launches.CONVERT: lambda topk: topk, "logits": lambda rows: rows})
    observer.watches_topk = True
    observer._watch_conversion(module)
    observer._watch_function(module, "logits", "decode", observer.logits, 3)
    convert = getattr(module, launches.CONVERT)
    cache, graph, other = rows(), Graph(), Graph()

    def layers(*kinds: str) -> None:
        for kind in kinds:
            if kind == "mla":
                assert (module.logits(3), convert(7)) == (3, 7)
            call(impl, cache)

    capturing[0] = True
    graph.capture_begin()
    layers("mla", "mla", "shared")
    other.capture_begin()
    layers("mla")
    capturing[0] = False
    assert observer.snapshot()["conversions"]["captured"] == {"decode": 3}
    observer.start()
    layers("mla", "mla", "mla")
    for _ in range(4):
        graph.replay()
    Graph().replay()  # captured by nobody
    counts = observer.snapshot()
    assert (counts["calls"]["eager"], counts["calls"]["replayed"]) == ({"decode": 3}, {"decode": 12})
    for kind in ("conversions", "logits"):
        assert (counts[kind]["eager"], counts[kind]["replayed"]) == ({"decode": 3}, {"decode": 8})
    assert (counts["graph_replays"], counts["conversions"]["replays"]) == (5, 4)
    observer.start()
    assert observer.snapshot()["conversions"]["replayed"] == {}


def calls_by_name(module: str) -> set[str]:
    """Return what functions of one of vLLM's modules call by a global or imported name."""
    tree = ast.parse((vllm_folder().parent / f"{module.replace('.', '/')}.py").read_text())
    calls = [node.func for node in ast.walk(tree) if isinstance(node, ast.Call)]
    return {function.id for function in calls if isinstance(function, ast.Name)}


def test_what_is_counted_of_a_topk_is_what_vllm_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    assert all(launches.CONVERT in calls_by_name(module) for module in launches.CONVERTING)
    deep_gemm = {"_deep_gemm_mqa_logits", "_deep_gemm_paged_mqa_logits"}
    triton_ops = {"triton_mqa_logits", "triton_paged_mqa_logits"}
    assert deep_gemm | triton_ops <= calls_by_name(launches.DEEP_GEMM)

    def given(topk: int) -> int:
        return topk

    modules = {name: SimpleNamespace(**{launches.CONVERT: given}) for name in launches.CONVERTING}
    modules[launches.DEEP_GEMM] = SimpleNamespace(**dict.fromkeys(deep_gemm, given))
    modules[launches.MQA_LOGITS] = SimpleNamespace(**dict.fromkeys(triton_ops, given))
    monkeypatch.setattr(launches, "import_module", modules.__getitem__)
    observer = launches.Observer()
    observer.watch_topk()
    for module in modules.values():
        for name, function in vars(module).items():
            assert function(7) == 7, name
    assert observer.snapshot()["logits"]["eager"] == {"prefill": 2, "decode": 2}
    observer._count_conversions()
    assert sum(observer.snapshot()["conversions"]["eager"].values()) == 2


def test_merges_by_pytorch_are_counted_in_graphs_too(monkeypatch: pytest.MonkeyPatch) -> None:
    capturing = [False]
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: capturing[0])

    class Graph:
        """Runs nothing."""

        def capture_begin(self) -> None:
            """Begin."""

        def replay(self) -> None:
            """Replay."""

    monkeypatch.setattr(torch.cuda, "CUDAGraph", Graph)
    module = SimpleNamespace(**{launches.MERGE: lambda gathered, topk, out=None: (gathered, topk, out)})
    monkeypatch.setattr(launches, "import_module", {launches.MERGES: module}.__getitem__)
    monkeypatch.setitem(sys.modules, launches.CUTEDSL_MERGES, None)
    monkeypatch.delitem(sys.modules, launches.CUTEDSL_MERGES)
    observer, _ = observed()
    observer._watch_graphs()
    assert not {"merges", "cutedsl_loaded"} & observer.snapshot().keys()
    observer.watch_merges()
    merge, graph = getattr(module, launches.MERGE), Graph()
    capturing[0] = True
    graph.capture_begin()
    assert merge("candidates", 512, out="indices") == ("candidates", 512, "indices")
    capturing[0] = False
    merge("candidates", 512)
    for _ in range(3):
        graph.replay()
    counts = observer.snapshot()
    assert (counts["merges"]["eager"], counts["merges"]["replayed"]) == ({"any": 1}, {"any": 3})
    assert counts["cutedsl_loaded"] is False
    assert observer.phase == "prefill"  # as before: what merges does not know the phase
    monkeypatch.setitem(sys.modules, launches.CUTEDSL_MERGES, module)
    assert observer.snapshot()["cutedsl_loaded"] is True
    observer.start()
    assert observer.snapshot()["merges"]["replayed"] == {}


def test_what_merges_is_imported_anew_for_each_merge() -> None:
    """One that a module had imported before it was wrapped would not be counted."""
    source = (vllm_folder() / "model_executor/layers/sparse_attn_indexer.py").read_text()
    functions = {node.name: node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.FunctionDef)}
    merging = functions["_merge_dcp_topk_global"]
    imports = {
        (node.module, name.name)
        for node in ast.walk(merging)
        if isinstance(node, ast.ImportFrom)
        for name in node.names
    }
    assert (launches.MERGES, launches.MERGE) in imports
    assert (launches.CUTEDSL_MERGES, f"{launches.MERGE}_cutedsl") in imports
    for path in vllm_folder().rglob("*.py"):
        text = path.read_text()
        assert launches.MERGE not in text or path.name in (
            "sparse_attn_indexer.py", "dcp_indexer.py", "dcp_indexer_cutedsl.py",
        ), path  # fmt: skip


def test_every_rank_is_asked() -> None:
    ranks = rank_observer.EveryRank()
    asked: list[tuple[str, Any]] = []

    def collective_rpc(method: str, args: Any) -> list[Any]:
        asked.append((method, args))
        variants = [(["a"], []), (["a", "b"], ["b"])]
        return variants if method.endswith("variants") else [{"rank": 0}, {"rank": 1}]

    ranks.attach(SimpleNamespace(collective_rpc=collective_rpc))
    assert ranks.snapshot() == {"rank": 0, "other_ranks": [{"rank": 1}]}
    assert ranks.variant_names() == (["a", "b"], ["b"])
    ranks.damage = "rank_zero"
    assert asked[-1] == ("observer_damage", ("rank_zero",))
    methods = {name for name in vars(rank_observer.RankObserver) if name.startswith("observer_")}
    assert {method for method, _ in asked} <= methods


def test_nothing_is_observed_outside_a_rank() -> None:
    assert rank_observer.OBSERVER is None
    with pytest.raises(RuntimeError):
        rank_observer.RankObserver().observer_start()


@pytest.mark.parametrize("rank", [0, 1])
def test_only_the_last_rank_is_zeroed(rank: int, monkeypatch: pytest.MonkeyPatch) -> None:
    observer = launches.Observer()
    monkeypatch.setattr(rank_observer, "OBSERVER", observer)
    worker = rank_observer.RankObserver()
    worker.rank, worker.parallel_config = rank, SimpleNamespace(world_size=2)
    worker.observer_damage("rank_zero")
    assert observer.damage == ("zero" if rank else "none")
    worker.observer_damage("lse")
    damage: str = rank_observer.this_rank().damage
    assert damage == "lse"


@pytest.mark.parametrize("version", ["2.28.9", "2.29.7"])
def test_an_older_nccl_loses_what_sleep_mode_needs(version: str, monkeypatch: pytest.MonkeyPatch) -> None:
    # Not at the top: tests of kernels must pretend a chip before vLLM is imported.
    binding = import_module("vllm.distributed.device_communicators.pynccl_wrapper").NCCLLibrary
    every = [function.name for function in binding.exported_functions]
    missing = rank_observer.SLEEP_FUNCTIONS if version == "2.28.9" else ()
    library = SimpleNamespace(**{name: None for name in every if name not in missing})
    monkeypatch.setattr(binding, "exported_functions", binding.exported_functions)
    monkeypatch.setattr(ctypes, "CDLL", lambda _: library)
    monkeypatch.setenv("VLLM_NCCL_SO_PATH", "libnccl.so.2")
    rank_observer.allow_older_nccl()
    left = [function.name for function in binding.exported_functions]
    assert left == [name for name in every if name not in missing]
    assert set(rank_observer.SLEEP_FUNCTIONS) < set(every)


def batch(**tokens: int) -> Any:
    return SimpleNamespace(num_scheduled_tokens=tokens)


def test_batches_are_watched() -> None:
    coming = [batch(a=1, b=1, c=1), batch(a=1, d=500), batch(e=700), batch(a=4)]
    scheduler = SimpleNamespace(
        schedule=lambda: coming.pop(0), _preempt_request=lambda request: request, num_spec_tokens=0
    )
    core = SimpleNamespace(scheduler=scheduler, batch_queue=deque())
    watched = BatchWatch(
        SimpleNamespace(llm_engine=SimpleNamespace(engine_core=SimpleNamespace(engine_core=core)))
    )
    scheduler.schedule()
    counts = {"requests": 3, "decodes": 3, "windows": 3, "prefills_in_flight": 0, "preemptions": 0}
    assert watched.as_json() == counts
    core.batch_queue.appendleft((None, scheduler.schedule(), None))
    scheduler.schedule()
    assert scheduler._preempt_request("x") == "x"
    assert watched.as_json() == counts | {"prefills_in_flight": 2, "preemptions": 1}


def test_only_whole_windows_of_a_batch_without_a_prefill_count() -> None:
    coming = [batch(a=6, b=6, c=6, d=7), batch(a=6, b=6, c=1, d=5), batch(a=6)]
    scheduler = SimpleNamespace(schedule=lambda: coming.pop(0), _preempt_request=None, num_spec_tokens=5)
    core = SimpleNamespace(scheduler=scheduler, batch_queue=None)
    watched = BatchWatch(
        SimpleNamespace(llm_engine=SimpleNamespace(engine_core=SimpleNamespace(engine_core=core)))
    )
    for _ in range(3):
        scheduler.schedule()
    assert (watched.requests, watched.decodes, watched.windows) == (4, 4, 2)


def test_drafts_are_counted() -> None:
    """The scheduler passes the numbers by keyword, and goes on as before."""
    tree = ast.parse((vllm_folder() / "v1/core/sched/scheduler.py").read_text())
    calls = [n for n in ast.walk(tree) if isinstance(n, ast.Call) and "make_spec_decod" in ast.dump(n.func)]
    assert calls
    for call in calls:
        assert {"num_draft_tokens", "num_accepted_tokens"} < {word.arg for word in call.keywords}
    scheduler = SimpleNamespace(make_spec_decoding_stats=lambda stats, **_: stats)
    core = SimpleNamespace(engine_core=SimpleNamespace(scheduler=scheduler))
    watched = DraftWatch(SimpleNamespace(llm_engine=SimpleNamespace(engine_core=core)))
    for drafted, accepted in ((3, 2), (3, 0), (2, 2)):
        given = {"num_draft_tokens": drafted, "num_accepted_tokens": accepted, "request_id": "a"}
        assert scheduler.make_spec_decoding_stats("stats", **given) == "stats"
    assert watched.as_json() == {"drafted": 8, "accepted": 4}
    watched.clear()
    assert watched.as_json() == {"drafted": 0, "accepted": 0}


def test_only_the_engines_own_errors_are_noted() -> None:
    def fail(error: Exception) -> Any:
        raise error

    assert failure(lambda: 1) is None
    said = str(failure(lambda: fail(RuntimeError("sync"))))
    assert re.fullmatch(r"RuntimeError: sync \(test_observers\.py:\d+, fail\)", said)
    with pytest.raises(ZeroDivisionError):
        failure(lambda: fail(ZeroDivisionError()))
