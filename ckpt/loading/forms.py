"""What a document says, if it has the form that it should have; a ValueError otherwise.

JSON has no types for sizes and names, and Python takes True for 1 and 1.0 for 1.
"""

from __future__ import annotations

from typing import Any

from ckpt.errors import StateError
from ckpt.paths import Path
from ckpt.storage.dtypes import stored

__all__ = ["dtype_name", "items", "key_path", "rank_of", "sizes", "whole_number"]

_MOST = 1 << 63


def whole_number(value: Any) -> int:
    """A number of something: whole, and not negative."""
    if type(value) is not int or not 0 <= value < _MOST:
        raise ValueError(f"{value!r:.80} is no number of something")
    return value


def sizes(value: Any) -> tuple[int, ...]:
    """A shape, or an offset: a list of such numbers."""
    for number in items(value):
        if type(number) is not int or not 0 <= number < _MOST:
            raise ValueError(f"{value!r:.80} are no sizes")
    return tuple(value)


def items(value: Any) -> list[Any]:
    """A list."""
    if type(value) is not list:
        raise ValueError(f"{value!r:.80} is no list")
    return value


def key_path(value: Any) -> Path:
    """The name of a leaf: a list of strings and integers."""
    for key in items(value):
        if type(key) is not str and type(key) is not int:
            raise ValueError(f"{value!r:.80} is no name")
    return tuple(value)


def rank_of(value: Any, world_size: int) -> int | None:
    """The rank that something belongs to, or None."""
    if value is not None and whole_number(value) >= world_size:
        raise ValueError(f"rank {value!r} is not among the {world_size} that wrote the step")
    rank: int | None = value
    return rank


def dtype_name(value: Any) -> str:
    """The name of a dtype that a checkpoint can hold."""
    try:
        stored(value)
    except (StateError, TypeError):
        raise ValueError(f"{value!r:.80} is no dtype that a checkpoint can hold") from None
    name: str = value
    return name
