"""Run the engine of one segment of the soak; `soak.py` starts it.

python soak_worker.py SEGMENT.json
"""

from __future__ import annotations

import faulthandler
import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any, Final

import small_models
import traffic
from engine_jobs import engine_arguments, environment
from engine_runner import WEIGHTS_SEED
from engine_worker import forbid_autotuning
from scheduling import BatchWatch
from soak import Segment
from traffic import Answer, Request

SEED: Final = 30_000  # of segment 0
TRAFFIC_SHARE: Final = 0.5  # of the time; replays have the rest
TOGETHER: Final = 12  # requests that are asked again at the same time
MOST_OPEN: Final = 64  # requests under way or waiting, beyond which no more arrive


class Prompts:
    """The text of requests."""

    def __init__(self, model: str) -> None:
        # Only the language is needed; the runner has written the weights.
        self._language = small_models.make_language(
            small_models.Random(WEIGHTS_SEED), small_models.MODELS[model].vocab
        )

    def of(self, request: Request) -> list[int]:
        """Return the tokens of a request's prompt."""
        shared: list[int] = []
        if request.prefix is not None:
            seed, length = request.prefix
            shared = self._text(length, seed)
        return shared + self._text(request.length - len(shared), request.seed)

    def _text(self, length: int, seed: int) -> list[int]:
        return small_models.make_text(self._language, length, seed)


class Soak:
    """An engine under traffic."""

    def __init__(self, segment: Segment, engine: Any) -> None:
        self.segment = segment
        self.core = engine.llm_engine
        self.prompts = Prompts(segment.job.model)
        self.beat = segment.base.with_suffix(".beat")
        self.open: dict[str, tuple[Request, Answer]] = {}
        self.closed: list[tuple[Request, Answer]] = []

    def add(self, request: Request, prefix: str, *, cancel: bool) -> None:
        """Send a request; a replay is not cancelled but ends where the first one was."""
        from vllm import SamplingParams

        params = SamplingParams(
            max_tokens=request.tokens, temperature=0.0, ignore_eos=True, detokenize=False, logprobs=2,
            prompt_logprobs=1 if request.scored else None,
        )  # fmt: skip
        name = f"{prefix}{request.name}"
        self.core.add_request(name, {"prompt_token_ids": self.prompts.of(request)}, params)
        self.open[name] = (request, Answer())
        if cancel and request.cancel_after == 0:
            self.cancel(name)

    def cancel(self, name: str) -> None:
        """Cancel a request that is under way."""
        self.core.abort_request([name])
        request, answer = self.open.pop(name)
        answer.cancelled = True
        self.closed.append((request, answer))

    def step(self, *, cancel: bool) -> None:
        """Let the engine make a step, and note what it says."""
        for out in self.core.step():
            if out.request_id not in self.open:
                continue  # cancelled while the step was under way
            request, answer = self.open[out.request_id]
            note(answer, out)
            if out.finished:
                self.closed.append(self.open.pop(out.request_id))
            elif cancel and request.cancel_after is not None and len(answer.tokens) >= request.cancel_after:
                self.cancel(out.request_id)
        self.beat.touch()

    def take(self) -> list[tuple[Request, Answer]]:
        """Return what was closed, and forget it."""
        closed, self.closed = self.closed, []
        return closed

    def traffic(self, until: float) -> list[tuple[Request, Answer]]:
        """Let requests arrive for a time, then finish those that are under way."""
        coming = traffic.requests(SEED + self.segment.number)
        upcoming, wait = next(coming), 0
        while time.monotonic() < until:
            while wait >= upcoming.gap and len(self.open) < MOST_OPEN:
                self.add(upcoming, "first", cancel=True)
                upcoming, wait = next(coming), 0
            if self.core.has_unfinished_requests():
                self.step(cancel=True)
            wait += 1
        self.drain(cancel=True)
        return self.take()

    def drain(self, *, cancel: bool) -> None:
        """Finish what is under way."""
        while self.core.has_unfinished_requests():
            self.step(cancel=cancel)

    def replay(self, recorded: list[tuple[Request, Answer]], until: float) -> dict[int, Answer]:
        """Ask recorded requests again, last ones first, some at a time, as long as there is time."""
        waiting = [request for request, answer in recorded if answer.tokens]
        found: dict[int, Answer] = {}
        while waiting and time.monotonic() < until:
            for request in (waiting.pop() for _ in range(min(TOGETHER, len(waiting)))):
                self.add(request, "again", cancel=False)
            self.drain(cancel=False)
            found |= {request.name: answer for request, answer in self.take()}
        return found


def note(answer: Answer, out: Any) -> None:
    """Take over what the engine says of a request so far."""
    completion = out.outputs[0]
    given = list(zip(completion.token_ids, completion.logprobs, strict=True))
    for token, entry in given[len(answer.tokens) :]:
        chosen = entry[token].logprob
        others = [item.logprob for other, item in entry.items() if other != token]
        answer.tokens.append(token)
        answer.logprobs.append(chosen)
        answer.gaps.append(chosen - max(others) if others else float("inf"))
    if out.prompt_logprobs and not answer.prompt_logprobs:
        entries = zip(out.prompt_token_ids[1:], out.prompt_logprobs[1:], strict=True)
        answer.prompt_logprobs = [entry[token].logprob for token, entry in entries]


def figures(recorded: list[tuple[Request, Answer]], replayed: dict[int, Answer]) -> dict[str, Any]:
    """Count, and compare."""
    answers = [*(answer for _, answer in recorded), *replayed.values()]
    differing = []
    for request, answer in recorded:
        if request.name in replayed:
            problem = traffic.replay_problem(answer, replayed[request.name])
            differing += [f"request {request.name}: {problem}"] if problem else []
    return {
        "requests": len(recorded),
        "tokens": sum(len(answer.tokens) for answer in answers),
        "prompt_tokens": sum(request.length for request, _ in recorded),
        "cancellations": sum(answer.cancelled for _, answer in recorded),
        "replays": len(replayed),
        "logprobs_checked": sum(len(answer.logprobs) + len(answer.prompt_logprobs) for answer in answers),
        "not_finite": [f"{bad} log-probabilities" for answer in answers if (bad := answer.not_finite())],
        "differing": differing,
    }


def main() -> None:
    """Run the segment in the file that the command line names."""
    end = time.monotonic()
    path = Path(sys.argv[1]).resolve()
    given = json.loads(path.read_text())
    segment = Segment(folder=Path(given.pop("folder")), **given)
    faulthandler.register(signal.SIGUSR1)  # the watchdog asks where a stuck engine is
    os.environ.update(environment(segment.job))
    forbid_autotuning()
    from vllm import LLM

    engine = LLM(**engine_arguments(segment.job, segment.folder / segment.job.model))
    batches = BatchWatch(engine)
    soak = Soak(segment, engine)
    began = time.monotonic()
    end += segment.seconds
    soak.beat.touch()
    recorded = soak.traffic(began + TRAFFIC_SHARE * (end - began))
    replayed = soak.replay(recorded, end)
    found = figures(recorded, replayed)
    found |= {"preemptions": batches.preemptions, "seconds": time.monotonic() - began, "hangs": []}
    records = [traffic.as_json(request, answer) for request, answer in recorded]
    path.with_suffix(".records.json").write_text(json.dumps(records))
    path.with_suffix(".result.json").write_text(json.dumps(found | {"batches": batches.as_json()}))


if __name__ == "__main__":
    main()
