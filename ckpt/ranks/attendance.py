"""`Attendance`: which ranks wait at one place of a program, for the warning of one of them.

    waits/NAME/RANK   is there while RANK waits

A rank writes it when a wait is long, and deletes it at the end of the wait.
"""

from __future__ import annotations

import contextlib
import functools
from typing import Any

from ckpt.ranks.late import LateRanks
from ckpt.ranks.rounds import known_of, named

__all__ = ["LONG_S", "Attendance"]

LONG_S = 1.0
"""A wait of so long is written."""


class Attendance:
    """The ranks that wait at a place with a `name`, in a store of torch that is for their group alone. Never waits."""

    def __init__(self, store: Any, name: str, rank: int, world_size: int) -> None:
        self._store = store
        self._name = name
        self._rank = rank
        self._world_size = world_size

    def note(self) -> None:
        """Write that this rank waits."""
        self._store.set(self._key(self._rank), "")

    def forget(self) -> None:
        """Delete that this rank waits."""
        with contextlib.suppress(RuntimeError):  # the store is gone
            self._store.delete_key(self._key(self._rank))

    def warn(self, late: LateRanks, waited_s: float, left_s: float | None, what: str, calls: str) -> None:
        """Log which ranks are missing to agree on `what`, on the lowest of those that wait."""
        waits = [bool(self._store.check([self._key(rank)])) for rank in range(self._world_size)]
        missing = [rank for rank, is_here in enumerate(waits) if not is_here]
        if missing and True not in waits[: self._rank]:
            about = f"{named(missing)} to agree on {what}"
            late.warn(self._rank, waited_s, left_s, about, missing, functools.partial(known_of, self._store), calls)

    def _key(self, rank: int) -> str:
        return f"waits/{self._name}/{rank}"
