"""Base of all rank assignments: interface, context, and what they use of the store."""

from __future__ import annotations

import abc
import dataclasses
from typing import Any, overload

from inprocess.exception import RankDiscarded
from inprocess.state import Mode, State

__all__ = ["RankAssignment", "RankAssignmentCtx", "RankDiscarded", "TwoStyleAssignment"]


@dataclasses.dataclass
class RankAssignmentCtx:
    """Input and output of a rank assignment.

    `state` is that of this rank and is updated in place. `store` is the store of the iteration that ends; the first
    assignment uses that of iteration 0. `terminated_ranks` are the ranks that do not go on, as dense ranks of that
    iteration. `initial_ranks` are those of all ranks, by dense rank, if processes have joined (they have the last dense
    ranks); else empty. Not frozen, because user code may change it instead of creating a new one.
    """

    state: State
    store: Any
    terminated_ranks: set[int]
    initial_ranks: tuple[int, ...] = ()


class RankAssignment(abc.ABC):
    """Gives the surviving ranks their numbers for the next iteration.

    `__call__` gets and returns a `RankAssignmentCtx`; written for two parameters it gets and returns `(state,
    terminated_ranks)`. It runs on every surviving rank at the same time. The result may depend only on the state and
    the terminated ranks (and on what all ranks read from the store), so that all ranks compute the same numbering. It
    raises `RankDiscarded` on a rank that takes no further part.
    """

    @abc.abstractmethod
    def __call__(self, ctx: Any, *args: Any) -> Any: ...

    def active_of(self, world_size: int) -> int | None:
        """Return how many of so many live ranks would be active after this; None if that cannot be known before.

        A process that could join asks this: it is not worth a restart if it would only be a spare.
        """
        return world_size


class RankFilter(RankAssignment):
    """A rank assignment that decides only which ranks are active. Stands left of the numbering in `Compose`."""


class TwoStyleAssignment(RankAssignment):
    """An assignment of this package: subclasses write `assign`, callers may use either style."""

    @overload
    def __call__(self, ctx: RankAssignmentCtx) -> RankAssignmentCtx: ...

    @overload
    def __call__(self, ctx: State, terminated_ranks: set[int]) -> tuple[State, set[int]]: ...

    def __call__(
        self, ctx: RankAssignmentCtx | State, terminated_ranks: set[int] | None = None
    ) -> RankAssignmentCtx | tuple[State, set[int]]:
        if isinstance(ctx, RankAssignmentCtx):
            return self.assign(ctx)
        if not isinstance(ctx, State) or terminated_ranks is None:
            raise TypeError(
                f"{type(self).__name__} takes a RankAssignmentCtx, or a State and the terminated ranks; "
                f"not {type(ctx).__name__}"
            )
        assigned = self.assign(RankAssignmentCtx(ctx, ctx.store, terminated_ranks))
        return assigned.state, assigned.terminated_ranks

    @abc.abstractmethod
    def assign(self, ctx: RankAssignmentCtx) -> RankAssignmentCtx:
        """Update `ctx.state` and return the context for what comes next."""


def check_terminated(ctx: RankAssignmentCtx) -> None:
    """Raise ValueError if a terminated rank is not a rank of the iteration that has ended."""
    strangers = sorted(rank for rank in ctx.terminated_ranks if not 0 <= rank < ctx.state.world_size)
    if strangers:
        raise ValueError(
            f"terminated ranks {strangers} do not exist in a world of {ctx.state.world_size}; "
            "they must be dense ranks of the iteration that ended"
        )


def surviving_rank(ctx: RankAssignmentCtx) -> int:
    """Return the rank in the iteration that has ended; RankDiscarded if it is a terminated one."""
    check_terminated(ctx)
    rank = ctx.state.rank
    if rank is None or rank in ctx.terminated_ranks:
        raise RankDiscarded(f"rank {rank} (initially {ctx.state.initial_rank}) is among the terminated ranks")
    return rank


def renumbered(ctx: RankAssignmentCtx, rank: int) -> RankAssignmentCtx:
    """Set the new dense rank; no terminated ranks remain, and which ranks are active is to be decided again."""
    state = ctx.state
    state.rank = rank
    state.world_size -= len(ctx.terminated_ranks)
    state.active_rank = state.active_world_size = None
    state.mode = Mode.INITIALIZED
    return dataclasses.replace(ctx, terminated_ranks=set())


def check_count(name: str, value: object) -> None:
    """Raise TypeError if `value` is not an integer, ValueError if it is less than 1."""
    if not isinstance(value, int) or isinstance(value, bool):
        raise TypeError(f"{name} must be an integer, not {type(value).__name__}: {value!r}")
    if value < 1:
        raise ValueError(f"{name} must be at least 1, not {value}")
