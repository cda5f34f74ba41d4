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
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import small_models
import traffic
from engine_jobs import engine_arguments, environment
from engine_runner import WEIGHTS_SEED
from engine_worker import forbid_autotuning, observe_backend
from scheduling import BatchWatch
from soak import Segment
from traffic import Answer, Request

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

SEED: Final = 30_000  # of segment 0
FIRST, LATER, AGAIN = "first", "later", "again"  # arrived, recorded; arrived, not recorded; asked again
# Of the time. To ask as many again takes longer, as fewer are open then and others go on arriving. Reckoned
# with the pace of the first eight segments nearly all are, nine of ten if the GPU is 1.5 times slower then.
RECORDED_SHARE: Final = 0.25
MOST_OPEN: Final = 64  # requests under way or waiting, beyond which no more arrive
TOGETHER: Final = 12  # requests that are asked again at the same time
# The engine serves in turn, so that replays have the share of it that they are of what is open: 52 others, as
# MOST_OPEN allows, would leave them a fifth. A burst fits in; between bursts fewer arrive than would fill it.
LATER_OPEN: Final = 14
LATER_GAPS: Final = 4  # times as many steps between arrivals
# Of so many steps one is damaged, if damage is planted, once no answer is recorded any more. Moving rows
# would hit long contexts alone: where all are selected, so is the row before.
DAMAGED_STEPS: Final = 50
PLANTED: Final = "zero"


@dataclass
class Asked:
    """A request, why it is there (`FIRST`, `LATER` or `AGAIN`), and the answer so far."""

    kind: str
    request: Request
    answer: Answer = field(default_factory=Answer)


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
    """An engine under traffic.

    Attributes:
        open: What is under way or waiting, by its name in the engine.
        closed: What was answered or cancelled, by kind.
        waiting: Recorded requests to ask again, last ones last.
        hit: Names of the recorded requests that were under way again in a damaged step.

    """

    def __init__(self, segment: Segment, engine: Any, observer: Any = None) -> None:
        self.core = engine.llm_engine
        self.prompts = Prompts(segment.job.model)
        self.beat = segment.base.with_suffix(".beat")
        self.open: dict[str, Asked] = {}
        self.closed: dict[str, list[Asked]] = {kind: [] for kind in (FIRST, LATER, AGAIN)}
        self.waiting: list[Request] = []
        self.hit: set[int] = set()
        self._observer = observer  # with which to damage steps; None for none
        self._steps = 0  # since the last answer was recorded
        self._coming = traffic.requests(SEED + segment.number)
        self._upcoming = next(self._coming)
        self._wait = 0  # steps since the last arrival

    def add(self, request: Request, kind: str) -> None:
        """Send a request; a replay is not cancelled but compared as far as the first one went."""
        from vllm import SamplingParams

        params = SamplingParams(
            max_tokens=request.tokens, temperature=0.0, ignore_eos=True, detokenize=False,
            logprobs=traffic.RANKED,
            prompt_logprobs=1 if request.scored else None,
        )  # fmt: skip
        name = f"{kind}{request.name}"
        self.core.add_request(name, {"prompt_token_ids": self.prompts.of(request)}, params)
        self.open[name] = Asked(kind, request)
        if kind != AGAIN and request.cancel_after == 0:
            self.cancel(name)

    def cancel(self, name: str) -> None:
        """Cancel a request that is under way."""
        self.core.abort_request([name])
        self.open[name].answer.cancelled = True
        self.close(name)

    def close(self, name: str) -> None:
        """Put away what was answered or cancelled; what is recorded is to be asked again."""
        asked = self.open.pop(name)
        self.closed[asked.kind].append(asked)
        if asked.kind == LATER:
            asked.answer.ranked.clear()  # only what is compared needs it
        if asked.kind == FIRST and asked.answer.tokens:
            self.waiting.append(asked.request)

    def step(self) -> None:
        """Let the engine make a step, and note what it says."""
        outputs = self.core.step()
        for out in outputs:
            if out.request_id not in self.open:
                continue  # cancelled while the step was under way
            asked = self.open[out.request_id]
            note(asked.answer, out)
            cancel_after = asked.request.cancel_after if asked.kind != AGAIN else None
            if out.finished:
                self.close(out.request_id)
            elif cancel_after is not None and len(asked.answer.tokens) >= cancel_after:
                self.cancel(out.request_id)
        if outputs:  # steps that give no token to anybody are no sign of life
            self.beat.touch()

    def traffic(self, recorded_until: float, until: float) -> None:
        """Let requests arrive all the time; once their answers are recorded no more, ask again in between."""
        while (now := time.monotonic()) < until:
            if now < recorded_until:
                self.arrive(FIRST, MOST_OPEN, 1)
            else:
                self.ask_again()
                self.arrive(LATER, LATER_OPEN, LATER_GAPS)
                self.damage()
            if self.core.has_unfinished_requests():
                self.step()

    def arrive(self, kind: str, most: int, slower: int) -> None:
        """Send what arrives before the next step.

        Args:
            kind: Of what arrives.
            most: Of this kind that are open at a time.
            slower: Factor of the steps between arrivals.

        """
        while self._wait >= slower * self._upcoming.gap and self.has_room(kind, most):
            self.add(self._upcoming, kind)
            self._upcoming, self._wait = next(self._coming), 0
        self._wait += 1

    def ask_again(self) -> None:
        """Send recorded requests again, last ones first, as far as there is room."""
        while self.waiting and self.has_room(AGAIN, TOGETHER):
            self.add(self.waiting.pop(), AGAIN)

    def damage(self) -> None:
        """Damage the next step, or no longer, if damage is planted."""
        if self._observer is None or any(asked.kind == FIRST for asked in self.open.values()):
            return
        self._steps += 1
        damages = self._steps % DAMAGED_STEPS == 0
        self._observer.damage = PLANTED if damages else "none"
        if damages:
            # The step before, whose tokens are not there yet, and this one are inside of these answers.
            again = [asked for asked in self.open.values() if asked.kind == AGAIN and asked.answer.tokens]
            recorded = {asked.request.name: len(asked.answer.tokens) for asked in self.closed[FIRST]}
            self.hit |= {
                asked.request.name
                for asked in again
                if len(asked.answer.tokens) + 3 < recorded[asked.request.name]
            }

    def has_room(self, kind: str, most: int) -> bool:
        """Say whether one more request of a kind may be open."""
        return len(self.open) < MOST_OPEN and sum(asked.kind == kind for asked in self.open.values()) < most

    def drain(self) -> None:
        """Finish what is under way."""
        while self.core.has_unfinished_requests():
            self.step()


