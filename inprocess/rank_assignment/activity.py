"""Filters by number: which of the live ranks are active, and which are spares."""

from __future__ import annotations

from inprocess.rank_assignment.base import RankAssignmentCtx, RankFilter, TwoStyleAssignment, check_count
from inprocess.state import Mode, State


def active_size(state: State) -> int:
    """Return how many ranks are active so far: all live ones if that is undecided, never more than there are.

    The limit matters after a numbering that left the active size of the previous, larger world in the state.
    """
    if state.active_world_size is None:
        return state.world_size
    return min(state.active_world_size, state.world_size)


def activate_below(state: State, size: int) -> None:
    """Make the dense ranks below `size` active with the same number and the others spares."""
    if state.rank is None:
        raise ValueError("a terminated rank can be neither active nor a spare")
    is_active = state.rank < size
    state.active_rank = state.rank if is_active else None
    state.active_world_size = size
    state.mode = Mode.ACTIVE if is_active else Mode.INACTIVE


class ActivateAllRanks(TwoStyleAssignment, RankFilter):
    """Makes every live rank active, with its dense number. Stands left of the numbering in `Compose`."""

    def assign(self, ctx: RankAssignmentCtx) -> RankAssignmentCtx:
        ctx.state.activate_all_ranks()
        return ctx


class MaxActiveWorldSize(TwoStyleAssignment, RankFilter):
    """Keeps at most the first `max_active_world_size` ranks active and makes the others spares; None is no limit.

    Stands left of the numbering in `Compose`. ValueError if it is less than 1.
    """

    def __init__(self, max_active_world_size: int | None = None) -> None:
        if max_active_world_size is not None:
            check_count("max_active_world_size", max_active_world_size)
        self.max_active_world_size = max_active_world_size

    def assign(self, ctx: RankAssignmentCtx) -> RankAssignmentCtx:
        size = active_size(ctx.state)
        limit = self.max_active_world_size
        activate_below(ctx.state, size if limit is None else min(size, limit))
        return ctx

    def active_of(self, world_size: int) -> int:
        return world_size if self.max_active_world_size is None else min(world_size, self.max_active_world_size)


class ActiveWorldSizeDivisibleBy(TwoStyleAssignment, RankFilter):
    """Rounds the number of active ranks down to a multiple of `divisor` and makes the others spares.

    With fewer than `divisor` ranks none is active. Stands left of the numbering in `Compose`. ValueError if `divisor`
    is less than 1.
    """

    def __init__(self, divisor: int = 1) -> None:
        check_count("divisor", divisor)
        self.divisor = divisor

    def assign(self, ctx: RankAssignmentCtx) -> RankAssignmentCtx:
        size = active_size(ctx.state)
        activate_below(ctx.state, size - size % self.divisor)
        return ctx

    def active_of(self, world_size: int) -> int:
        return world_size - world_size % self.divisor


WorldSizeDivisibleBy = ActiveWorldSizeDivisibleBy
