"""Requests that a server answers later: when keys exist, when a set is large enough, or when their time is over."""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

__all__ = ["Waiter", "Waiters"]

_SLACK = 1024  # finished entries tolerated in the heap of deadlines


@dataclass(eq=False)
class Waiter:
    """One waiting request. `token` is the server's; either `keys` is not empty, or `set_name` is given with `size`."""

    token: Any
    deadline: float
    keys: tuple[bytes, ...] = ()
    set_name: bytes | None = None
    size: int = 0
    done: bool = False


class Waiters:
    """Who waits for what. A change looks only at those it may concern. For one thread.

    A waiter for several keys is filed under one that is missing, and moves on to the next when that one appears.
    """

    def __init__(self) -> None:
        self._by_key: dict[bytes, dict[Waiter, None]] = {}
        self._by_size: dict[bytes, dict[int, dict[Waiter, None]]] = {}
        self._deadlines: list[tuple[float, int, Waiter]] = []
        self._count = 0
        self._live = 0

    def file(self, waiter: Waiter, missing: bytes | None = None) -> None:
        """Take in a waiter; `missing` is one of its keys that does not exist yet."""
        self._refile(waiter, missing)
        self._count += 1
        self._live += 1
        heapq.heappush(self._deadlines, (waiter.deadline, self._count, waiter))

    def take_by_key(self, key: bytes) -> list[Waiter]:
        """Remove and return those filed under this key. Put back with `refile` those that miss another one."""
        found = list(self._by_key.pop(key, {}))
        self._live -= len(found)
        for waiter in found:
            waiter.done = True
        return found

    def refile(self, waiter: Waiter, missing: bytes) -> None:
        """File a waiter taken by `take_by_key` under another missing key."""
        waiter.done = False
        self._live += 1
        self._refile(waiter, missing)

    def take_by_size(self, name: bytes, size: int) -> list[Waiter]:
        """Remove and return those who wait for at most this size of the set."""
        by_size = self._by_size.get(name, {})
        found = [waiter for wanted in sorted(by_size) if wanted <= size for waiter in by_size[wanted]]
        for waiter in found:
            self.discard(waiter)
        return found

    def discard(self, waiter: Waiter) -> None:
        """Remove a waiter, wherever it is filed. Idempotent."""
        if waiter.done:
            return
        waiter.done = True
        self._live -= 1
        if waiter.set_name is not None:
            by_size = self._by_size[waiter.set_name]
            del by_size[waiter.size][waiter]
            if not by_size[waiter.size]:
                del by_size[waiter.size]
            if not by_size:
                del self._by_size[waiter.set_name]
            return
        for key in waiter.keys:
            filed = self._by_key.get(key, {})
            if filed.pop(waiter, self) is None and not filed:
                del self._by_key[key]

    def overdue(self, now: float) -> Iterator[Waiter]:
        """Remove and yield those whose time is over."""
        while self._deadlines and self._deadlines[0][0] <= now:
            waiter = heapq.heappop(self._deadlines)[2]
            if not waiter.done:
                self.discard(waiter)
                yield waiter

    def next_deadline(self) -> float | None:
        """When `overdue` should be asked next. None: nobody waits."""
        while self._deadlines and self._deadlines[0][2].done:
            heapq.heappop(self._deadlines)
        if len(self._deadlines) > 2 * self._live + _SLACK:
            self._deadlines = [entry for entry in self._deadlines if not entry[2].done]
            heapq.heapify(self._deadlines)
        return self._deadlines[0][0] if self._deadlines else None

    def _refile(self, waiter: Waiter, missing: bytes | None) -> None:
        if waiter.set_name is not None:
            self._by_size.setdefault(waiter.set_name, {}).setdefault(waiter.size, {})[waiter] = None
        else:
            assert missing is not None
            self._by_key.setdefault(missing, {})[waiter] = None
