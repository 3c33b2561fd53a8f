"""The board: memory shared by a rank and its monitor, with open sections, their start times and their limits.

    rank      writes a few words per event; no system call, no wakeup, nothing that could wait for the monitor
    monitor   reads the words (`board_reader`) at each deadline, and once per shortest limit (`deadlines`)

So a monitor that hangs, is stopped or is dead costs the rank nothing, and one that takes over finds everything in
place. The memory is a memfd sealed against shrinking: neither process can cut it short while the other uses it.

Words are signed 64 bit. Each has one writer: the client of the rank, or the wrapper around it (`gate`). Stamps are
nanoseconds of the section clock: CLOCK_MONOTONIC, which all processes of a host share, less the time during which hang
protection was off. A stamp of 0 means "never", a limit of -1 "no limit".

The client's words are consistent if SEQUENCE is even, and equal before and after reading. A client that dies or is
stopped within an update leaves it odd; what is read then is wrong by one event at most, because closing a section first
moves IDLE_SINCE and then clears the section.
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

from inprocess.sections.timeouts import STEP, HeartbeatTimeouts, SectionTimeouts

MAGIC = 0x494E5052_0002
LARGEST_BYTES = 16 << 20
(
    MAGIC_AT,
    SEQUENCE,
    GENERATION,  # restart index, the bit LIVE, and which client owns the board; both write it, never at the same time
    COUNTING,  # wrapper: whether clocks count
    FROZEN_AT,  # wrapper: the stamp at which the section clock was stopped, or 0
    OFFSET,  # wrapper: nanoseconds by which the section clock is behind CLOCK_MONOTONIC
    BEGUN,  # wrapper: when the events of this restart index began to count
    CLIENT_GENERATION,  # the generation to which the client's words belong
    ATTACHED,  # whether there is a client
    STARTED,
    IDLE_SINCE,
    LAST_BEAT,
    STEP_AGE,  # -1 before the first step
    ITERATION,  # -1 if unknown
    INITIAL_LIMIT,
    BEAT_LIMIT,
    OUT_LIMIT,
    BEATS_LEARNED,
    OUT_LEARNED,
    WARMUP_ITERATIONS,
    SECTION_COUNT,
    BLOB_BYTES,
) = range(22)
SECTIONS = 32
WORDS_PER_SECTION = 4  # open since, limit, whether that is learned, in the background since
RECENT = 64  # events in the ring
OPEN, CLOSE, BEAT = range(3)
OWNER_MASK = (1 << 16) - 1
LIVE = 1 << 16  # events count
RESTART_SHIFT = 17


class BoardError(ValueError):
    """The memory is not a board, is one of another version, or is not sealed."""


class Board:
    """A mapping of a board that `making.make_board` has created. Several writers in one process need a lock.

    The memory is unmapped by `close`, or with the object.
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
            raise BoardError(f"the board's description is invalid: {error}") from error
        if len(self.names) != self._count:
            raise BoardError("the board's description has another number of sections than the board")
        self.slots: dict[str, int] = {n: SECTIONS + WORDS_PER_SECTION * i for i, n in enumerate(self.names)}
        self._step_slot = self.slots.get(STEP, -1)
        self._sequence = self.words[SEQUENCE] & ~1
        self._steps = 0
        self._first_step: int | None = None

    @classmethod
    def attach(cls, fd: int) -> Board:
        """Map the board behind a descriptor, which the caller keeps. BoardError if it is not that of a board."""
        try:
            seals = fcntl.fcntl(fd, fcntl.F_GET_SEALS)
            size = os.fstat(fd).st_size
            if not seals & fcntl.F_SEAL_SHRINK or not 8 * SECTIONS <= size <= LARGEST_BYTES or size % 8:
                raise BoardError("the descriptor is not that of a board")
            return cls(mmap.mmap(fd, 0))
        except OSError as error:
            raise BoardError(f"the descriptor is not that of a board: {error}") from error

    def close(self) -> None:
        """Unmap the memory. Idempotent."""
        self.words.release()
        with contextlib.suppress(BufferError):
            self._memory.close()

    # -- the section clock ---------------------------------------------------------------------------------------------

    def stamp(self, clock_ns: Callable[[], int] = time.monotonic_ns) -> int:
        """Return the time of the section clock."""
        return self.words[FROZEN_AT] or clock_ns() - self.words[OFFSET]

    # -- the client's side ---------------------------------------------------------------------------------------------

    def claim(self) -> int:
        """Take the board over from an earlier client, whose events no longer count. Returns the new generation."""
        words = self.words
        owner = (words[GENERATION] + 1) & OWNER_MASK
        words[GENERATION] = (words[GENERATION] & ~OWNER_MASK) | owner
        words[ATTACHED] = 1
        return words[GENERATION]

    def has_live_client(self) -> bool:
        """Whether a client is attached whose events count in the present restart index."""
        words = self.words
        same = words[CLIENT_GENERATION] == words[GENERATION]
        return bool(words[ATTACHED]) and same and bool(words[GENERATION] & LIVE)

    def restart(self, generation: int, stamp: int) -> None:
        """Close everything, without events; all times count from `stamp`."""
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
        """The client leaves: nothing is watched."""
        self.words[ATTACHED] = 0

    def open(self, slot: int, stamp: int, iteration: int | None) -> None:
        """Open the section with this slot."""
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
        """Close the section with this slot."""
        words, sequence = self.words, self._sequence
        words[SEQUENCE] = sequence + 1
        words[IDLE_SINCE] = stamp
        words[slot] = 0
        at = self.ring + (sequence & (2 * RECENT - 1))
        words[at] = slot << 2 | CLOSE
        words[at + 1] = stamp
        self._sequence = words[SEQUENCE] = sequence + 2

    def set_background(self, slot: int, stamp: int) -> None:
        """Set the start time of the background section with this slot; 0 if it is not open. One word, no event."""
        self.words[slot + 3] = stamp

    def beat(self, stamp: int) -> None:
        """Note a heartbeat."""
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
        """How many updates there were so far."""
        return self._sequence // 2

    # -- limits --------------------------------------------------------------------------------------------------------

    def set_limits(self, beats: HeartbeatTimeouts, sections: SectionTimeouts) -> None:
        """Install limits; they also apply to sections that are open already."""
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
        """Set for how many iterations the warm-up limit applies."""
        self.words[WARMUP_ITERATIONS] = iterations

    # -- the wrapper's side --------------------------------------------------------------------------------------------

    def begin(self, restart_index: int, stamp: int) -> None:
        """Let events count from `stamp` on; what was opened under an earlier restart index does not."""
        words = self.words
        words[BEGUN] = stamp
        words[GENERATION] = restart_index << RESTART_SHIFT | LIVE | (words[GENERATION] & OWNER_MASK)
        words[COUNTING] = 1

    def begun(self) -> int:
        """Return the stamp given to `begin`."""
        return self.words[BEGUN]

    def drop_events(self) -> None:
        """Ignore events until `begin`; the clocks of open sections go on."""
        self.words[GENERATION] &= ~LIVE

    def stop_counting(self) -> None:
        """Watch nothing until `begin`."""
        self.drop_events()
        self.words[COUNTING] = 0

    def freeze(self, now_ns: int) -> None:
        """Stop the section clock."""
        self.words[FROZEN_AT] = now_ns - self.words[OFFSET]

    def thaw(self, now_ns: int) -> None:
        """Let the section clock go on from where it was stopped."""
        self.words[OFFSET] = now_ns - self.words[FROZEN_AT]
        self.words[FROZEN_AT] = 0  # last: until then the clock is still stopped


def to_ns(seconds: float | None) -> int:
    """Return the word for a limit in seconds."""
    return -1 if seconds is None else max(0, round(seconds * 1e9))


def from_ns(nanoseconds: int) -> float | None:
    """Return the limit in a word, in seconds."""
    return None if nanoseconds < 0 else nanoseconds / 1e9  # divided, so that 60 s are read as 60 s
