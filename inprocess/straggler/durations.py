"""Durations of one section on this rank, in bounded memory.

program      `add`: appends to a deque and counts; no lock, which an exception thrown into it could leave locked
publisher    `summarize`: moves them into a window, and closes the window once it has enough of them
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from statistics import median

LEAST_SAMPLES = 8  # of a window: the median of fewer says little
MOST_SAMPLES = 256


@dataclass(frozen=True, slots=True)
class SectionSummary:
    """Executions of a section on one rank: how many, the median of the latest window, and the shortest such median."""

    count: int
    median_s: float
    best_s: float


class SectionTimes:
    """`add` may be called by any thread, `summarize` by one at a time."""

    __slots__ = ("_best_s", "_median_s", "_pending", "_window", "count")

    def __init__(self) -> None:
        self.count = 0
        self._pending: deque[float] = deque(maxlen=MOST_SAMPLES)
        self._window: deque[float] = deque(maxlen=MOST_SAMPLES)
        self._median_s = self._best_s = -1.0

    def add(self, seconds: float) -> None:
        """Note one execution."""
        self.count += 1
        self._pending.append(seconds)

    def summarize(self) -> SectionSummary | None:
        """Return the summary; None before the first window is closed.

        A window has the executions since the last one, of more than `MOST_SAMPLES` the latest.
        """
        for _ in range(len(self._pending)):
            self._window.append(self._pending.popleft())
        if len(self._window) >= LEAST_SAMPLES:
            self._median_s = median(self._window)
            self._best_s = self._median_s if self._best_s < 0 else min(self._best_s, self._median_s)
            self._window.clear()
        return None if self._median_s < 0 else SectionSummary(self.count, self._median_s, self._best_s)
