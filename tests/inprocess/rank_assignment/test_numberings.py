"""`ShiftRanks`, `FillGaps` and `LauncherOrder`."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from inprocess.exception import InternalError
from inprocess.rank_assignment import (
    FillGaps,
    LauncherOrder,
    RankAssignment,
    RankAssignmentCtx,
    RankDiscarded,
    ShiftRanks,
)
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


class JobInLauncherOrder:
    """A job whose ranks are lost and replaced; all processes number by themselves. `ranks` is by initial rank."""

    def __init__(self, world_size: int) -> None:
        self.world_size = world_size
        self.ranks = {rank: rank for rank in range(world_size)}
        self._assignments = {rank: LauncherOrder() for rank in range(world_size)}
        self._restart((), ())

    def lose(self, *lost: int, joining: tuple[int, ...] = ()) -> list[int]:
        """End an iteration without the processes with these initial ranks; return the initial ranks by rank."""
        self._restart(lost, joining)
        return sorted(self.ranks, key=lambda each: self.ranks[each])

    def _restart(self, lost: tuple[int, ...], joining: tuple[int, ...]) -> None:
        first = all(each == rank for each, rank in self.ranks.items()) and not (lost or joining)
        terminated = {self.ranks[each] for each in lost}
        before = sorted(self.ranks, key=lambda each: self.ranks[each])
        initial_ranks = tuple(-1 if each in lost else each for each in before) + joining if joining else ()
        self.ranks |= {each: len(before) + number for number, each in enumerate(joining)}
        self._assignments |= {each: LauncherOrder() for each in joining}
        world_size = len(self.ranks)
        for each in set(self.ranks) - set(lost):
            state = State(self.ranks[each], world_size, initial_rank=each, initial_world_size=self.world_size)
            state.active_world_size = None if first or each in joining else world_size
            result = self._assignments[each](RankAssignmentCtx(state, None, set(terminated), initial_ranks))
            assert result.terminated_ranks == set()
            assert state.world_size == world_size - len(lost)
            assert state.rank is not None
            self.ranks[each] = state.rank
        for each in lost:
            del self.ranks[each]
        assert sorted(self.ranks.values()) == list(range(len(self.ranks)))


def test_a_replacement_takes_the_place_of_who_was_lost() -> None:
    job = JobInLauncherOrder(8)
    assert job.lose(1, 4) == [0, 2, 3, 5, 6, 7]
    assert job.lose(joining=(8 + 4,)) == [0, 2, 3, 12, 5, 6, 7]
    assert job.lose(12, 7, joining=(16 + 1,)) == [0, 17, 2, 3, 5, 6]
    assert job.lose(joining=(24 + 7, 32 + 4)) == [0, 17, 2, 3, 36, 5, 6, 31]


@given(st.data())
def test_all_processes_order_themselves_in_the_same_way(data: st.DataObject) -> None:
    size = data.draw(st.integers(1, 6))
    job = JobInLauncherOrder(size)
    replacements = 0
    for _ in range(data.draw(st.integers(0, 5))):
        vacant = sorted(set(range(size)) - {each % size for each in job.ranks})
        joining = []
        for place in data.draw(st.lists(st.sampled_from(vacant), unique=True)) if vacant else []:
            replacements += 1
            joining.append(place + size * replacements)
        alive = sorted(job.ranks)
        lost = data.draw(st.lists(st.sampled_from(alive), unique=True, max_size=len(alive) - (not joining)))
        order = [each % size for each in job.lose(*lost, joining=tuple(sorted(joining)))]
        assert order == sorted(set(order))


def test_launcher_order_refuses_another_numbering_beside_it() -> None:
    assignment = LauncherOrder()
    assignment(RankAssignmentCtx(State(0, 4), None, set()))
    with pytest.raises(InternalError, match="of 3 ranks the initial ones of 4 are known"):
        assignment(RankAssignmentCtx(State(0, 3, active_world_size=3, initial_world_size=4), None, set()))
