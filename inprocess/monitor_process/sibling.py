"""The sibling monitor: heartbeats of monitor processes, to notice nodes that have failed.

The monitor process of each rank updates a heartbeat and watches that of the next rank, in a ring. A heartbeat is a
number that changes. Only the watcher's clock tells for how long it has not changed, so clocks of different hosts are
never compared.

When a heartbeat stops, the others of the same node have usually stopped, too, and with them their watchers. So all
heartbeats are then watched for half the time limit more, and all that do not change are reported together.

One thread per iteration, in the monitor process.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Protocol

from inprocess.agreement import heartbeat_key
from inprocess.exception import StaleViewError, StoreError

__all__ = ["HeartbeatStore", "SiblingMonitor", "heartbeat_interval_s"]

_log = logging.getLogger(__name__)
_MOST_BEATS_PER_S = 512  # of all ranks together
_FEWEST_BEATS = 6  # within the time limit


def heartbeat_interval_s(wanted_s: float, timeout_s: float, world_size: int) -> float:
    """Return the interval of a rank's heartbeat: longer in a large job, so that the server can keep up.

    It is `wanted_s`, or longer so that all ranks together send at most 512 heartbeats a second; but it grows no longer
    than a sixth of `timeout_s`.
    """
    return max(wanted_s, min(world_size / _MOST_BEATS_PER_S, timeout_s / _FEWEST_BEATS))


class HeartbeatStore(Protocol):
    """What this module uses of a store."""

    def set(self, key: str, value: str) -> None: ...
    def get(self, key: str) -> bytes: ...
    def check(self, keys: list[str]) -> bool: ...
    def get_within(self, key: str, timeout: timedelta) -> bytes: ...


@dataclass
class _Seen:
    """The last value of a heartbeat, and when this process first read it. Monotonic seconds."""

    value: bytes | None
    since: float


class SiblingMonitor:
    """Updates the heartbeat of `rank` and watches that of the next rank, from `start` to `stop`.

    `report(ranks)` is called with ranks whose heartbeat has not changed for `timeout_s`, each once. Each heartbeat
    carries a `note()`, for `notes_of_others` on other ranks. When the others are in a later iteration, `stale()` is
    called and the thread ends.
    """

    def __init__(
        self,
        store: HeartbeatStore,
        rank: int,
        world_size: int,
        *,
        interval_s: float,
        timeout_s: float,
        report: Callable[[list[int]], None],
        note: Callable[[], str] = lambda: "",
        stale: Callable[[], object] = lambda: None,
    ) -> None:
        self._store = store
        self._rank = rank
        self._world_size = world_size
        self._interval_s = interval_s
        self._timeout_s = timeout_s
        self._report = report
        self._note = note
        self._stale = stale
        self._reported: set[int] = set()
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name=f"sibling-{rank}", daemon=True)

    def start(self) -> None:
        """Start the thread. Does not wait for the store."""
        self._thread.start()

    def stop(self, timeout_s: float | None = None) -> None:
        """End the thread, after at most one request to the store. Idempotent."""
        self._stopped.set()
        if self._thread.ident is not None and self._thread is not threading.current_thread():
            self._thread.join(timeout_s)

    def notes_of_others(self) -> list[str]:
        """Return the notes of the latest heartbeats of all other ranks. Any thread."""
        keys = [heartbeat_key(rank) for rank in range(self._world_size) if rank != self._rank]
        try:
            beats = [self._store.get(key).decode(errors="replace") for key in keys if self._store.check([key])]
        except StoreError as error:
            _log.warning("the standings of the other ranks are unknown: %s", error)
            return []
        return [beat.partition(" ")[2] for beat in beats]

    def _run(self) -> None:
        neighbour = (self._rank + 1) % self._world_size
        beats = 0
        seen: _Seen | None = None
        while not self._stopped.is_set():
            try:
                self._store.set(heartbeat_key(self._rank), f"{beats} {self._note()}")
                beats += 1
                if neighbour != self._rank:
                    # Not before the first interval is over: all ranks begin at the same time, and the server is busy.
                    seen = _Seen(None, time.monotonic()) if seen is None else self._look(neighbour, seen)
                    if self._silent(seen, self._timeout_s):
                        self._report_silent(self._silent_ranks(neighbour))
                        neighbour, seen = self._next_alive(neighbour), None
            except StaleViewError:
                if not self._stopped.is_set():
                    self._stale()
                return
            except StoreError as error:
                _log.warning("the heartbeat of rank %d did not reach the store: %s", self._rank, error)
            self._stopped.wait(self._interval_s)

    def _look(self, rank: int, seen: _Seen | None) -> _Seen:
        """Read a heartbeat. One that does not exist yet counts from the first time it was read."""
        value: bytes | None = None
        if seen is not None and seen.value is not None:  # it exists unless the others are far ahead: one request
            value = self._store.get_within(heartbeat_key(rank), timedelta(seconds=self._timeout_s))
        elif self._store.check([heartbeat_key(rank)]):
            value = self._store.get(heartbeat_key(rank))
        if seen is None or value != seen.value:
            return _Seen(value, time.monotonic())
        return seen

    def _silent(self, seen: _Seen, limit_s: float) -> bool:
        return time.monotonic() - seen.since >= limit_s

    def _silent_ranks(self, certain: int) -> list[int]:
        """Watch all heartbeats for half the limit, updating our own; return the ranks without a change."""
        others = [r for r in range(self._world_size) if r not in (self._rank, certain) and r not in self._reported]
        first = {rank: self._look(rank, None) for rank in others}
        deadline = time.monotonic() + self._timeout_s / 2
        beat = 0
        while others and time.monotonic() < deadline and not self._stopped.wait(self._interval_s):
            self._store.set(heartbeat_key(self._rank), f"looking {beat}")
            beat += 1
        silent = [rank for rank in others if self._look(rank, first[rank]) is first[rank]]
        return [] if self._stopped.is_set() else sorted([certain, *silent])

    def _report_silent(self, ranks: list[int]) -> None:
        if ranks:
            _log.error("no heartbeat of rank(s) %s for %g s", ranks, self._timeout_s)
            self._reported.update(ranks)
            self._report(ranks)

    def _next_alive(self, rank: int) -> int:
        for step in range(1, self._world_size):
            candidate = (rank + step) % self._world_size
            if candidate not in self._reported:
                return candidate
        return self._rank
