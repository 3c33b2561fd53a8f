"""`FilterCountGroupedByKey`: groups are counted in the store, by all survivors at the same time."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest

from inprocess.compose import Compose
from inprocess.exception import BarrierTimeout
from inprocess.rank_assignment import (
    FilterCountGroupedByKey,
    FilterGroupedByKey,
    RankAssignment,
    RankAssignmentCtx,
    RankDiscarded,
    ShiftRanks,
)
from inprocess.state import State
from tests.inprocess.rank_assignment.stores import FakeStore, on_all_ranks

WORLD = 6


def marked(assignment: RankAssignment, terminated: set[int]) -> set[int]:
    """Return the terminated set that all ranks outside of it agree on."""
    store = FakeStore()

    def run(rank: int) -> set[int]:
        return assignment(RankAssignmentCtx(State(rank, WORLD), store, set(terminated))).terminated_ranks

    answers = on_all_ranks(set(range(WORLD)) - terminated, run)
    everything = set().union(*answers.values())
    assert all(answer == everything for rank, answer in answers.items() if rank not in everything)
    return everything


def pairs(state: Any) -> int:
    return state.rank // 2


def is_pair(count: int) -> bool:
    return count == 2


def test_the_group_of_a_lost_rank_goes_with_it() -> None:
    assert marked(FilterCountGroupedByKey(pairs, is_pair), {3}) == {2, 3}


def test_nobody_goes_when_all_groups_are_whole() -> None:
    assert marked(FilterCountGroupedByKey(pairs, is_pair), set()) == set()


def test_a_constant_key_is_one_group() -> None:
    assert marked(FilterCountGroupedByKey("job", lambda count: count >= 5), {0}) == {0}
    assert marked(FilterCountGroupedByKey("job", lambda count: count >= 6), {0}) == set(range(WORLD))


def test_older_key_function() -> None:
    assert marked(FilterGroupedByKey(lambda rank, world_size: rank * 2 // world_size, lambda n: n > 2), {5}) == {
        3,
        4,
        5,
    }
    assert marked(FilterGroupedByKey("job", lambda count: count > 2), {5}) == {5}


def test_several_filters_in_a_chain_do_not_mix() -> None:
    triples = FilterCountGroupedByKey(lambda state: state.rank // 3, lambda count: count > 1)
    again = FilterCountGroupedByKey(pairs, is_pair)
    assert marked(Compose(triples, again), {3}) == {2, 3}
    assert marked(Compose(again, triples), {3, 4}) == {2, 3, 4, 5}


def test_numbering_after_it() -> None:
    store = FakeStore()
    chain = Compose(ShiftRanks(), FilterCountGroupedByKey(pairs, is_pair))

    def run(rank: int) -> int | None:
        try:
            return chain(RankAssignmentCtx(State(rank, WORLD), store, {3})).state.rank
        except RankDiscarded:
            return None

    assert on_all_ranks([0, 1, 2, 4, 5], run) == {0: 0, 1: 1, 2: None, 4: 2, 5: 3}


def test_the_store_of_the_state_serves_the_older_style() -> None:
    store = FakeStore()

    def run(rank: int) -> tuple[State, set[int]]:
        state = State(rank, WORLD)
        state.store = store
        return FilterGroupedByKey(lambda rank, _: rank // 2, is_pair)(state, {1})

    assert {frozenset(left) for _, left in on_all_ranks([0, 2, 3, 4, 5], run).values()} == {frozenset({0, 1})}


def test_two_assignments_with_the_same_store() -> None:
    """As for the assignment before iteration 0 and the one after it, with other dense ranks."""
    store = FakeStore()
    chain = Compose(
        ShiftRanks(), FilterCountGroupedByKey(pairs, is_pair), FilterCountGroupedByKey("job", lambda count: count > 1)
    )

    def run(rank: int) -> int | None:
        state = State(rank, WORLD)
        try:
            chain(RankAssignmentCtx(state, store, {0}))
            chain(RankAssignmentCtx(state, store, set()))
        except RankDiscarded:
            return None
        return state.rank

    assert on_all_ranks([1, 2, 3, 4, 5], run) == {1: None, 2: 0, 3: 1, 4: 2, 5: 3}


def test_a_terminated_rank_stays_silent() -> None:
    store = FakeStore()
    ctx = RankAssignmentCtx(State(1, 2), store, {1})
    assert FilterCountGroupedByKey("job", is_pair)(ctx) is ctx
    assert not store.calls


def test_a_missing_rank_is_a_timeout() -> None:
    lonely = FilterCountGroupedByKey("job", is_pair, timeout=timedelta(milliseconds=1))
    with pytest.raises(BarrierTimeout):
        lonely(RankAssignmentCtx(State(0, 2), FakeStore(), set()))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((3, is_pair), "key_or_fn must be a str or a function, not int"),
        (("job", 2), "condition must be a function"),
        (("job", is_pair, 60), "timeout must be a timedelta, not int"),
    ],
)
def test_bad_arguments(arguments: tuple[Any, ...], message: str) -> None:
    with pytest.raises(TypeError, match=message):
        FilterCountGroupedByKey(*arguments)
