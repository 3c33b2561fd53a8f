"""Which parameters get the `CallWrapper`."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, Optional, Union

import pytest

from inprocess.wrap import inject


class Call:
    """Stands for the `CallWrapper`: only its type matters."""


class OtherCall(Call):
    pass


CALL = Call()


def call(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    args, kwargs = inject(function, Call, CALL, args, kwargs)
    return function(*args, **kwargs)


def first(a: Call, b: int) -> Any:
    return a, b


def with_default(b: int, a: Optional[Call] = None) -> Any:  # noqa: UP045
    return a, b


def with_union(b: int, a: Call | None = None) -> Any:
    return a, b


def with_old_union(b: int, a: Union[Call, None] = None) -> Any:  # noqa: UP007
    return a, b


def keyword_only(b: int, *, a: Call) -> Any:
    return a, b


def between(b: int, a: Call, *rest: Any, **more: Any) -> Any:
    return (a, b, *rest, more) if rest or more else (a, b)


@pytest.mark.parametrize("function", [with_default, with_union, with_old_union, keyword_only, between])
def test_it_is_passed_wherever_the_parameter_stands(function: Callable[..., Any]) -> None:
    assert call(function, 3) == (CALL, 3)
    assert call(function, b=3) == (CALL, 3)
    assert call(function, b=3, a=None) == (CALL, 3)


@pytest.mark.parametrize("function", [first, with_default, with_union])
def test_it_replaces_what_the_caller_gave(function: Callable[..., Any]) -> None:
    assert call(function, a=Call(), b=3) == (CALL, 3)
    arguments = (None, 3) if function is first else (3, None)
    assert call(function, *arguments) == (CALL, 3)


def test_what_follows_it_stays_where_it_was() -> None:
    assert call(between, 3, None, 4, 5, x=6) == (CALL, 3, 4, 5, {"x": 6})


def test_several_parameters_get_it() -> None:
    def function(a: Call, b: int, c: Call | None = None) -> Any:
        return a, b, c

    assert call(function, b=1) == (CALL, 1, CALL)


def test_other_annotations_do_not() -> None:
    def function(a: Any = 1, b: OtherCall | None = None, c: int | Call | None = None, d: Call | int = 4, e=5) -> Any:  # type: ignore[no-untyped-def]
        return a, b, c, d, e

    assert call(function) == (1, None, None, 4, 5)


def test_variable_parameters_do_not() -> None:
    def function(*a: Call, **b: Call) -> Any:
        return a, b

    assert call(function, 1, x=2) == ((1,), {"x": 2})


def test_annotations_whose_other_names_are_unknown() -> None:
    def function(b: NotImported, a: Optional[Call] = None, c: elsewhere.Call | None = None) -> Any:  # type: ignore[name-defined]  # noqa: F821, UP045
        return a, b, c

    assert call(function, 3) == (CALL, 3, CALL)


def test_methods_partials_decorated_functions_and_objects() -> None:
    class Trainer:
        def train(self, b: int, a: Call | None = None) -> Any:
            return a, b

        def __call__(self, b: int, a: Call | None = None) -> Any:
            return a, b

    @functools.wraps(with_union)
    def decorated(*args: Any, **kwargs: Any) -> Any:
        return with_union(*args, **kwargs)

    for function in (Trainer().train, Trainer(), decorated, functools.partial(with_union)):
        assert call(function, 3) == (CALL, 3)


def test_what_cannot_be_called_so_is_said_by_the_call() -> None:
    with pytest.raises(TypeError, match="unexpected keyword argument 'c'"):
        call(with_union, 3, c=1)
    with pytest.raises(TypeError, match="missing 1 required"):
        call(with_union)


def test_a_function_without_signature() -> None:
    assert call(max, 1, 2) == 2
