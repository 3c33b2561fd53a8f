"""As many ranks work as fit a multiple."""

from __future__ import annotations

from inprocess.rank_assignment.activity import activate_below, active_size
from inprocess.rank_assignment.base import RankAssignmentCtx, TwoStyleAssignment, check_count

__all__ = ["ActiveWorldSizeDivisibleBy", "WorldSizeDivisibleBy"]


class ActiveWorldSizeDivisibleBy(TwoStyleAssignment):
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


WorldSizeDivisibleBy = ActiveWorldSizeDivisibleBy
