"""Everyone works."""

from __future__ import annotations

from inprocess.rank_assignment.base import RankAssignmentCtx, TwoStyleAssignment

__all__ = ["ActivateAllRanks"]


class ActivateAllRanks(TwoStyleAssignment):
    """Makes every live rank active, with its dense number. Stands left of the numbering in `Compose`."""

    def assign(self, ctx: RankAssignmentCtx) -> RankAssignmentCtx:
        ctx.state.activate_all_ranks()
        return ctx
