"""The tree: groups of ranks in groups of ranks, and who of them is live, active or a spare."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise

from inprocess.rank_assignment.tree.exchange import Grouping
from inprocess.rank_assignment.tree.layer import Layer, LayerFlag

__all__ = ["Leaf", "Node", "RankTree"]


class Node:
    """A group of ranks. `line` is the way up: the node itself first, the root last."""

    __slots__ = ("active", "children", "leaves", "line", "live", "max_ranks", "min_ranks")

    def __init__(self, layer: Layer, parent: Node | None) -> None:
        self.min_ranks = layer.min_ranks
        self.max_ranks = layer.max_ranks
        self.line: tuple[Node, ...] = (self,) if parent is None else (self, *parent.line)
        self.children: list[Node] = []
        self.leaves: list[Leaf] = []  # all below, depth-first, lost ones included
        self.live = 0
        self.active = 0

    def has_room(self) -> bool:
        """Return whether one more rank may be active."""
        return self.max_ranks is None or self.active < self.max_ranks


class Leaf:
    """A rank. It keeps its place for good; its numbers change with every restart.

    `rank` is its dense number, None once it is lost, which is final. `active_rank` is None on a spare and a lost rank.
    `benched` orders the spares by when they were made spares.
    """

    __slots__ = ("active_rank", "benched", "group", "rank")

    def __init__(self, rank: int, group: Node) -> None:
        self.rank: int | None = rank
        self.active_rank: int | None = None
        self.benched = 0
        self.group = group
        for node in group.line:
            node.live += 1

    @property
    def is_spare(self) -> bool:
        """Return whether the rank is live but not active."""
        return self.rank is not None and self.active_rank is None

    def may_be_activated(self) -> bool:
        """Return whether all groups the rank is in have room for one more active rank."""
        return all(node.has_room() for node in self.group.line)

    def activate(self, number: int) -> None:
        """Make a spare active under `number`."""
        self.active_rank = number
        for node in self.group.line:
            node.active += 1

    def deactivate(self) -> None:
        """Take the active number away."""
        self.active_rank = None
        for node in self.group.line:
            node.active -= 1

    def lose(self) -> None:
        """Take the rank out of the job."""
        if self.active_rank is not None:
            self.deactivate()
        self.rank = None
        for node in self.group.line:
            node.live -= 1


class RankTree:
    """All nodes by layer, the root's first; all leaves depth-first; the live leaves by dense rank.

    RuntimeError if the ranks do not form one tree with these layers. Just built, every rank is a spare.
    """

    def __init__(self, layers: Sequence[Layer], grouping: Grouping) -> None:
        _check(layers, grouping)
        self.layers: list[list[Node]] = [[] for _ in layers]
        self.active_world_size = 0
        self._benchings = 0
        groups = self._grow(layers, grouping.paths)
        self.by_rank = [Leaf(rank, groups[path]) for rank, path in enumerate(grouping.path_of_rank)]
        for leaf in self.by_rank:
            leaf.group.leaves.append(leaf)
        for parents in reversed(self.layers[:-1]):
            for parent in parents:
                parent.leaves = [leaf for child in parent.children for leaf in child.leaves]
        self.leaves = self.root.leaves
        # How many groups above a rank, from its own one upwards without a gap, have the flag.
        self.reserve_height = _unbroken(layers, LayerFlag.RESERVE)
        self.backfill_height = _unbroken(layers, LayerFlag.BACKFILL)

    @property
    def root(self) -> Node:
        """The group of all ranks."""
        return self.layers[0][0]

    def is_in_rank_order(self) -> bool:
        """Return whether the dense ranks ascend depth-first, which only a new tree can fail to do."""
        ranks = [leaf.rank for leaf in self.leaves if leaf.rank is not None]
        return all(low < high for low, high in pairwise(ranks))

    def active_leaves(self) -> Iterator[Leaf]:
        """Yield the active ranks, depth-first."""
        return (leaf for leaf in self.leaves if leaf.active_rank is not None)

    def bench(self, leaf: Leaf) -> None:
        """Make a live leaf a spare, the most recent one."""
        if leaf.active_rank is not None:
            leaf.deactivate()
        self._benchings += 1
        leaf.benched = self._benchings

    def number_densely(self) -> None:
        """Give the live leaves their dense ranks: their depth-first positions among themselves."""
        self.by_rank = [leaf for leaf in self.leaves if leaf.rank is not None]
        for rank, leaf in enumerate(self.by_rank):
            leaf.rank = rank

    def _grow(self, layers: Sequence[Layer], paths: Sequence[Sequence[str]]) -> list[Node]:
        """Make the nodes on all paths, in the order of the paths; return the last node of each."""
        nodes: dict[tuple[str, ...], Node] = {}
        ends = []
        for path in paths:
            node = None
            for depth, layer in enumerate(layers):
                prefix = tuple(path[: depth + 1])
                if prefix not in nodes:
                    nodes[prefix] = Node(layer, node)
                    self.layers[depth].append(nodes[prefix])
                    if node is not None:
                        node.children.append(nodes[prefix])
                node = nodes[prefix]
            assert node is not None  # there is at least one layer
            ends.append(node)
        return ends


def _check(layers: Sequence[Layer], grouping: Grouping) -> None:
    for path in grouping.paths:
        if len(path) != len(layers):
            raise RuntimeError(f"all ranks must have the same layers, but one has {len(path)} and one {len(layers)}")
    roots = sorted({path[0] for path in grouping.paths})
    if len(roots) != 1:
        raise RuntimeError(f"the first layer must have the same key on all ranks; it has {roots}")


def _unbroken(layers: Sequence[Layer], flag: LayerFlag) -> int:
    height = 0
    for layer in reversed(layers):
        if not layer.has(flag):
            break
        height += 1
    return height
