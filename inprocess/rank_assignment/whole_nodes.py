"""Rank assignment by whole nodes: a spare node has the ranks of a lost one, and the others keep theirs."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from inprocess.exception import InternalError
from inprocess.node_layout import NodeLayout
from inprocess.rank_assignment.activity import activate_below
from inprocess.rank_assignment.base import RankAssignmentCtx, TwoStyleAssignment, renumbered, surviving_rank
from inprocess.rank_assignment.node_choice import LauncherNode, choose_nodes


class WholeNodes(TwoStyleAssignment):
    """As many nodes are active as the job began with; the ranks of the others are spares.

    For jobs of ``ckpt_launcher --ft-hot-spares``, where it is the default. A node that has lost a process gives its
    ranks to a spare node that is complete, local rank by local rank; all other nodes keep theirs. Its own remaining
    ranks become spares, and are a spare node when the lost process is replaced. With ``--ft-segment`` a spare of the
    same segment is taken, or else the whole block of nodes is replaced by nodes of another segment.

    If there are fewer complete nodes, or none of the segment, those that are not complete go on, too, with fewer ranks
    in all. Their order is kept, gaps are closed.

    The ranks do not communicate, so the death of one during the assignment does not block the others. No other
    numbering may be in the same `Compose`. RankDiscarded on a terminated rank, ValueError without such a launcher.
    """

    def __init__(self) -> None:
        self._members: Sequence[int] = ()  # the initial ranks, by dense rank

    def assign(self, ctx: RankAssignmentCtx) -> RankAssignmentCtx:
        rank, state, layout = surviving_rank(ctx), ctx.state, _layout()
        if state.active_world_size is None:  # of a new call of the wrapper
            self._members = range(state.world_size)
        members = ctx.initial_ranks or self._members
        if len(members) != state.world_size:
            raise InternalError(
                f"of {state.world_size} ranks the initial ones of {len(members)} are known; nothing but WholeNodes may "
                "number ranks"
            )
        order, active = order_of(members, ctx.terminated_ranks, layout)
        self._members = [members[each] for each in order]
        ctx = renumbered(ctx, order.index(rank))
        activate_below(ctx.state, active)
        return ctx

    def active_of(self, world_size: int) -> int:
        layout = _layout()
        return min(world_size, layout.processes * len(layout.segments))


def order_of(members: Sequence[int], terminated: Iterable[int], layout: NodeLayout) -> tuple[list[int], int]:
    """Return the old dense ranks of the survivors in their new order, and how many of them are active.

    `members` are the initial ranks of all, by old dense rank; negative for one of which it is not known.
    """
    lost = frozenset(terminated)
    by_node: dict[int, list[tuple[int, int]]] = {}  # node -> (local rank, old rank) of its survivors, in the old order
    for rank, initial_rank in enumerate(members):
        if initial_rank >= 0:
            node, local_rank = layout.place_of(initial_rank)
            survivors = by_node.setdefault(node, [])
            if rank not in lost:
                survivors.append((local_rank, rank))
    seats = _seats(by_node, layout)
    spares = [node for node in by_node if node not in seats]
    order = [rank for node in (*seats, *spares) for _, rank in sorted(by_node[node])]
    return order, sum(len(by_node[node]) for node in seats)


def _seats(by_node: dict[int, list[tuple[int, int]]], layout: NodeLayout) -> list[int]:
    """Return the nodes that are active, in the order of their ranks."""
    count = len(layout.segments)
    nodes = [
        LauncherNode(str(node), str(node), segment=str(layout.segment_of(node)), order=order)
        for order, node in enumerate(by_node)
    ]
    present = [node for node in nodes if by_node[int(node.key)]]
    local_ranks = list(range(layout.processes))
    complete = [node for node in present if sorted(each for each, _ in by_node[int(node.key)]) == local_ranks]
    earlier = _earlier_seats(nodes, count, layout.block)
    chosen = choose_nodes(complete, earlier, (), count, layout.block)
    if chosen is None and layout.block > 1:
        chosen = [node for node in earlier if node in present]
    elif chosen is None:
        most = sorted(present, key=lambda node: (node not in complete, node.order))[:count]
        chosen = sorted(most, key=lambda node: node.order)
    return [int(node.key) for node in chosen]


def _earlier_seats(nodes: Sequence[LauncherNode], count: int, block: int) -> list[LauncherNode]:
    """Return the nodes that had the seats, by these in the order of their ranks; empty ones in incomplete blocks."""
    empty = LauncherNode("", "")
    seats: list[LauncherNode] = []
    for node in nodes:
        if len(seats) % block and seats[len(seats) // block * block].segment != node.segment:
            seats += [empty] * (block - len(seats) % block)
        seats.append(node)
    return (seats + [empty] * count)[:count]


def _layout() -> NodeLayout:
    layout = NodeLayout.from_environment()
    if layout is None:
        raise ValueError("WholeNodes is for jobs of ckpt_launcher with --ft-hot-spares: take another rank assignment")
    return layout
