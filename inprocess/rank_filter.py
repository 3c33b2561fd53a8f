"""Filters of who works, as a separate stage after the rank assignment and after all ranks were activated.

The older place for them. `inprocess.rank_assignment` has the same filters as members of the assignment itself.
"""

from __future__ import annotations

import abc

from inprocess.rank_assignment.activity import activate_below, active_size
from inprocess.rank_assignment.base import check_count
from inprocess.state import State

__all__ = ["MaxActiveWorldSize", "RankFilter", "WorldSizeDivisibleBy"]


class RankFilter(abc.ABC):
    """Chooses spares: gets this rank's state with all ranks active, changes `mode` and the active numbers, returns it.

    What it does may depend only on the state, and must come out the same on all ranks.
    """

    @abc.abstractmethod
    def __call__(self, state: State) -> State: ...


class MaxActiveWorldSize(RankFilter):
    """Keeps at most the first `n` ranks active; None is no limit. ValueError if `n` is less than 1."""

    def __init__(self, n: int | None = None) -> None:
        if n is not None:
            check_count("n", n)
        self.n = n

    def __call__(self, state: State) -> State:
        size = active_size(state)
        activate_below(state, size if self.n is None else min(size, self.n))
        return state


class WorldSizeDivisibleBy(RankFilter):
    """Rounds the number of active ranks down to a multiple of `d`. ValueError if `d` is less than 1."""

    def __init__(self, d: int = 1) -> None:
        check_count("d", d)
        self.d = d

    def __call__(self, state: State) -> State:
        size = active_size(state)
        activate_below(state, size - size % self.d)
        return state
