"""The types of the program that a state may hold, by the name that a checkpoint knows them by.

The table below is the one piece of state that a module of this package keeps. What a name means is a fact about the
whole process, and values are decoded in places that know nothing of the program (`ckpt.open`, the tools). A checkpoint
only names types: it is the program that gives a name its meaning, so nothing is ever imported or called because a
checkpoint says so.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum, Flag
from typing import Any, Literal, TypeVar, overload

from ckpt.values.standard import BUILT_IN

__all__ = ["Encoder", "Form", "Unregistered", "encoder_of", "encoder_named", "form_of", "name_of", "register_encoder"]

_T = TypeVar("_T")

Form = Literal["enum", "flag", "namedtuple", "registered"]
"""How a value of a named type is stored: the name of the member, its number, the fields, or what `to_json` gave."""


@dataclass(frozen=True, slots=True)
class Unregistered:
    """A value of a type that this program has not registered, as `ckpt.open` gives it.

    `name` is the type's module and qualified name. `data` is, by `form`: of an "enum" the name of the member, of a
    "flag" its number, of a "namedtuple" a tuple of pairs of field and value, of "registered" what `to_json` returned.
    """

    name: str
    data: Any
    form: Form = "registered"

    def __hash__(self) -> int:
        """That of the name alone: `data` need not be hashable."""
        return hash(self.name)


@dataclass(frozen=True, slots=True)
class Encoder:
    """A registered type. Without functions it is an enum or a named tuple, which need none."""

    kind: type[Any]
    to_json: Callable[[Any], Any] | None
    from_json: Callable[[Any], Any] | None


_ENCODERS: dict[str, Encoder] = {}


@overload
def register_encoder(kind: type[Any]) -> None: ...
@overload
def register_encoder(kind: type[_T], to_json: Callable[[_T], Any], from_json: Callable[[Any], _T]) -> None: ...


def register_encoder(
    kind: type[Any], to_json: Callable[[Any], Any] | None = None, from_json: Callable[[Any], Any] | None = None
) -> None:
    """Make values of exactly this type leaves that a state may hold, in this process.

    ``to_json(value)`` returns anything a state may hold as a value (numbers, strings, lists, dicts, other registered
    types), and ``from_json`` makes an equal value of it. For an `enum.Enum` and a named tuple both may be left out;
    registering one is only needed to have `ckpt.open` know it, or to restore it where the state has no value of its
    type. The checkpoint names the type by its module and qualified name. Registering it again replaces the functions.

    Call it before saving and before restoring, on every rank. TypeError for a type that is stored in another way (a
    number, a list, a tensor), and if only one function is given.
    """
    if not isinstance(kind, type):
        raise TypeError(f"register_encoder takes a type, not {kind!r}")
    if kind in BUILT_IN or any((base.__module__, base.__name__) == ("torch", "Tensor") for base in kind.__mro__):
        raise TypeError(f"{kind.__qualname__} is stored in its own way and cannot be registered")
    if (to_json is None) != (from_json is None):
        raise TypeError(f"registering {kind.__qualname__} takes both to_json and from_json")
    if to_json is None and form_of(kind) is None:
        raise TypeError(f"{kind.__qualname__} is neither an Enum nor a named tuple: give to_json and from_json")
    _ENCODERS[name_of(kind)] = Encoder(kind, to_json, from_json)


def name_of(kind: type[Any]) -> str:
    """What a checkpoint calls a type."""
    return f"{kind.__module__}.{kind.__qualname__}"


def encoder_of(kind: type[Any]) -> Encoder | None:
    """What is registered for exactly this type."""
    encoder = _ENCODERS.get(name_of(kind)) if _ENCODERS else None
    return encoder if encoder is not None and encoder.kind is kind else None


def encoder_named(name: str) -> Encoder | None:
    """What is registered under the name that a checkpoint has."""
    return _ENCODERS.get(name)


def form_of(kind: type[Any]) -> Form | None:
    """How values of a type are stored that need not be registered; None for all others."""
    if issubclass(kind, Enum):
        return "flag" if issubclass(kind, Flag) else "enum"
    is_named_tuple = issubclass(kind, tuple) and isinstance(getattr(kind, "_fields", None), tuple)
    return "namedtuple" if is_named_tuple else None
