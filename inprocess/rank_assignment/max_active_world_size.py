"""No more than so many ranks work."""

from __future__ import annotations

from inprocess.rank_assignment.activity import activate_below, active_size
from inprocess.rank_assignment.base import RankAssignmentCtx, TwoStyleAssignment, check_count

__all__ = ["MaxActiveWorldSize"]


class MaxActiveWorldSize(TwoStyleAssignment):
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
