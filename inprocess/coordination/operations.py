"""The operations that every store has: those of torch, with torch's meaning; and what our own clients share."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Any, NamedTuple

__all__ = ["NO_GUARD", "Guard", "Operations", "few", "in_bytes"]


class Guard(NamedTuple):
    """A request is done only as long as `key` holds `value`; otherwise it ends with StaleViewError."""

    key: str
    value: str


NO_GUARD = Guard("", "")


def in_bytes(value: str | bytes) -> bytes:
    """Return a value as it is stored: text in UTF-8."""
    return value.encode() if isinstance(value, str) else bytes(value)


def few(keys: Sequence[str]) -> str:
    """Name keys in a message, not too many."""
    return ", ".join(map(repr, keys[:4])) + (f" and {len(keys) - 4} more" if len(keys) > 4 else "")


class Operations:
    """For type checkers, and to read: what `StoreMixin` needs of the class it is mixed into."""

    def set(self, key: str, value: Any) -> None:
        """Write a value, over any other."""

    def get(self, key: str) -> bytes:
        """Return the value of a key, once it exists."""
        raise NotImplementedError

    def add(self, key: str, amount: int) -> int:
        """Add to a number, 0 if it does not exist yet; returns the sum."""
        raise NotImplementedError

    def append(self, key: str, value: Any) -> None:
        """Append to a value, empty if it does not exist yet."""

    def check(self, keys: list[str]) -> bool:
        """Whether all these keys exist now."""
        raise NotImplementedError

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        """Wait until all these keys exist."""

    def compare_set(self, key: str, expected: Any, desired: Any) -> bytes:
        """Write `desired` if the key holds `expected` or is absent and `expected` empty; returns what it holds then."""
        raise NotImplementedError

    def delete_key(self, key: str) -> bool:
        """Delete a key; returns whether it existed."""
        raise NotImplementedError

    def num_keys(self) -> int:
        """Return how many keys there are."""
        raise NotImplementedError

    @property
    def timeout(self) -> timedelta:
        """How long `get` and `wait` wait by default."""
        raise NotImplementedError
