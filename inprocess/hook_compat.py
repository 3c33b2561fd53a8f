"""Call the hooks that users pass to the wrapper, written in either of two styles.

A hook with one required positional parameter is in the *current* style, one with two in the *classic* one:

    initialize, abort, completion, terminate    (state)
    finalize, health_check                      (state)    or  (state, train_ex)
    rank_assignment                             (context)  or  (state, terminated_ranks)
    rank_filter                                 (state)

`state` is a `FrozenState`; for rank assignments and filters it is the mutable `State`. A hook without parameters is
called without arguments. The style is determined once, when the wrapper is created, and separately for each member of a
`Compose`. Hooks return what they were given (in the classic style, both); one that does not is reported, and the next
one gets what it was given.
"""

from __future__ import annotations

import dataclasses
import enum
import inspect
import logging
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from inprocess.compose import describe, members_of, positional_parameters
from inprocess.exception import RestartError
from inprocess.rank_assignment import RankAssignment, RankAssignmentCtx, Tree
from inprocess.rank_filter import RankFilter
from inprocess.state import FrozenState, Mode, State

__all__ = ["Numbering", "Role", "StateHook"]

_log = logging.getLogger(__name__)


class Role(enum.Enum):
    """The arguments of the wrapper that are hooks; the value is the name of the argument."""

    INITIALIZE = "initialize"
    HEALTH_CHECK = "health_check"
    ABORT = "abort"
    FINALIZE = "finalize"
    COMPLETION = "completion"
    TERMINATE = "terminate"
    RANK_ASSIGNMENT = "rank_assignment"
    RANK_FILTER = "rank_filter"


# The second parameter of a hook in the classic style.
_SECOND_PARAMETER = {
    Role.HEALTH_CHECK: "train_ex",
    Role.FINALIZE: "train_ex",
    Role.RANK_ASSIGNMENT: "terminated_ranks",
}


class _Style(enum.Enum):
    WITHOUT_ARGUMENTS = enum.auto()
    CURRENT = enum.auto()
    CLASSIC = enum.auto()
    RANK_FILTER = enum.auto()  # one parameter, as in the current style, but the mutable state


@dataclass(frozen=True)
class _Member:
    """One callable of a hook. `is_chained`: other members get what it returns."""

    call: Callable[..., Any]
    style: _Style
    is_chained: bool

    def report(self, returned: object) -> None:
        """Report that the hook did not return what it was given."""
        what = "None" if returned is None else f"an unexpected {type(returned).__name__}"
        text = f"{describe(self.call)} returned {what}; what it was given is used instead"
        if self.is_chained:
            warnings.warn(text, stacklevel=2)
        else:
            _log.debug(text)


@dataclass(frozen=True)
class StateHook:
    """A hook that gets the frozen state: every role except the two that number ranks.

    Calling it calls the members of the hook, the last one first, and returns the state that the first one returned.
    Errors of members are passed on. Without a hook it does nothing.
    """

    members: tuple[_Member, ...]

    @classmethod
    def inspect(cls, role: Role, hook: Callable[..., Any] | None) -> StateHook:
        """Return the hook that was passed as argument `role`. TypeError if it cannot be called in either style."""
        return cls(tuple(_inspected(role, hook)))

    def __call__(self, state: FrozenState) -> FrozenState:
        for member in self.members:
            if member.style is _Style.WITHOUT_ARGUMENTS:
                member.call()
                continue
            classic = member.style is _Style.CLASSIC
            returned = member.call(state, state.fn_exception) if classic else member.call(state)
            state = _state_from(member, returned, state)
        return state


@dataclass(frozen=True)
class Numbering:
    """The rank assignment and, in the classic style, the rank filter after it."""

    assignments: tuple[_Member, ...]
    filters: tuple[_Member, ...]

    @classmethod
    def inspect(
        cls, rank_assignment: Callable[..., Any] | None, rank_filter: Callable[..., Any] | None = None
    ) -> Numbering:
        """Return the numbering from these two arguments of the wrapper.

        TypeError if one cannot be called in either style, ValueError if a `Tree` is not alone.
        """
        if rank_assignment is None:
            raise TypeError("rank_assignment must not be None; ShiftRanks() is the simplest assignment")
        numbering = cls(
            tuple(_inspected(Role.RANK_ASSIGNMENT, rank_assignment)), tuple(_inspected(Role.RANK_FILTER, rank_filter))
        )
        members = numbering.assignments + numbering.filters
        if len(members) > 1 and any(isinstance(member.call, Tree) for member in members):
            raise ValueError("Tree numbers ranks and chooses spares by itself: no Compose and no rank_filter with it")
        return numbering

    def __call__(self, ctx: RankAssignmentCtx) -> RankAssignmentCtx:
        """Number the survivors and decide who is active; `ctx.state` is this rank's, complete when this returns.

        After the assignment all ranks are activated, unless a member has decided that (by setting `state.mode`). Then
        the rank filter follows. RankDiscarded on a rank that takes no further part; RestartError if terminated ranks
        remain, because no member renumbers the others.
        """
        ctx.state.store = ctx.store  # where classic hooks expect it
        ctx.state.mode = Mode.INITIALIZED
        for member in self.assignments:
            ctx = _assign(member, ctx)
        if ctx.state.mode is Mode.INITIALIZED and not ctx.terminated_ranks:
            ctx.state.activate_all_ranks()
        for member in self.filters:
            ctx = _assign(member, ctx)
        if ctx.terminated_ranks:
            raise RestartError(
                f"rank_assignment left the terminated ranks {sorted(ctx.terminated_ranks)} in the job; a numbering, "
                "ShiftRanks() for one, must stand left of what terminates ranks"
            )
        return ctx

    def active_of(self, world_size: int) -> int | None:
        """Return how many of so many live ranks would be active; None if a member cannot know that before.

        Members that do not say it, such as functions, are taken to activate all.
        """
        size: int | None = world_size
        for member in self.assignments + self.filters:
            if size is not None and isinstance(member.call, RankAssignment | RankFilter):
                size = member.call.active_of(size)
        return size


