"""Filters that choose the active ranks, in a separate stage after the rank assignment and the activation of all ranks.

This is the older place for them. `inprocess.rank_assignment` has the same filters as members of the assignment itself.
"""

from __future__ import annotations

import abc

from inprocess.rank_assignment.activity import activate_below, active_size
from inprocess.rank_assignment.base import check_count
from inprocess.state import State

__all__ = ["MaxActiveWorldSize", "RankFilter", "WorldSizeDivisibleBy"]


class RankFilter(abc.ABC):
    """Chooses spares: gets the state of this rank with all ranks active, changes `mode` and the active numbers.

    The result may depend only on the state, and must be the same on all ranks.
    """

    @abc.abstractmethod
    def __call__(self, state: State) -> State: ...

    def active_of(self, world_size: int) -> int | None:
        """Return how many of so many live ranks would be active, as a `RankAssignment` does."""
        return world_size


class MaxActiveWorldSize(RankFilter):
    """Keeps at most the first `max_active_world_size` ranks active; None is no limit. ValueError if it is below 1."""

    def __init__(self, max_active_world_size: int | None = None) -> None:
        if max_active_world_size is not None:
            check_count("max_active_world_size", max_active_world_size)
        self.max_active_world_size = max_active_world_size

    def __call__(self, state: State) -> State:
        size = active_size(state)
        limit = self.max_active_world_size
        activate_below(state, size if limit is None else min(size, limit))
        return state

    def active_of(self, world_size: int) -> int:
        return world_size if self.max_active_world_size is None else min(world_size, self.max_active_world_size)


class WorldSizeDivisibleBy(RankFilter):
    """Rounds the number of active ranks down to a multiple of `divisor`. ValueError if it is less than 1."""

    def __init__(self, divisor: int = 1) -> None:
        check_count("divisor", divisor)
        self.divisor = divisor

    def __call__(self, state: State) -> State:
        size = active_size(state)
        activate_below(state, size - size % self.divisor)
        return state

    def active_of(self, world_size: int) -> int:
        return world_size - world_size % self.divisor
