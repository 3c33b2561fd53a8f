"""The Python stacks of all threads of a process, also while its GIL is held in C.

    rank      own_stacks: in Python, for a thread of the process itself
              StackReporter: faulthandler writes the stacks, in a signal handler in C, into a file in memory
    reader    read_stacks: empties the file, sends the signal, waits until the handler has returned, reads the file

The handler runs without the GIL and on whatever it finds: CPython's faulthandler is made for processes that are broken.
Walking the frames of a thread that runs at that moment can, rarely, read memory that was freed. So ask only for a
process that is given up on anyway, or of which no thread runs Python because the GIL is held.
"""

from __future__ import annotations

import ctypes
import faulthandler
import fcntl
import logging
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from types import TracebackType

from inprocess.main_thread.signals import find_free_signal, read_signal_sets

__all__ = ["StackReporter", "own_stacks", "read_stacks"]

_log = logging.getLogger(__name__)
_POLL_S = 0.002
_READER_TIMEOUT_S = 2.0


class StackReporter:
    """Makes this process answer `read_stacks` of another one that got `signal_number` and inherited `fd`.

    `install` and `uninstall` (idempotent), or the context, on the main thread; `fd` is closed by `uninstall`, and by
    `exec`. A system call interrupted by the signal is restarted, but for those the kernel never restarts (`nanosleep`,
    `poll`, `epoll_wait`, ...): Python repeats them, a library may not. Forked children share the file, but nobody sends
    them the signal.
    """

    def __init__(self) -> None:
        self.signal_number: int | None = None
        self.fd: int | None = None
        self._pid = 0

    def install(self) -> None:
        """Begin to answer, on a free real-time signal.

        Where that cannot be (off the main thread, no free signal, no file) it logs a warning, and `signal_number` and
        `fd` stay None.
        """
        if self.fd is not None:
            return
        try:
            _check_main_thread()
            number = find_free_signal()
            fd = os.memfd_create("inprocess-stacks", os.MFD_CLOEXEC)
            try:
                # The reader empties the file; an offset would be shared with it, or stale.
                fcntl.fcntl(fd, fcntl.F_SETFL, os.O_APPEND)
                faulthandler.register(number, file=fd, all_threads=True, chain=False)
            except BaseException:
                os.close(fd)
                raise
        except (RuntimeError, OSError) as error:
            _log.warning("the stacks of this process cannot be read by its monitor: %s", error)
            return
        self.signal_number, self.fd, self._pid = number, fd, os.getpid()

    def uninstall(self) -> None:
        """Give the signal back, with its default disposition as it was before, and close the file.

        A reader that is about to send the signal is waited for, 2 s at most: the default action would kill us. After
        that (it was stopped) the signal stays ignored.
        """
        if self.fd is None or self.signal_number is None:
            return
        _check_main_thread()
        fd, number = self.fd, self.signal_number
        if os.getpid() == self._pid:
            with _reading_right(fd, time.monotonic() + _READER_TIMEOUT_S) as ours:
                signal.signal(number, signal.SIG_IGN)  # the kernel also drops those already sent
                if ours:
                    faulthandler.unregister(number)
                    signal.signal(number, signal.SIG_DFL)  # so that Python's own table knows, too
        self.fd = self.signal_number = None
        os.close(fd)

    def __enter__(self) -> StackReporter:
        self.install()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.uninstall()


def own_stacks() -> str:
    """Return the stacks of all threads of this process, that of the main thread first, newest frame last."""
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    main = threading.main_thread().ident
    parts = []
    for ident, frame in sorted(sys._current_frames().items(), key=lambda found: found[0] != main):
        name = names.get(ident, f"0x{ident:x}, not of Python")
        parts.append(f"Thread {name}:\n{''.join(traceback.format_stack(frame))}")
    return "\n".join(parts)


def read_stacks(pid: int, signal_number: int, fd: int, timeout_s: float) -> str:
    """Return the stacks of all threads of a process with a `StackReporter`, newest frame first, as faulthandler writes.

    Any thread of any process that may send it signals; one at a time in each process. The main thread is asked; if it
    does not answer within half the time (a hung driver), another one. "Current thread" is the one that answered.
    Bounded by `timeout_s`. Empty if the process does not answer: it is stopped, dead, has no handler (nothing is sent
    then), or `fd` is in use by another reader. Cut short if it did not finish in time.

    Limits of faulthandler: 100 threads (then "..."), 100 frames each, identifiers instead of names.
    """
    deadline = time.monotonic() + timeout_s
    with _reading_right(fd, deadline) as ours:
        if not ours:
            return ""
        os.ftruncate(fd, 0)
        halfway = (time.monotonic() + deadline) / 2
        if not _ask(pid, pid, signal_number, fd, halfway):
            for thread_id in _other_threads(pid):
                if os.fstat(fd).st_size > 0 or _ask(pid, thread_id, signal_number, fd, deadline):
                    break
        text = os.pread(fd, os.fstat(fd).st_size, 0)
        os.ftruncate(fd, 0)
    return text.decode(errors="replace")


def _ask(pid: int, thread_id: int, signal_number: int, fd: int, until: float) -> bool:
    """Send the signal to one thread and wait until its handler has returned. False if it cannot, or not in time."""
    sets = read_signal_sets(pid, thread_id)
    # Without a handler the signal would kill. Blocked: it would not come before the timeout, but later.
    if sets is None or sets.stopped or not sets.is_caught(signal_number) or sets.is_blocked(signal_number):
        return False
    try:
        if not sets.is_pending(signal_number):  # since an earlier question
            _send(pid, thread_id, signal_number)
    except OSError:
        return False
    while time.monotonic() < until:
        size = os.fstat(fd).st_size
        time.sleep(_POLL_S)
        sets = read_signal_sets(pid, thread_id)
        if sets is None:
            return False
        # The kernel blocks the signal while its handler runs. Text shows that it began.
        returned = not sets.is_pending(signal_number) and not sets.is_blocked(signal_number)
        if returned and 0 < size == os.fstat(fd).st_size:
            return True
    return False


def _other_threads(pid: int) -> list[int]:
    try:
        return [int(name) for name in os.listdir(f"/proc/{pid}/task") if int(name) != pid]
    except OSError:
        return []


def _send(pid: int, thread_id: int, signal_number: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    try:
        tgkill = libc.tgkill
    except AttributeError:  # glibc before 2.30; the kernel prefers the main thread, too
        os.kill(pid, signal_number)
        return
    if tgkill(pid, thread_id, signal_number) != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))


@contextmanager
def _reading_right(fd: int, deadline: float) -> Iterator[bool]:
    """Hold the lock between processes: the handler is neither removed nor asked by two. False if time is over."""
    while True:
        try:
            fcntl.lockf(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            break
        except OSError:
            if time.monotonic() >= deadline:
                yield False
                return
        time.sleep(_POLL_S)
    try:
        yield True
    finally:
        fcntl.lockf(fd, fcntl.LOCK_UN)


def _check_main_thread() -> None:
    if threading.current_thread() is not threading.main_thread():
        raise RuntimeError("only the main thread can change signal handlers")
