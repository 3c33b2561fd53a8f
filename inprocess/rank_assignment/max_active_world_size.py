"""No more than so many ranks work."""

from __future__ import annotations

from inprocess.rank_assignment.activity import activate_below, active_size
from inprocess.rank_assignment.base import RankAssignmentCtx, TwoStyleAssignment, check_count

__all__ = ["MaxActiveWorldSize"]


class MaxActiveWorldSize(TwoStyleAssignment):
    """Keeps at most the first `n` ranks active and makes the others spares; None is no limit.

    Stands left of the numbering in `Compose`. ValueError if `n` is less than 1.
    """

    def __init__(self, n: int | None = None) -> None:
        if n is not None:
            check_count("n", n)
        self.n = n

    def assign(self, ctx: RankAssignmentCtx) -> RankAssignmentCtx:
        size = active_size(ctx.state)
        activate_below(ctx.state, size if self.n is None else min(size, self.n))
        return ctx
