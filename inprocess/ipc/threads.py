"""Threads that can be joined by a thread into which exceptions are thrown."""

from __future__ import annotations

import contextlib
import os
import threading
import weakref
from collections.abc import Callable, Iterable
from typing import Any

from inprocess.ipc.deadline import Deadline
from inprocess.ipc.suspension import Silence

_SLICE_S = 0.05  # a waiting main thread returns to bytecode this often: exceptions reach it, and it counts as alive


class JoinableThread(threading.Thread):
    """A thread that is alive until it has ended.

    This does not hold for `threading.Thread` before Python 3.13: after an exception (a KeyboardInterrupt, or one thrown
    by another thread) has interrupted its `join`, the thread counts as ended, and later calls of `join` do not wait.
    Resources that it still uses would then be freed too early.
    """

    def __init__(self, target: Callable[..., Any], name: str, args: tuple[Any, ...] = ()) -> None:
        super().__init__(target=target, name=name, args=args, daemon=True)
        self._pid = os.getpid()
        self._over = False
        self._running = threading.Lock()
        self._running.acquire()

    def run(self) -> None:
        try:
            super().run()
        finally:
            self._over = True
            self._running.release()

    def is_alive(self) -> bool:
        """Return whether it was started by this process and has not ended."""
        return self.ident is not None and not self._over and os.getpid() == self._pid

    def join(self, timeout: float | None = None) -> None:
        """Wait until it has ended, at most `timeout` seconds. Any number of threads may call it, also repeatedly.

        Time in which this process was suspended does not count: the thread was, too.
        """
        waited = None if timeout is None else Silence(timeout)
        while self.is_alive():
            slice_s = _SLICE_S
            if waited is not None and timeout is not None:
                slice_s = min(_SLICE_S, timeout - waited.seconds())
                waited.expect(slice_s)
            if slice_s <= 0:
                return
            if self._running.acquire(timeout=slice_s):  # an interrupt after this line does no harm: it has ended
                self._running.release()


def finishes_within(deadline: Deadline, function: Callable[[], None], name: str) -> bool:
    """Run a function in a thread, and return whether it has ended by the deadline; raise what it raised.

    For what may wait in the kernel for a file system that does not answer: no other thread can end that. The thread
    goes on then, and the interpreter does not wait for it.
    """
    raised: list[BaseException] = []

    def run() -> None:
        try:
            function()
        except BaseException as error:
            raised.append(error)

    thread = JoinableThread(run, name)
    thread.start()
    thread.join(max(_SLICE_S, deadline.left_s))
    if raised:
        raise raised[0]
    return not thread.is_alive()


def before_exit(method: weakref.WeakMethod[Callable[[], object]]) -> None:
    """Call a method, if its object still exists then, when the interpreter begins to exit.

    That is before the handlers of `atexit`, which run when all threads that are no daemons have ended. Does nothing if
    the interpreter exits already.
    """

    def call() -> None:
        found = method()
        if found is not None:
            found()

    with contextlib.suppress(RuntimeError):
        threading._register_atexit(call)  # type: ignore[attr-defined]


def join_all(threads: Iterable[JoinableThread]) -> None:
    """Wait until all threads have ended; then raise the last exception that interrupted the wait, if any."""
    interrupt: BaseException | None = None
    for thread in threads:
        while thread.is_alive():
            try:
                thread.join()
            except BaseException as error:
                interrupt = error
    if interrupt is not None:
        raise interrupt
