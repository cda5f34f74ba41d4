"""The soak's traffic is mixed, other answers are found, and segments of other wheels are not added up."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest
import traffic
from hypothesis import given
from hypothesis import strategies as st
from traffic import Answer, Comparison, Request

if TYPE_CHECKING:
    from collections.abc import Iterable

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
    logprobs = [-0.5 - 0.01 * n for n in range(count)]
    return Answer(list(range(count)), logprobs, ranked(range(count), logprobs), [-1.0] * 7)


def ranked(tokens: Iterable[int], logprobs: Iterable[float]) -> list[dict[int, float]]:
    """Rank the tokens that were chosen, and one that is far behind."""
    return [{token: value, 999: value - 4.0} for token, value in zip(tokens, logprobs, strict=True)]


def parting(place: int, before: dict[int, float], after: dict[int, float]) -> tuple[Answer, Answer]:
    """Return two answers of which each chose, at a place, the first of what it ranks there."""
    one, other = answer(), answer()
    for side, ranks, rest in ((one, before, 0), (other, after, 50)):
        side.tokens[place] = next(iter(ranks))
        side.logprobs[place] = side.ranked[place][side.tokens[place]] = ranks[side.tokens[place]]
        side.ranked[place] = ranks
        side.tokens[place + 1 :] = [token + rest for token in side.tokens[place + 1 :]]
    return one, other


def changed(**what: Any) -> Answer:
    return replace(answer(), **what)


def test_the_same_answer_is_no_problem() -> None:
    assert traffic.compare(answer(), answer()) == Comparison(None, 20, 7)


def test_a_cancelled_request_is_compared_as_far_as_it_went() -> None:
    before = replace(answer(2), cancelled=True)
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
        changed(tokens=[*range(19), 99], ranked=ranked([*range(19), 99], answer().logprobs)),
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


TIE, OTHER_WAY = {10: -0.70, 90: -0.72, 3: -4.0}, {90: -0.69, 10: -0.71, 3: -4.0}


@pytest.mark.parametrize("place", [0, 10, 19])
def test_a_near_tie_may_go_the_other_way(place: int) -> None:
    found = traffic.compare(*parting(place, TIE, OTHER_WAY))
    assert (found.problem, found.tokens, found.prompt_logprobs) == (None, place, 7)
    assert found.swing == pytest.approx(0.04)


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ({10: -0.01, 90: -8.0}, {90: -5.0, 10: -5.1}),
        ({10: -0.7, 90: -0.9}, {90: -0.01, 10: -8.0}),
        ({10: -0.7, 90: -0.72}, {90: -5.2, 10: -5.22}),
        ({10: -0.7, 3: -0.72}, {90: -0.7, 10: -0.71}),
        ({10: -0.7, 90: -0.72}, {90: -0.7, 3: -0.71}),
        ({10: -0.5, 90: -0.8}, {90: -0.5, 10: -0.8}),
        ({10: -0.7, 90: -0.72}, {90: math.nan, 10: -0.7}),
        ({10: -0.7, 90: -0.72}, {90: -0.7, 10: math.nan}),
        ({10: -0.7, 90: -0.72}, {90: -0.7, 10: -math.inf}),
    ],
    ids=[
        *("sure, then undecided", "undecided, then sure", "undecided both times, about less"),
        *("not ranked before", "not ranked after", "both moderately sure"),
        *("nan", "nan of the other", "minus infinity"),
    ],
)
@pytest.mark.parametrize("place", [0, 10])
def test_damage_where_answers_part_is_found(
    place: int, before: dict[int, float], after: dict[int, float]
) -> None:
    """A damaged place flattens what it predicts: undecided alone does not excuse another token."""
    assert traffic.compare(*parting(place, before, after)).problem


def test_of_a_token_that_is_not_ranked_it_is_said_how_far_the_ranking_goes() -> None:
    """How many were nearly tied tells damage from a ranking that is too short."""
    problem = traffic.compare(*parting(3, {10: -0.7, 4: -0.75}, {90: -0.7, 10: -0.8})).problem
    assert problem == "token 3 is 90, not 10, not both among the most probable, which span 0.05 and 0.10"


def test_flat_predictions_are_found_wherever_they_begin() -> None:
    for place in range(20):
        one, other = answer(), answer()
        for n in range(place, 20):
            other.tokens[n], other.logprobs[n] = 60 + n, -6.0
            other.ranked[n] = {60 + n: -6.0, n: -6.001, 5: -6.01}
            one.ranked[n] = {n: one.logprobs[n], 60 + n: -7.0}
        assert traffic.compare(one, other).problem


@given(st.integers(1, 20), st.integers(0, 20), st.integers(0, 9))
def test_what_was_compared_is_counted(count: int, place: int, scored: int) -> None:
    before = Answer(list(range(count)), [-0.5] * count, [], [-1.0] * scored)
    before.ranked = [{n: -0.5, n + 100: -0.51} for n in range(count)]
    tokens = [token + 100 * (place <= n) for n, token in enumerate(before.tokens)]
    after = replace(before, tokens=[*tokens, 7])
    compared = min(place, count)
    swing = 0.0 if place < count else None
    assert traffic.compare(before, after) == Comparison(None, compared, scored, swing)
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
        "widest_swing": 0.1 * (1 + number),
        "passed": True, **numbers, **lists, **what,
    }  # fmt: skip


def test_segments_are_added_up() -> None:
    total = traffic.merge([segment(1), segment(0, differing=["request 4: token"], passed=False)])
    assert (total["segments"], total["seconds"], total["requests"]) == ([0, 1], 21.0, 6)
    assert (total["traffic_seconds"], total["clock_seconds"]) == (20.0, 11.5)
    assert total["widest_swing"] == 0.2
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
    for schema in (1, 2):
        with pytest.raises(traffic.MergeError, match=r"segments \[1\] are of another soak.py"):
            traffic.merge([segment(0), segment(1, schema=schema)])


def test_no_segments_are_refused() -> None:
    with pytest.raises(traffic.MergeError):
        traffic.merge([])
    with pytest.raises(traffic.MergeError):
        traffic.merge([segment(0, wheel_files=None)])
