"""Every event of a rank: measured, and written to the board. The hot path; nothing in here waits for anybody.

An event that belongs to a past is dropped: of a client that another one has replaced, or of an iteration that the
in-process wrapper is unwinding, or has ended.
"""

from __future__ import annotations

import logging
import sys
import threading
import time
from collections.abc import Callable, Collection
from typing import Any

from inprocess.fault_tolerance.data import HeartbeatTimeouts, SectionTimeouts
from inprocess.fault_tolerance.fork_guard import ForkGuard
from inprocess.fault_tolerance.timeouts_calc import TimeoutsCalc, TimeoutsCalcError
from inprocess.sections.board import FROZEN_AT, GENERATION, LIVE, OFFSET, OWNER_MASK, Board

__all__ = ["Forked", "Recorder"]

_log = logging.getLogger(__name__)
_NS = 1e-9


class Forked(Exception):
    """This process is a child of the one that is monitored."""


class Recorder:
    """Owns the client's words of a board. All methods may be called from any thread, also from signal handlers.

    TimeoutsCalcError for an event that makes no sense; `Forked` in a forked child.
    """

    def __init__(self, board: Board, safety_factor: float, clock_ns: Callable[[], int] = time.monotonic_ns) -> None:
        self.board = board
        self.calc = TimeoutsCalc(board.names, start_time=board.stamp(clock_ns) * _NS, safety_factor=safety_factor)
        self.iteration: int | None = None
        self._clock_ns = clock_ns
        self._words = board.words
        self._slots = board.slots
        self._same_process = ForkGuard()
        self._lock = threading.RLock()  # reentrant: a signal handler of the user may close sections
        self._abandoned: set[str] = set()
        self._background: dict[object, tuple[str, int]] = {}  # name and stamp of what goes on in the background
        self._generation = board.claim()
        self._owner = self._generation & OWNER_MASK
        self._iteration_source = _megatron_iteration()
        board.restart(self._generation, board.stamp(clock_ns))
        if self._iteration_source is not None:
            self.set_iteration(self._iteration_source() or 1)

    # -- events --------------------------------------------------------------------------------------------------------

    def open(self, name: str) -> bool:
        """A section begins. False if the name is not watched, or the event was dropped."""
        slot = self._slots.get(name)
        if slot is None:
            return False
        if not self._same_process:
            raise Forked
        with self._lock:
            words = self._words
            if words[GENERATION] != self._generation and not self._catch_up():
                return False
            stamp = words[FROZEN_AT] or self._clock_ns() - words[OFFSET]
            self.calc.update_on_section_open(name, stamp * _NS)
            if self._iteration_source is not None:
                self._ask_iteration()
            self.board.open(slot, stamp, self.iteration)
        return True

    def close(self, name: str, generation: int | None = None, learn: bool = True) -> bool:
        """A section ends. False if the name is not watched, or the event was dropped.

        Dropped is also what belongs to another `generation` than this one.
        """
        slot = self._slots.get(name)
        if slot is None:
            return False
        if not self._same_process:
            raise Forked
        with self._lock:
            words = self._words
            if words[GENERATION] != self._generation and not self._catch_up():
                return False
            if generation is not None and generation != self._generation:
                return False
            stamp = words[FROZEN_AT] or self._clock_ns() - words[OFFSET]
            try:
                self.calc.update_on_section_close(name, stamp * _NS, learn)
            except TimeoutsCalcError:
                if name not in self._abandoned:
                    raise
                self._abandoned.discard(name)
                return False
            self.board.close_section(slot, stamp)
        return True

    def close_all(self) -> None:
        """Every open section ends."""
        with self._entered() as current:
            for name in list(self.calc.open_sections) if current else ():
                self.close(name)

    def beat(self) -> None:
        """A heartbeat."""
        with self._entered() as current:
            if current:
                stamp = self.board.stamp(self._clock_ns)
                self.calc.update_on_heartbeat(stamp * _NS)
                self.board.beat(stamp)

    def begin_in_background(self, name: str, at_ns: int) -> object | None:
        """Return what tells `left_in_background` and `end_in_background` which one; None: it is not watched."""
        slot = self._slots.get(name)
        if slot is None or not self._same_process:
            return None
        with self._entered() as current:
            if not current:
                return None
            key = object()
            self._background[key] = name, self.board.stamp(lambda: at_ns)
            self._show_background(name)
        return key

    def left_in_background(self, key: object) -> float | None:
        """Return how long it may go on, in seconds; None: for ever, or it belongs to the past."""
        if not self._same_process:
            return None
        with self._entered() as current:
            found = self._background.get(key)
            if not current or found is None:
                return None
            limit = self._words[self._slots[found[0]] + 1]
            return None if limit < 0 else (found[1] + limit - self.board.stamp(self._clock_ns)) * _NS

    def end_in_background(self, key: object, taken_s: float | None) -> None:
        """It is over. None: do not learn from it."""
        if not self._same_process:
            return
        with self._entered() as current:
            found = self._background.pop(key, None)
            if not current or found is None:
                return
            name, stamp = found
            self._show_background(name)
            if taken_s is not None:  # by a clock that does not stand still when ours does
                counted_s = (self.board.stamp(self._clock_ns) - stamp) * _NS
                self.calc.update_on_background(name, max(0.0, min(taken_s, counted_s)))

    def _show_background(self, name: str) -> None:
        since = min((stamp for other, stamp in self._background.values() if other == name), default=0)
        self.board.set_background(self._slots[name], since)

    def set_iteration(self, iteration: int) -> None:
        """From now on events belong to this iteration."""
        self.iteration = int(iteration)
        self.board.set_iteration(self.iteration)

    @property
    def generation(self) -> int:
        """What events belong to now: changes with each restart."""
        return self._generation

    @property
    def open_sections(self) -> Collection[str]:
        """The names of what is open."""
        return tuple(self.calc.open_sections)

    # -- limits --------------------------------------------------------------------------------------------------------

    def set_limits(self, beats: HeartbeatTimeouts, sections: SectionTimeouts) -> None:
        """Install limits, for what is open, too."""
        with self._entered():
            self.board.set_limits(beats, sections)

    def count_running_gap(self) -> None:
        """Measure the time since the last close, if nothing is open."""
        with self._entered() as current:
            if current:
                self.calc.update_on_running_gap(self.board.stamp(self._clock_ns) * _NS)

    def events(self) -> int:
        """Return how many events the board has."""
        with self._entered():
            return self.board.events

    def detach(self) -> None:
        """Nothing is watched any more. Idempotent."""
        with self._entered():
            self._background.clear()
            if self._words[GENERATION] & OWNER_MASK == self._owner:
                self.board.detach()

    @property
    def same_process(self) -> bool:
        """False in a forked child."""
        return bool(self._same_process)

    # -- the past ------------------------------------------------------------------------------------------------------

    def _entered(self) -> _Entered:
        return _Entered(self)

    def _catch_up(self) -> bool:
        """Under the lock, the generation has changed: False if events do not count; else begin anew."""
        generation = self._words[GENERATION]
        if generation & OWNER_MASK != self._owner or not generation & LIVE:
            return False
        self._abandoned = set(self.calc.open_sections)
        self._background.clear()
        begun = self.board.begun()
        self.calc.restart(begun * _NS)
        self.board.restart(generation, begun)
        self._generation = generation
        _log.info("another iteration has begun: %s not open any more", sorted(self._abandoned) or "nothing was open;")
        return True

    def _ask_iteration(self) -> None:
        iteration = self._iteration_source() if self._iteration_source is not None else None
        if iteration is not None and iteration != self.iteration:
            self.set_iteration(iteration)


class _Entered:
    """The lock, in the right process. Enters with whether events count."""

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder

    def __enter__(self) -> bool:
        recorder = self._recorder
        if not recorder._same_process:
            raise Forked
        recorder._lock.acquire()
        return recorder._words[GENERATION] == recorder._generation or recorder._catch_up()

    def __exit__(self, *error: object) -> None:
        self._recorder._lock.release()


def _megatron_iteration() -> Callable[[], int | None] | None:
    """Return what tells Megatron's iteration, if its module of global arguments is loaded."""
    module = sys.modules.get("megatron.training.global_vars")
    if module is None:
        return None

    def ask() -> int | None:
        try:
            arguments: Any = module.get_args()
        except Exception:  # asserts that they are set
            return None
        for name in ("curr_iteration", "iteration"):
            value = getattr(arguments, name, None)
            if isinstance(value, int):
                return value
        return None

    return ask
