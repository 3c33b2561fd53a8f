"""Detect that the main thread executes bytecode, without running Python code on it.

CPython lets any thread queue a C function that the main thread calls between two bytecode instructions. `int
sem_post(sem_t *)` has the signature of such a pending call, and returns 0 for success.
"""

from __future__ import annotations

import ctypes
import errno
import math
import threading
import time

_SEMAPHORE_BYTES = 128  # sizeof(sem_t) is 32 or less everywhere


class MainThreadProbe:
    """A semaphore that is posted by a pending call on the main thread, and by `nudge` from anywhere.

    At most one call is outstanding. A post does not show its origin, so posts are counted: those taken minus the nudges
    given are the calls that ran.

    The semaphore must live as long as a call may still post it. If the main thread does not run that call, not even
    during `close`, the memory is not freed: 128 bytes for a watchdog that ends while the main thread hangs. Nor is it
    freed by a daemon thread that still runs when Python ends.
    """

    def __init__(self) -> None:
        python, libc = ctypes.PyDLL(None), ctypes.CDLL(None, use_errno=True)
        libc.calloc.restype = ctypes.c_void_p
        libc.calloc.argtypes = (ctypes.c_size_t, ctypes.c_size_t)
        libc.free.argtypes = (ctypes.c_void_p,)
        address = libc.calloc(1, _SEMAPHORE_BYTES)
        if address is None or libc.sem_init(ctypes.c_void_p(address), 0, 0) != 0:
            raise MemoryError("no memory for a semaphore")
        self._libc = libc
        self._semaphore = ctypes.c_void_p(address)
        self._post = python.sem_post  # does not block: no need to release the GIL
        self._post_address = ctypes.cast(python.sem_post, ctypes.c_void_p)
        self._add_pending_call = python.Py_AddPendingCall
        self._lock = threading.RLock()
        self._taken = 0  # posts
        self._nudges = 0
        self._ran = 0  # calls
        self._closed = False
        self.outstanding = False

    def schedule(self) -> None:
        """Queue a call, unless one is outstanding. Does nothing if the queue of the interpreter is full."""
        if not self.outstanding:
            self.outstanding = self._add_pending_call(self._post_address, self._semaphore) == 0

    def nudge(self) -> None:
        """Make `wait` return early. Any thread."""
        with self._lock:
            if not self._closed:
                try:
                    self._post(self._semaphore)
                finally:  # an exception thrown into this thread is raised after the post, never before
                    self._nudges += 1

    def wait(self, until: float | None) -> bool:
        """Sleep until a post, or `until` (monotonic; None: no limit). True if the outstanding call has run."""
        while self._sleep(until) != 0:
            error = ctypes.get_errno()
            if error == errno.ETIMEDOUT:
                return False
            if error != errno.EINTR:
                raise OSError(error, "cannot wait for a semaphore")
        self._taken += 1
        with self._lock:  # so that a post whose nudge is not counted yet does not count as the call
            ran = self.outstanding and self._taken - self._nudges > self._ran
            if ran:
                self._ran += 1
                self.outstanding = False
            return ran

    def _sleep(self, until: float | None) -> int:
        if until is None:
            return int(self._libc.sem_wait(self._semaphore))
        clock: tuple[ctypes.c_int, ...] = (ctypes.c_int(time.CLOCK_MONOTONIC),)
        try:
            wait = self._libc.sem_clockwait
        except AttributeError:  # glibc before 2.30. Timeouts of Python's own locks have the same weakness there:
            wait, clock = self._libc.sem_timedwait, ()  # a step of the wall clock changes them
            until += time.time() - time.monotonic()
        fraction, whole = math.modf(until)
        timespec = (ctypes.c_long * 2)(int(whole), int(fraction * 1e9))
        return int(wait(self._semaphore, *clock, timespec))

    def close(self, grace_s: float) -> None:
        """Wait at most `grace_s` for the outstanding call, then free the semaphore if that is safe."""
        end = time.monotonic() + grace_s
        while self.outstanding and time.monotonic() < end:
            self.wait(end)
        with self._lock:
            self._closed = True
            if not self.outstanding:
                self._libc.sem_destroy(self._semaphore)
                self._libc.free(self._semaphore)
