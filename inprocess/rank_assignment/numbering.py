"""Numberings: the dense ranks of the survivors in the next iteration."""

from __future__ import annotations

from collections.abc import Sequence

from inprocess.exception import InternalError
from inprocess.rank_assignment.base import RankAssignmentCtx, TwoStyleAssignment, renumbered, surviving_rank


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


class LauncherOrder(TwoStyleAssignment):
    """The survivors have the order of the ranks that the launcher gave them; a replacement has that of who was lost.

    As `ShiftRanks`, until a process joins. Of 8 ranks, 1 and 4 lost: 0, 2, 3, 5, 6, 7 become 0, 1, 2, 3, 4, 5. A
    replacement of 4 joins: it becomes 3, and 5, 6, 7 become 4, 5, 6. When the last lost rank is replaced, all have the
    numbers they began with: neighbours are on one node again, and the plan of saves is the one of before.

    The ranks do not communicate, so the death of one during the assignment does not block the others. No other
    numbering may be in the same `Compose`. RankDiscarded on a terminated rank.
    """

    def __init__(self) -> None:
        self._members: Sequence[int] = ()  # the initial ranks, by dense rank

    def assign(self, ctx: RankAssignmentCtx) -> RankAssignmentCtx:
        rank, state = surviving_rank(ctx), ctx.state
        assert state.initial_world_size is not None
        if state.active_world_size is None:  # of a new call of the wrapper
            self._members = range(state.world_size)
        members = ctx.initial_ranks or self._members
        if len(members) != state.world_size:
            raise InternalError(
                f"of {state.world_size} ranks the initial ones of {len(members)} are known; nothing but LauncherOrder "
                "may number ranks"
            )
        size = state.initial_world_size
        survivors = [each for each in range(state.world_size) if each not in ctx.terminated_ranks]
        survivors.sort(key=lambda each: (members[each] % size, members[each]))
        self._members = [members[each] for each in survivors]
        return renumbered(ctx, survivors.index(rank))
