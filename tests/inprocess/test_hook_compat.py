"""Hooks in both styles, alone and in `Compose`; the numbering made of rank assignment and rank filter."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from dataclasses import replace
from inspect import signature
from typing import Any

import pytest

from inprocess import rank_filter
from inprocess.compose import Compose
from inprocess.exception import RankDiscarded, RestartError
from inprocess.hook_compat import Numbering, Role, StateHook
from inprocess.rank_assignment import (
    ActivateAllRanks,
    ActiveWorldSizeDivisibleBy,
    FillGaps,
    Layer,
    MaxActiveWorldSize,
    RankAssignment,
    RankAssignmentCtx,
    ShiftRanks,
    Tree,
)
from inprocess.state import FrozenState, Mode, State

FAULT = ValueError("fault")
STATE = FrozenState(rank=1, world_size=4, fn_exception=FAULT)
STATE_ROLES = [role for role in Role if not role.value.startswith("rank_")]


class Recorder:
    """Hooks of all shapes that write down what they get."""

    def __init__(self) -> None:
        self.calls: list[tuple[object, ...]] = []

    def current(self, state: FrozenState) -> FrozenState:
        self.calls.append((state,))
        return state

    def classic(self, state: FrozenState, train_ex: Exception | None) -> tuple[FrozenState, Exception | None]:
        self.calls.append((state, train_ex))
        return state, train_ex

    def classic_with_default(self, state: FrozenState, train_ex: Exception | None = None) -> FrozenState:
        self.calls.append((state, train_ex))
        return state

    def with_option(self, state: FrozenState, verbose: bool = False) -> FrozenState:
        self.calls.append((state, verbose))
        return state

    def any_number(self, *args: object) -> object:
        self.calls.append(args)
        return args[0]

    def nothing(self) -> None:
        self.calls.append(())

    def forgets(self, state: FrozenState) -> None:
        self.calls.append((state,))

    def __call__(self, state: FrozenState) -> FrozenState:
        return self.current(state)


@pytest.mark.parametrize(
    ("shape", "expected"),
    [
        ("current", (STATE,)),
        ("classic", (STATE, FAULT)),
        ("classic_with_default", (STATE, FAULT)),
        ("with_option", (STATE, False)),
        ("any_number", (STATE,)),
        ("nothing", ()),
        ("forgets", (STATE,)),
    ],
)
@pytest.mark.parametrize("role", [Role.FINALIZE, Role.HEALTH_CHECK])
def test_what_a_hook_gets(role: Role, shape: str, expected: tuple[object, ...]) -> None:
    recorder = Recorder()
    assert StateHook.inspect(role, getattr(recorder, shape))(STATE) == STATE
    assert recorder.calls == [expected]


@pytest.mark.parametrize("role", STATE_ROLES)
def test_objects_and_partial_functions(role: Role) -> None:
    recorder = Recorder()
    StateHook.inspect(role, recorder)(STATE)
    StateHook.inspect(role, functools.partial(Recorder.current, recorder))(STATE)
    assert recorder.calls == [(STATE,), (STATE,)]


@pytest.mark.parametrize("role", STATE_ROLES)
def test_no_hook_does_nothing(role: Role) -> None:
    assert StateHook.inspect(role, None)(STATE) is STATE


def test_a_hook_that_python_cannot_inspect_gets_the_state() -> None:
    with pytest.raises(ValueError, match="signature"):
        signature(iter)
    assert StateHook.inspect(Role.ABORT, iter).members
    with pytest.raises(TypeError, match="'FrozenState' object is not iterable"):
        StateHook.inspect(Role.ABORT, iter)(STATE)


def test_the_style_is_found_out_once() -> None:
    class Changing:
        inspections = 0

        @property
        def __signature__(self) -> Any:
            Changing.inspections += 1
            return None

        def __call__(self, state: FrozenState) -> FrozenState:
            return state

    hook = StateHook.inspect(Role.FINALIZE, Changing())
    before = Changing.inspections
    assert before > 0
    hook(STATE)
    hook(STATE)
    assert Changing.inspections == before


def test_styles_are_decided_per_member() -> None:
    recorder = Recorder()
    chain = Compose(
        recorder.classic, recorder.nothing, Compose(recorder.current, recorder.classic), recorder.any_number
    )
    assert StateHook.inspect(Role.FINALIZE, chain)(STATE) is STATE
    assert recorder.calls == [(STATE,), (STATE, FAULT), (STATE,), (), (STATE, FAULT)]


def test_members_get_what_the_member_right_of_them_returned() -> None:
    recorder = Recorder()
    other = KeyError("other")

    def later(state: FrozenState) -> FrozenState:
        return replace(state, iteration=state.iteration + 1)

    def excuses(state: FrozenState, train_ex: Exception | None) -> tuple[FrozenState, Exception]:
        return state, other

    result = StateHook.inspect(Role.FINALIZE, Compose(recorder.classic, excuses, later))(STATE)
    assert (result.iteration, result.fn_exception) == (1, other)
    assert recorder.calls == [(result, other)]


def test_a_mutable_state_is_frozen_again() -> None:
    result = StateHook.inspect(Role.INITIALIZE, FrozenState.thaw)(STATE)
    assert result == STATE.thaw().freeze()


def test_none_from_a_single_hook_is_only_logged(caplog: pytest.LogCaptureFixture) -> None:
    recorder = Recorder()
    with caplog.at_level(logging.DEBUG, "inprocess"):
        assert StateHook.inspect(Role.FINALIZE, recorder.forgets)(STATE) is STATE
    assert "forgets" in caplog.text
    assert "test_hook_compat.py:" in caplog.text
    assert "returned None" in caplog.text


@pytest.mark.parametrize(("returned", "text"), [(None, "returned None"), (True, "unexpected bool"), ((), "tuple")])
def test_in_a_chain_it_is_a_warning_and_the_chain_goes_on(returned: object, text: str) -> None:
    recorder = Recorder()
    hook = StateHook.inspect(Role.FINALIZE, Compose(recorder.current, lambda state: returned))
    with pytest.warns(UserWarning, match=rf"test_hook_compat.py:\d+\).*{text}"):
        assert hook(STATE) is STATE
    assert recorder.calls == [(STATE,)]


def test_what_a_hook_raises_passes_through() -> None:
    recorder = Recorder()

    def fail(state: FrozenState) -> FrozenState:
        raise FAULT

    with pytest.raises(ValueError, match="fault"):
        StateHook.inspect(Role.INITIALIZE, Compose(recorder.current, fail))(STATE)
    assert recorder.calls == []


def inspect(role: Role, hook: Any) -> object:
    match role:
        case Role.RANK_ASSIGNMENT:
            return Numbering.inspect(hook)
        case Role.RANK_FILTER:
            return Numbering.inspect(ShiftRanks(), hook)
        case _:
            return StateHook.inspect(role, hook)


@pytest.mark.parametrize("role", Role)
@pytest.mark.parametrize(
    ("hook", "message"),
    [
        (3, r"{role} must be callable, not int: 3"),
        (Recorder, r"{role} must be an object that can be called, not the class Recorder"),
        (lambda a, b, c: a, r"{role}: .*<lambda> \(.*test_hook_compat.py:\d+\) has the parameters \(a, b, c\)"),
        (Compose(lambda a: a, lambda a, b, c: a), r"{role}: .* has the parameters \(a, b, c\)"),
        (lambda a, *, b: a, r"{role}: .* has the parameters \(a, \*, b\)"),
    ],
)
def test_hooks_that_cannot_be_called(role: Role, hook: Any, message: str) -> None:
    with pytest.raises(TypeError, match=message.format(role=role.value)):
        inspect(role, hook)


@pytest.mark.parametrize("role", [Role.INITIALIZE, Role.ABORT, Role.COMPLETION, Role.TERMINATE, Role.RANK_FILTER])
def test_not_all_roles_have_two_arguments(role: Role) -> None:
    with pytest.raises(TypeError, match=r"has the parameters \(a, b\); it would be called with \(state\)$"):
        inspect(role, lambda a, b: a)


# -- numbering ---------------------------------------------------------------------------------------------------------


def number(
    rank_assignment: Callable[..., Any],
    rank_filter: Callable[..., Any] | None = None,
    *,
    rank: int = 7,
    world_size: int = 8,
    terminated: frozenset[int] = frozenset({1, 4, 5}),
) -> tuple[int | None, int, int | None, int | None, Mode]:
    """Return the numbers of a rank after a restart in which all were active."""
    state = State(rank, world_size)
    state.activate_all_ranks()
    ctx = RankAssignmentCtx(state, "store", set(terminated))
    result = Numbering.inspect(rank_assignment, rank_filter)(ctx)
    assert result.terminated_ranks == set()
    state = result.state
    return state.rank, state.world_size, state.active_rank, state.active_world_size, state.mode


def classic_shift(state: State, terminated_ranks: set[int]) -> tuple[State, set[int]]:
    """A classic assignment as users write it; it knows nothing of active ranks."""
    assert state.store == "store"
    if state.rank in terminated_ranks:
        raise RankDiscarded
    assert state.rank is not None
    state.rank -= sum(lost < state.rank for lost in terminated_ranks)
    state.world_size -= len(terminated_ranks)
    terminated_ranks.clear()
    return state, terminated_ranks


class CurrentShift(RankAssignment):
    """The same in the current style, also without a thought for active ranks."""

    def __call__(self, ctx: RankAssignmentCtx) -> RankAssignmentCtx:
        ctx.state, ctx.terminated_ranks = classic_shift(ctx.state, ctx.terminated_ranks)
        return ctx


@pytest.mark.parametrize("assignment", [ShiftRanks(), FillGaps(), classic_shift, CurrentShift(), FillGaps().__call__])
def test_a_numbering_alone_leaves_all_ranks_active(assignment: Callable[..., Any]) -> None:
    assert number(assignment) == (4, 5, 4, 5, Mode.ACTIVE)


@pytest.mark.parametrize(
    "assignment",
    [
        Compose(MaxActiveWorldSize(4), ShiftRanks()),
        Compose(ActiveWorldSizeDivisibleBy(4), ActivateAllRanks(), FillGaps()),
        Compose(MaxActiveWorldSize(4), classic_shift),
        Compose(MaxActiveWorldSize(4), CurrentShift()),
        Compose(rank_filter.MaxActiveWorldSize(4), ShiftRanks()),
    ],
)
def test_ranks_are_not_activated_again_after_a_filter(assignment: Compose) -> None:
    assert number(assignment) == (4, 5, None, 4, Mode.INACTIVE)
    assert number(assignment, rank=0) == (0, 5, 0, 4, Mode.ACTIVE)


def test_an_assignment_of_the_user_may_decide_who_is_active() -> None:
    def odd_ones_rest(ctx: RankAssignmentCtx) -> RankAssignmentCtx:
        ctx.state.active_rank, ctx.state.active_world_size, ctx.state.mode = None, 2, Mode.INACTIVE
        return ctx

    assert number(Compose(odd_ones_rest, ShiftRanks())) == (4, 5, None, 2, Mode.INACTIVE)


def plain_filter(state: State) -> State:
    assert (state.active_rank, state.active_world_size, state.mode) == (4, 5, Mode.ACTIVE)
    state.active_rank, state.active_world_size, state.mode = None, 3, Mode.INACTIVE
    return state


@pytest.mark.parametrize("assignment", [ShiftRanks(), classic_shift, Compose(ActivateAllRanks(), FillGaps())])
@pytest.mark.parametrize(
    "filter_",
    [
        rank_filter.MaxActiveWorldSize(3),
        rank_filter.WorldSizeDivisibleBy(3),
        Compose(rank_filter.MaxActiveWorldSize(3), rank_filter.WorldSizeDivisibleBy(2)),
        plain_filter,
        MaxActiveWorldSize(3),
    ],
)
def test_rank_filter_comes_after_assignment_and_activation(
    assignment: Callable[..., Any], filter_: Callable[..., Any]
) -> None:
    assert number(assignment, filter_) == (4, 5, None, 3, Mode.INACTIVE)


def test_what_an_assignment_forgets_to_return_is_not_lost() -> None:
    def forgets(state: State, terminated_ranks: set[int]) -> None:
        classic_shift(state, terminated_ranks)

    calls = []
    assert number(forgets) == (4, 5, 4, 5, Mode.ACTIVE)
    with pytest.warns(UserWarning, match=r"forgets .* returned None"):
        assert number(Compose(lambda: calls.append(1), ActivateAllRanks(), forgets)) == (4, 5, 4, 5, Mode.ACTIVE)
    assert calls == [1]


def test_terminated_ranks_must_not_be_left_over() -> None:
    with pytest.raises(
        RestartError, match=r"left the terminated ranks \[1, 4, 5\] in the job; a numbering, ShiftRanks"
    ):
        number(ActivateAllRanks())
    assert number(ActivateAllRanks(), terminated=frozenset()) == (7, 8, 7, 8, Mode.ACTIVE)


def test_a_lost_rank_is_discarded() -> None:
    for assignment in (ShiftRanks(), classic_shift, Compose(ActivateAllRanks(), FillGaps())):
        with pytest.raises(RankDiscarded):
            number(assignment, rank=4)


def test_an_assignment_is_needed() -> None:
    with pytest.raises(TypeError, match="rank_assignment must not be None"):
        Numbering.inspect(None)


@pytest.mark.parametrize(
    "arguments",
    [
        (Compose(ShiftRanks(), Tree([Layer()])),),
        (Compose(Compose(Tree([Layer()])), ActivateAllRanks()),),
        (Tree([Layer()]), rank_filter.MaxActiveWorldSize(2)),
    ],
)
def test_a_tree_stands_alone(arguments: tuple[Any, ...]) -> None:
    with pytest.raises(ValueError, match="Tree numbers ranks and chooses spares by itself"):
        Numbering.inspect(*arguments)
    Numbering.inspect(Compose(Tree([Layer()])))
