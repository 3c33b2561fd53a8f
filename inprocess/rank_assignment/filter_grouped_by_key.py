"""Filters that terminate whole groups: a host that lost one GPU gives up the others."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from datetime import timedelta
from typing import Any

from inprocess.coordination import RankVerbs
from inprocess.rank_assignment.base import RankAssignmentCtx, TwoStyleAssignment, check_terminated
from inprocess.state import State


class FilterCountGroupedByKey(TwoStyleAssignment):
    """Terminates every rank whose group has a size that `condition` refuses.

    A group is all surviving ranks with the same key: `key_or_fn` itself, or what it returns for the `FrozenState` of a
    rank (as text). `condition` gets the number of ranks in the group of this rank. Ranks are only marked: a numbering
    must follow, that is, stand to the left of this in `Compose`. All surviving ranks must call it; `BarrierTimeout`
    after `timeout` if one does not.

    Calls are matched across ranks by their order on the store, so several filters in one chain do not mix.
    """

    def __init__(
        self,
        key_or_fn: str | Callable[..., Any],
        condition: Callable[[int], bool],
        timeout: timedelta = timedelta(seconds=60),
    ) -> None:
        if not isinstance(key_or_fn, str) and not callable(key_or_fn):
            raise TypeError(f"key_or_fn must be a str or a function, not {type(key_or_fn).__name__}: {key_or_fn!r}")
        if not callable(condition):
            raise TypeError(f"condition must be a function of a group's size, not {type(condition).__name__}")
        if not isinstance(timeout, timedelta):
            raise TypeError(f"timeout must be a timedelta, not {type(timeout).__name__}")
        self.key_or_fn = key_or_fn
        self.condition = condition
        self.timeout = timeout

    def assign(self, ctx: RankAssignmentCtx) -> RankAssignmentCtx:
        check_terminated(ctx)
        rank = ctx.state.rank
        if rank is None or rank in ctx.terminated_ranks:
            return ctx  # it counts in no group, and the numbering will discard it
        survivors = ctx.state.world_size - len(ctx.terminated_ranks)
        discarded = self._discarded(ctx, rank, survivors)
        return dataclasses.replace(ctx, terminated_ranks=ctx.terminated_ranks | discarded)

    def active_of(self, world_size: int) -> int | None:
        return None  # it depends on the groups of those that join

    def _key_of(self, state: State) -> str:
        return self.key_or_fn if isinstance(self.key_or_fn, str) else str(self.key_or_fn(state.freeze()))

    def _discarded(self, ctx: RankAssignmentCtx, rank: int, survivors: int) -> set[int]:
        """Return the discarded ranks, the same on all ranks: written before the second barrier, read after it."""
        store: RankVerbs = ctx.store
        # The survivors have run the same chains, so the n-th call of one is the n-th of all. Counting calls in the
        # store, where they end with the iteration, needs no counter in this process that all instances would share.
        # The initial rank, because dense ones change between two assignments with the same store.
        call = store.add(f"group_filter/calls/{ctx.state.initial_rank}", 1)
        prefix = f"group_filter/{call}"
        count_key, list_key = f"{prefix}/count/{self._key_of(ctx.state)}", f"{prefix}/discarded"
        store.add(count_key, 1)
        store.barrier([rank], f"{prefix}/counted", survivors, self.timeout)
        if not self.condition(store.add(count_key, 0)):
            store.append(list_key, f"{rank},")
        store.barrier([rank], f"{prefix}/judged", survivors, self.timeout)
        if not store.check([list_key]):
            return set()
        return {int(text) for text in store.get(list_key).decode().split(",") if text}


class FilterGroupedByKey(FilterCountGroupedByKey):
    """The same with the older kind of key function, `(rank, world_size)`."""

    def _key_of(self, state: State) -> str:
        return self.key_or_fn if isinstance(self.key_or_fn, str) else str(self.key_or_fn(state.rank, state.world_size))
