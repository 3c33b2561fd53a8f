"""`Tree` at the size of the largest jobs. Counts decide, not the clock; `-s` shows the time."""

from __future__ import annotations

import contextlib
import time

from inprocess.rank_assignment import Layer, LayerFlag, RankAssignmentCtx, Tree
from inprocess.state import State
from tests.inprocess.rank_assignment.stores import FakeStore, NotThereYet

RANKS, PER_HOST, PER_RACK, SPARES = 16_384, 8, 128, 384


def new_tree() -> Tree:
    return Tree(
        [
            Layer(1, RANKS - SPARES, "job", LayerFlag.RESERVE | LayerFlag.BACKFILL),
            Layer(1, None, lambda state: f"rack-{state.rank // PER_RACK:03}", LayerFlag.RESERVE | LayerFlag.BACKFILL),
            Layer(PER_HOST, None, lambda state: f"node-{state.rank // PER_HOST:05}.cluster", LayerFlag.RESERVE),
        ],
        lambda size: size - size % PER_HOST,
    )


def test_16384_ranks() -> None:
    store = FakeStore(waits=False)
    for rank in range(1, RANKS):
        with contextlib.suppress(NotThereYet):
            new_tree()(RankAssignmentCtx(State(rank, RANKS), store, set()))
    assert store.calls == {"send_key": RANKS - 1, "get": RANKS - 1}

    seconds = {}
    for rank in (0, 5000):
        tree, state = new_tree(), State(rank, RANKS)
        store.calls.clear()
        start = time.perf_counter()
        tree(RankAssignmentCtx(state, store, set()))
        seconds[f"build on rank {rank}"] = time.perf_counter() - start
        reads = {"get_keys": 1, "set": 1} if rank == 0 else {}
        assert store.calls == {"send_key": 1, "get": 1, **reads}
        assert (state.rank, state.active_rank, state.active_world_size) == (rank, rank, RANKS - SPARES)

        for lost in ({9}, set(range(4096, 4224)), {17, 1000, 8191, 12000}):
            start = time.perf_counter()
            tree(RankAssignmentCtx(state, store, lost))
            seconds[f"restart on rank {rank}, {len(lost)} lost"] = time.perf_counter() - start
        assert store.calls == {"send_key": 1, "get": 1, **reads}
        assert state.active_rank == rank
        assert state.active_world_size == RANKS - SPARES
        assert state.world_size == RANKS - 8 - 128 - 4 * 8
    print(*(f"\n{name}: {value * 1000:.0f} ms" for name, value in seconds.items()))
