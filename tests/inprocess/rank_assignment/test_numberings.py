"""`ShiftRanks` and `FillGaps`."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from inprocess.rank_assignment import FillGaps, RankAssignment, RankAssignmentCtx, RankDiscarded, ShiftRanks
from inprocess.state import Mode, State


def renumber(assignment: RankAssignment, world_size: int, terminated: set[int]) -> dict[int, int]:
    """Map each survivor to its new rank; checks what is the same for all numberings."""
    numbers = {}
    for rank in range(world_size):
        state = State(rank, world_size, active_rank=rank, active_world_size=world_size, mode=Mode.ACTIVE, iteration=3)
        ctx = RankAssignmentCtx(state, None, set(terminated))
        if rank in terminated:
            with pytest.raises(RankDiscarded, match=f"rank {rank} "):
                assignment(ctx)
            assert (state.rank, state.world_size, state.active_rank) == (rank, world_size, rank)
            continue
        result = assignment(ctx)
        assert result.state is state
        assert result.terminated_ranks == set()
        assert ctx.terminated_ranks == terminated
        assert state.world_size == world_size - len(terminated)
        assert (state.initial_rank, state.initial_world_size, state.iteration) == (rank, world_size, 3)
        assert (state.active_rank, state.active_world_size, state.mode) == (None, None, Mode.INITIALIZED)
        numbers[rank] = state.rank
    return numbers


def test_shift_ranks_keeps_the_order() -> None:
    assert renumber(ShiftRanks(), 8, {1, 4, 5}) == {0: 0, 2: 1, 3: 2, 6: 3, 7: 4}


def test_fill_gaps_moves_the_ranks_that_do_not_fit() -> None:
    assert renumber(FillGaps(), 8, {1, 4, 5}) == {0: 0, 2: 2, 3: 3, 6: 1, 7: 4}


@pytest.mark.parametrize("assignment", [ShiftRanks(), FillGaps()])
def test_nothing_changes_when_nobody_is_lost(assignment: RankAssignment) -> None:
    assert renumber(assignment, 5, set()) == {rank: rank for rank in range(5)}


@given(st.integers(1, 20).flatmap(lambda n: st.tuples(st.just(n), st.sets(st.integers(0, n - 1)))))
def test_numbers_have_no_gaps(world: tuple[int, set[int]]) -> None:
    world_size, terminated = world
    survivors = [rank for rank in range(world_size) if rank not in terminated]
    assert renumber(ShiftRanks(), world_size, terminated) == {rank: i for i, rank in enumerate(survivors)}
    filled = renumber(FillGaps(), world_size, terminated)
    assert sorted(filled.values()) == list(range(len(survivors)))
    assert all(filled[rank] == rank for rank in survivors if rank < len(survivors))
    movers = [filled[rank] for rank in survivors if rank >= len(survivors)]
    assert movers == sorted(movers)


@pytest.mark.parametrize("assignment", [ShiftRanks(), FillGaps()])
@pytest.mark.parametrize("stranger", [-1, 4])
def test_terminated_ranks_must_exist(assignment: RankAssignment, stranger: int) -> None:
    with pytest.raises(ValueError, match="do not exist in a world of 4"):
        assignment(RankAssignmentCtx(State(0, 4), None, {stranger}))


def test_a_rank_without_a_number_is_discarded() -> None:
    with pytest.raises(RankDiscarded):
        ShiftRanks()(RankAssignmentCtx(State(None, 4), None, set()))


def test_both_styles_of_call() -> None:
    state = State(7, 8)
    returned, terminated = FillGaps()(state, {1, 4, 5})
    assert returned is state
    assert (state.rank, state.world_size, terminated) == (4, 5, set())


@pytest.mark.parametrize("args", [(State(0, 1),), (3, set())])
def test_other_calls_are_errors(args: tuple[object, ...]) -> None:
    with pytest.raises(TypeError, match="ShiftRanks takes a RankAssignmentCtx"):
        ShiftRanks()(*args)
