"""Numberings: the dense ranks of the survivors in the next iteration."""

from __future__ import annotations

from inprocess.rank_assignment.base import RankAssignmentCtx, TwoStyleAssignment, renumbered, surviving_rank

__all__ = ["FillGaps", "ShiftRanks"]


class ShiftRanks(TwoStyleAssignment):
    """Every surviving rank moves down by the number of terminated ranks below it.

    Of 8 ranks, 1, 4 and 5 terminated: 0, 2, 3, 6, 7 become 0, 1, 2, 3, 4. RankDiscarded on a terminated rank.
    """

    def assign(self, ctx: RankAssignmentCtx) -> RankAssignmentCtx:
        rank = surviving_rank(ctx)
        return renumbered(ctx, rank - sum(lost < rank for lost in ctx.terminated_ranks))


class FillGaps(TwoStyleAssignment):
    """Ranks that fit into the smaller world keep their number; the others, in order, take the gaps, in order.

    Of 8 ranks, 1, 4 and 5 terminated: 0, 2 and 3 stay, 6 becomes 1, 7 becomes 4. RankDiscarded on a terminated rank.
    """

    def assign(self, ctx: RankAssignmentCtx) -> RankAssignmentCtx:
        rank = surviving_rank(ctx)
        world_size = ctx.state.world_size - len(ctx.terminated_ranks)
        if rank >= world_size:
            gaps = sorted(lost for lost in ctx.terminated_ranks if lost < world_size)
            lost_before = sum(world_size <= lost < rank for lost in ctx.terminated_ranks)
            rank = gaps[rank - world_size - lost_before]
        return renumbered(ctx, rank)
