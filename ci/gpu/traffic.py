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
    from collections.abc import Iterable, Iterator, Mapping, Sequence

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
        ranked: At each place, the most probable tokens with their log-probabilities, the chosen one too.
        prompt_logprobs: Of the prompt's tokens but the first, if they were asked for.
        cancelled: Whether the request was cancelled before its end.

    """

    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    ranked: list[dict[int, float]] = field(default_factory=list)
    prompt_logprobs: list[float] = field(default_factory=list)
    cancelled: bool = False

    def not_finite(self) -> int:
        """Return how many log-probabilities are NaN or infinite."""
        return sum(not math.isfinite(value) for value in (*self.logprobs, *self.prompt_logprobs))


# Answers differ by the rounding of other batches: in the mean over many positions native engines differ by
# 0.0009 to 0.0018, ours from them by up to 0.0021 (`differences` in results/{fp8,wide,groups,dcp}.json).
# Where a choice is close, another token may follow, and from there on the answers have nothing in common. At
# that place they still have: both must rank both tokens, and what one is ahead of the other by may not swing
# by more than this. Where engines chose greedily one log-probability changed by 0.16 at most, see below.
NEAR_TIE: Final = 0.5
# Tokens that an answer ranks at each place, as many as vLLM gives unless told otherwise. Among 5 one of both
# was missing in 25 of 2,245 partings, while in all others the distance changed by 0.12 at most: more than 5
# were as good as tied.
RANKED: Final = 20
# Half of the least, and ten times rounding: damaged attention changes these models' log-probabilities by more
# (`damage` in the same reports). The LSE in base 2 changed them by 0.040 and 0.074 in the mean, rows moved by
# one by 0.31 to 2.9, other damages by 0.36 to 4.0.
MEAN_BOUND: Final = 0.02
# Log-probabilities that the mean is taken over at least; of fewer, the sum may be as large as of so many. A
# rounding can move a row out of the top-k and change one of them by much. In six million positions where
# engines agree (arrays of these proofs) 32 in a row differed by 0.46 in sum at most, not 0.64, one alone by
# 0.21; in what engines chose greedily by 0.16 and 0.06. More have more room: 192 in a row, 1.4 of 3.8.
FEWEST: Final = 32
ANY_BOUND: Final = 1.5


@dataclass(frozen=True)
class Comparison:
    """What the second answer to a request has in common with the first.

    Attributes:
        problem: How it differs; None if it does not.
        tokens: Generated tokens, from the first on, that are equal; their log-probabilities were compared.
        prompt_logprobs: Log-probabilities of the prompt that were compared.
        swing: Where another token followed at a near tie, how much the two tokens' distance changed; None if
            none did. What comes after is not compared.

    """

    problem: str | None
    tokens: int = 0
    prompt_logprobs: int = 0
    swing: float | None = None


def compare(before: Answer, after: Answer) -> Comparison:
    """Compare the answers to the same request.

    Tokens must be the same up to the first near tie (`NEAR_TIE`), and until then, and of both tokens there,
    log-probabilities within `MEAN_BOUND` in the mean and `ANY_BOUND` each.

    Args:
        before: The recorded answer; a cancelled one is compared as far as it goes.
        after: The answer to the same request, later and in other company.

    """
    count = len(before.tokens)
    if len(after.tokens) < count:
        return Comparison(f"{len(after.tokens)} tokens instead of {count}")
    pairs = list(zip(before.tokens, after.tokens[:count], strict=True))
    parted = next((n for n, (old, new) in enumerate(pairs) if old != new), count)
    old = [*before.prompt_logprobs, *before.logprobs[:parted]]
    new = [*after.prompt_logprobs, *after.logprobs[:parted]]
    if len(old) != len(new):
        return Comparison(f"{len(new)} log-probabilities instead of {len(old)}")
    changes = [b - a for a, b in zip(old, new, strict=True)]
    swing = None
    if parted < count:
        ranks = before.ranked[parted], after.ranked[parted]
        if not all(token in ranked for token in pairs[parted] for ranked in ranks):
            spans = " and ".join(f"{max(ranked.values()) - min(ranked.values()):.2f}" for ranked in ranks)
            missing = f"not both among the most probable, which span {spans}"
            return Comparison(f"token {parted} is {pairs[parted][1]}, not {pairs[parted][0]}, {missing}")
        first, second = (ranks[1][token] - ranks[0][token] for token in pairs[parted])
        swing = abs(second - first)
        if not swing <= NEAR_TIE:
            return Comparison(f"token {parted} is {pairs[parted][1]}, not {pairs[parted][0]}, by {swing:.2f}")
        changes += [first, second]
    problem = change_problem([abs(change) for change in changes])
    return Comparison(problem, parted, len(before.prompt_logprobs), swing)


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


SCHEMA: Final = 3
"""Of reports. In those of schema 1 no request arrived while recorded ones were asked again; in those of
schema 2 answers could part wherever one of them was undecided, and nothing was compared at that place."""
# What a segment must not be without.
NEEDED = (
    *("requests", "tokens", "prompt_tokens", "cancellations", "preemptions", "logprobs_checked"),
    *("recorded", "replays", "replayed_tokens", "tokens_compared", "prompt_logprobs_compared"),
)
SUMS = (*NEEDED, "parted", "parted_at_once")
TIMES = ("seconds", "traffic_seconds")
LISTS = ("not_finite", "differing", "hangs")


def union(intervals: Iterable[tuple[float, float]]) -> float:
    """Return the length of what intervals, each with its begin and its end, cover together."""
    length, covered = 0.0, -math.inf
    for begin, end in sorted(intervals):
        length += max(0.0, end - max(begin, covered))
        covered = max(covered, end)
    return length


def merge(segments: Sequence[Mapping[str, Any]], least: float = 0.0) -> dict[str, Any]:
    """Add up the reports of segments.

    Args:
        segments: Their reports.
        least: Seconds in which requests arrived that they must have had together.

    Raises:
        MergeError: There is none, one is there twice or of another schema, they are not of the same wheel
            or too short.

    """
    if not segments:
        raise MergeError("no segment")
    names = [segment["segment"] for segment in segments]
    if old := [segment["segment"] for segment in segments if segment["schema"] != SCHEMA]:
        raise MergeError(f"segments {old} are of another soak.py, whose reports count less: run them again")
    wheels = {wheel_of(segment) for segment in segments}
    if len(wheels) != 1 or None in wheels:
        raise MergeError(f"segments of different wheels, or of an unknown one: {sorted(map(str, wheels))}")
    if len(set(names)) != len(names):
        raise MergeError(f"a segment is there twice: {sorted(names)}")
    total: dict[str, Any] = {name: sum(segment[name] for segment in segments) for name in (*TIMES, *SUMS)}
    if total["traffic_seconds"] < least:
        raise MergeError(f"{total['traffic_seconds']:.0f} s of traffic, not {least:.0f}")
    total |= {name: [item for segment in segments for item in segment[name]] for name in LISTS}
    return {
        "schema": SCHEMA,
        "segments": sorted(names),
        "clock_seconds": union((segment["began"], segment["ended"]) for segment in segments),
        "engines": sorted({segment["engine"] for segment in segments}),
        "widest_swing": max(segment["widest_swing"] for segment in segments),
        **total,
        "host": segments[0]["host"],
        "wheel_files": segments[0]["wheel_files"],
        "passed": all(segment["passed"] for segment in segments),
        "result": "passed" if all(segment["passed"] for segment in segments) else "FAILED",
    }


def as_json(request: Request, answer: Answer) -> dict[str, Any]:
    """Return a recorded request with its answer."""
    return {"request": asdict(request), "answer": asdict(answer)}
