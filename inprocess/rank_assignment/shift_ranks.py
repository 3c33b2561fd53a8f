"""Close the gaps and keep the order."""

from __future__ import annotations

from inprocess.rank_assignment.base import RankAssignmentCtx, TwoStyleAssignment, renumbered, surviving_rank

__all__ = ["ShiftRanks"]


class ShiftRanks(TwoStyleAssignment):
    """Every surviving rank moves down by the number of terminated ranks below it.

    Of 8 ranks, 1, 4 and 5 terminated: 0, 2, 3, 6, 7 become 0, 1, 2, 3, 4. RankDiscarded on a terminated rank.
    """

    def assign(self, ctx: RankAssignmentCtx) -> RankAssignmentCtx:
        rank = surviving_rank(ctx)
        return renumbered(ctx, rank - sum(lost < rank for lost in ctx.terminated_ranks))
