"""The lock that keeps an abort out of the sections of user code that must not be torn.

Asynchronous exceptions make even `with` hard to get right. CPython raises them only where it looks for them: when a
Python function starts, after the call of a C function returned, and at the end of a loop's body. Hence:

* A lock is taken by a call of C code, and the very next look is still in the `try` that gives it back (`__enter__`).
* Between that look and the body of `with` there is none: leaving a `try`, returning, and entering the body do not look.
* `__exit__` is C code. One written in Python could be interrupted at its start, and the lock would stay taken.
"""

from __future__ import annotations

import logging
from _thread import RLock
from collections.abc import Callable, Iterator
from contextlib import contextmanager

__all__ = ["AtomicLock"]

_log = logging.getLogger(__name__)
_SLICE_S = 0.005  # how late an exception thrown into a waiting thread may be


class AtomicLock(RLock):  # type: ignore[misc]  # typeshed calls it final; it is not, in any version
    """A reentrant lock for `atomic()` on the main thread and `hold()` on the monitor thread. Nesting works.

    While the main thread is in a section no abort begins and nothing is thrown; while the monitor thread holds the lock
    the main thread cannot enter one. Hand out `atomic()` itself: a context manager in Python around it would lose what
    the module promises.
    """

    def atomic(self) -> AtomicLock:
        """Return the context manager of a section. An exception thrown into a waiting thread is raised within 5 ms."""
        return self

    def __enter__(self) -> bool:  # type: ignore[override]
        if self._is_owned():  # type: ignore[attr-defined]  # what threading.Condition asks its lock, too
            try:
                self.acquire()  # does not wait; an exception can only come up after it
            except BaseException:
                self.release()
                raise
            return True
        try:
            while not self.acquire(True, _SLICE_S):
                pass
        except BaseException:
            # Before or after the lock was taken? Only the lock knows. Nothing here may call Python code.
            try:  # noqa: SIM105
                self.release()
            except RuntimeError:  # before
                pass
            raise
        return True

    @contextmanager
    def hold(self, notice_after_s: float, notice: Callable[[], object]) -> Iterator[None]:
        """Hold the lock on a thread into which nobody throws exceptions: the monitor thread.

        Waits as long as it takes. `notice()` is called in this thread, once, when that has been `notice_after_s`; if
        it raises, that is logged.
        """
        if not self.acquire(True, notice_after_s):
            try:
                notice()
            except Exception:
                _log.exception("the notice that the abort waits for an atomic section fails")
            self.acquire()
        try:
            yield
        finally:
            self.release()
