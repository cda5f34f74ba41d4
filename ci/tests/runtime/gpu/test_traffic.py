"""The soak's traffic is mixed, other answers are found, and segments of other wheels are not added up."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace
from typing import Any

import pytest
import traffic
from hypothesis import given
from hypothesis import strategies as st
from traffic import Answer, Comparison, Request

FILES = {"wheel": {"sha256": "a" * 64, "name": "w"}, "stack_id": "b" * 64}


def take(seed: int, count: int) -> list[Request]:
    return list(itertools.islice(traffic.requests(seed), count))


@given(st.integers(0, 1 << 40))
def test_every_request_can_be_served(seed: int) -> None:
    before: dict[int, int] = {}
    for number, request in enumerate(take(seed, 120)):
        assert request.name == number
        assert traffic.SHORTEST <= request.length <= traffic.LONGEST
        assert 1 <= request.tokens <= traffic.MOST_TOKENS
        assert request.gap >= 0
        assert request.cancel_after is None or 0 <= request.cancel_after <= request.tokens
        assert not request.scored or request.length <= traffic.SCORED_LENGTH
        if request.prefix is not None:
            source, length = request.prefix
            assert 0 <= length <= min(request.length, before[source])
        before[request.seed] = request.length


def test_the_same_seed_gives_the_same_traffic() -> None:
    assert take(5, 300) == take(5, 300)
    assert take(5, 300) != take(6, 300)


def test_traffic_is_mixed() -> None:
    some = take(3, 3000)
    assert min(request.length for request in some) == 1
    assert max(request.length for request in some) > 29_000
    for share, had in (
        (traffic.CANCELLED, [request.cancel_after is not None for request in some]),
        (traffic.SHARED, [request.prefix is not None for request in some]),
    ):
        assert 0.7 * share < sum(had) / len(some) < 1.3 * share
    assert any(request.cancel_after == 0 for request in some)
    assert any(request.scored for request in some)
    bursts = [len(list(group)) for key, group in itertools.groupby(some, lambda r: r.gap == 0) if key]
    assert max(bursts) >= traffic.BURST_SIZE
    assert max(request.gap for request in some) > 10


def answer(count: int = 20) -> Answer:
    return Answer(
        tokens=list(range(count)), logprobs=[-0.5 - 0.01 * n for n in range(count)], gaps=[1.0] * count,
        prompt_logprobs=[-1.0] * 7,
    )  # fmt: skip


def changed(**what: Any) -> Answer:
    return replace(answer(), **what)


def test_the_same_answer_is_no_problem() -> None:
    assert traffic.compare(answer(), answer()) == Comparison(None, 20, 7)


def test_a_cancelled_request_is_compared_as_far_as_it_went() -> None:
    before = Answer([0, 1], [-0.5, -0.51], [1.0, 1.0], [-1.0] * 7, cancelled=True)
    assert traffic.compare(before, answer()).problem is None
    assert traffic.compare(replace(before, tokens=[0, 9]), answer()).problem


@given(st.integers(0, 19), st.floats(1e-7, 1e-3))
def test_rounding_is_no_problem(place: int, change: float) -> None:
    logprobs = list(answer().logprobs)
    logprobs[place] += change
    other = changed(logprobs=logprobs)
    assert traffic.compare(answer(), other).problem is None


@pytest.mark.parametrize(
    "other",
    [
        changed(tokens=[*range(19), 99]),
        changed(tokens=list(range(19))),
        changed(logprobs=[math.nan] * 20),
        changed(prompt_logprobs=[-1.0] * 6),
        changed(prompt_logprobs=[-1.0] * 6 + [math.nan]),
        changed(prompt_logprobs=[-3.0, *[-1.0] * 6]),
        changed(logprobs=[value - 0.4 for value in answer().logprobs]),
    ],
    ids=["token", "short", "nan", "missing", "prompt nan", "one row", "all rows"],
)
def test_planted_differences_are_found(other: Answer) -> None:
    assert traffic.compare(answer(), other).problem


@pytest.mark.parametrize(("count", "allowed"), [(1, True), (3, True), (4, False), (20, False)])
def test_the_mean_of_few_tokens_may_differ_by_more(count: int, allowed: bool) -> None:
    before = replace(answer(count), prompt_logprobs=[])
    after = replace(before, logprobs=[value - 0.2 for value in before.logprobs])
    assert (traffic.compare(before, after).problem is None) == allowed


def test_only_a_near_tie_may_go_the_other_way() -> None:
    tie = [1.0] * 10 + [0.01] + [1.0] * 9
    before = changed(gaps=tie)
    logprobs = [*answer().logprobs[:10], *[-9.0] * 10]
    after = changed(tokens=[*range(10), *range(50, 60)], gaps=tie, logprobs=logprobs)
    assert traffic.compare(before, after) == Comparison(None, 10, 7, parted=True)
    assert traffic.compare(before, replace(after, gaps=[1.0] * 20)).problem is None
    assert traffic.compare(answer(), replace(after, gaps=[1.0] * 20)).problem


@given(st.integers(1, 20), st.integers(0, 20), st.integers(0, 9))
def test_what_was_compared_is_counted(count: int, place: int, scored: int) -> None:
    before = Answer(list(range(count)), [-0.5] * count, [0.01] * count, [-1.0] * scored)
    tokens = [token + 100 * (place <= n) for n, token in enumerate(before.tokens)]
    after = replace(before, tokens=[*tokens, 7])
    compared = min(place, count)
    assert traffic.compare(before, after) == Comparison(None, compared, scored, parted=place < count)
    # What comes after the parting is not compared, the token before it is.
    for n in range(count):
        logprobs = [-0.5 - 9.0 * (n == other) for other in range(count)]
        assert bool(traffic.compare(before, replace(after, logprobs=logprobs)).problem) == (n < compared)


def test_what_is_damaged_little_is_found_in_long_answers() -> None:
    # The LSE in base 2 changed log-probabilities by 0.04 in the mean, rounding by 0.002.
    before = replace(answer(100), prompt_logprobs=[])
    for change, allowed in ((0.04, False), (0.002, True)):
        after = replace(before, logprobs=[value - change for value in before.logprobs])
        assert (traffic.compare(before, after).problem is None) == allowed


@given(st.lists(st.tuples(st.integers(0, 40), st.integers(0, 15))))
def test_the_union_of_intervals_is_what_they_cover(given_: list[tuple[int, int]]) -> None:
    intervals = [(float(begin), float(begin + length)) for begin, length in given_]
    covered = {second for begin, length in given_ for second in range(begin, begin + length)}
    assert traffic.union(intervals) == len(covered)


@given(st.lists(st.sampled_from([-1.0, math.nan, math.inf, -math.inf])))
def test_what_is_not_finite_is_counted(values: list[float]) -> None:
    expected = sum(value != -1.0 for value in values)
    assert Answer(logprobs=values).not_finite() == Answer(prompt_logprobs=values).not_finite() == expected


def segment(number: int, **what: Any) -> dict[str, Any]:
    numbers = dict.fromkeys(traffic.SUMS, 3)
    lists: dict[str, Any] = {name: [] for name in traffic.LISTS}
    return {
        "schema": traffic.SCHEMA, "segment": number, "engine": "e", "seconds": 10.5, "traffic_seconds": 10.0,
        "began": 50.0 + number, "ended": 60.5 + number, "host": {"torch": "2"}, "wheel_files": FILES,
        "passed": True, **numbers, **lists, **what,
    }  # fmt: skip


def test_segments_are_added_up() -> None:
    total = traffic.merge([segment(1), segment(0, differing=["request 4: token"], passed=False)])
    assert (total["segments"], total["seconds"], total["requests"]) == ([0, 1], 21.0, 6)
    assert (total["traffic_seconds"], total["clock_seconds"]) == (20.0, 11.5)
    assert all(total[name] == 6 for name in traffic.SUMS)
    assert total["differing"] == ["request 4: token"]
    assert (total["passed"], total["result"]) == (False, "FAILED")
    assert traffic.merge([segment(1)])["result"] == "passed"


@pytest.mark.parametrize(
    "others",
    [
        [segment(1, wheel_files={**FILES, "stack_id": "c" * 64})],
        [segment(1, wheel_files={**FILES, "wheel": {"sha256": "c" * 64}})],
        [segment(1, wheel_files=None)],
        [segment(0)],
    ],
    ids=["other stack", "other wheel", "no wheel", "twice"],
)
def test_segments_that_do_not_belong_together_are_refused(others: list[dict[str, Any]]) -> None:
    with pytest.raises(traffic.MergeError):
        traffic.merge([segment(0), *others])


def test_the_time_with_arrivals_counts() -> None:
    assert traffic.merge([segment(0), segment(1)], 20.0)["seconds"] == 21.0
    with pytest.raises(traffic.MergeError, match="20 s of traffic, not 21"):
        traffic.merge([segment(0), segment(1)], 21.0)


def test_reports_that_count_less_are_refused() -> None:
    with pytest.raises(traffic.MergeError, match=r"segments \[1\] are of another soak.py"):
        traffic.merge([segment(0), segment(1, schema=1)])


def test_no_segments_are_refused() -> None:
    with pytest.raises(traffic.MergeError):
        traffic.merge([])
    with pytest.raises(traffic.MergeError):
        traffic.merge([segment(0, wheel_files=None)])
