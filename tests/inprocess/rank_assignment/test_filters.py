"""Who is active: filters as members of an assignment, and as the separate stage of the older interface."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from inprocess import rank_filter
from inprocess.compose import Compose
from inprocess.rank_assignment import (
    ActivateAllRanks,
    ActiveWorldSizeDivisibleBy,
    MaxActiveWorldSize,
    RankAssignment,
    RankAssignmentCtx,
    RankFilter,
    ShiftRanks,
    WorldSizeDivisibleBy,
)
from inprocess.state import Mode, State


def active_numbers(assignment: RankAssignment, states: list[State], terminated: set[int]) -> list[int | None]:
    """Run the assignment on all survivors; return their active ranks."""
    for state in states:
        assignment(RankAssignmentCtx(state, None, set(terminated)))
        assert state.mode is (Mode.INACTIVE if state.active_rank is None else Mode.ACTIVE)
    numbers = [state.active_rank for state in states]
    active = [number for number in numbers if number is not None]
    assert {state.active_world_size for state in states} == {len(active)}
    return numbers


def world(size: int) -> list[State]:
    return [State(rank, size) for rank in range(size)]


def test_all_active() -> None:
    assert active_numbers(Compose(ActivateAllRanks(), ShiftRanks()), world(3), set()) == [0, 1, 2]


def test_limit() -> None:
    assert active_numbers(MaxActiveWorldSize(2), world(4), set()) == [0, 1, None, None]
    assert active_numbers(MaxActiveWorldSize(9), world(2), set()) == [0, 1]
    assert active_numbers(MaxActiveWorldSize(), world(3), set()) == [0, 1, 2]


@pytest.mark.parametrize("name", [ActiveWorldSizeDivisibleBy, WorldSizeDivisibleBy])
def test_divisible(name: type[ActiveWorldSizeDivisibleBy]) -> None:
    assert active_numbers(name(3), world(5), set()) == [0, 1, 2, None, None]
    assert active_numbers(name(), world(2), set()) == [0, 1]
    assert active_numbers(name(4), world(3), set()) == [None, None, None]


def test_filters_narrow_each_other() -> None:
    chain = Compose(ActiveWorldSizeDivisibleBy(2), MaxActiveWorldSize(5), ShiftRanks())
    states = world(8)
    assert active_numbers(chain, states, set()) == [0, 1, 2, 3, None, None, None, None]
    survivors = [state for state in states if state.initial_rank not in (0, 1, 2, 3, 4)]
    assert active_numbers(chain, survivors, {0, 1, 2, 3, 4}) == [0, 1, None]


def test_active_ranks_are_never_more_than_live_ones() -> None:
    """After a numbering of somebody else, which left the active size of the larger world in the state."""
    state = State(0, 3, active_rank=0, active_world_size=6)
    MaxActiveWorldSize(6)(RankAssignmentCtx(state, None, set()))
    assert state.active_world_size == 3


def test_separate_stage() -> None:
    for filter_, expected in [
        (rank_filter.MaxActiveWorldSize(3), [0, 1, 2, None, None]),
        (rank_filter.MaxActiveWorldSize(), [0, 1, 2, 3, 4]),
        (rank_filter.WorldSizeDivisibleBy(2), [0, 1, 2, 3, None]),
        (Compose(rank_filter.WorldSizeDivisibleBy(2), rank_filter.MaxActiveWorldSize(3)), [0, 1, None, None, None]),
    ]:
        states = world(5)
        for state in states:
            state.activate_all_ranks()
            assert filter_(state) is state
        assert [state.active_rank for state in states] == expected


@pytest.mark.parametrize(
    "make",
    [
        MaxActiveWorldSize,
        ActiveWorldSizeDivisibleBy,
        rank_filter.MaxActiveWorldSize,
        rank_filter.WorldSizeDivisibleBy,
    ],
)
def test_bad_numbers(make: Callable[[Any], object]) -> None:
    with pytest.raises(ValueError, match=r"must be at least 1, not 0"):
        make(0)
    for wrong in ("2", 2.0, True):
        with pytest.raises(TypeError, match="must be an integer"):
            make(wrong)


def test_a_terminated_rank_has_no_activity() -> None:
    with pytest.raises(ValueError, match="neither active nor a spare"):
        MaxActiveWorldSize(1)(RankAssignmentCtx(State(None, 2), None, set()))


class EvenRanks(RankFilter):
    """A filter of a program, as it writes one."""

    def __call__(self, ctx: RankAssignmentCtx) -> RankAssignmentCtx:
        rank, size = ctx.state.rank, ctx.state.world_size
        assert rank is not None
        ctx.state.active_rank = None if rank % 2 else rank // 2
        ctx.state.active_world_size = (size + 1) // 2
        ctx.state.mode = Mode.INACTIVE if rank % 2 else Mode.ACTIVE
        return ctx


def test_filters_have_a_class_of_their_own() -> None:
    for each in (ActivateAllRanks(), MaxActiveWorldSize(1), ActiveWorldSizeDivisibleBy(2), EvenRanks()):
        assert isinstance(each, RankFilter)
    assert not isinstance(ShiftRanks(), RankFilter)
    assert isinstance(Compose(EvenRanks(), MaxActiveWorldSize(2)), RankFilter)
    composed = Compose(EvenRanks(), ShiftRanks())
    assert isinstance(composed, RankAssignment)
    assert active_numbers(composed, world(3), set()) == [0, None, 1]
