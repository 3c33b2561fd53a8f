"""Waits that are bounded, and that an exception thrown into the waiting thread ends.

CPython raises such an exception only between bytecode instructions, so the main thread waits in slices.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable
from typing import Generic, TypeVar

from inprocess.exception import TimeoutError
from inprocess.ipc.threads import JoinableThread

__all__ = ["BoundedCall", "bounded_call", "wait_until_set"]

_SLICE_S = 0.05
_T = TypeVar("_T")


class BoundedCall(Generic[_T]):
    """A function that runs in a daemon thread of its own, on the CUDA device of the thread that started it.

    CUDA is not initialized by this. A call that hangs keeps its thread, and the process can end all the same.
    """

    def __init__(self, function: Callable[[], _T], name: str) -> None:
        self.name = name
        self._function = function
        self._device = _current_cuda_device()
        self._error: BaseException | None = None
        self._results: list[_T] = []
        self._thread = JoinableThread(self._run, name)
        self._thread.start()

    def result(self, timeout: float | None) -> _T:
        """Wait at most `timeout` seconds (None: no limit); return what the function returned or raise what it raised.

        `exception.TimeoutError` if it has not ended. An exception thrown into the caller ends the wait.
        """
        if not self.wait(timeout):
            raise TimeoutError(f"{self.name} has not ended within {timeout:g} s")
        if self._error is not None:
            raise self._error
        return self._results[0]

    def wait(self, timeout: float | None) -> bool:
        """Wait at most `timeout` seconds (None: no limit); return whether the call has ended."""
        self._thread.join(timeout)
        return not self._thread.is_alive()

    def _run(self) -> None:
        try:
            if self._device is not None:
                sys.modules["torch"].cuda.set_device(self._device)
            self._results.append(self._function())
        except BaseException as error:
            self._error = error


def bounded_call(function: Callable[[], _T], timeout: float, name: str) -> _T:
    """Return what `function` returns; `exception.TimeoutError` if it has not ended within `timeout` seconds."""
    return BoundedCall(function, name).result(timeout)


def wait_until_set(event: threading.Event, timeout: float | None = None, slice_s: float = _SLICE_S) -> bool:
    """Wait until the event is set, at most `timeout` seconds; return whether it is. On the main thread in slices."""
    if threading.current_thread() is not threading.main_thread():
        return event.wait(timeout)
    deadline = None if timeout is None else time.monotonic() + timeout
    while True:
        if event.wait(slice_s if deadline is None else max(0.0, min(slice_s, deadline - time.monotonic()))):
            return True
        if deadline is not None and time.monotonic() >= deadline:
            return False


def _current_cuda_device() -> int | None:
    torch = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_initialized():
        return None
    device: int = torch.cuda.current_device()
    return device
