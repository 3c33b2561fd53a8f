"""Signals that bring a blocked main thread back to bytecode, so that it notices an exception thrown into it.

CPython raises an asynchronous exception only between bytecode instructions. A main thread in a blocking call gets there
through a signal: the system call ends with EINTR, and CPython runs the Python function that handles the signal before
it repeats the call; the first instruction of that function raises the pending exception, out of the blocking call.

Freed by `wake` (the exception comes out of the call):
    `time.sleep`; `acquire` of Lock, RLock, Semaphore; `Event.wait`, `Condition.wait`, `Thread.join`;
    `queue.Queue.get`, `queue.SimpleQueue.get`; `concurrent.futures.Future.result`; multiprocessing locks, queues and
    pipes; `os.read` and `os.write` of pipes, `open` of a FIFO; `socket.recv`, `send`, `accept`, `connect`;
    `select`, `poll`, `epoll`, `asyncio.run`; `os.waitpid`, `Popen.wait`; `fcntl.flock`; `signal.sigtimedwait`,
    `signal.pause`.
Freed, but the call ends early, as if its work was done: `usleep`, `sem_wait` and the like called through `ctypes`.
Not freed:
    C and C++ code that repeats a call after EINTR, or waits for a mutex, a condition variable or the end of a thread,
    which do not know EINTR: gloo and NCCL collectives, waiting in a torch store, CUDA synchronisation, OpenMP;
    `getaddrinfo`; `signal.sigwait`; a busy loop in C; a process in uninterruptible sleep (a hung file server, a
    driver); a main thread that blocks the signal.

The signal is a real-time one that this process does not use. Python's own table (`signal.getsignal`) does not show what
C libraries have installed, so the kernel is asked, in /proc.
"""

from __future__ import annotations

import logging
import os
import signal
import threading
from collections.abc import Callable
from dataclasses import dataclass
from types import FrameType, TracebackType

_log = logging.getLogger(__name__)


class MainThreadInterrupter:
    """A signal handler on an unused real-time signal, and `wake`, which sends that signal.

    The handler calls `on_wake` with the frame that was interrupted; by default it does nothing.

    `install` and `uninstall` (or the context) on the main thread. Elsewhere `install` logs a warning and leaves the
    interrupter disabled: `enabled` is False, `why_disabled` says why, `wake` does nothing.

    The signal may break a library in the process whose system calls do not expect EINTR: Python installs handlers
    without SA_RESTART, on which this relies. So send it only after the iteration was interrupted. A forked child has
    the handler, but is never sent the signal; a new program has no handler.
    """

    def __init__(self, on_wake: Callable[[FrameType | None], object] = lambda frame: None) -> None:
        self.signal_number: int | None = None
        self.why_disabled: str | None = "not installed"
        self._handler = _handler(on_wake)
        self._pid = 0
        self._main_thread = 0
        self._lock = threading.RLock()  # no signal is sent between the check in `wake` and `uninstall`

    @property
    def enabled(self) -> bool:
        """Whether `wake` works."""
        return self.why_disabled is None

    def install(self) -> None:
        """Install the handler on a free real-time signal. Idempotent. Disabled outside the main thread."""
        if self.enabled:
            return
        try:
            if threading.current_thread() is not threading.main_thread():
                raise RuntimeError("only the main thread can install a signal handler")
            with self._lock:
                number = find_free_signal()
                signal.signal(number, self._handler)
                self.signal_number = number
                self._pid, self._main_thread = os.getpid(), threading.get_ident()
                self.why_disabled = None
        except (RuntimeError, ValueError, OSError) as error:
            self.why_disabled = str(error)
            _log.warning("a main thread in a blocking call cannot be woken: %s", error)

    def uninstall(self) -> None:
        """Restore the default disposition of the signal. Idempotent; main thread.

        A pending signal is dropped. No exceptions should be thrown into this thread any more: one that is raised in
        here may leave the handler in place, which is harmless.
        """
        with self._lock:
            number = self.signal_number
            if not self.enabled or number is None:
                return
            self.why_disabled = "uninstalled"
            if os.getpid() != self._pid or signal.getsignal(number) is not self._handler:
                return  # other code has taken it over
            # The default action kills the process. Ignoring a signal makes the kernel drop those already sent.
            signal.signal(number, signal.SIG_IGN)
            signal.signal(number, signal.SIG_DFL)

    def reaches_main_thread(self) -> bool:
        """Return whether the handler would run: it is installed, and the main thread does not block the signal."""
        with self._lock:
            number = self.signal_number
            if not self.enabled or number is None or os.getpid() != self._pid:
                return False
            sets = read_signal_sets(self._pid)
            return sets is not None and sets.is_caught(number) and not sets.is_blocked(number)

    def wake(self) -> None:
        """Make the main thread run bytecode if it is in one of the calls that can be freed. Any thread.

        Call it after throwing the exception, and again, with pauses, until the main thread runs: a signal that arrives
        just before the main thread enters the system call does not interrupt that call.
        """
        with self._lock:
            number = self.signal_number
            if not self.enabled or number is None or os.getpid() != self._pid:
                return
            sets = read_signal_sets(self._pid)
            if sets is None or not sets.is_caught(number):  # the handler was removed: the signal would end the process
                self.why_disabled = f"the handler of signal {number} was removed"
                _log.warning("a main thread in a blocking call cannot be woken: %s", self.why_disabled)
            elif not sets.is_pending(number):
                signal.pthread_kill(self._main_thread, number)

    def __enter__(self) -> MainThreadInterrupter:
        self.install()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.uninstall()


def _handler(on_wake: Callable[[FrameType | None], object]) -> Callable[[int, FrameType | None], object]:
    """Return a handler that `signal.getsignal` returns as the same object."""

    def handle(number: int, frame: FrameType | None) -> None:
        on_wake(frame)

    return handle


# Both ends are in use: glibc and musl reserve the lowest three (SIGRTMIN already leaves those out), garbage collectors
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
        """Return whether the signal was sent and has not been handled yet."""
        return _has(self.pending, number)

    def is_blocked(self, number: int) -> bool:
        """Return whether the thread blocks the signal; it also does while it runs a handler of it."""
        return _has(self.blocked, number)

    def is_caught(self, number: int) -> bool:
        """Return whether the process has a handler, so that the signal does not end it."""
        return _has(self.caught, number)

    def is_free(self, number: int) -> bool:
        """Return whether the signal has its default disposition, and no thread waits for it by blocking it."""
        return not _has(self.pending | self.blocked | self.ignored | self.caught, number)


def read_signal_sets(pid: int, thread_id: int | None = None) -> SignalSets | None:
    """Return the sets of a thread (default: the main one) from /proc. None if it does not exist or is a zombie."""
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

    It stays free until a handler is installed: two threads that search at the same time may find the same one.
    """
    sets = read_signal_sets(os.getpid())
    assert sets is not None  # the process of the caller exists
    for number in range(signal.SIGRTMAX - _MARGIN, signal.SIGRTMIN + _MARGIN - 1, -1):
        if sets.is_free(number):
            return number
    raise RuntimeError("this process uses all real-time signals; one between SIGRTMIN and SIGRTMAX must be free")


def _has(mask: int, number: int) -> bool:
    return bool(mask >> (number - 1) & 1)
