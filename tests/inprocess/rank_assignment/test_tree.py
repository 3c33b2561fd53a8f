"""`Tree` by examples: what each rule does to a job, seen from all its ranks."""

from __future__ import annotations

import gc
import warnings
import weakref
from collections.abc import Callable
from typing import Any

import pytest

from inprocess.exception import InternalError
from inprocess.rank_assignment import Layer, LayerFlag, RankAssignmentCtx, RankDiscarded, Tree
from inprocess.state import State
from tests.inprocess.rank_assignment.jobs import Job
from tests.inprocess.rank_assignment.stores import FakeStore, on_all_ranks

RESERVE, BACKFILL = LayerFlag.RESERVE, LayerFlag.BACKFILL


def host_of(size: int) -> Callable[[Any], int]:
    return lambda state: state.rank // size


def same(*ranks: int) -> dict[int, int]:
    return {rank: rank for rank in ranks}


# -- backfill ----------------------------------------------------------------------------------------------------------


def test_backfill_moves_the_last_rank_only() -> None:
    job = Job([Layer(flag=BACKFILL)], 8)
    assert job.active == same(*range(8))
    assert job.lose(1) == same(0, 2, 3, 4, 5, 6) | {7: 1}


def test_backfill_of_several_holes() -> None:
    assert Job([Layer(flag=BACKFILL)], 8).lose(1, 2) == same(0, 3, 4, 5) | {7: 1, 6: 2}
    assert Job([Layer(flag=BACKFILL)], 8).lose(1, 7) == same(0, 2, 3, 4, 5) | {6: 1}
    assert Job([Layer(flag=BACKFILL)], 4).lose(2, 3) == same(0, 1)


def test_backfill_again_and_again() -> None:
    job = Job([Layer(flag=BACKFILL)], 6)
    assert job.lose(0) == same(1, 2, 3, 4) | {5: 0}
    assert job.lose(5) == same(1, 2, 3) | {4: 0}
    assert job.lose(1, 4) == {3: 0, 2: 1}


def test_without_a_flag_higher_ranks_move_down() -> None:
    assert Job([Layer()], 8).lose(1, 4) == {0: 0, 2: 1, 3: 2, 5: 3, 6: 4, 7: 5}


def test_domain_of_backfill_is_the_highest_group_of_the_chain() -> None:
    hosts = Layer(key_or_fn=host_of(4), flag=BACKFILL)
    assert Job([Layer(), hosts], 8).lose(1) == {0: 0, 3: 1, 2: 2, 4: 3, 5: 4, 6: 5, 7: 6}
    assert Job([Layer(flag=BACKFILL), hosts], 8).lose(1) == same(0, 2, 3, 4, 5, 6) | {7: 1}
    broken = Layer(key_or_fn=host_of(4))
    assert Job([Layer(flag=BACKFILL), broken], 8).lose(1) == {0: 0, 2: 1, 3: 2, 4: 3, 5: 4, 6: 5, 7: 6}


# -- reserve -----------------------------------------------------------------------------------------------------------


def test_reserve_gives_the_spare_benched_last() -> None:
    job = Job([Layer(max_ranks=4, flag=RESERVE)], 8)
    assert job.active == same(0, 1, 2, 3)
    assert job.lose(1) == same(0, 2, 3) | {7: 1}
    assert job.lose(3, 7) == same(0, 2) | {6: 1, 5: 3}
    assert job.lose(4) == same(0, 2) | {6: 1, 5: 3}
    assert job.lose(0) == {6: 0, 2: 1, 5: 2}


def test_reserve_of_the_nearest_group() -> None:
    hosts = Layer(max_ranks=3, key_or_fn=host_of(4), flag=RESERVE)
    job = Job([Layer(flag=RESERVE), hosts], 8)
    assert job.active == {0: 0, 1: 1, 2: 2, 4: 3, 5: 4, 6: 5}
    assert job.lose(0) == {3: 0, 1: 1, 2: 2, 4: 3, 5: 4, 6: 5}


