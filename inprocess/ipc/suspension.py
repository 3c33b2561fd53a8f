"""Suspensions of this process, which its watchers must not take for the silence of others.

A process is suspended by a signal, a debugger or a cgroup, or with its whole machine when that is migrated. It hears
nothing meanwhile, and what it watches may be suspended with it and go on some seconds later. So a watcher announces
when it will look next. Where it looks much later than that, it was suspended itself: that time does not count, and
after a long suspension a limit starts again. It may be suspended while it works, too, also just before it looks: so it
looks as of the last time at which it knows that it was not.
"""

from __future__ import annotations

import math
import time

_DELAY_S = 0.25  # by which a busy machine, or the interpreter lock, may delay a thread
_SHORT_S, _LONG_S = 1.0, 5.0


def starts_again(missed_s: float, limit_s: float) -> bool:
    """Return whether a limit starts again after a suspension: one of half the limit, or of some seconds."""
    return missed_s >= max(_SHORT_S, min(_LONG_S, limit_s / 2))


class Suspension:
    """Notices for how long this process was suspended while a thread slept, or worked. For one thread.

    The loop of the thread sleeps between `expect` and `missed_s`, and works after it. Its work takes no time, except
    for waits that `blocked` ends. Until the first `expect` nothing is noticed.
    """

    def __init__(self) -> None:
        self._due = math.inf
        self._missed_s = 0.0
        self.checked_s = time.monotonic()
        """When `missed_s` was called last, in seconds of CLOCK_MONOTONIC. A limit that had not passed then has not."""

    def expect(self, pause_s: float | None) -> None:
        """Announce that the thread sleeps for this time at most; None: indefinitely."""
        self._note()
        self._due = math.inf if pause_s is None else time.monotonic() + pause_s

    def blocked(self) -> None:
        """Note that the thread has waited for something else: it does not know whether it was suspended meanwhile."""
        if self._due < math.inf:
            self._due = time.monotonic()

    def missed_s(self) -> float:
        """Return for how long the process was suspended since the last call; 0 for what a busy machine explains."""
        self._note()
        missed_s, self._missed_s = self._missed_s, 0.0
        return missed_s

    def _note(self) -> None:
        self.checked_s = time.monotonic()
        self._missed_s += max(0.0, self.checked_s - self._due - _DELAY_S)
        self._due = self.checked_s


class Silence:
    """How long a peer has been silent, of the time in which this process listened. For one thread.

    A process that was suspended, or whose interpreter was held by other threads, heard nothing meanwhile. After a long
    suspension the silence starts again, see `starts_again`. `limit_s` is how long the peer may be silent.
    """

    def __init__(self, limit_s: float) -> None:
        self._limit_s = limit_s
        self._seconds = 0.0
        self._checked_at = time.monotonic()
        self._expected_s = 0.0

    def seconds(self) -> float:
        """Return the silence until now."""
        now = time.monotonic()
        gap_s, counted_s = now - self._checked_at, self._expected_s + _DELAY_S
        if starts_again(gap_s - counted_s, self._limit_s):
            self._seconds = 0.0
        else:
            self._seconds += min(gap_s, counted_s)
        self._checked_at, self._expected_s = now, 0.0
        return self._seconds

    def expect(self, seconds: float) -> None:
        """Announce that the next call comes after this time at the latest."""
        self.seconds()
        self._expected_s = seconds

    def end(self) -> None:
        """Start again: the peer has sent something."""
        self._seconds, self._checked_at = 0.0, time.monotonic()
