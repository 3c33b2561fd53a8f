"""The types whose values a state may hold: standard types of Python and torch, and types that the program registers.

The table of registered types is the only state of a module in this package. It belongs to the whole process, and values
are decoded in places that know nothing of the program (`ckpt.open`, the tools). A checkpoint only names types: nothing
is imported or called because a checkpoint says so.
"""

from __future__ import annotations

import io
from argparse import Namespace
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from datetime import date, datetime, time, timedelta, timezone
from decimal import Decimal
from enum import Enum, Flag
from fractions import Fraction
from pathlib import PosixPath, PurePosixPath, PureWindowsPath
from types import MappingProxyType
from typing import Any, Literal, TypeVar, overload
from uuid import UUID

_MAX_DIMENSIONS = 64  # of a tensor or an array


@dataclass(frozen=True, slots=True)
class Standard:
    """A type stored as ``{"$": name, "value": ...}``. The functions convert to and from a value with a JSON form."""

    name: str
    to_value: Callable[[Any], Any]
    from_value: Callable[[Any], Any]


def _timezone(value: timezone) -> list[Any]:
    offset = value.utcoffset(None)
    name = value.tzname(None)
    return [offset, None if name == timezone(offset).tzname(None) else name]


def _to_timezone(value: list[Any]) -> timezone:
    offset, name = value
    return timezone(offset) if name is None else timezone(offset, name)


def _clock(value: datetime | time) -> list[Any]:
    return [value.replace(tzinfo=None).isoformat(), value.fold, value.tzinfo]


def _to_datetime(value: list[Any]) -> datetime:
    text, fold, zone = value
    return datetime.fromisoformat(text).replace(fold=fold, tzinfo=zone)


def _to_time(value: list[Any]) -> time:
    text, fold, zone = value
    return time.fromisoformat(text).replace(fold=fold, tzinfo=zone)


def _to_bytearray(value: bytes) -> bytearray:
    if not isinstance(value, bytes):
        raise TypeError("not made of bytes")  # bytearray(5) would be five zeros
    return bytearray(value)


def _to_file(value: list[Any]) -> io.BytesIO:
    data, position = value
    file = io.BytesIO(data)
    file.seek(position)
    return file


@dataclass(frozen=True, slots=True, repr=False)
class ArrayValue:
    """A tensor or a numpy array inside a value that is stored as a whole, such as the state of a data loader.

    `library` is "torch" or "numpy"; `dtype` is the name that this library has for it, for numpy with the byte order.
    `data` are the elements in C order. Needs neither library, so that tools can read the value.
    """

    library: Literal["torch", "numpy"]
    dtype: str
    shape: tuple[int, ...]
    data: bytes

    def __repr__(self) -> str:
        return f"<{self.library} {self.dtype}{list(self.shape)}>"


def _to_fraction(value: list[int]) -> Fraction:
    numerator, denominator = value
    if type(numerator) is not int or type(denominator) is not int:
        raise TypeError("not made of two integers")  # Fraction("1e3000000000") would take hours
    return Fraction(numerator, denominator)


def _to_decimal(value: str) -> Decimal:
    if type(value) is not str:
        raise TypeError("not made of a string")
    return Decimal(value)


def _to_array(value: list[Any]) -> ArrayValue:
    library, dtype, shape, data = value
    sizes = type(shape) is list and len(shape) <= _MAX_DIMENSIONS and all(_is_size(size) for size in shape)
    if library not in ("torch", "numpy") or type(dtype) is not str or not sizes or type(data) is not bytes:
        raise ValueError("not an array")
    return ArrayValue(library, dtype, tuple(shape), data)


def _is_size(value: Any) -> bool:
    return type(value) is int and 0 <= value < 1 << 63


STANDARD: Mapping[type[Any], Standard] = MappingProxyType(
    {
        ArrayValue: Standard(
            "array", lambda value: [value.library, value.dtype, list(value.shape), value.data], _to_array
        ),
        bytearray: Standard("bytearray", bytes, _to_bytearray),
        PosixPath: Standard("PosixPath", str, PosixPath),
        PurePosixPath: Standard("PurePosixPath", str, PurePosixPath),
        PureWindowsPath: Standard("PureWindowsPath", str, PureWindowsPath),
        date: Standard("date", date.isoformat, date.fromisoformat),
        datetime: Standard("datetime", _clock, _to_datetime),
        time: Standard("time", _clock, _to_time),
        timedelta: Standard(
            "timedelta", lambda value: [value.days, value.seconds, value.microseconds], lambda value: timedelta(*value)
        ),
        timezone: Standard("timezone", _timezone, _to_timezone),
        Decimal: Standard("Decimal", str, _to_decimal),
        Fraction: Standard("Fraction", lambda value: [value.numerator, value.denominator], _to_fraction),
        UUID: Standard("UUID", str, UUID),
        range: Standard("range", lambda value: [value.start, value.stop, value.step], lambda value: range(*value)),
        slice: Standard("slice", lambda value: [value.start, value.stop, value.step], lambda value: slice(*value)),
        io.BytesIO: Standard("BytesIO", lambda value: [value.getvalue(), value.tell()], _to_file),
    }
)


