"""Ask the same prompts alone and in changing company, which must not change a bit (VLLM_BATCH_INVARIANT)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from engine_worker import start

if TYPE_CHECKING:
    from collections.abc import Callable

    from engine_jobs import Task

LONGEST_PROBE = 4100
TOKENS = 48
GAP = 7  # steps between the arrivals of two requests


def parameters(*, scored: bool) -> Any:
    """Return greedy sampling with log-probabilities; scored prompts read no prefix from the cache."""
    from vllm import SamplingParams

    return SamplingParams(
        max_tokens=TOKENS, temperature=0.0, ignore_eos=True, detokenize=False,
        logprobs=1, prompt_logprobs=1 if scored else None,
    )  # fmt: skip


def answers(outputs: list[Any]) -> dict[str, list[float]]:
    """Return the log-probabilities of prompts and continuations, and the tokens chosen."""
    found: dict[str, list[float]] = {"prefill": [], "decode": [], "tokens": []}
    for out in outputs:
        for token, entry in zip(out.prompt_token_ids[1:], (out.prompt_logprobs or [])[1:], strict=False):
            found["prefill"].append(entry[token].logprob)
        completion = out.outputs[0]
        for token, entry in zip(completion.token_ids, completion.logprobs, strict=True):
            found["decode"].append(entry[token].logprob)
            found["tokens"].append(token)
    return found


def together(engine: Any, prompts: list[list[int]], *, scored: bool = True) -> list[Any]:
    """Return what the engine makes of prompts that arrive at once."""
    given = [{"prompt_token_ids": prompt} for prompt in prompts]
    outputs: list[Any] = engine.generate(given, parameters(scored=scored), use_tqdm=False)
    return outputs


def staggered(engine: Any, prompts: list[list[int]]) -> list[Any]:
    """Return what the engine makes of prompts that arrive while it works on the ones before."""
    core = engine.llm_engine
    finished: dict[str, Any] = {}
    waiting = [(f"late{number}", prompt) for number, prompt in enumerate(prompts)]
    names = [name for name, _ in waiting]
    while waiting or core.has_unfinished_requests():
        if waiting:
            name, prompt = waiting.pop(0)
            core.add_request(name, {"prompt_token_ids": prompt}, parameters(scored=True))
        for _ in range(GAP):
            if core.has_unfinished_requests():
                finished |= {out.request_id: out for out in core.step() if out.finished}
    return [finished[name] for name in names]


def run_invariance(task: Task) -> tuple[dict[str, Any], dict[str, Any]]:
    """Ask the same prompts in five ways.

    Alone; all at once; in other order among companions; one after the other while the ones before decode;
    and once more at once with their prefixes in the cache, where only continuations have log-probabilities.
    """
    running = start(task)
    engine = running.engine
    probes = [tokens[:LONGEST_PROBE] for tokens in task.texts["text"]]
    companions = task.texts["short_text"]
    crowd = [prompt for pair in zip(reversed(probes), companions, strict=False) for prompt in pair]
    ways: dict[str, Callable[[], list[Any]]] = {
        "alone": lambda: [out for probe in probes for out in together(engine, [probe])],
        "together": lambda: together(engine, probes),
        "crowded": lambda: together(engine, crowd)[0::2][::-1],
        "staggered": lambda: staggered(engine, probes),
        "cached": lambda: together(engine, probes, scored=False),
    }
    for way, ask in ways.items():
        found = answers(ask())
        running.arrays |= {f"{way}_{part}": values for part, values in found.items() if values}
        running.watch.lap(way)
    return running.arrays, {"seconds": running.watch.laps}
