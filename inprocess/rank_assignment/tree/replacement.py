"""What a fault does to the tree: who goes with the lost ranks, who takes their places, which places close."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable
from dataclasses import dataclass

from inprocess.rank_assignment.tree.nodes import Leaf, Node, RankTree

__all__ = ["replace_lost"]


@dataclass(frozen=True, slots=True)
class Hole:
    """An active number whose rank was lost, and the group that rank was in."""

    number: int
    group: Node


def replace_lost(tree: RankTree, terminated: Iterable[int]) -> None:
    """Take the terminated dense ranks, and groups left too small, out of the tree; afterwards the active numbers have
    no holes again. Dense ranks are not changed yet."""
    lost = [tree.by_rank[rank] for rank in terminated]
    holes = sorted(_lose(tree, lost), key=lambda hole: hole.number)
    holes = _use_reserves(tree, holes)
    vacant = _backfill(tree, holes)
    _close(tree, vacant)


def _lose(tree: RankTree, lost: Iterable[Leaf]) -> list[Hole]:
    """Mark what is lost. A group with fewer than `min_ranks` left goes as a whole; small groups count before the groups
    they are in."""
    holes = []

    def lose(leaf: Leaf) -> None:
        if leaf.active_rank is not None:
            holes.append(Hole(leaf.active_rank, leaf.group))
        leaf.lose()

    for leaf in lost:
        lose(leaf)
    for nodes in reversed(tree.layers):
        for node in nodes:
            if 0 < node.live < node.min_ranks:
                for leaf in node.leaves:
                    if leaf.rank is not None:
                        lose(leaf)
    return holes


def _use_reserves(tree: RankTree, holes: list[Hole]) -> list[Hole]:
    """Let spares take over, each from the nearest group with RESERVE that has one; return the holes that remain."""
    benches: dict[Node, list[Leaf]] = {}
    remaining = []
    for hole in holes:
        for group in hole.group.line[: tree.reserve_height]:
            if group not in benches:
                spares = (leaf for leaf in group.leaves if leaf.is_spare)
                benches[group] = sorted(spares, key=lambda leaf: leaf.benched)
            spare = _next_spare(benches[group])
            if spare is not None:
                spare.activate(hole.number)
                break
        else:
            remaining.append(hole)
    return remaining


def _next_spare(bench: list[Leaf]) -> Leaf | None:
    """Remove and return the spare that became one last, of those that may be activated."""
    while bench:
        spare = bench.pop()
        # Another group may have taken it, or its own group is full. Groups only fill up while reserves are used, so a
        # spare that may not be activated now may not be later in this restart, either.
        if spare.is_spare and spare.may_be_activated():
            return spare
    return None


def _backfill(tree: RankTree, holes: list[Hole]) -> list[int]:
    """Let the largest active ranks of the same domain move into the holes; return the numbers that nobody has then.

    The domain of a hole is the highest group in the unbroken chain of groups with BACKFILL above it.
    """
    if not tree.backfill_height:
        return [hole.number for hole in holes]
    domains: dict[Node, list[int]] = {}
    for hole in holes:
        domains.setdefault(hole.group.line[tree.backfill_height - 1], []).append(hole.number)
    vacant = []
    for domain, numbers in domains.items():
        movers = sorted((n, leaf) for leaf in domain.leaves if (n := leaf.active_rank) is not None)
        for number in numbers:
            if movers and movers[-1][0] > number:
                left, mover = movers.pop()
                mover.active_rank = number
                vacant.append(left)
            else:
                vacant.append(number)
    return vacant


def _close(tree: RankTree, vacant: list[int]) -> None:
    """Move everyone above a vacant number down."""
    vacant.sort()
    for leaf in tree.active_leaves():
        assert leaf.active_rank is not None
        leaf.active_rank -= bisect_left(vacant, leaf.active_rank)
    tree.active_world_size -= len(vacant)
