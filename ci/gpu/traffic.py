"""Random traffic for an engine, and what it answered: pure Python, the same for the same seed everywhere.

A segment's traffic is an endless series of requests. Arrivals are counted in steps of the engine, so that
what is in a batch depends on the seed and not on how fast the machine is. Lengths are spread evenly over
the orders of magnitude; some requests begin like an earlier one, some are cancelled, now and then many come
at once.
"""

from __future__ import annotations

import math
import random
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

SHORTEST, LONGEST = 1, 30_000
MOST_TOKENS = 192
SCORED_LENGTH = 4_000  # longer prompts are not asked for the log-probabilities of their own tokens
CANCELLED, SHARED, SCORED, BURST = 0.12, 0.2, 0.1, 0.04
MEAN_GAP = 3.0  # steps
BURST_SIZE = 12
RECENT = 64  # prompts that a later one may begin like


@dataclass(frozen=True)
class Request:
    """One request.

    Attributes:
        name: Number in the segment.
        seed: Of its own text.
        length: Tokens of the prompt.
        prefix: Seed and length of the beginning that it has in common with an earlier request.
        tokens: Tokens to generate.
        gap: Steps after the arrival of the request before.
        cancel_after: Tokens after which it is cancelled; None if it is not.
        scored: Whether the prompt's own log-probabilities are asked for.

    """

    name: int
    seed: int
    length: int
    prefix: tuple[int, int] | None
    tokens: int
    gap: int
    cancel_after: int | None
    scored: bool


def requests(seed: int) -> Iterator[Request]:
    """Yield the requests of a segment, without end."""
    source = random.Random(seed)
    recent: list[tuple[int, int]] = []
    waiting = 0  # of a burst
    name = 0
    while True:
        length = min(LONGEST, max(SHORTEST, round(math.exp(source.uniform(0.0, math.log(LONGEST))))))
        own = source.randrange(1 << 30)
        prefix = shared_prefix(source, recent, length)
        tokens = source.randint(1, MOST_TOKENS)
        cancelled = source.random() < CANCELLED
        waiting = BURST_SIZE if not waiting and source.random() < BURST else max(0, waiting - 1)
        yield Request(
            name=name,
            seed=own,
            length=length,
            prefix=prefix,
            tokens=tokens,
            gap=0 if waiting else round(source.expovariate(1 / MEAN_GAP)),
            cancel_after=source.randint(0, tokens) if cancelled else None,
            scored=length <= SCORED_LENGTH and source.random() < SCORED,
        )
        recent = [*recent, (own, length)][-RECENT:]
        name += 1


def shared_prefix(
    source: random.Random, recent: Sequence[tuple[int, int]], length: int
) -> tuple[int, int] | None:
    """Choose an earlier prompt, and how much of it the next one repeats."""
    if not recent or source.random() >= SHARED:
        return None
    seed, longest = source.choice(list(recent))
    return seed, source.randint(0, min(longest, length))


@dataclass
class Answer:
    """What the engine made of a request.

    Attributes:
        tokens: Generated tokens.
        logprobs: Their log-probabilities.
        gaps: By how much each was more probable than the next best.
        prompt_logprobs: Of the prompt's tokens but the first, if they were asked for.
        cancelled: Whether the request was cancelled before its end.

    """

    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    gaps: list[float] = field(default_factory=list)
    prompt_logprobs: list[float] = field(default_factory=list)
    cancelled: bool = False

    def not_finite(self) -> int:
        """Return how many log-probabilities are NaN or infinite."""
        return sum(not math.isfinite(value) for value in (*self.logprobs, *self.prompt_logprobs))


# Answers differ by the rounding of other batches. Where a choice is that close,
# another token may follow, and from there on the answers have nothing in common. Rows that are read wrongly
# change these models' log-probabilities by 0.4 to 0.9 in the mean (`complete_proofs`), rounding by 0.001.
NEAR_TIE: Final = 0.3
MEAN_BOUND: Final = 0.05
FEWEST: Final = 8  # log-probabilities; the mean of fewer may differ by more, as their sum may
ANY_BOUND: Final = 1.5


