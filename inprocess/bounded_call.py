"""Call a function that may hang, without hanging."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

from inprocess.exception import TimeoutError
from inprocess.ipc.threads import JoinableThread

__all__ = ["BoundedCall", "bounded_call"]


class BoundedCall:
    """A function that runs in a daemon thread of its own, on the CUDA device of the thread that started it.

    CUDA is left alone unless somebody has initialized it. A call that hangs keeps its thread, and the process can end.
    """

    def __init__(self, function: Callable[[], Any], name: str) -> None:
        self.name = name
        self._function = function
        self._device = _current_cuda_device()
        self._error: BaseException | None = None
        self._result: Any = None
        self._thread = JoinableThread(self._run, name)
        self._thread.start()

    def result(self, timeout: float | None) -> Any:
        """Wait at most `timeout` seconds; return what the function returned or raise what it raised.

        `exception.TimeoutError` if it has not ended. The caller is in bytecode again and again, so an exception that is
        thrown into it ends the wait. None is no limit.
        """
        self._thread.join(timeout)
        if self._thread.is_alive():
            raise TimeoutError(f"{self.name} has not ended within {timeout:g} s")
        if self._error is not None:
            raise self._error
        return self._result

    def _run(self) -> None:
        try:
            if self._device is not None:
                sys.modules["torch"].cuda.set_device(self._device)
            self._result = self._function()
        except BaseException as error:
            self._error = error


def bounded_call(function: Callable[[], Any], timeout: float, name: str) -> Any:
    """`BoundedCall(function, name).result(timeout)`."""
    return BoundedCall(function, name).result(timeout)


def _current_cuda_device() -> int | None:
    torch = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_initialized():
        return None
    device: int = torch.cuda.current_device()
    return device
