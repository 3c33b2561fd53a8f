"""Real-time signals: one that nobody uses, and what the kernel says a thread does with it.

Python's own table (`signal.getsignal`) does not know what C libraries have installed, so the kernel is asked.
"""

from __future__ import annotations

import os
import signal
from dataclasses import dataclass

__all__ = ["SignalSets", "find_free_signal", "read_signal_sets"]

# Both ends are taken: glibc and musl reserve the lowest three (SIGRTMIN already leaves those out), garbage collectors
# and managed runtimes count upwards from SIGRTMIN, valgrind and some emulators downwards from SIGRTMAX.
_MARGIN = 8


@dataclass(frozen=True, slots=True)
class SignalSets:
    """What one thread does with signals, as bit masks; bit 0 is signal 1.

    `pending` and `blocked` are of the thread, `ignored` and `caught` of its process. `stopped`: by SIGSTOP, a terminal
    or a debugger.
    """

    stopped: bool
    pending: int
    blocked: int
    ignored: int
    caught: int

    def is_pending(self, number: int) -> bool:
        """Return whether the signal was sent and has not been taken yet."""
        return _has(self.pending, number)

    def is_blocked(self, number: int) -> bool:
        """Return whether the thread blocks the signal; it also does while it runs a handler of it."""
        return _has(self.blocked, number)

    def is_caught(self, number: int) -> bool:
        """Return whether the process has a handler, so that the signal does not end it."""
        return _has(self.caught, number)

    def is_free(self, number: int) -> bool:
        """Return whether the signal has its default disposition and nobody waits for it by blocking it."""
        return not _has(self.pending | self.blocked | self.ignored | self.caught, number)


def read_signal_sets(pid: int, thread_id: int | None = None) -> SignalSets | None:
    """Read the sets of a thread (default: the main one) from /proc. None if it does not exist, or is a zombie."""
    try:
        with open(f"/proc/{pid}/task/{thread_id or pid}/status", "rb") as file:
            lines = file.read().splitlines()
    except OSError:  # also ESRCH, in the middle of reading
        return None
    fields = dict(line.split(b":", 1) for line in lines if b":" in line)
    state = fields[b"State"].split()[0]
    if state in (b"Z", b"X"):
        return None
    pending, blocked, ignored, caught = (int(fields[name], 16) for name in (b"SigPnd", b"SigBlk", b"SigIgn", b"SigCgt"))
    return SignalSets(
        stopped=state in (b"T", b"t"),
        pending=pending | int(fields[b"ShdPnd"], 16),
        blocked=blocked,
        ignored=ignored,
        caught=caught,
    )


def find_free_signal() -> int:
    """Return a real-time signal that this process does not use. RuntimeError if there is none.

    It stays free until a handler is installed: two threads that look at the same time may find the same one.
    """
    sets = read_signal_sets(os.getpid())
    assert sets is not None  # the caller lives, hence so does its process
    for number in range(signal.SIGRTMAX - _MARGIN, signal.SIGRTMIN + _MARGIN - 1, -1):
        if sets.is_free(number):
            return number
    raise RuntimeError("this process uses all real-time signals; free one between SIGRTMIN and SIGRTMAX")


def _has(mask: int, number: int) -> bool:
    return bool(mask >> (number - 1) & 1)
