"""`Compose` as a function and as an instance of what its members are."""

from __future__ import annotations

import abc
import gc
import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest

from inprocess.compose import Compose, describe, members_of


class Base(abc.ABC):
    @abc.abstractmethod
    def __call__(self, value: int) -> int: ...


@dataclass(frozen=True)
class Add(Base):
    amount: int

    def __call__(self, value: int) -> int:
        return value + self.amount


class Double(Base):
    def __call__(self, value: int) -> int:
        return 2 * value


class DoubleAgain(Double):
    pass


class Stranger:
    def __call__(self, value: int) -> int:
        return -value


def test_from_right_to_left() -> None:
    assert Compose(Add(1), Double())(5) == 11
    assert Compose(Double(), Add(1))(5) == 12
    assert Compose(str, Double(), abs)(-3) == "6"


def test_without_members_it_changes_nothing() -> None:
    assert Compose()(5) == 5
    assert Compose()(1, 2) == (1, 2)
    assert Compose()() is None


@pytest.mark.parametrize(
    ("members", "ancestor", "not_ancestor"),
    [
        ((Add(1), Double()), Base, Double),
        ((Double(), DoubleAgain()), Double, DoubleAgain),
        ((DoubleAgain(), DoubleAgain()), DoubleAgain, Stranger),
        ((Add(1), Add(2)), Add, Double),
        ((Add(1), Stranger()), object, Base),
        ((Add(1), lambda value: value), object, Base),
        ((Compose(Double(), Add(1)), Compose(Add(1), Add(1))), Base, Add),
        ((lambda value: value, lambda value: value), Compose, Base),
    ],
)
def test_is_an_instance_of_the_lowest_common_ancestor(
    members: tuple[Callable[..., Any], ...], ancestor: type, not_ancestor: type
) -> None:
    composed = Compose(*members)
    assert isinstance(composed, Compose)
    assert isinstance(composed, ancestor)
    assert not isinstance(composed, not_ancestor)
    assert composed.instances == members
    assert composed(3) == members[0](members[1](3))


def test_the_ancestor_may_be_abstract_in_other_ways() -> None:
    class Planned(Base):
        @abc.abstractmethod
        def plan(self) -> int: ...

        def __call__(self, value: int) -> int:
            return value + self.plan()

    class One(Planned):
        def plan(self) -> int:
            return 1

    class Two(Planned):
        def plan(self) -> int:
            return 2

    composed = Compose(One(), Two())
    assert isinstance(composed, Planned)
    assert composed(0) == 3


def test_equal_by_identity_whatever_the_members_are() -> None:
    one, other = Compose(Add(1), Add(2)), Compose(Add(1), Add(2))
    assert one == one
    assert one != other
    assert len({one, other}) == 2
    assert repr(one) == "Compose(Add(amount=1), Add(amount=2))"


def test_tuples_become_arguments() -> None:
    assert Compose(lambda a, b: a - b, lambda a, b: (b, a))(1, 5) == 4
    assert Compose(lambda a: (a, a))(1) == (1, 1)


def test_none_is_reported_and_passes_on_what_was_given() -> None:
    def forgets(value: int) -> None:
        pass

    with pytest.warns(UserWarning, match=r"forgets .*test_compose.py:\d+\) returned None"):
        assert Compose(Double(), forgets)(4) == 8
    with pytest.warns(UserWarning, match="returned None"):
        assert Compose(forgets, Double())(4) == 8


def test_members_without_parameters() -> None:
    calls = []

    def note() -> None:
        calls.append("note")

    def make() -> int:
        return 7

    assert Compose(note, note)() is None
    assert Compose(Double(), note, Add(1))(1) == 4
    assert Compose(Double(), make)() == 14
    assert Compose(Double(), make, Add(1))(100) == 14
    assert calls == ["note"] * 3


def test_what_a_member_raises_passes_through() -> None:
    def fail(value: int) -> int:
        raise KeyError(value)

    with pytest.raises(KeyError, match="2"):
        Compose(Add(1), fail, Double())(1)


def test_members_must_be_callable() -> None:
    with pytest.raises(TypeError, match="a member of Compose must be callable, not int: 3"):
        Compose(Add(1), 3)  # type: ignore[arg-type]


def test_members_of_nested_compositions_in_the_order_listed() -> None:
    a, b, c = Add(1), Add(2), Add(3)
    assert members_of(Compose(a, Compose(b, Compose(), c))) == (a, b, c)
    assert members_of(a) == (a,)


def test_composes_its_own_class() -> None:
    class Logged(Compose):
        pass

    composed = Logged(Add(1), Double())
    assert isinstance(composed, Logged)
    assert isinstance(composed, Base)
    assert composed(1) == 3


@pytest.mark.parametrize(
    ("function", "expected"),
    [
        (Double(), r"\.Double \(.*test_compose.py:\d+\)"),
        (test_tuples_become_arguments, r"\.test_tuples_become_arguments \("),
        (gc.collect, r"gc\.collect$"),
        (partial(Double(), 1), r"functools\.partial$"),
        (Double().__call__, r"\.Double\.__call__ \("),
        ([].append, r"list\.append$"),
        (int, r"builtins\.int$"),
    ],
)
def test_description(function: Callable[..., Any], expected: str) -> None:
    assert re.search(expected, describe(function)), describe(function)
