"""Types of Python and torch that are stored without loss, each under its own name."""

from __future__ import annotations

import io
from argparse import Namespace
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import date, datetime, time, timedelta, timezone
from decimal import Decimal
from fractions import Fraction
from pathlib import PosixPath, PurePosixPath, PureWindowsPath
from types import MappingProxyType
from typing import Any
from uuid import UUID

__all__ = ["BUILT_IN", "STANDARD", "STANDARD_BY_NAME", "TORCH", "Standard"]


@dataclass(frozen=True, slots=True)
class Standard:
    """A type stored as ``{"$": name, "value": ...}``. Both functions pass what is itself a value."""

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
        raise TypeError("not made of bytes")  # of a number it would make so many zeros
    return bytearray(value)


def _to_file(value: list[Any]) -> io.BytesIO:
    data, position = value
    file = io.BytesIO(data)
    file.seek(position)
    return file


STANDARD: Mapping[type[Any], Standard] = MappingProxyType(
    {
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
        Decimal: Standard("Decimal", str, Decimal),
        Fraction: Standard(
            "Fraction", lambda value: [value.numerator, value.denominator], lambda value: Fraction(*value)
        ),
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
"""Types of torch by their names there, so that torch need not be imported to look for them."""

STANDARD_BY_NAME: Mapping[str, Standard] = MappingProxyType(
    {standard.name: standard for standard in (*STANDARD.values(), *TORCH.values())}
)

BUILT_IN: frozenset[type[Any]] = frozenset(STANDARD) | {
    *(type(None), bool, int, float, complex, str, bytes, list, tuple, set, frozenset, deque),
    *(dict, OrderedDict, Counter, Namespace),
}
"""All types of Python that have a form of their own."""