def _to_device(value: str) -> Any:
    import torch

    return torch.device(value)


def _to_size(value: list[int]) -> Any:
    import torch

    return torch.Size(value)


TORCH: Mapping[str, Standard] = MappingProxyType(
    {"device": Standard("torch.device", str, _to_device), "Size": Standard("torch.Size", list, _to_size)}
)
"""Types of torch by name, so that torch need not be imported to look them up."""

STANDARD_BY_NAME: Mapping[str, Standard] = MappingProxyType(
    {standard.name: standard for standard in (*STANDARD.values(), *TORCH.values())}
)

BUILT_IN: frozenset[type[Any]] = frozenset(STANDARD) | {
    *(type(None), bool, int, float, complex, str, bytes, list, tuple, set, frozenset, deque),
    *(dict, OrderedDict, Counter, Namespace),
}
"""All types that are stored without being registered."""

_T = TypeVar("_T")

Form = Literal["enum", "flag", "namedtuple", "registered", "class"]
"""How a value of a named type is stored: by the member's name, its number, its fields, or what `to_json` returns.

A "class" is the type itself.
"""


@dataclass(frozen=True, slots=True)
class Unregistered:
    """A placeholder for a value of a type that this program has not registered, as returned by `ckpt.open`.

    `name` is the type's module and qualified name. `data` is, by `form`: of an "enum" the name of the member, of a
    "flag" its number, of a "namedtuple" a tuple of pairs of field and value, of "registered" what `to_json` returned.
    The type itself, a "class", has none.
    """

    name: str
    data: Any
    form: Form = "registered"

    def __hash__(self) -> int:
        """Hash the name only if `data` is not hashable."""
        try:
            return hash((self.name, self.data))
        except TypeError:
            return hash(self.name)

    @classmethod
    def within(cls, value: Any) -> Iterator[Unregistered]:
        """Yield the placeholders in a value, which may be one itself."""
        return (part for part in all_parts(value) if type(part) is cls)


def all_parts(value: Any) -> Iterator[Any]:
    """Yield a value, and the values in it at any depth."""
    yield value
    parts: Iterable[Any] = ()
    if isinstance(value, dict):
        parts = (*value.keys(), *value.values())
    elif isinstance(value, list | tuple | set | frozenset | deque):
        parts = value
    elif isinstance(value, Namespace):
        parts = vars(value).values()
    elif isinstance(value, Unregistered):
        parts = (value.data,)
    for part in parts:
        yield from all_parts(part)


@dataclass(frozen=True, slots=True)
class Encoder:
    """A registered type. The functions are None for an enum or a named tuple."""

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
    """Allow values of exactly this type as leaves of a state, in this process.

    ``to_json(value)`` returns a value that a state may hold (numbers, strings, lists, dicts, other registered types),
    and ``from_json`` makes an equal value of it. Both may be omitted for an `enum.Enum` or a named tuple, which must be
    registered only for `ckpt.open`, or for a restore into a state without a value of the type. The checkpoint names the
    type by its module and qualified name. Registering it again replaces the functions.

    Call it before saving and before restoring, on every rank. TypeError for a type that is stored without being
    registered (a number, a list, a tensor), and if only one function is given.
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
    """Return the name of a type in a checkpoint."""
    return f"{kind.__module__}.{kind.__qualname__}"


def encoder_of(kind: type[Any]) -> Encoder | None:
    """Return the encoder registered for exactly this type."""
    encoder = _ENCODERS.get(name_of(kind)) if _ENCODERS else None
    return encoder if encoder is not None and encoder.kind is kind else None


def encoder_named(name: str) -> Encoder | None:
    """Return the encoder registered under this name."""
    return _ENCODERS.get(name)


def form_of(kind: type[Any]) -> Form | None:
    """Return how values of an enum or a named tuple are stored; None for other types."""
    if issubclass(kind, Enum):
        return "flag" if issubclass(kind, Flag) else "enum"
    is_named_tuple = issubclass(kind, tuple) and isinstance(getattr(kind, "_fields", None), tuple)
    return "namedtuple" if is_named_tuple else None
