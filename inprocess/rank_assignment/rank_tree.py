"""The tree of ranks: groups in groups, and which ranks are live, active or spares.

Layer, LayerFlag       what the user says about one level
RankTree, Node, Leaf   the tree itself; a node is a group, a leaf is a rank
activate_first         which ranks of a new tree are active
limit_active_size      the active world shrinks, although no rank was lost
replace_lost           a fault: which ranks go with the lost ones, which take their places, which places close
"""

from __future__ import annotations

import enum
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

from inprocess.rank_assignment.base import check_count
from inprocess.state import FrozenState


class LayerFlag(enum.Flag):
    """How the groups of a layer replace a lost active rank.

    RESERVE: a spare of the group may take its place. BACKFILL: the largest active ranks of the group may.
    """

    RESERVE = enum.auto()
    BACKFILL = enum.auto()


@dataclass(frozen=True)
class Layer:
    """One level: ranks with the same key, below the same parent, are a group.

    A group with fewer than `min_ranks` healthy ranks loses all of them at the next restart. At most `max_ranks` (None:
    any number) of a group are active. `key_or_fn` is the key, or a function that returns it for a rank's `FrozenState`.
    """

    min_ranks: int = 1
    max_ranks: int | None = None
    key_or_fn: str | Callable[[FrozenState], object] = ""
    flag: LayerFlag | None = None

    def __post_init__(self) -> None:
        check_count("min_ranks", self.min_ranks)
        if self.max_ranks is not None:
            check_count("max_ranks", self.max_ranks)
            if self.min_ranks > self.max_ranks:
                raise ValueError(f"min_ranks ({self.min_ranks}) must not be larger than max_ranks ({self.max_ranks})")
        if not isinstance(self.key_or_fn, str) and not callable(self.key_or_fn):
            raise TypeError(f"key_or_fn must be a str or a function, not {type(self.key_or_fn).__name__}")
        if self.flag is not None and not isinstance(self.flag, LayerFlag):
            raise TypeError(f"flag must be a LayerFlag, not {type(self.flag).__name__}: {self.flag!r}")

    def has(self, flag: LayerFlag) -> bool:
        """Return whether the layer has `flag`."""
        return self.flag is not None and flag in self.flag

    def key_of(self, state: FrozenState) -> str:
        """Return the key of the rank that `state` belongs to."""
        return self.key_or_fn if isinstance(self.key_or_fn, str) else str(self.key_or_fn(state))


@dataclass(frozen=True)
class Grouping:
    """The group of each rank.

    `paths` are the different lists of keys from the root down, in the order of the first rank that has them;
    `path_of_rank[r]` is the index of the path of rank `r`.
    """

    paths: list[list[str]]
    path_of_rank: list[int]


class Node:
    """A group of ranks. `line` is the path to the root: the node itself first, the root last."""

    __slots__ = ("active", "children", "leaves", "line", "live", "max_ranks", "min_ranks")

    def __init__(self, layer: Layer, parent: Node | None) -> None:
        self.min_ranks = layer.min_ranks
        self.max_ranks = layer.max_ranks
        self.line: tuple[Node, ...] = (self,) if parent is None else (self, *parent.line)
        self.children: list[Node] = []
        self.leaves: list[Leaf] = []  # all leaves below, depth-first, including lost ones
        self.live = 0
        self.active = 0

    def has_room(self) -> bool:
        """Return whether one more rank may be active."""
        return self.max_ranks is None or self.active < self.max_ranks


class Leaf:
    """A rank. Its place in the tree never changes; its numbers change with every restart.

    `rank` is its dense rank, None once it is lost, which is final. `active_rank` is None for spares and lost ranks.
    `benched` orders the spares by the time at which they became spares.
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
        """Remove the active number."""
        self.active_rank = None
        for node in self.group.line:
            node.active -= 1

    def lose(self) -> None:
        """Remove the rank from the job."""
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
        # How many groups above a rank, upwards from its own without a gap, have the flag.
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


@dataclass(frozen=True, slots=True)
class Hole:
    """An active number whose rank was lost, and the group of that rank."""

    number: int
    group: Node


def replace_lost(tree: RankTree, terminated: Iterable[int]) -> None:
    """Remove the terminated dense ranks, and groups that are too small then, from the tree.

    Afterwards the active numbers have no holes. Dense ranks are not changed yet.
    """
    lost = [tree.by_rank[rank] for rank in terminated]
    holes = sorted(_lose(tree, lost), key=lambda hole: hole.number)
    holes = _use_reserves(tree, holes)
    vacant = _backfill(tree, holes)
    _close(tree, vacant)


def _lose(tree: RankTree, lost: Iterable[Leaf]) -> list[Hole]:
    """Mark the lost ranks and return the holes.

    A group with fewer than `min_ranks` remaining ranks is lost as a whole; inner groups come before outer ones.
    """
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
    """Fill holes with spares, from the nearest group with RESERVE that has one; return the remaining holes."""
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
        # It may have been used for another hole, or its own group is full. Groups only fill up at this stage, so a
        # spare that may not be activated now may not be activated later in this restart either.
        if spare.is_spare and spare.may_be_activated():
            return spare
    return None


def _backfill(tree: RankTree, holes: list[Hole]) -> list[int]:
    """Let the largest active ranks of the same domain move into the holes; return the numbers that no rank has then.

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
    """Move all ranks above a vacant number down."""
    vacant.sort()
    for leaf in tree.active_leaves():
        assert leaf.active_rank is not None
        leaf.active_rank -= bisect_left(vacant, leaf.active_rank)
    tree.active_world_size -= len(vacant)