def _inspected(role: Role, hook: Callable[..., Any] | None) -> Iterator[_Member]:
    """Yield the members of a hook in the order they are to be called."""
    if hook is None:
        return
    if not callable(hook):
        raise TypeError(f"{role.value} must be callable, not {type(hook).__name__}: {hook!r}")
    members = members_of(hook)
    for member in reversed(members):
        yield _Member(member, _style_of(role, member), is_chained=len(members) > 1)


def _style_of(role: Role, function: Callable[..., Any]) -> _Style:
    if isinstance(function, type):
        raise TypeError(f"{role.value} must be an object that can be called, not the class {function.__qualname__}")
    parameters = positional_parameters(function)
    if parameters is None:
        return _Style.CURRENT
    second = _SECOND_PARAMETER.get(role)
    required = [
        parameter
        for parameter in parameters
        if parameter.default is parameter.empty and parameter.kind is not parameter.VAR_POSITIONAL
    ]
    most = 1 if second is None else 2
    if len(required) > most or _needs_keywords(function):
        accepted = "(state)" if second is None else f"(state) or (state, {second})"
        raise TypeError(
            f"{role.value}: {describe(function)} has the parameters {inspect.signature(function)}; "
            f"it would be called with {accepted}"
        )
    if not parameters:
        return _Style.WITHOUT_ARGUMENTS
    if _is_rank_filter(role, function):
        return _Style.RANK_FILTER
    # The classic exception parameter is often written with a default.
    takes_exception = second == "train_ex" and len(parameters) > 1 and parameters[1].name == second
    return _Style.CLASSIC if len(required) == 2 or takes_exception else _Style.CURRENT


def _is_rank_filter(role: Role, function: Callable[..., Any]) -> bool:
    """Return whether the object is a rank filter: by its class if that is known, else by its argument."""
    if isinstance(function, RankAssignment):
        return False
    return role is Role.RANK_FILTER or isinstance(function, RankFilter)


def _needs_keywords(function: Callable[..., Any]) -> bool:
    return any(
        parameter.kind is parameter.KEYWORD_ONLY and parameter.default is parameter.empty
        for parameter in inspect.signature(function).parameters.values()
    )


def _state_from(member: _Member, returned: object, given: FrozenState) -> FrozenState:
    """Return the state a hook passes on: what it returned, if that is one or a pair that begins with one."""
    first, *rest = returned if isinstance(returned, tuple) and returned else (returned,)
    if not isinstance(first, FrozenState | State):
        member.report(returned)
        return given
    state = first.freeze()
    if member.style is _Style.CLASSIC and rest and rest[0] is not state.fn_exception:
        state = dataclasses.replace(state, fn_exception=rest[0])
    return state


def _assign(member: _Member, ctx: RankAssignmentCtx) -> RankAssignmentCtx:
    """Call a member of the rank assignment or the rank filter; return the context for the next."""
    # A copy: a classic hook may change the set, which only the next member is to see.
    terminated = set(ctx.terminated_ranks) if member.style is _Style.CLASSIC else ctx.terminated_ranks
    returned: object
    match member.style:
        case _Style.WITHOUT_ARGUMENTS:
            member.call()
            return ctx
        case _Style.CURRENT:
            returned = member.call(ctx)
        case _Style.CLASSIC:
            returned = member.call(ctx.state, terminated)
        case _Style.RANK_FILTER:
            returned = member.call(ctx.state)
    match returned:
        case RankAssignmentCtx():
            return returned
        case State():
            return RankAssignmentCtx(returned, ctx.store, terminated)
        case (State() as state, set() | frozenset() as left):
            return RankAssignmentCtx(state, ctx.store, set(left))
    member.report(returned)
    return dataclasses.replace(ctx, terminated_ranks=terminated)
