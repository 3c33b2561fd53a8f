"""The memory a rank and its monitor share: what is open since when, and how long it may be.

    rank      writes a few words per event; no system call, no wakeup, nothing that could wait for the monitor
    monitor   reads the words (`board_reading`) when a deadline comes, and once per shortest limit (`watch`)

So a monitor that is stuck, stopped or dead costs the rank nothing, and one that takes over finds everything in place.
The memory is a sealed memfd: nobody can cut it short under the other's hands.

Words are signed 64 bit. Each is written by one party only: the client of the rank, or the wrapper around it (`gate`).
Stamps are nanoseconds of the section clock: CLOCK_MONOTONIC, which is one for all processes of a host, less the time
during which hang protection was off. Zero means "never", a limit of -1 "no limit".

Words of the client are consistent for a reader when SEQUENCE is even and the same before and after. A client that dies
or is stopped in the middle leaves it odd; what is read then is right up to one event, because closing first moves
IDLE_SINCE and then clears the section.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import mmap
import os
import time
from collections.abc import Callable
from typing import Any

from inprocess.sections.layout import (
    ATTACHED,
    BEAT,
    BEAT_LIMIT,
    BEATS_LEARNED,
    BEGUN,
    BLOB_BYTES,
    CLIENT_GENERATION,
    CLOSE,
    COUNTING,
    EPOCH_SHIFT,
    FROZEN_AT,
    GENERATION,
    IDLE_SINCE,
    INITIAL_LIMIT,
    ITERATION,
    LARGEST_BYTES,
    LAST_BEAT,
    LIVE,
    MAGIC,
    MAGIC_AT,
    OFFSET,
    OPEN,
    OUT_LEARNED,
    OUT_LIMIT,
    OWNER_MASK,
    RECENT,
    SECTION_COUNT,
    SECTIONS,
    SEQUENCE,
    STARTED,
    STEP_AGE,
    WARMUP_ITERATIONS,
    WORDS_PER_SECTION,
    from_ns,
    to_ns,
)
from inprocess.sections.table import STEP
from inprocess.sections.timeouts import HeartbeatTimeouts, SectionTimeouts

__all__ = ["Board", "BoardError"]


class BoardError(ValueError):
    """The memory is not a board, or is of another version, or not sealed."""


class Board:
    """A view of the memory, which `making.make_board` makes. Not for several writers at once: callers hold a lock.

    The mapping lasts until the object is forgotten, or `close`.
    """

    def __init__(self, memory: mmap.mmap) -> None:
        self._memory = memory
        self.words = memoryview(memory).cast("q")
        if self.words[MAGIC_AT] != MAGIC:
            raise BoardError("this memory is not a board of this version")
        self._count = self.words[SECTION_COUNT]
        self.ring = SECTIONS + WORDS_PER_SECTION * self._count
        start = 8 * (self.ring + 2 * RECENT)
        size = self.words[BLOB_BYTES]
        if self._count < 0 or size < 0 or start + size > len(memory):
            raise BoardError("the board is larger than its memory")
        try:
            blob = json.loads(bytes(memory[start : start + size]))
            self.names: tuple[str, ...] = tuple(str(name) for name in blob["names"])
            self.config: dict[str, Any] = dict(blob["config"])
        except (ValueError, KeyError, TypeError) as error:
            raise BoardError(f"the board's description is broken: {error}") from error
        if len(self.names) != self._count:
            raise BoardError("the board's description is of another size")
        self.slots: dict[str, int] = {n: SECTIONS + WORDS_PER_SECTION * i for i, n in enumerate(self.names)}
        self._step_slot = self.slots.get(STEP, -1)
        self._sequence = self.words[SEQUENCE] & ~1
        self._steps = 0
        self._first_step: int | None = None

    @classmethod
    def attach(cls, fd: int) -> Board:
        """Map the board behind a descriptor, which the caller keeps. BoardError if there is none."""
        try:
            seals = fcntl.fcntl(fd, fcntl.F_GET_SEALS)
            size = os.fstat(fd).st_size
            if not seals & fcntl.F_SEAL_SHRINK or not 8 * SECTIONS <= size <= LARGEST_BYTES or size % 8:
                raise BoardError("the descriptor is not that of a board")
            return cls(mmap.mmap(fd, 0))
        except OSError as error:
            raise BoardError(f"the descriptor is not that of a board: {error}") from error

    def close(self) -> None:
        """Give the mapping up. Idempotent."""
        self.words.release()
        with contextlib.suppress(BufferError):
            self._memory.close()

    # -- the section clock ---------------------------------------------------------------------------------------------

    def stamp(self, clock_ns: Callable[[], int] = time.monotonic_ns) -> int:
        """Return the section clock's time."""
        return self.words[FROZEN_AT] or clock_ns() - self.words[OFFSET]

    # -- the client's side ---------------------------------------------------------------------------------------------

    def claim(self) -> int:
        """A client takes the board over from an earlier one, whose events are dropped from now on. Its generation."""
        words = self.words
        owner = (words[GENERATION] + 1) & OWNER_MASK
        words[GENERATION] = (words[GENERATION] & ~OWNER_MASK) | owner
        words[ATTACHED] = 1
        return words[GENERATION]

    def has_live_client(self) -> bool:
        """Whether a client is attached whose events count in the present epoch."""
        words = self.words
        same = words[CLIENT_GENERATION] == words[GENERATION]
        return bool(words[ATTACHED]) and same and bool(words[GENERATION] & LIVE)

    def restart(self, generation: int, stamp: int) -> None:
        """Nothing is open any more; everything counts from `stamp`."""
        words = self.words
        words[SEQUENCE] = self._sequence + 1
        for slot in self.slots.values():
            words[slot] = words[slot + 3] = 0
        words[STARTED] = words[IDLE_SINCE] = stamp
        words[LAST_BEAT], words[STEP_AGE] = 0, -1
        words[CLIENT_GENERATION] = generation
        self._steps, self._first_step = 0, None
        self._sequence += 2
        words[SEQUENCE] = self._sequence

    def detach(self) -> None:
        """The client has gone: nothing is watched."""
        self.words[ATTACHED] = 0

    def open(self, slot: int, stamp: int, iteration: int | None) -> None:
        """The section with this slot begins."""
        words, sequence = self.words, self._sequence
        words[SEQUENCE] = sequence + 1
        if slot == self._step_slot:
            self._count_step(iteration)
        words[slot] = stamp
        at = self.ring + (sequence & (2 * RECENT - 1))
        words[at] = slot << 2 | OPEN
        words[at + 1] = stamp
        self._sequence = words[SEQUENCE] = sequence + 2

    def close_section(self, slot: int, stamp: int) -> None:
        """The section with this slot ends."""
        words, sequence = self.words, self._sequence
        words[SEQUENCE] = sequence + 1
        words[IDLE_SINCE] = stamp
        words[slot] = 0
        at = self.ring + (sequence & (2 * RECENT - 1))
        words[at] = slot << 2 | CLOSE
        words[at + 1] = stamp
        self._sequence = words[SEQUENCE] = sequence + 2

    def set_background(self, slot: int, stamp: int) -> None:
        """The section with this slot goes on in the background since then; 0: it does not. One word, no event."""
        self.words[slot + 3] = stamp

    def beat(self, stamp: int) -> None:
        """A heartbeat."""
        words, sequence = self.words, self._sequence
        words[SEQUENCE] = sequence + 1
        words[LAST_BEAT] = stamp
        at = self.ring + (sequence & (2 * RECENT - 1))
        words[at] = BEAT
        words[at + 1] = stamp
        self._sequence = words[SEQUENCE] = sequence + 2

    def set_iteration(self, iteration: int) -> None:
        """Note the iteration, for reports."""
        self.words[ITERATION] = iteration

    def _count_step(self, iteration: int | None) -> None:
        age = self._steps
        self._steps += 1
        if iteration is not None:
            if self._first_step is None:
                self._first_step = iteration
            age = max(0, iteration - self._first_step)
        self.words[STEP_AGE] = age

    @property
    def events(self) -> int:
        """How many changes there were so far."""
        return self._sequence // 2

    # -- limits --------------------------------------------------------------------------------------------------------

    def set_limits(self, beats: HeartbeatTimeouts, sections: SectionTimeouts) -> None:
        """Install limits; they hold for what is open already, too."""
        words = self.words
        words[SEQUENCE] = self._sequence + 1
        words[INITIAL_LIMIT] = to_ns(beats.initial)
        words[BEAT_LIMIT] = to_ns(beats.subsequent)
        words[BEATS_LEARNED] = beats.were_calculated
        words[OUT_LIMIT] = to_ns(sections.out_of_section)
        words[OUT_LEARNED] = sections.is_out_of_section_calculated
        for name, slot in self.slots.items():
            words[slot + 1] = to_ns(sections.section.get(name))
            words[slot + 2] = name in sections.calculated_sections
        self._sequence += 2
        words[SEQUENCE] = self._sequence

    def limits(self) -> tuple[HeartbeatTimeouts, SectionTimeouts]:
        """Return what `set_limits` has installed."""
        words = self.words
        beats = HeartbeatTimeouts(from_ns(words[INITIAL_LIMIT]), from_ns(words[BEAT_LIMIT]), bool(words[BEATS_LEARNED]))
        sections = SectionTimeouts(
            {name: from_ns(words[slot + 1]) for name, slot in self.slots.items()},
            from_ns(words[OUT_LIMIT]),
            {name for name, slot in self.slots.items() if words[slot + 2]},
            bool(words[OUT_LEARNED]),
        )
        return beats, sections

    def set_warmup(self, iterations: int) -> None:
        """Override how many iterations the warm-up limit holds."""
        self.words[WARMUP_ITERATIONS] = iterations

    # -- the wrapper's side --------------------------------------------------------------------------------------------

    def begin(self, epoch: int, stamp: int) -> None:
        """Events count again, in a new epoch that begins now; what is open of an older one does not."""
        words = self.words
        words[BEGUN] = stamp
        words[GENERATION] = epoch << EPOCH_SHIFT | LIVE | (words[GENERATION] & OWNER_MASK)
        words[COUNTING] = 1

    def begun(self) -> int:
        """Return the stamp at which the epoch began."""
        return self.words[BEGUN]

    def drop_events(self) -> None:
        """Events do not count until `begin`; the clocks of what is open go on."""
        self.words[GENERATION] &= ~LIVE

    def stop_counting(self) -> None:
        """Nothing is watched until `begin`."""
        self.drop_events()
        self.words[COUNTING] = 0

    def freeze(self, now_ns: int) -> None:
        """The section clock stands still."""
        self.words[FROZEN_AT] = now_ns - self.words[OFFSET]

    def thaw(self, now_ns: int) -> None:
        """It goes on where it stood."""
        self.words[OFFSET] = now_ns - self.words[FROZEN_AT]
        self.words[FROZEN_AT] = 0  # second: in between it still stands
