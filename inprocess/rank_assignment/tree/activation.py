"""Who is active at the start, and how the active world gets smaller without anybody being lost."""

from __future__ import annotations

from collections.abc import Callable

from inprocess.rank_assignment.tree.nodes import RankTree

__all__ = ["activate_first", "limit_active_size"]


def activate_first(tree: RankTree) -> None:
    """Number the ranks of a new tree depth-first; where a group has no room for one more, the rank is a spare."""
    number = 0
    for leaf in tree.leaves:
        if leaf.may_be_activated():
            leaf.activate(number)
            number += 1
        else:
            tree.bench(leaf)
    tree.active_world_size = number


def limit_active_size(tree: RankTree, world_size_filter: Callable[[int], int]) -> None:
    """Make spares of the highest active ranks until as many are active as the filter says; it is not asked about 0.

    TypeError if it does not return an integer, ValueError if that is negative or more than there are.
    """
    before = tree.active_world_size
    if not before:
        return
    size = world_size_filter(before)
    if not isinstance(size, int) or isinstance(size, bool):
        raise TypeError(f"world_size_filter must return an integer, not {type(size).__name__}: {size!r}")
    if not 0 <= size <= before:
        raise ValueError(f"world_size_filter may only shrink the active world, but made {before} ranks {size}")
    surplus = [(n, leaf) for leaf in tree.leaves if (n := leaf.active_rank) is not None and n >= size]
    for _, leaf in sorted(surplus):
        tree.bench(leaf)
    tree.active_world_size = size
