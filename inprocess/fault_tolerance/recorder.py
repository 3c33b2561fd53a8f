"""Records the events of a rank: measures them and writes them to the board. This is the hot path: nothing waits.

Events do not count, and are dropped, if they are from a client that another one has replaced, or from an iteration that
the in-process wrapper is unwinding or has ended.
"""

from __future__ import annotations

import logging
import mmap
import os
import sys
import threading
import time
from collections.abc import Callable, Collection
from typing import Any

from inprocess.fault_tolerance.timeouts_calc import TimeoutsCalc, TimeoutsCalcError
from inprocess.sections.board import FROZEN_AT, GENERATION, LIVE, OFFSET, OWNER_MASK, Board
from inprocess.sections.timeouts import HeartbeatTimeouts, SectionTimeouts

__all__ = ["ForkGuard", "Forked", "Recorder"]

_log = logging.getLogger(__name__)
_NS = 1e-9
_WIPE_ON_FORK = 18  # MADV_WIPEONFORK of <linux/mman.h>


class Forked(Exception):
    """This process was forked from the monitored one."""


class ForkGuard:
    """True in the process that has created it, false in forked children; the price is one read from memory.

    The kernel clears the page in a forked child (MADV_WIPEONFORK), however it was forked: also by C code that runs none
    of Python's hooks. Where the kernel cannot, the process id is read each time, which is a system call.
    """

    __slots__ = ("_pid", "_word")

    def __init__(self) -> None:
        self._pid = os.getpid()
        self._word: memoryview | None = None
        page = mmap.mmap(-1, mmap.PAGESIZE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        try:
            page.madvise(_WIPE_ON_FORK)
        except OSError:
            return
        self._word = memoryview(page)
        self._word[0] = 1

    def __bool__(self) -> bool:
        word = self._word
        return bool(word[0]) if word is not None else os.getpid() == self._pid


class Recorder:
    """Owns the client's words of a board. All methods may be called from any thread and from signal handlers.

    TimeoutsCalcError for an invalid event; `Forked` in a forked child.
    """

    def __init__(self, board: Board, safety_factor: float, clock_ns: Callable[[], int] = time.monotonic_ns) -> None:
        self.board = board
        self.calc = TimeoutsCalc(board.names, start_time=board.stamp(clock_ns) * _NS, safety_factor=safety_factor)
        self.iteration: int | None = None
        self.on_duration: Callable[[str, float], None] | None = None
        self._clock_ns = clock_ns
        self._words = board.words
        self._slots = board.slots
        self._same_process = ForkGuard()
        self._lock = threading.RLock()  # reentrant: a signal handler of the user may close sections
        self._abandoned: set[str] = set()
        self._background: dict[object, tuple[str, int]] = {}  # sections in the background: name and start
        self._generation = board.claim()
        self._owner = self._generation & OWNER_MASK
        self._iteration_source = _megatron_iteration()
        board.restart(self._generation, board.stamp(clock_ns))
        if self._iteration_source is not None:
            self.set_iteration(self._iteration_source() or 1)

    # -- events --------------------------------------------------------------------------------------------------------

    def open(self, name: str) -> bool:
        """Open a section. False if the name is not watched or the event was dropped."""
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
        """Close a section. False if the name is not watched or the event was dropped.

        The event is also dropped if `generation` is not the present one.
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
                seconds = self.calc.update_on_section_close(name, stamp * _NS, learn)
            except TimeoutsCalcError:
                if name not in self._abandoned:
                    raise
                self._abandoned.discard(name)
                return False
            self.board.close_section(slot, stamp)
        if self.on_duration is not None and learn:
            self.on_duration(name, seconds)
        return True

    def close_all(self) -> None:
        """Close every open section."""
        with self._entered() as current:
            for name in list(self.calc.open_sections) if current else ():
                self.close(name)

    def beat(self) -> None:
        """Note a heartbeat."""
        with self._entered() as current:
            if current:
                stamp = self.board.stamp(self._clock_ns)
                self.calc.update_on_heartbeat(stamp * _NS)
                self.board.beat(stamp)

    def begin_in_background(self, name: str, at_ns: int) -> object | None:
        """Return a key for `left_in_background` and `end_in_background`; None if the name is not watched."""
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
        """Return the seconds that are left; None if there is no limit, or the section does not count any more."""
        if not self._same_process:
            return None
        with self._entered() as current:
            found = self._background.get(key)
            if not current or found is None:
                return None
            limit = self._words[self._slots[found[0]] + 1]
            return None if limit < 0 else (found[1] + limit - self.board.stamp(self._clock_ns)) * _NS

    def end_in_background(self, key: object, taken_s: float | None) -> None:
        """End the section. It took `taken_s` seconds; None: do not learn from it."""
        if not self._same_process:
            return
        with self._entered() as current:
            found = self._background.pop(key, None)
            if not current or found is None:
                return
            name, stamp = found
            self._show_background(name)
            if taken_s is not None:  # on a clock that goes on while the section clock is stopped
                counted_s = (self.board.stamp(self._clock_ns) - stamp) * _NS
                self.calc.update_on_background(name, max(0.0, min(taken_s, counted_s)))

    def _show_background(self, name: str) -> None:
        since = min((stamp for other, stamp in self._background.values() if other == name), default=0)
        self.board.set_background(self._slots[name], since)

    def set_iteration(self, iteration: int) -> None:
        """Set the iteration to which events belong from now on."""
        self.iteration = int(iteration)
        self.board.set_iteration(self.iteration)

    @property
    def generation(self) -> int:
        """To which generation events belong now. Changes with each restart."""
        return self._generation

    @property
    def open_sections(self) -> Collection[str]:
        """The names of open sections."""
        return tuple(self.calc.open_sections)

    # -- limits --------------------------------------------------------------------------------------------------------

    def set_limits(self, beats: HeartbeatTimeouts, sections: SectionTimeouts) -> None:
        """Install limits; they also apply to sections that are open."""
        with self._entered():
            self.board.set_limits(beats, sections)

    def count_running_gap(self) -> None:
        """Count the time since the last section was closed as a gap, if none is open."""
        with self._entered() as current:
            if current:
                self.calc.update_on_running_gap(self.board.stamp(self._clock_ns) * _NS)

    def events(self) -> int:
        """Return how many updates the board has."""
        with self._entered():
            return self.board.events

    def detach(self) -> None:
        """Leave the board: nothing is watched any more. Idempotent."""
        with self._entered():
            self._background.clear()
            if self._words[GENERATION] & OWNER_MASK == self._owner:
                self.board.detach()

    @property
    def same_process(self) -> bool:
        """False in a forked child."""
        return bool(self._same_process)

    # -- restarts ------------------------------------------------------------------------------------------------------

    def _entered(self) -> _Entered:
        return _Entered(self)

    def _catch_up(self) -> bool:
        """The generation has changed: False if events do not count; else start anew. Under the lock."""
        generation = self._words[GENERATION]
        if generation & OWNER_MASK != self._owner or not generation & LIVE:
            return False
        self._abandoned = set(self.calc.open_sections)
        self._background.clear()
        begun = self.board.begun()
        self.calc.restart(begun * _NS)
        self.board.restart(generation, begun)
        self._generation = generation
        _log.info("another iteration has begun; sections that were open: %s", sorted(self._abandoned))
        return True

    def _ask_iteration(self) -> None:
        iteration = self._iteration_source() if self._iteration_source is not None else None
        if iteration is not None and iteration != self.iteration:
            self.set_iteration(iteration)


class _Entered:
    """The recorder's lock, in the monitored process. Its context is whether events count."""

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
    """Return a function that returns Megatron's iteration, if its module of global arguments is loaded."""
    module = sys.modules.get("megatron.training.global_vars")
    if module is None:
        return None

    def ask() -> int | None:
        try:
            arguments: Any = module.get_args()
        except Exception:  # an AssertionError if they are not set
            return None
        for name in ("curr_iteration", "iteration"):
            value = getattr(arguments, name, None)
            if isinstance(value, int):
                return value
        return None

    return ask