def replay_problem(before: Answer, after: Answer) -> str | None:
    """Say how the answer to the same request differs, None if it does not.

    Tokens must be the same up to the first near tie (`NEAR_TIE`), and until then log-probabilities within
    `MEAN_BOUND` in the mean and `ANY_BOUND` each.

    Args:
        before: The recorded answer; a cancelled one is compared as far as it goes.
        after: The answer to the same request, later and in other company.

    """
    count = len(before.tokens)
    if len(after.tokens) < count:
        return f"{len(after.tokens)} tokens instead of {count}"
    pairs = list(zip(before.tokens, after.tokens[:count], strict=True))
    parted = next((n for n, (old, new) in enumerate(pairs) if old != new), count)
    if parted < count and min(before.gaps[parted], after.gaps[parted]) > NEAR_TIE:
        return f"token {parted} is {pairs[parted][1]}, not {pairs[parted][0]}"
    old = [*before.prompt_logprobs, *before.logprobs[:parted]]
    new = [*after.prompt_logprobs, *after.logprobs[:parted]]
    if len(old) != len(new):
        return f"{len(new)} log-probabilities instead of {len(old)}"
    return change_problem([abs(a - b) for a, b in zip(old, new, strict=True)])


def change_problem(changes: Sequence[float]) -> str | None:
    """Say that log-probabilities changed by more than they may, None if they did not."""
    if not changes:
        return None
    if not all(map(math.isfinite, changes)):
        return "log-probabilities are not finite"
    mean, most = sum(changes) / len(changes), max(changes)
    mean_bound = MEAN_BOUND * max(len(changes), FEWEST) / len(changes)
    allowed = mean <= mean_bound and most <= ANY_BOUND
    return None if allowed else f"log-probabilities differ by {mean:.2e} in the mean and up to {most:.2e}"


class MergeError(Exception):
    """Segments do not belong together."""


def wheel_of(segment: Mapping[str, Any]) -> tuple[str, str] | None:
    """Return the hash of the wheel and the stack's id, None if the report names none."""
    files = segment.get("wheel_files")
    return (files["wheel"]["sha256"], files["stack_id"]) if files else None


SUMS = ("requests", "tokens", "prompt_tokens", "cancellations", "preemptions", "replays", "logprobs_checked")
LISTS = ("not_finite", "differing", "hangs")


def merge(segments: Sequence[Mapping[str, Any]], least: float = 0.0) -> dict[str, Any]:
    """Add up the reports of segments.

    Args:
        segments: Their reports.
        least: Seconds of traffic that they must have had together.

    Raises:
        MergeError: There is none, one is there twice, they are not of the same wheel or too short.

    """
    if not segments:
        raise MergeError("no segment")
    wheels = {wheel_of(segment) for segment in segments}
    if len(wheels) != 1 or None in wheels:
        raise MergeError(f"segments of different wheels, or of an unknown one: {sorted(map(str, wheels))}")
    names = [segment["segment"] for segment in segments]
    if len(set(names)) != len(names):
        raise MergeError(f"a segment is there twice: {sorted(names)}")
    seconds = sum(segment["seconds"] for segment in segments)
    if seconds < least:
        raise MergeError(f"{seconds:.0f} s of traffic, not {least:.0f}")
    total: dict[str, Any] = {name: sum(segment[name] for segment in segments) for name in SUMS}
    total |= {name: [item for segment in segments for item in segment[name]] for name in LISTS}
    return {
        "schema": 1,
        "segments": sorted(names),
        "seconds": seconds,
        "engines": sorted({segment["engine"] for segment in segments}),
        **total,
        "host": segments[0]["host"],
        "wheel_files": segments[0]["wheel_files"],
        "passed": all(segment["passed"] for segment in segments),
        "result": "passed" if all(segment["passed"] for segment in segments) else "FAILED",
    }


def as_json(request: Request, answer: Answer) -> dict[str, Any]:
    """Return a recorded request with its answer."""
    return {"request": asdict(request), "answer": asdict(answer)}