def note(answer: Answer, out: Any) -> None:
    """Take over what the engine says of a request so far."""
    completion = out.outputs[0]
    given = list(zip(completion.token_ids, completion.logprobs, strict=True))
    for token, entry in given[len(answer.tokens) :]:
        answer.tokens.append(token)
        answer.logprobs.append(entry[token].logprob)
        answer.ranked.append({other: item.logprob for other, item in entry.items()})
    if out.prompt_logprobs and not answer.prompt_logprobs:
        entries = zip(out.prompt_token_ids[1:], out.prompt_logprobs[1:], strict=True)
        answer.prompt_logprobs = [entry[token].logprob for token, entry in entries]


def figures(closed: Mapping[str, Sequence[Asked]]) -> dict[str, Any]:
    """Count what was closed, by kind, and compare the replays with what was recorded."""
    arrived = [*closed[FIRST], *closed[LATER]]
    answers = [asked.answer for asked in (*arrived, *closed[AGAIN])]
    recorded = {asked.request.name: asked.answer for asked in closed[FIRST] if asked.answer.tokens}
    names = [asked.request.name for asked in closed[AGAIN]]
    compared = [traffic.compare(recorded[asked.request.name], asked.answer) for asked in closed[AGAIN]]
    found = zip(names, compared, strict=True)
    return {
        "requests": len(arrived),
        "tokens": sum(len(answer.tokens) for answer in answers),
        "prompt_tokens": sum(asked.request.length for asked in arrived),
        "cancellations": sum(asked.answer.cancelled for asked in arrived),
        "recorded": len(recorded),
        "replays": len(compared),
        "replayed_tokens": sum(len(recorded[name].tokens) for name in names),
        "tokens_compared": sum(one.tokens for one in compared),
        "prompt_logprobs_compared": sum(one.prompt_logprobs for one in compared),
        "parted": sum(one.swing is not None for one in compared),
        "parted_at_once": sum(one.swing is not None and not one.tokens for one in compared),
        "widest_swing": max((one.swing for one in compared if one.swing is not None), default=0.0),
        "logprobs_checked": sum(len(answer.logprobs) + len(answer.prompt_logprobs) for answer in answers),
        "not_finite": [f"{bad} log-probabilities" for answer in answers if (bad := answer.not_finite())],
        "differing": [f"request {name}: {one.problem}" for name, one in found if one.problem],
    }


def planted(soak: Soak) -> dict[str, Any]:
    """Say which of the answers that damage hit were found to differ."""
    recorded = {asked.request.name: asked.answer for asked in soak.closed[FIRST]}
    hit = [asked for asked in soak.closed[AGAIN] if asked.request.name in soak.hit]
    compared = [traffic.compare(recorded[asked.request.name], asked.answer) for asked in hit]
    return {"hit": len(hit), "found": sum(one.problem is not None for one in compared)}


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

    observer = observe_backend(segment.job) if segment.planted else None
    engine = LLM(**engine_arguments(segment.job, segment.folder / segment.job.model))
    batches = BatchWatch(engine)
    soak = Soak(segment, engine, observer)
    began, began_at = time.monotonic(), time.time()
    end += segment.seconds
    soak.beat.touch()
    soak.traffic(began + RECORDED_SHARE * (end - began), end)
    arrived = time.monotonic()
    if observer is not None:
        observer.damage = "none"
    soak.drain()
    found = figures(soak.closed) | (planted(soak) if segment.planted else {})
    found["differing"] += [f"{name}: it never ended" for name in soak.open]
    found |= {
        "preemptions": batches.preemptions, "hangs": [], "seconds": time.monotonic() - began,
        "traffic_seconds": arrived - began, "began": began_at, "ended": time.time(),
    }  # fmt: skip
    records = [traffic.as_json(asked.request, asked.answer) for asked in soak.closed[FIRST]]
    path.with_suffix(".records.json").write_text(json.dumps(records))
    path.with_suffix(".result.json").write_text(json.dumps(found | {"batches": batches.as_json()}))


if __name__ == "__main__":
    main()
