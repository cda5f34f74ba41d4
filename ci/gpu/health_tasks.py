"""What an engine does apart from its answers: host synchronisation, and allocations on the device."""

from __future__ import annotations

import traceback
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from engine_worker import start
from launches import wrapped

if TYPE_CHECKING:
    from collections.abc import Callable

    from engine_jobs import Task

LONGEST_PROMPT = 4100
TOKENS = 96
STEADY_STEPS = 64  # the last ones, with all requests and no prefill


def prompts_of(task: Task) -> list[dict[str, list[int]]]:
    """Return the shorter prompts of the long text."""
    texts = [tokens[:LONGEST_PROMPT] for tokens in task.texts["text"]]
    return [{"prompt_token_ids": tokens} for tokens in texts]


def generate(engine: Any, prompts: list[dict[str, list[int]]], tokens: int) -> int:
    """Let the engine continue the prompts; return how many tokens it gave."""
    from vllm import SamplingParams

    params = SamplingParams(max_tokens=tokens, temperature=0.0, ignore_eos=True, detokenize=False)
    outputs = engine.generate(prompts, params, use_tqdm=False)
    return sum(len(out.outputs[0].token_ids) for out in outputs)


def failure(work: Callable[[], Any]) -> str | None:
    """Return the error that the engine died of and where, None if it did not."""
    try:
        work()
    except RuntimeError as error:
        place = traceback.extract_tb(error.__traceback__)[-1]
        return f"{type(error).__name__}: {error} ({Path(place.filename).name}:{place.lineno}, {place.name})"
    return None


def run_sync(task: Task) -> tuple[dict[str, Any], dict[str, Any]]:
    """Generate where a read of the device by the host is an error, then with one planted in attention.

    vLLM checks `execute_model` and `sample_tokens` (`VLLM_GPU_SYNC_CHECK`) once it has started. The planted
    read must be found; the engine cannot be used any more then.
    """
    running = start(task)
    prompts = prompts_of(task)
    clean = failure(lambda: generate(running.engine, prompts, TOKENS))
    planted = None
    if clean is None:
        running.observer.damage = "sync"
        # Other prompts than before: of those the cache holds the prefixes, which leaves little to attend.
        others = [{"prompt_token_ids": prompt["prompt_token_ids"][::-1]} for prompt in prompts]
        planted = failure(lambda: generate(running.engine, others, TOKENS))
    return {}, {"seconds": running.watch.laps, "clean": clean, "planted": planted}


def allocations() -> int:
    """Return how many allocations PyTorch's allocator has served."""
    return int(torch.cuda.memory_stats()["allocation.all.allocated"])


class AllocationCounts:
    """Allocations inside replays of graphs, inside `forward_mqa` outside graphs, and in each step.

    Attributes:
        replays: Allocations during each replay of a graph.
        calls: Allocations during each call of the backend's `forward_mqa` outside a capture.
        steps: Allocations during each step of the engine.

    """

    def __init__(self) -> None:
        self.replays: list[int] = []
        self.calls: list[int] = []
        self.steps: list[int] = []
        self.is_on = False

    def watch(self, owner: Any, name: str, counts: list[int]) -> None:
        """Count what happens inside a function of a class or an object."""
        original = getattr(owner, name)

        def counted(*args: Any, **kwargs: Any) -> Any:
            if not self.is_on or torch.cuda.is_current_stream_capturing():
                return original(*args, **kwargs)
            before = allocations()
            result = original(*args, **kwargs)
            counts.append(allocations() - before)
            return result

        setattr(owner, name, wrapped(original, counted))


def run_allocations(task: Task) -> tuple[dict[str, Any], dict[str, Any]]:
    """Count allocations while a batch decodes whose prefixes are in the cache."""
    from vllm.v1.attention.backends.registry import AttentionBackendEnum

    counts = AllocationCounts()
    implementation = AttentionBackendEnum[task.job.backend].get_class().get_impl_cls()
    counts.watch(implementation, "forward_mqa", counts.calls)
    running = start(task)
    counts.watch(torch.cuda.CUDAGraph, "replay", counts.replays)
    counts.watch(running.engine.llm_engine, "step", counts.steps)
    prompts = prompts_of(task)
    generate(running.engine, prompts, TOKENS)  # whatever is allocated once
    counts.is_on = True
    marks: list[dict[str, Any]] = []

    def mark(*args: Any, **kwargs: Any) -> Any:
        if len(counts.steps) >= TOKENS - STEADY_STEPS:
            marks.append({"calls": len(counts.calls), **torch.cuda.memory_stats()})
        return step(*args, **kwargs)

    step = running.engine.llm_engine.step
    running.engine.llm_engine.step = mark
    generate(running.engine, prompts, TOKENS)
    first, last = marks[0], marks[-1]
    calls = counts.calls[first["calls"] : last["calls"]]
    return {}, {
        "seconds": running.watch.laps,
        "replays": len(counts.replays),
        "inside_replays": sum(counts.replays),
        "calls": len(calls),
        "per_call": sum(calls) / len(calls) if calls else 0.0,
        "per_step": sum(counts.steps[-STEADY_STEPS:]) / STEADY_STEPS,
        "device_allocations": last["num_device_alloc"] - first["num_device_alloc"],
        "reserved_bytes": last["reserved_bytes.all.current"] - first["reserved_bytes.all.current"],
    }