def test_reserve_does_not_climb_past_a_layer_without_it() -> None:
    hosts = Layer(key_or_fn=host_of(2))
    assert Job([Layer(max_ranks=4, flag=RESERVE), hosts], 6).lose(0) == {1: 0, 2: 1, 3: 2}
    hosts = Layer(key_or_fn=host_of(2), flag=RESERVE)
    assert Job([Layer(max_ranks=4, flag=RESERVE), hosts], 6).lose(0) == {5: 0, 1: 1, 2: 2, 3: 3}
    assert Job([Layer(max_ranks=4), hosts], 6).lose(0) == {1: 0, 2: 1, 3: 2}


def test_replacements_keep_to_the_max_ranks_of_their_own_group() -> None:
    hosts = Layer(max_ranks=2, key_or_fn=host_of(3), flag=RESERVE)
    job = Job([Layer(flag=RESERVE), hosts], 6)
    assert job.active == {0: 0, 1: 1, 3: 2, 4: 3}
    assert job.lose(0, 1) == {2: 0, 3: 1, 4: 2}


def test_a_spare_takes_one_place_only() -> None:
    job = Job([Layer(max_ranks=8, flag=RESERVE), Layer(key_or_fn=host_of(3), flag=RESERVE)], 12)
    # 8 stands ready for its own host and for the job. The host is first; nobody is left for 7.
    assert job.lose(0, 6, 7, 9, 10) == {11: 0, 1: 1, 2: 2, 3: 3, 4: 4, 5: 5, 8: 6}


def test_reserve_first_then_backfill() -> None:
    job = Job([Layer(max_ranks=6, flag=RESERVE | BACKFILL)], 7)
    assert job.lose(1, 2) == same(0, 3, 4) | {6: 1, 5: 2}
    assert job.lose(0) == {4: 0, 6: 1, 5: 2, 3: 3}


# -- groups that are lost as a whole -----------------------------------------------------------------------------------


def test_a_group_below_min_ranks_goes_as_a_whole() -> None:
    hosts = Layer(min_ranks=4, max_ranks=4, key_or_fn=host_of(4), flag=RESERVE)
    job = Job([Layer(max_ranks=8, flag=RESERVE), hosts], 12)
    assert job.lose(2) == {11: 0, 10: 1, 9: 2, 8: 3, 4: 4, 5: 5, 6: 6, 7: 7}
    assert sorted(job.states) == list(range(4, 12))
    assert job.lose(8) == {4: 0, 5: 1, 6: 2, 7: 3}
    assert job.lose(7) == {}


def test_small_groups_count_before_the_groups_they_are_in() -> None:
    racks = Layer(min_ranks=3, key_or_fn=host_of(4))
    hosts = Layer(min_ranks=2, key_or_fn=host_of(2))
    assert sorted(Job([Layer(), racks, hosts], 8).lose(5)) == [0, 1, 2, 3]


def test_too_few_ranks_for_the_root_are_none() -> None:
    assert Job([Layer(min_ranks=3)], 4).lose(0, 1) == {}


def test_a_spare_that_is_lost_leaves_no_hole() -> None:
    job = Job([Layer(max_ranks=2, flag=RESERVE)], 4)
    assert job.lose(3) == same(0, 1)
    assert job.lose(0) == {2: 0, 1: 1}


# -- the size of the active world --------------------------------------------------------------------------------------


def test_world_size_filter_makes_spares_of_the_highest() -> None:
    job = Job([Layer(flag=RESERVE)], 9, lambda size: size - size % 4)
    assert job.active == same(*range(8))
    assert job.lose(0) == same(*range(1, 8)) | {8: 0}
    assert job.lose(3) == {8: 0, 1: 1, 2: 2, 4: 3}
    # 5, 6 and 7 became spares in the order of their numbers, so 7 is the last.
    assert job.lose(1) == {8: 0, 7: 1, 2: 2, 4: 3}
    assert job.lose(8) == {6: 0, 7: 1, 2: 2, 4: 3}


