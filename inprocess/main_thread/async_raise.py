"""Exceptions thrown from one thread into another.

CPython keeps one such exception per thread and raises it when the thread next checks, between two bytecode instructions
(at the start of a function, after a call, at the end of a loop body). A thread inside a C function checks on return;
see `inprocess.main_thread.signals` for bringing it back early.
"""

from __future__ import annotations

import contextlib
import ctypes
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import CodeType
from typing import Any

from inprocess.ipc.threads import JoinableThread

_POLL_S = 0.001


def async_raise(thread_id: int, exc_type: type[BaseException]) -> None:
    """Make the thread with this `ident` raise `exc_type()` soon. Any thread; does nothing while Python shuts down.

    It replaces one that was thrown before and has not been raised yet. RuntimeError if there is no such thread.
    TypeError if `exc_type` is not an exception class: CPython cannot throw instances.
    """
    if not (isinstance(exc_type, type) and issubclass(exc_type, BaseException)):
        raise TypeError(f"only exception classes can be thrown into a thread, not {exc_type!r}")
    if sys.is_finalizing():
        return
    affected = _set_async_exc(thread_id, ctypes.py_object(exc_type))
    if affected == 0:
        raise RuntimeError(f"cannot throw {exc_type.__name__}: there is no thread with the ident {thread_id}")
    if affected > 1:
        _set_async_exc(thread_id, ctypes.py_object())
        raise RuntimeError(f"throwing {exc_type.__name__} hit {affected} threads instead of one; taken back")


def clear_async_raise(thread_id: int) -> None:
    """Take back an exception that was thrown into the calling thread and has not been raised yet.

    `thread_id` is the ident of the caller; RuntimeError for another thread. The exception may still be raised on the
    way into this function, but not after it has returned.
    """
    if thread_id != threading.get_ident():
        raise RuntimeError("a thread can take back only exceptions thrown into itself")
    # CPython's own way to take one back (throwing NULL) makes the thread check for it permanently, before 3.13: every
    # call is slower from then on, and one under a debugger or coverage tool never ends. So replace it and raise that.
    with contextlib.suppress(_TakenBack):
        async_raise(thread_id, _TakenBack)


class _TakenBack(BaseException):
    """Replaces an exception that is taken back."""


@contextmanager
def reraise_if_unraisable(exc_type: type[BaseException]) -> Iterator[None]:
    """While active, throw an `exc_type` again that was raised where Python cannot propagate it. Also a decorator.

    Such places are destructors, callbacks of weak references and of the garbage collector; Python passes the exception
    to `sys.unraisablehook` and continues. It is thrown into the same thread again as soon as that has left the hook.
    All other exceptions go to the previous hook, which is restored at the end, also if the body raises; afterwards
    nothing is thrown.
    """
    again = _ThrowAgain()
    previous = sys.unraisablehook

    def hook(unraisable: Any) -> None:
        try:
            if unraisable.exc_type is not None and issubclass(unraisable.exc_type, exc_type):
                again.throw(unraisable.exc_type, hook.__code__)
            else:
                previous(unraisable)
        except exc_type as error:  # raised in this hook, where Python would drop it, too
            again.throw(type(error), hook.__code__)

    sys.unraisablehook = hook
    try:
        yield
    finally:
        # An async exception may end this block early: restore the hook first.
        if sys.unraisablehook is hook:  # else a later hook calls this one, which then only passes on
            sys.unraisablehook = previous
        again.close()


class _ThrowAgain:
    """Helper threads that wait for their target to leave a function and throw an exception into it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._closed = False
        self._helpers: list[JoinableThread] = []

    def throw(self, exc_type: type[BaseException], code: CodeType) -> None:
        """Throw into the calling thread as soon as it no longer executes `code`."""
        arguments = (threading.get_ident(), exc_type, code)
        helper = JoinableThread(self._run, "throw-again", arguments)
        self._helpers.append(helper)
        helper.start()

    def _run(self, thread_id: int, exc_type: type[BaseException], code: CodeType) -> None:
        while True:
            with self._lock:
                if self._closed or thread_id not in sys._current_frames():
                    return
                if not _executes(thread_id, code):
                    async_raise(thread_id, exc_type)
                    return
            time.sleep(_POLL_S)

    def close(self) -> None:
        with self._lock:
            self._closed = True
        for helper in self._helpers:
            helper.join()


def _executes(thread_id: int, code: CodeType) -> bool:
    frame = sys._current_frames().get(thread_id)
    while frame is not None:
        if frame.f_code is code:
            return True
        frame = frame.f_back
    return False


def _set_async_exc(thread_id: int, exception: ctypes.py_object[Any]) -> int:
    # A separate library handle: argument types set on `ctypes.pythonapi` would affect the whole process.
    function = ctypes.PyDLL(None).PyThreadState_SetAsyncExc
    function.argtypes = (ctypes.c_ulong, ctypes.py_object)
    function.restype = ctypes.c_int
    return int(function(thread_id, exception))
