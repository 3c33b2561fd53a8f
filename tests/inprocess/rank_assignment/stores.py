"""A coordination store in memory, for all ranks of a test in one process."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import TypeVar

from inprocess.exception import BarrierOverflow, BarrierTimeout

T = TypeVar("T")


class NotThereYet(Exception):
    """A store that does not wait was asked for what nobody has written."""


class FakeStore:
    """Waits like a real store, or raises `NotThereYet` instead if `waits` is false. Counts the calls."""

    def __init__(self, *, waits: bool = True) -> None:
        self.calls: Counter[str] = Counter()
        self._values: dict[str, bytes] = {}
        self._changed = threading.Condition()
        self._waits = waits

    def set(self, key: str, value: str | bytes) -> None:
        with self._changed:
            self.calls["set"] += 1
            self._put(key, value if isinstance(value, bytes) else value.encode())

    def get(self, key: str) -> bytes:
        with self._changed:
            self.calls["get"] += 1
            return self._wait_for(key)

    def add(self, key: str, amount: int) -> int:
        with self._changed:
            self.calls["add"] += 1
            total = int(self._values.get(key, b"0")) + amount
            self._put(key, str(total).encode())
            return total

    def append(self, key: str, value: str) -> None:
        with self._changed:
            self.calls["append"] += 1
            self._put(key, self._values.get(key, b"") + value.encode())

    def check(self, keys: list[str]) -> bool:
        with self._changed:
            self.calls["check"] += 1
            return all(key in self._values for key in keys)

    def send_key(self, key: str, rank: int, name: str = "") -> None:
        with self._changed:
            self.calls["send_key"] += 1
            self._put(f"key/{name}/{rank}", key.encode())

    def get_keys(self, ranks: Sequence[int], name: str = "") -> list[str]:
        with self._changed:
            self.calls["get_keys"] += 1
            return [self._wait_for(f"key/{name}/{rank}").decode() for rank in ranks]

    def barrier(
        self,
        ranks: Iterable[int],
        group_name: str,
        rendezvous_count: int,
        timeout: timedelta,
        timeout_chunk: timedelta | None = None,
    ) -> None:
        with self._changed:
            self.calls["barrier"] += 1
            arrived = int(self._values.get(group_name, b"0")) + len(list(ranks))
            self._put(group_name, str(arrived).encode())
            if arrived > rendezvous_count:
                raise BarrierOverflow(group_name)
            full = self._changed.wait_for(
                lambda: int(self._values[group_name]) >= rendezvous_count, timeout.total_seconds()
            )
            if not full:
                raise BarrierTimeout(group_name)

    def _put(self, key: str, value: bytes) -> None:
        self._values[key] = value
        self._changed.notify_all()

    def _wait_for(self, key: str) -> bytes:
        if not self._waits and key not in self._values:
            raise NotThereYet(key)
        if not self._changed.wait_for(lambda: key in self._values, timeout=20):
            raise AssertionError(f"nobody wrote {key}")
        return self._values[key]


def on_all_ranks(ranks: Iterable[int], function: Callable[[int], T]) -> dict[int, T]:
    """Return what `function` returns on each rank, run at the same time."""
    ranks = list(ranks)
    with ThreadPoolExecutor(len(ranks)) as pool:
        return dict(zip(ranks, pool.map(function, ranks), strict=True))
