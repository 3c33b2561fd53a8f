"""`Compose`: several callables as one, called from right to left, with the common type of its members."""

from __future__ import annotations

import inspect
import types
import warnings
from collections.abc import Callable, Sequence
from typing import Any

__all__ = ["Compose", "describe", "members_of", "positional_parameters"]


class Compose:
    """`Compose(a, b, c)(x)` is `a(b(c(x)))`.

    The object is an instance of `Compose` and of the lowest common base class of its members, so a composition of
    finalizers is a finalizer. A tuple returned by one member becomes the arguments of the next. A member without
    parameters is called without arguments. A member that returns None passes on what it was given; if that was
    anything, there is a `UserWarning`, because a ``return`` may be missing.

    TypeError if a member is not callable.
    """

    instances: tuple[Callable[..., Any], ...]

    def __new__(cls, *instances: Callable[..., Any]) -> Compose:
        for instance in instances:
            if not callable(instance):
                raise TypeError(f"a member of Compose must be callable, not {type(instance).__name__}: {instance!r}")
        made: Compose = object.__new__(_class_for(cls, instances))
        return made

    def __init__(self, *instances: Callable[..., Any]) -> None:
        self.instances = instances
        self._without_parameters = tuple(not _takes_anything(instance) for instance in instances)

    def __call__(self, *args: Any) -> Any:
        result: Any = args[0] if len(args) == 1 else args or None
        for instance, without_parameters in zip(
            reversed(self.instances), reversed(self._without_parameters), strict=True
        ):
            given = () if without_parameters else args
            returned = instance(*given)
            if returned is not None:
                result = returned
                args = returned if isinstance(returned, tuple) else (returned,)
            elif given:
                warnings.warn(
                    f"{describe(instance)} returned None; the members of Compose left of it get what it was given",
                    stacklevel=2,
                )
        return result

    def __repr__(self) -> str:
        return f"Compose({', '.join(map(repr, self.instances))})"

    # By identity: the methods of a member class (a dataclass, for example) would need its fields.
    __eq__ = object.__eq__
    __hash__ = object.__hash__


def members_of(function: Callable[..., Any]) -> tuple[Callable[..., Any], ...]:
    """Return the members of a `Compose` in the order they were listed, nested ones in place; else `function` alone."""
    if not isinstance(function, Compose):
        return (function,)
    return tuple(member for instance in function.instances for member in members_of(instance))


def positional_parameters(function: Callable[..., Any]) -> list[inspect.Parameter] | None:
    """Return the parameters that can be given by position, ``*args`` included; None if Python cannot tell."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):
        return None
    positional = (
        inspect.Parameter.POSITIONAL_ONLY,
        inspect.Parameter.POSITIONAL_OR_KEYWORD,
        inspect.Parameter.VAR_POSITIONAL,
    )
    return [parameter for parameter in parameters if parameter.kind in positional]


def describe(function: Callable[..., Any]) -> str:
    """Return the name of a callable and, where it is known, the file and line where it is defined."""
    named = function if hasattr(function, "__qualname__") else type(function)
    name = f"{named.__module__}.{named.__qualname__}"
    called = function if hasattr(function, "__code__") else inspect.getattr_static(type(function), "__call__")
    code = getattr(called, "__code__", None)
    return name if code is None else f"{name} ({code.co_filename}:{code.co_firstlineno})"


def _takes_anything(function: Callable[..., Any]) -> bool:
    return positional_parameters(function) != []


def _class_for(compose: type[Compose], instances: Sequence[Callable[..., Any]]) -> type[Compose]:
    """Return the class that derives from `compose` and the lowest common base class of the instances.

    The members of a nested `Compose` count, not the nested object: the common base of two compositions of finalizers is
    that of finalizers.
    """
    lines = [type(member).__mro__ for instance in instances for member in members_of(instance)]
    common = [ancestor for ancestor in lines[0] if all(ancestor in line for line in lines)] if lines else [object]
    for ancestor in common:
        if ancestor is object or issubclass(compose, ancestor):
            break
        try:
            made: type[Compose] = types.new_class(f"Compose[{ancestor.__name__}]", (compose, ancestor))
        except TypeError:
            continue  # a class without subclasses, such as that of plain functions
        # A composition can be called; the members implement the other abstract methods of the base class.
        made.__abstractmethods__ = frozenset()  # type: ignore[attr-defined]
        return made
    return compose
