"""A job of many ranks, each with its own `Tree` and its own state, in one thread."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence

from inprocess.rank_assignment import Layer, RankAssignmentCtx, RankDiscarded, Tree
from inprocess.state import Mode, State
from tests.inprocess.rank_assignment.stores import FakeStore, NotThereYet


class Job:
    """`states` are those of the ranks still there, by initial rank."""

    def __init__(
        self, layers: Sequence[Layer], world_size: int, world_size_filter: Callable[[int], int] | None = None
    ) -> None:
        self.store = FakeStore(waits=False)
        self.states = {rank: State(rank, world_size) for rank in range(world_size)}
        self.trees = {rank: Tree(layers, world_size_filter) for rank in self.states}
        for rank in reversed(range(1, world_size)):  # all publish their keys before rank 0 reads them
            with contextlib.suppress(NotThereYet):
                self._assign(rank, set())
        for rank in self.states:
            self._assign(rank, set())
        self.check()

    def restart(self, terminated: set[int]) -> None:
        """Assign on every rank, those that are terminated included, after a fault that took these dense ranks."""
        for initial in list(self.states):
            try:
                self._assign(initial, terminated)
            except RankDiscarded:
                del self.states[initial]
        self.check()

    def check(self) -> None:
        """What must hold for any tree, before and after any fault."""
        states = list(self.states.values())
        assert sorted(state.rank for state in states) == list(range(len(states)))
        assert {state.world_size for state in states} <= {len(states)}
        active = sorted(state.active_rank for state in states if state.active_rank is not None)
        assert active == list(range(len(active)))
        assert {state.active_world_size for state in states} <= {len(active)}
        for state in states:
            assert state.mode is (Mode.INACTIVE if state.active_rank is None else Mode.ACTIVE)
            assert state.initial_world_size == len(self.trees)

    @property
    def active(self) -> dict[int, int]:
        """The active rank of each initial rank that has one."""
        return {rank: state.active_rank for rank, state in self.states.items() if state.active_rank is not None}

    def lose(self, *initial_ranks: int) -> dict[int, int]:
        """Restart without these initial ranks; return `active`."""
        self.restart({self.states[rank].rank for rank in initial_ranks})
        return self.active

    def _assign(self, initial: int, terminated: set[int]) -> None:
        ctx = RankAssignmentCtx(self.states[initial], self.store, set(terminated))
        assert self.trees[initial](ctx).terminated_ranks == set()
