"""The sibling monitor: heartbeats of monitor processes, to notice nodes that have failed.

The monitor process of each rank updates a heartbeat and watches that of the next rank, in a ring. A heartbeat is a
number that changes. Only the watcher's clock tells for how long it has not changed, so clocks of different hosts are
never compared. Time in which the watcher was suspended itself, or could not read the heartbeat, does not count.

When a heartbeat stops, the others of the same node have usually stopped, too, and with them their watchers. So all
heartbeats, also the one that stopped, are then watched for half the time limit more, and all that do not change are
reported together.

One thread per iteration, in the monitor process.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Protocol

from inprocess.exception import StaleViewError, StoreError
from inprocess.ipc.suspension import Silence
from inprocess.reports import heartbeat_key

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


@dataclass(frozen=True)
class _Seen:
    """A heartbeat that this process has read; None: it did not exist yet."""

    value: bytes | None


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
        self._beats = 0
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
        seen: _Seen | None = None
        silence = Silence(self._timeout_s)
        while not self._stopped.is_set():
            silence.expect(self._timeout_s / _FEWEST_BEATS)  # for the requests: others may wait for the store, too
            try:
                self._beat()
                if neighbour != self._rank:
                    # Not before the first interval is over: all ranks begin at the same time, and the server is busy.
                    now = _Seen(None) if seen is None else self._look(neighbour, seen)
                    if now is not seen:
                        silence.end()
                    seen = now
                    if silence.seconds() >= self._timeout_s:
                        self._report_silent(self._silent_ranks())
                        neighbour, seen = self._next_alive(), None
            except StaleViewError:
                if not self._stopped.is_set():
                    self._stale()
                return
            except StoreError as error:
                _log.warning("the heartbeat of rank %d did not reach the store: %s", self._rank, error)
                silence.end()  # the neighbour may not reach it, either
            silence.expect(self._interval_s)
            self._stopped.wait(self._interval_s)

    def _beat(self) -> None:
        self._store.set(heartbeat_key(self._rank), f"{self._beats} {self._note()}")
        self._beats += 1

    def _look(self, rank: int, seen: _Seen | None) -> _Seen:
        """Read a heartbeat. One that does not exist yet counts from the first time it was read."""
        value: bytes | None = None
        if seen is not None and seen.value is not None:  # it exists unless the others are far ahead: one request
            value = self._store.get_within(heartbeat_key(rank), timedelta(seconds=self._timeout_s))
        elif self._store.check([heartbeat_key(rank)]):
            value = self._store.get(heartbeat_key(rank))
        return seen if seen is not None and value == seen.value else _Seen(value)

    def _silent_ranks(self) -> list[int]:
        """Watch all heartbeats for half the limit, updating our own; return the ranks without a change."""
        others = [rank for rank in range(self._world_size) if rank != self._rank and rank not in self._reported]
        first = {rank: self._look(rank, None) for rank in others}
        watched = Silence(self._timeout_s)
        while watched.seconds() < self._timeout_s / 2:
            watched.expect(self._interval_s)
            if self._stopped.wait(self._interval_s):
                return []
            self._beat()
        return [rank for rank in others if self._look(rank, first[rank]) is first[rank]]

    def _report_silent(self, ranks: list[int]) -> None:
        if ranks:
            _log.error("no heartbeat of rank(s) %s for %g s", ranks, self._timeout_s)
            self._report(ranks)
            self._reported.update(ranks)  # now, as a report that did not reach the store is made again

    def _next_alive(self) -> int:
        for step in range(1, self._world_size):
            candidate = (self._rank + step) % self._world_size
            if candidate not in self._reported:
                return candidate
        return self._rank
