"""The Python stacks of all threads of a process, also while its GIL is held in C.

    rank      own_stacks: in Python, for a thread of the process itself
              StackReporter: faulthandler writes the stacks, in a signal handler in C, into a file in memory
    reader    read_stacks: empties the file, sends the signal, waits until the handler has returned, reads the file

The handler runs without the GIL, in any state of the process: CPython's faulthandler is made for broken processes.
Walking the frames of a thread that runs at that moment can, rarely, read freed memory. So use it only for a process
that will be killed anyway, or in which no thread runs Python because the GIL is held.
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

_log = logging.getLogger(__name__)
_POLL_S = 0.002
_READER_TIMEOUT_S = 2.0


class StackReporter:
    """Makes this process answer `read_stacks` of a process that has `signal_number` and inherited `fd`.

    `install` and `uninstall` (idempotent), or the context, on the main thread; `fd` is closed by `uninstall`, and by
    `exec`. A system call interrupted by the signal is restarted, but for those the kernel never restarts (`nanosleep`,
    `poll`, `epoll_wait`, ...): Python repeats them, a library may not. Forked children share the file, but are
    never sent the signal.
    """

    def __init__(self) -> None:
        self.signal_number: int | None = None
        self.fd: int | None = None
        self._pid = 0

    def install(self) -> None:
        """Install the handler on a free real-time signal.

        If that is impossible (not the main thread, no free signal, no file) it logs a warning, and `signal_number` and
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
            _log.warning("the monitor process cannot read the stacks of this process: %s", error)
            return
        self.signal_number, self.fd, self._pid = number, fd, os.getpid()

    def uninstall(self) -> None:
        """Restore the default disposition of the signal, and close the file.

        Waits at most 2 s for a reader that is about to send the signal, because the default action would kill this
        process. If that reader is stopped, the signal stays ignored.
        """
        if self.fd is None or self.signal_number is None:
            return
        _check_main_thread()
        fd, number = self.fd, self.signal_number
        if os.getpid() == self._pid:
            with _reader_lock(fd, time.monotonic() + _READER_TIMEOUT_S) as locked:
                signal.signal(number, signal.SIG_IGN)  # the kernel also drops pending ones
                if locked:
                    faulthandler.unregister(number)
                    signal.signal(number, signal.SIG_DFL)  # also updates Python's own table
        self.fd = self.signal_number = None
        os.close(fd)

    def __enter__(self) -> StackReporter:
        self.install()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.uninstall()


def own_stacks() -> str:
    """Return the stacks of all threads of this process, that of the main thread first, newest frame last.

    Characters that UTF-8 does not have, as in names of files that are not text, are escaped.
    """
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    main = threading.main_thread().ident
    parts = []
    for ident, frame in sorted(sys._current_frames().items(), key=lambda found: found[0] != main):
        name = names.get(ident, f"0x{ident:x}, not of Python")
        parts.append(f"Thread {name}:\n{''.join(traceback.format_stack(frame))}")
    return "\n".join(parts).encode(errors="backslashreplace").decode()


def read_stacks(pid: int, signal_number: int, fd: int, timeout_s: float) -> str:
    """Return the stacks of all threads of a process with a `StackReporter`, newest frame first, as faulthandler writes.

    Any process that may send it signals can call this, one thread at a time. The signal goes to the main thread; if
    that does not answer within half the time (a hung driver), to another one. "Current thread" is the one that
    answered. Bounded by `timeout_s`. Empty if the process does not answer: it is stopped, dead, has no handler (nothing
    is sent then), or another reader uses `fd`. Truncated if it did not finish in time.

    Limits of faulthandler: 100 threads (then "..."), 100 frames each, identifiers instead of names.
    """
    deadline = time.monotonic() + timeout_s
    with _reader_lock(fd, deadline) as locked:
        if not locked:
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
    # Without a handler the signal would kill; a blocked one would arrive too late.
    if sets is None or sets.stopped or not sets.is_caught(signal_number) or sets.is_blocked(signal_number):
        return False
    try:
        if not sets.is_pending(signal_number):  # else it is pending since an earlier read
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
    except AttributeError:  # glibc before 2.30; the kernel prefers the main thread
        os.kill(pid, signal_number)
        return
    if tgkill(pid, thread_id, signal_number) != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))


@contextmanager
def _reader_lock(fd: int, deadline: float) -> Iterator[bool]:
    """Hold the lock between processes, so that only one reads, and none during `uninstall`. False at the deadline."""
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
