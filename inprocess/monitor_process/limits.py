"""The soft and the hard progress limit of one rank. Pure: the caller passes the time."""

from __future__ import annotations

import enum
import math
from dataclasses import dataclass

from inprocess.ipc.suspension import starts_again
from inprocess.progress_watchdog import Timestamp


class Limit(enum.Enum):
    """Which limit has passed."""

    SOFT = "soft"
    HARD = "hard"


@dataclass
class ProgressLimits:
    """When a rank without progress is late. Times are monotonic seconds.

    Each limit is reported once until `start` arms both again. `stretch` extends the time of a rank that waits.
    """

    soft_s: float
    hard_s: float
    enabled: bool = True
    armed: bool = False

    def __post_init__(self) -> None:
        self._suspended_until = -math.inf
        self._auto: float | None = None
        self._manual: float | None = None
        self._reported: set[Limit] = set()
        self._stretched_hard_s: float | None = None

    def start(self, now: float) -> None:
        """An iteration begins: the last progress is now, and there was no ping."""
        self.armed = True
        self._auto, self._manual = now, None
        self._reported.clear()
        self._stretched_hard_s = None

    def update(self, timestamp: Timestamp) -> None:
        """Set the latest progress of the rank."""
        self._auto, self._manual = timestamp.auto, timestamp.manual

    def note_suspension(self, missed_s: float, now: float) -> None:
        """Note that this process was suspended for `missed_s` until now, and perhaps the rank with it.

        After a long suspension the limits start again, with the progress that the rank made before.
        """
        if starts_again(missed_s, self.soft_s):
            self._suspended_until = now

    def stretch(self, hard_s: float) -> bool:
        """Replace the hard limit, once per iteration. False if it was replaced before."""
        if self._stretched_hard_s is not None:
            return False
        self._stretched_hard_s = hard_s
        self._reported.discard(Limit.HARD)
        return True

    def silent_s(self, now: float) -> float:
        """Return for how long there was no progress: of either kind, if the rank pings."""
        since = self._since()
        return 0.0 if since is None else now - since

    def next_deadline(self) -> float | None:
        """Return when `overrun` will return a limit if no progress is made; None for never."""
        since = self._since()
        left = [limit_s for limit, limit_s in self._limits() if limit not in self._reported]
        if not (self.armed and self.enabled and left) or since is None:
            return None
        return since + min(left)

    def overrun(self, now: float) -> Limit | None:
        """Return a limit that has passed and was not reported before; the soft one first."""
        if not (self.armed and self.enabled):
            return None
        silent_s = self.silent_s(now)
        for limit, limit_s in self._limits():
            if limit not in self._reported and silent_s >= limit_s:
                self._reported.add(limit)
                return limit
        return None

    def _since(self) -> float | None:
        """Return the time of the last progress that counts: of either kind, if the rank pings."""
        times = [time for time in (self._auto, self._manual) if time is not None]
        return max(min(times), self._suspended_until) if times else None

    def _limits(self) -> tuple[tuple[Limit, float], ...]:
        return (Limit.SOFT, self.soft_s), (Limit.HARD, self._stretched_hard_s or self.hard_s)
