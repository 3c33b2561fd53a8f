"""A call that was given to a writer and has no outcome yet."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any

from ckpt.async_calls.payload import Payload
from ckpt.async_calls.request import CallTimer, RecoverableCall

__all__ = ["SentCall"]


class SentCall:
    """It keeps its payload, so that another writer can have it if this one dies before starting it.

    Raises what pickling the call raises.
    """

    def __init__(
        self,
        index: int,
        fn: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        preload_fn: Callable[[], Any] | None = None,
    ) -> None:
        self.index = index
        self.label = getattr(fn, "__qualname__", None) or type(fn).__qualname__
        in_writer = fn.in_writer if isinstance(fn, RecoverableCall) else fn
        self.payload = Payload(in_writer, args, kwargs, preload_fn)
        self.attempts = 0
        self.timer: CallTimer | None = None
        self._on_begun: Callable[[int], CallTimer | None] | None = getattr(fn, "on_begun", None)
        self._sent_ns = time.monotonic_ns()

    def begin(self, at_ns: int) -> None:
        """Its turn has come: start its clock, if it has one and that has not been started before."""
        if self.timer is None and self._on_begun is not None:
            self.timer = self._on_begun(max(at_ns, self._sent_ns))

    def over(self, taken_s: float | None = None) -> None:
        """It has an outcome, or is dropped. `taken_s`: how long it took, if it did its work."""
        self.payload.close()
        timer, self.timer = self.timer, None
        if timer is not None:
            timer.end(taken_s)
