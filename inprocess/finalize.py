"""Hooks that clean up after the wrapped function was unwound."""

from __future__ import annotations

import abc
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from types import MappingProxyType
from typing import Any

from inprocess.bounded_waits import bounded_call
from inprocess.state import FrozenState

__all__ = ["Finalize", "ThreadedFinalize"]


class Finalize(abc.ABC):
    """Called on the main thread after a fault, when the wrapped function was unwound and `abort` has returned.

    Other ranks may be anywhere, or dead: no collectives. Returns the state it was given. An error leaves the
    wrapper: this rank takes no part in the next iteration, and its health check is skipped.
    """

    @abc.abstractmethod
    def __call__(self, state: FrozenState) -> FrozenState: ...


class ThreadedFinalize(Finalize):
    """Runs `fn(*args, **kwargs)` in a daemon thread, with a time limit.

    `timeout` is a timedelta, or seconds. `exception.TimeoutError` if it has not ended then; the thread continues.
    Errors of `fn` are raised. The thread uses the CUDA device of the caller if CUDA is initialized.
    """

    def __init__(
        self,
        timeout: timedelta | float,
        fn: Callable[..., Any],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = MappingProxyType({}),
    ) -> None:
        self.timeout = timeout
        self.fn = fn
        self.args = tuple(args)
        self.kwargs = dict(kwargs or {})

    def __call__(self, state: FrozenState) -> FrozenState:
        seconds = self.timeout.total_seconds() if isinstance(self.timeout, timedelta) else float(self.timeout)
        name = f"finalize {getattr(self.fn, '__qualname__', self.fn)}"
        bounded_call(lambda: self.fn(*self.args, **self.kwargs), seconds, name)
        return state
