"""Checks of arguments: each error names the argument, says what it is expected to be, and shows the value."""

from __future__ import annotations

import math
from collections.abc import Mapping
from datetime import timedelta
from typing import Any

__all__ = [
    "check_choice",
    "check_flag",
    "check_mapping",
    "check_name",
    "check_number",
    "check_step",
    "duration",
    "in_seconds",
    "whole_number",
]

_LONGEST_NAME = 200


def duration(name: str, value: Any, *, or_zero: bool = False) -> timedelta:
    """Return a timedelta, or a number of seconds, as a timedelta. It must be positive, or zero with `or_zero`."""
    if isinstance(value, int | float) and not isinstance(value, bool):
        try:
            given, value = value, timedelta(seconds=value)
        except (OverflowError, ValueError):  # also of what is too long
            raise ValueError(f"{name} must be a finite duration, not {value!r} seconds") from None
        if given > 0 and not value:
            value = timedelta.resolution  # a timedelta has whole microseconds; zero would mean something else
    if not isinstance(value, timedelta):
        raise TypeError(f"{name} must be a number of seconds or a timedelta, such as 60, not {_shown(value)}")
    if value < timedelta(0) or not (value or or_zero):
        raise ValueError(f"{name} must {'not be negative' if or_zero else 'be positive'}, but is {value}")
    return value


def in_seconds(value: timedelta | float) -> float:
    """Return a duration that was checked as a number of seconds."""
    return value.total_seconds() if isinstance(value, timedelta) else float(value)


def whole_number(name: str, value: Any, *, least: int = 1, unit: str = "") -> int:
    """Return a whole number of at least `least`. TypeError for another type, ValueError for a smaller number."""
    expected = f"a whole number{unit and f' of {unit}'} of at least {least}"
    if type(value) is not int:
        raise TypeError(f"{name} must be {expected}, not {_shown(value)}")
    if value < least:
        raise ValueError(f"{name} must be {expected}, not {value}")
    return value


def check_number(name: str, value: Any, unit: str) -> None:
    """Raise TypeError or ValueError unless `value` is a positive, finite number of a unit."""
    if not isinstance(value, int | float) or isinstance(value, bool):
        raise TypeError(f"{name} must be a positive number of {unit}, not {_shown(value)}")
    if not (value > 0 and math.isfinite(value)):
        raise ValueError(f"{name} must be a positive number of {unit}, not {value!r}")


def check_flag(name: str, value: Any) -> None:
    """Raise TypeError unless `value` is True or False."""
    if not isinstance(value, bool):
        raise TypeError(f"{name} must be True or False, not {_shown(value)}")


def check_mapping(name: str, value: Any) -> None:
    """Raise TypeError unless `value`, options of a storage, is None or a mapping."""
    if value is not None and not isinstance(value, Mapping):
        # Not the value: storage options have credentials, which get into no log.
        raise TypeError(
            f"{name} must be a dict, such as {{'endpoint': 'http://host:9000'}}, not a {type(value).__name__}"
        )


def check_name(name: str, value: Any) -> None:
    """Raise TypeError or ValueError unless `value` is a short text of printable characters."""
    if not isinstance(value, str):
        raise TypeError(f"{name} must be a name, such as 'run7', not {_shown(value)}")
    if not (value.strip() and value.isprintable() and len(value) <= _LONGEST_NAME):
        raise ValueError(f"{name} must be a name of 1 to {_LONGEST_NAME} printable characters, not {value!r:.80}")


def check_choice(name: str, value: Any, choices: tuple[Any, ...]) -> None:
    """Raise ValueError unless `value` is one of some values, of the same type."""
    if not any(type(value) is type(choice) and value == choice for choice in choices):
        *others, last = map(repr, choices)
        raise ValueError(f"{name} must be {', '.join(others)} or {last}, not {_shown(value)}")


def _shown(value: Any) -> str:
    return f"{value!r:.80} ({type(value).__name__})"


def check_step(step: Any, method: str) -> None:
    """Raise ValueError unless `step`, given to this method beside the state, is a number of a step."""
    if not isinstance(step, int) or isinstance(step, bool) or not 0 <= step < 10**18:
        what = step if isinstance(step, int) else f"a {type(step).__name__}"  # not the text of a whole state
        raise ValueError(f"step must be an int from 0 to 10**18 - 1, not {what}: {method}(state, step)")
