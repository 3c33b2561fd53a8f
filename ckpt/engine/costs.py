"""The training time that saves take, as the loop measures it from one call of `Checkpointer.step` to the next."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from statistics import fmean, median
from typing import Any

from ckpt.pace import Measured

_QUIET = 101  # steps whose median is the time of a step beside which nothing is saved
_LEAST_QUIET = 3
_MOST = 1e12  # seconds, or faults
_SAVES = 8  # whose mean is the cost of a save
_PAUSE = 10  # a step beside a save that takes more than so many others is a pause of the loop, such as an evaluation


class Costs:
    """The costs of saves, or of snapshots. For the thread that trains, on the rank that decides when to save.

    A save costs the time by which the steps from its begin until it is published are longer than others, and at least
    what its call took. Pauses of the loop meanwhile, such as an evaluation, are not its cost. `clock` returns seconds
    that only grow.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._begun_at = clock()
        self._stepped_at: float | None = None
        self._quiet: deque[float] = deque(maxlen=_QUIET)
        self._costs: deque[float] = deque(maxlen=_SAVES)
        self._latency_s: float | None = None
        self._trained_s = 0.0
        self._faults = 0
        self._open: list[float] | None = None  # the times of the steps since a save that is not published was begun
        self._stall_s = 0.0

    @property
    def step_s(self) -> float:
        """The time of a step; 0 before one was measured."""
        return median(self._quiet) if self._quiet else 0.0

    @property
    def since_s(self) -> float:
        """The seconds since the last save was begun, or the state was restored."""
        return self._clock() - self._begun_at

    @property
    def measured(self) -> Measured:
        """The measurements so far."""
        cost_s = fmean(self._costs) if self._costs else None
        return Measured(cost_s, self._latency_s, self._trained_s, self._faults)

    def note_step(self, is_in_flight: bool) -> None:
        """Note the end of a step; a save may be in flight."""
        now = self._clock()
        if self._stepped_at is not None:
            took_s = now - self._stepped_at
            self._trained_s += took_s
            if self._open is not None:
                self._open.append(took_s)
            elif not is_in_flight:
                self._quiet.append(took_s)
        self._stepped_at = now
        if self._open and not is_in_flight:
            self._close(now)

    def begin(self, stall_s: float, *, is_measured: bool = True) -> None:
        """Note a save that was begun just now; its call took `stall_s`. Not measured if it has failed already."""
        now = self._clock()
        if self._open:
            self._close(now)
        self._begun_at, self._stall_s, self._open = now - stall_s, stall_s, [] if is_measured else None
        if not is_measured:
            self._stepped_at = None  # the next step does not count: the call was in it

    def _close(self, now: float) -> None:
        assert self._open is not None
        more_s, step_s = 0.0, self.step_s
        if len(self._quiet) >= _LEAST_QUIET:
            beside = [self._open[0] - self._stall_s, *self._open[1:]]  # the call was in the first one
            more_s = self._stall_s + sum(min(took_s, _PAUSE * step_s) - step_s for took_s in beside)
        self._costs.append(max(more_s, self._stall_s))
        self._latency_s = now - self._begun_at
        self._open = None

    def restored(self, document: Mapping[str, Any] | None, faults: int) -> None:
        """Go on after a restore, before which there were so many faults, with what an earlier process has measured."""
        if document is not None:
            known = measured_of(document)
            if known.cost_s is not None:
                self._costs.append(known.cost_s)
            self._latency_s = known.latency_s
            self._trained_s, self._faults = known.trained_s, known.faults
        self._faults += faults
        self._begun_at, self._stepped_at, self._open = self._clock(), None, None

    def to_document(self) -> dict[str, Any]:
        """Return the measurements as JSON."""
        known = self.measured
        numbers = {"cost_s": known.cost_s, "latency_s": known.latency_s, "trained_s": known.trained_s}
        return {**numbers, "faults": known.faults}


def measured_of(document: Mapping[str, Any]) -> Measured:
    """Return the measurements that a step has recorded. A stranger may have written them: other values are unknown."""

    def number(name: str) -> float | None:
        value = document.get(name)
        if not isinstance(value, int | float) or isinstance(value, bool):
            return None
        return float(value) if 0 <= value < _MOST else None

    return Measured(number("cost_s"), number("latency_s"), number("trained_s") or 0.0, int(number("faults") or 0))
