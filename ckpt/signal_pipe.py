"""Signals as bytes in a pipe, readable by a thread at once, whatever the main thread does.

Python runs signal handlers in the main thread, between two bytecode instructions; a main thread that waits in a
collective runs none. But CPython's handler in C writes the number of the signal to the wakeup descriptor at once, and
that is our pipe. A descriptor that was there before gets the numbers from us. If other code replaces ours later, the
handler in Python still writes to the pipe, when the main thread runs it.
"""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import weakref
from collections.abc import Callable, Iterable
from types import FrameType
from typing import Any

__all__ = ["SignalPipe", "signal_name"]

_IN_PYTHON = 128  # added to the number of a signal that the handler in Python writes
_NUDGE = 0


class SignalPipe:
    """Catches signals, from the constructor to `release`, both in the main thread. `take` is for one other thread.

    A handler that a signal had before is called after ours, and put back by `release`. Default actions and SIG_IGN are
    not carried out. Forked children have the handlers that were there before.
    """

    def __init__(self, numbers: Iterable[int]) -> None:
        """Install the handlers. ValueError outside the main thread, and for a handler that Python did not install."""
        self._earlier: dict[int, Any] = {}
        self._earlier_fd = self._earlier_file = -1  # its number, and our own descriptor of the same file
        self._is_released = False
        self._handler = self._receive  # one object, to be recognized
        self._read_fd, self._write_fd = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        try:
            self._earlier_fd = signal.set_wakeup_fd(self._write_fd, warn_on_full_buffer=False)
            if self._earlier_fd >= 0:
                with contextlib.suppress(OSError):  # it was closed without being replaced
                    self._earlier_file = os.dup(self._earlier_fd)
            for number in numbers:
                self._catch(number)
        except BaseException:
            self.release()
            self.close()
            raise
        _protect_from_children(weakref.ref(self))

    def fileno(self) -> int:
        """Return the descriptor that is readable when `take` has something; -1 after `close`."""
        return self._read_fd

    def nudge(self) -> None:
        """Make the descriptor readable."""
        self._write(_NUDGE)

    def take(self) -> set[int]:
        """Return the numbers of signals that have arrived, of those that are caught. Never waits."""
        try:
            data = os.read(self._read_fd, 4096)
        except OSError:
            return set()
        passed_on = bytes(number for number in data if _NUDGE < number < _IN_PYTHON)
        if passed_on and self._earlier_file >= 0:
            with contextlib.suppress(OSError):
                os.write(self._earlier_file, passed_on)
        return {number % _IN_PYTHON for number in data} & self._earlier.keys()

    def release(self) -> None:
        """Put back the handlers and the wakeup descriptor, unless they were replaced. Idempotent; main thread.

        Several pipes can be released in any order: what one that is released already had replaced is put back.
        """
        self._is_released = True
        for number in self._earlier:
            if signal.getsignal(number) is self._handler:
                signal.signal(number, self._before(number))
        current = signal.set_wakeup_fd(-1)
        wanted = current
        if current == self._write_fd >= 0:
            wanted = self._earlier_fd if self._is_earlier_open() else -1
        if wanted >= 0:
            with contextlib.suppress(ValueError, OSError):  # it was closed meanwhile
                signal.set_wakeup_fd(wanted, warn_on_full_buffer=False)

    def close(self) -> None:
        """Close the pipe, after `release`, when no thread takes from it any more. Idempotent."""
        fds = self._read_fd, self._write_fd, self._earlier_file
        self._read_fd = self._write_fd = self._earlier_file = -1
        for fd in fds:
            if fd >= 0:
                os.close(fd)

    def _catch(self, number: int) -> None:
        earlier = signal.getsignal(number)
        if earlier is None or (not callable(earlier) and _is_caught(number)):
            raise ValueError(
                f"{signal_name(number)} has a handler that was not installed by Python (faulthandler.register does "
                "that, too) and could not be put back: do not name this signal"
            )
        self._earlier[number] = signal.signal(number, self._handler)

    def _before(self, number: int) -> Any:
        """Return the handler that a signal had before this pipe and those below it that are released."""
        earlier = self._earlier[number]
        pipe = getattr(earlier, "__self__", None)
        return pipe._before(number) if isinstance(pipe, SignalPipe) and pipe._is_released else earlier

    def _is_earlier_open(self) -> bool:
        """Return whether the number of the earlier wakeup descriptor stands for the same file as then."""
        try:
            return os.path.sameopenfile(self._earlier_fd, self._earlier_file)
        except OSError:
            return False

    def _receive(self, number: int, frame: FrameType | None) -> None:
        """The handler in Python. It takes no lock: it runs between any two instructions of the main thread."""
        self._write(_IN_PYTHON + number)
        earlier = self._earlier.get(number)
        if callable(earlier) and earlier is not signal.default_int_handler:
            earlier(number, frame)

    def _write(self, number: int) -> None:
        with contextlib.suppress(OSError):  # closed; or full, and then the thread that reads is awake
            os.write(self._write_fd, bytes([number]))


def _protect_from_children(pipe: Callable[[], SignalPipe | None]) -> None:
    """Make a signal to a forked child none to this process. The child gets it when the earlier handlers are back."""
    forks = threading.local()

    def before() -> None:
        found = pipe()
        numbers = () if found is None else found._earlier.keys()
        forks.mask = signal.pthread_sigmask(signal.SIG_BLOCK, numbers)

    def in_parent() -> None:
        signal.pthread_sigmask(signal.SIG_SETMASK, forks.mask)

    def in_child() -> None:
        found = pipe()
        if found is not None:
            found.release()
            found.close()
        signal.pthread_sigmask(signal.SIG_SETMASK, forks.mask)

    os.register_at_fork(before=before, after_in_parent=in_parent, after_in_child=in_child)


def _is_caught(number: int) -> bool:
    """Return whether this process has a handler for a signal, as far as the kernel tells (see proc(5))."""
    try:
        with open("/proc/self/status", encoding="ascii", errors="replace") as status:
            caught = next((line.split()[1] for line in status if line.startswith("SigCgt:")), "0")
    except OSError:
        return False
    return bool(int(caught, 16) >> (number - 1) & 1)


def signal_name(number: int) -> str:
    """Return the name of a signal, its number if it has none."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"{number}"
