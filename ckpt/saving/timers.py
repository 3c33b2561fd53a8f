"""Time limits of the calls that write, of several observers: the first that runs out ends the call."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass

from ckpt.async_calls import CallTimer
from ckpt.events import SectionLate
from ckpt.observing import emit, is_observed

Begin = Callable[[str, int], CallTimer | None]


class Timers:
    """Begins the timers of a call."""

    def __init__(self) -> None:
        self._begins: dict[tuple[str, Begin], None] = {}  # in order, each once

    def add(self, name: str, begin: Begin) -> None:
        """Let each call have the timer ``begin(name, at_ns)``, too; see `RestartBridge.observe_phases`."""
        self._begins[name, begin] = None

    def begin(self, at_ns: int, rank: int) -> CallTimer | None:
        """Return the timer of a call that begins at this time of CLOCK_MONOTONIC; None if it has no limit."""
        begun = [(name, begin(name, at_ns)) for name, begin in self._begins]
        timers = [(name, timer) for name, timer in begun if timer is not None]
        return _First(timers, at_ns, rank) if timers else None


@dataclass(frozen=True, slots=True)
class _First:
    """Several timers as one. See `CallTimer`."""

    timers: list[tuple[str, CallTimer]]
    at_ns: int
    rank: int

    def left_s(self) -> float | None:
        left_s = self._left_s(self._first)
        return None if left_s == math.inf else left_s

    def overdue(self, pid: int | None) -> str:
        name, timer = self._first
        if is_observed():
            emit(SectionLate(time.time(), self.rank, name, (time.monotonic_ns() - self.at_ns) / 1e9))
        return timer.overdue(pid)

    def end(self, taken_s: float | None) -> None:
        for _, timer in self.timers:
            timer.end(taken_s)

    @property
    def _first(self) -> tuple[str, CallTimer]:
        return min(self.timers, key=self._left_s)

    @staticmethod
    def _left_s(timer: tuple[str, CallTimer]) -> float:
        left_s = timer[1].left_s()
        return math.inf if left_s is None else left_s