def test_the_highest_number_becomes_a_spare_last() -> None:
    job = Job([Layer(flag=RESERVE)], 9, lambda size: size - size % 4)
    assert job.lose(5) == same(0, 1, 2, 3, 4, 6, 7) | {8: 5}
    assert job.lose(3) == same(0, 1, 2) | {4: 3}  # 8 was benched as number 4, before 6 and 7
    assert job.lose(1) == same(0, 2) | {7: 1, 4: 3}


def test_world_size_filter_may_leave_nobody() -> None:
    job = Job([Layer()], 4, lambda size: size - size % 4)
    assert job.lose(0) == {}
    assert {state.active_world_size for state in job.states.values()} == {0}
    assert job.lose(1) == {}  # and is not asked about nobody


@pytest.mark.parametrize(
    ("answer", "error", "message"),
    [
        (5, ValueError, "may only shrink the active world, but made 4 ranks 5"),
        (-1, ValueError, "made 4 ranks -1"),
        (2.0, TypeError, "must return an integer, not float: 2.0"),
        (True, TypeError, "must return an integer, not bool"),
    ],
)
def test_bad_world_size_filter(answer: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        Job([Layer()], 4, lambda size: answer)


# -- dense ranks -------------------------------------------------------------------------------------------------------


def test_dense_ranks_follow_the_tree() -> None:
    with pytest.warns(UserWarning, match="not made of neighbouring ranks"):
        job = Job([Layer(), Layer(key_or_fn=lambda state: state.rank % 2)], 6)
    assert {rank: state.rank for rank, state in job.states.items()} == {0: 0, 2: 1, 4: 2, 1: 3, 3: 4, 5: 5}
    assert job.active == {0: 0, 2: 1, 4: 2, 1: 3, 3: 4, 5: 5}
    assert job.lose(2) == {0: 0, 4: 1, 1: 2, 3: 3, 5: 4}
    assert {rank: state.rank for rank, state in job.states.items()} == {0: 0, 4: 1, 1: 2, 3: 3, 5: 4}


def test_the_same_key_below_different_groups_is_a_different_group() -> None:
    job = Job([Layer(), Layer(key_or_fn=host_of(2)), Layer(min_ranks=1, max_ranks=1, key_or_fn="gpu")], 4)
    assert job.active == {0: 0, 2: 1}


def test_groups_too_small_from_the_start_are_announced() -> None:
    with pytest.warns(UserWarning, match="1 groups of the tree have fewer than min_ranks ranks from the start"):
        job = Job([Layer(), Layer(min_ranks=2, key_or_fn=host_of(2))], 5)
    assert job.active == same(*range(5))
    assert job.lose() == same(*range(4))


# -- what a rank does --------------------------------------------------------------------------------------------------


def test_all_ranks_at_the_same_time() -> None:
    store = FakeStore()
    layers = [Layer(), Layer(key_or_fn=lambda state: f"host {state.rank // 2}")]

    def build(rank: int) -> State:
        return Tree(layers)(RankAssignmentCtx(State(rank, 6), store, set())).state

    assert {rank: state.active_rank for rank, state in on_all_ranks(range(6), build).items()} == same(*range(6))
    assert store.calls == {"send_key": 6, "get_keys": 1, "set": 1, "get": 6}


def test_different_roots() -> None:
    with pytest.raises(RuntimeError, match=r"first layer must have the same key on all ranks; it has \['0', '1'\]"):
        Job([Layer(key_or_fn=host_of(2))], 4)


def test_different_layers() -> None:
    store = FakeStore()

    def build(rank: int) -> None:
        with pytest.raises(RuntimeError, match=r"same layers, but one has \d and one \d"):
            Tree([Layer()] * (1 + rank % 2))(RankAssignmentCtx(State(rank, 2), store, set()))

    on_all_ranks(range(2), build)


def test_a_new_call_of_the_wrapper_starts_a_new_tree() -> None:
    tree = Tree([Layer(flag=BACKFILL)])
    for _ in range(2):
        store = FakeStore()
        assert tree(RankAssignmentCtx(State(0, 1), store, set())).state.active_world_size == 1
        assert store.calls["set"] == 1


def test_a_restart_needs_no_store() -> None:
    tree = Tree([Layer(flag=BACKFILL)])
    ctx = tree(RankAssignmentCtx(State(0, 1), FakeStore(), set()))
    assert tree(RankAssignmentCtx(ctx.state, None, set())).state.active_rank == 0


def test_the_exception_of_the_iteration_is_not_kept() -> None:
    class Fault(Exception):
        pass

    tree = Tree([Layer(key_or_fn="job")])
    state = State(0, 1)
    tree(RankAssignmentCtx(state, FakeStore(), set()))
    state.fn_exception = Fault()
    alive = weakref.ref(state.fn_exception)
    tree(RankAssignmentCtx(state, None, set()))
    state.fn_exception = None
    gc.collect()
    assert alive() is None


def test_it_cannot_begin_at_a_restart() -> None:
    with pytest.raises(RuntimeError, match="must be built at the start, with all ranks"):
        Tree([Layer()])(RankAssignmentCtx(State(0, 2), FakeStore(), {1}))


def test_nobody_else_may_number_ranks() -> None:
    job = Job([Layer()], 4)
    job.states[2].rank = 1
    with pytest.raises(InternalError, match="rank 1 of 4 has place 2 of 4 in the tree"):
        job.restart(set())


def test_terminated_ranks_must_exist() -> None:
    with pytest.raises(ValueError, match=r"terminated ranks \[9\] do not exist in a world of 4"):
        Job([Layer()], 4).restart({9})


def test_a_lost_rank_is_discarded_with_a_reason() -> None:
    job = Job([Layer(min_ranks=4)], 4)
    for rank, tree in job.trees.items():
        with pytest.raises(RankDiscarded, match="was lost, or its group has too few healthy ranks"):
            tree(RankAssignmentCtx(job.states[rank], None, {1}))


# -- bad arguments -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"min_ranks": 0}, ValueError, "min_ranks must be at least 1, not 0"),
        ({"max_ranks": 0}, ValueError, "max_ranks must be at least 1, not 0"),
        ({"min_ranks": "1"}, TypeError, "min_ranks must be an integer, not str"),
        ({"min_ranks": 3, "max_ranks": 2}, ValueError, r"min_ranks \(3\) must not be larger than max_ranks \(2\)"),
        ({"key_or_fn": 7}, TypeError, "key_or_fn must be a str or a function, not int"),
        ({"flag": 1}, TypeError, "flag must be a LayerFlag, not int"),
    ],
)
def test_bad_layers(arguments: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        Layer(**arguments)


@pytest.mark.parametrize(
    ("layers", "world_size_filter", "error", "message"),
    [
        ([], None, ValueError, "at least one layer"),
        ([Layer(), "host"], None, TypeError, "layers must be of Layer objects, not str"),
        ([Layer()], 8, TypeError, "world_size_filter must be a function, not int"),
    ],
)
def test_bad_trees(layers: Any, world_size_filter: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        Tree(layers, world_size_filter)


def test_flags_combine() -> None:
    layer = Layer(flag=RESERVE | BACKFILL)
    assert layer.has(RESERVE)
    assert layer.has(BACKFILL)
    assert not Layer(flag=RESERVE).has(BACKFILL)
    assert not Layer().has(RESERVE)


def test_a_tree_in_rank_order_warns_of_nothing() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        Job([Layer(), Layer(key_or_fn=host_of(3))], 7)
