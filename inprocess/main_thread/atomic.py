"""The lock that keeps aborts out of sections of user code that must not be interrupted.

Asynchronous exceptions make even `with` hard to get right. CPython raises them only where it checks for them: at the
start of a Python function, after the return of a C function, and at the end of a loop body. Hence:

* A lock is acquired by C code, and the next check is still inside the `try` that releases it (`__enter__`).
* No check follows before the body of `with`: leaving a `try`, returning, and entering the body have none.
* `__exit__` is C code. One in Python could be interrupted at its start, and the lock would stay acquired.
"""

from __future__ import annotations

import logging
from _thread import RLock
from collections.abc import Callable, Iterator
from contextlib import contextmanager

_log = logging.getLogger(__name__)
_SLICE_S = 0.005  # how late an exception thrown into a waiting thread may be


class AtomicLock(RLock):  # type: ignore[misc]  # typeshed calls it final; it is not, in any version
    """A reentrant lock for `atomic()` on the main thread and `hold()` on the monitor thread. Nesting works.

    While the main thread is in a section, no abort begins and nothing is thrown; while the monitor thread holds the
    lock, the main thread cannot enter one. Return `atomic()` itself to users: a context manager in Python around it
    would lose these guarantees.
    """

    def atomic(self) -> AtomicLock:
        """Return the context manager of a section. An exception thrown into a waiting thread is raised within 5 ms."""
        return self

    def is_held_here(self) -> bool:
        """Return whether the calling thread is in a section."""
        return bool(self._is_owned())  # type: ignore[attr-defined]  # threading.Condition uses it, too

    def __enter__(self) -> bool:  # type: ignore[override]
        if self.is_held_here():
            try:
                self.acquire()  # does not wait; an exception can only be raised after it
            except BaseException:
                self.release()
                raise
            return True
        try:
            while not self.acquire(True, _SLICE_S):
                pass
        except BaseException:
            # Only the lock knows whether it was acquired. Nothing here may call Python code.
            try:  # noqa: SIM105
                self.release()
            except RuntimeError:  # it was not
                pass
            raise
        return True

    @contextmanager
    def hold(self, notice_after_s: float, notice: Callable[[], object]) -> Iterator[None]:
        """Hold the lock on a thread into which no exceptions are thrown: the monitor thread.

        Waits without limit. After `notice_after_s` it calls `notice()` once, in this thread; errors of that are logged.
        """
        if not self.acquire(True, notice_after_s):
            try:
                notice()
            except Exception:
                _log.exception("the notice that the abort waits for an atomic section failed")
            self.acquire()
        try:
            yield
        finally:
            self.release()
