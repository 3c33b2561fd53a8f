"""Rank assignment along the topology of the job: which ranks fail together, and which replace each other.

At the first assignment every rank learns the groups of all ranks, through the store. From then on each has a copy of
the tree (see `rank_tree`) and changes it by itself at each restart. The copies stay equal because a change depends on
nothing but the tree and the terminated ranks, which are the same everywhere.
"""

from __future__ import annotations

import dataclasses
import json
import warnings
import zlib
from collections.abc import Callable, Sequence

from inprocess.coordination import RankVerbs
from inprocess.exception import InternalError, RankDiscarded
from inprocess.rank_assignment.base import RankAssignmentCtx, TwoStyleAssignment, check_terminated
from inprocess.rank_assignment.rank_tree import (
    Grouping,
    Layer,
    Leaf,
    RankTree,
    activate_first,
    limit_active_size,
    replace_lost,
)
from inprocess.state import Mode, State


class Tree(TwoStyleAssignment):
    """Numbers ranks, and chooses spares and their replacements, along a tree of groups.

    `layers` describe the levels from the root (all ranks) down; the ranks are the leaves below the last one.
    `world_size_filter` gets the number of ranks that could be active and returns how many shall be, not more.

    At the first assignment of a call of the wrapper, all ranks exchange their keys, the only communication. Ranks are
    activated depth-first while no group above them has reached `max_ranks`. RuntimeError if the ranks do not form one
    tree; a warning if groups are not made of neighbours, because then numbers do not follow the initial ranks.

    At a restart:

    1. from the bottom up, a group with fewer healthy ranks than `min_ranks` loses them all;
    2. each lost active rank, lowest number first, is replaced by a spare: the last one that became one, in the nearest
       group above it that has one, as long as all groups on the way have RESERVE;
    3. into holes that are left move the largest active ranks of the domain, lowest hole first: the highest group above
       the hole such that all groups on the way have BACKFILL. Where there is none, higher ranks move down by one;
    4. `world_size_filter` may make spares of the highest active ranks.

    A replacement never brings a group above its `max_ranks`. Dense ranks follow the tree, depth-first. A rank whose
    place is lost gets `RankDiscarded`; so does a process that joins the job later, of which the tree knows nothing.

    It decides everything itself: use it neither in a `Compose` nor together with a rank filter.
    """

    def __init__(self, layers: Sequence[Layer], world_size_filter: Callable[[int], int] | None = None) -> None:
        self.layers = tuple(layers)
        if not self.layers:
            raise ValueError("a tree needs at least one layer, the root")
        for layer in self.layers:
            if not isinstance(layer, Layer):
                raise TypeError(f"layers must be of Layer objects, not {type(layer).__name__}: {layer!r}")
        if world_size_filter is not None and not callable(world_size_filter):
            raise TypeError(f"world_size_filter must be a function, not {type(world_size_filter).__name__}")
        self.world_size_filter = world_size_filter
        self._tree: RankTree | None = None
        self._own: Leaf | None = None

    def assign(self, ctx: RankAssignmentCtx) -> RankAssignmentCtx:
        check_terminated(ctx)
        tree = self._tree
        if ctx.initial_ranks:
            self._leave_out_newcomers(ctx.state)
        # A state that was never active is that of a new call of the wrapper, for which an old tree means nothing.
        if tree is None or (ctx.state.active_world_size is None and not ctx.terminated_ranks):
            tree = self._build(ctx)
            activate_first(tree)
        else:
            self._check_numbers(tree, ctx.state)
            replace_lost(tree, ctx.terminated_ranks)
        tree.number_densely()
        self._check_own_place(ctx.state)
        if self.world_size_filter is not None:
            limit_active_size(tree, self.world_size_filter)
        self._update(ctx.state, tree)
        return dataclasses.replace(ctx, terminated_ranks=set())

    def active_of(self, world_size: int) -> int:
        return 0  # a process that joins later has no place, so it gains nothing

    def _leave_out_newcomers(self, state: State) -> None:
        """Go on without the processes that have joined: they have the last ranks. RankDiscarded on these."""
        if self._tree is None:
            raise RankDiscarded("a Tree takes in no process that joins later")
        state.world_size = len(self._tree.by_rank)

    def _build(self, ctx: RankAssignmentCtx) -> RankTree:
        state = ctx.state
        if ctx.terminated_ranks or state.rank is None:
            raise RuntimeError("a tree must be built at the start, with all ranks; it cannot begin at a restart")
        frozen = state.freeze()
        keys = [layer.key_of(frozen) for layer in self.layers]
        tree = RankTree(self.layers, _exchange_keys(ctx.store, state.rank, state.world_size, keys))
        _warn_about(tree)
        self._tree, self._own = tree, tree.by_rank[state.rank]
        return tree

    def _check_numbers(self, tree: RankTree, state: State) -> None:
        assert self._own is not None
        if (state.rank, state.world_size) != (self._own.rank, len(tree.by_rank)):
            raise InternalError(
                f"rank {state.rank} of {state.world_size} has place {self._own.rank} of {len(tree.by_rank)} in the "
                "tree; nothing but the tree may number ranks"
            )

    def _check_own_place(self, state: State) -> None:
        assert self._own is not None
        if self._own.rank is None:
            raise RankDiscarded(
                f"rank {state.rank} (initially {state.initial_rank}) was lost, or its group has too few healthy ranks"
            )

    def _update(self, state: State, tree: RankTree) -> None:
        assert self._own is not None
        state.rank = self._own.rank
        state.world_size = len(tree.by_rank)
        state.active_rank = self._own.active_rank
        state.active_world_size = tree.active_world_size
        state.mode = Mode.INACTIVE if state.active_rank is None else Mode.ACTIVE


def _warn_about(tree: RankTree) -> None:
    if not tree.is_in_rank_order():
        warnings.warn(
            "the groups of the tree are not made of neighbouring ranks, so numbers will not follow initial ranks",
            stacklevel=2,
        )
    small = sum(node.live < node.min_ranks for nodes in tree.layers for node in nodes)
    if small:
        warnings.warn(
            f"{small} groups of the tree have fewer than min_ranks ranks from the start; the first restart loses them",
            stacklevel=2,
        )


_NAME = "tree"
_STORE_KEY = "rank_assignment/tree"


def _exchange_keys(store: RankVerbs, rank: int, world_size: int, keys: list[str]) -> Grouping:
    """Publish the keys of this rank, one for each layer, and return those of all ranks.

    Rank 0 reads all keys and publishes one text, in which each combination of keys occurs once and the ranks refer to
    it by number. The others read only that: for n ranks, the store gets 3 n small requests instead of n².
    """
    store.send_key(json.dumps(keys), rank, _NAME)
    if rank == 0:
        store.set(_STORE_KEY, _encode(store.get_keys(range(world_size), _NAME)))
    return _decode(store.get(_STORE_KEY))


def _encode(texts: list[str]) -> bytes:
    numbers: dict[str, int] = {}
    path_of_rank = [numbers.setdefault(text, len(numbers)) for text in texts]
    return zlib.compress(json.dumps([list(numbers), path_of_rank]).encode())


def _decode(data: bytes) -> Grouping:
    texts, path_of_rank = json.loads(zlib.decompress(data))
    return Grouping([json.loads(text) for text in texts], path_of_rank)
