"""A store of torch whose operations end, whatever becomes of its host.

An operation of torch's `TCPStore` waits without limit in C++ when its host is cut off or stopped, and no signal handler
of Python runs meanwhile. Here each operation runs in a thread of its own, and the caller waits for that thread:

    caller (main thread, or torch's heartbeats)     thread of the operation
      BoundedStore.add  ── starts ───────────────▶  TCPStore.add, may hang; the interpreter does not wait for it
      wait in Python, at most `limit_s`  ◀── ends ──

Operations that wait for keys (`get`, `multi_get`, `wait`) look for them repeatedly instead.
"""

from __future__ import annotations

import functools
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

from torch.distributed import DistNetworkError, DistStoreError, Store  # type: ignore[attr-defined]

from inprocess.bounded_waits import BoundedCall
from inprocess.exception import TimeoutError

_SLICE_S = 0.25
_SIGNAL_GRACE_S = 1.0
_POLL_S = 0.03


def interruptible(function: Callable[[], Any], name: str, timeout_s: float | None = None) -> Any:
    """Call a function of torch, and let signal handlers run, and raise, meanwhile.

    `exception.TimeoutError` after `timeout_s`; the function then goes on in its thread.
    """
    return BoundedCall(function, name).result(timeout_s)


class BoundedStore(Store):
    """A store that asks `inner`, for what launchers do. Any thread; keep a reference while torch uses it.

    DistNetworkError if `inner` does not answer within `limit_s`, and from then on always. On the main thread also after
    one second if a signal has arrived (`has_signal`): that is dealt with first. DistStoreError if keys do not appear
    within the timeout of `inner`.
    """

    def __init__(self, inner: Any, limit_s: float, has_signal: Callable[[], bool]) -> None:
        super().__init__()
        self._inner = inner
        self._limit_s = limit_s
        self._has_signal = has_signal
        self._lost = ""

    @property
    def address(self) -> tuple[str, int] | None:
        """Host and port of the store, as far as it has them."""
        found = self._inner
        while hasattr(found, "underlying_store"):
            found = found.underlying_store
        return (str(found.host), int(found.port)) if hasattr(found, "port") else None

    def set(self, key: str, value: Any) -> None:
        """See `torch.distributed.Store`; so for all methods."""
        self._call("set", key, value)

    def get(self, key: str) -> Any:
        self.wait([key])
        return self._call("get", key)

    def multi_get(self, keys: list[str]) -> Any:
        self.wait(keys)
        return self._call("multi_get", keys)

    def multi_set(self, keys: list[str], values: list[Any]) -> None:
        self._call("multi_set", keys, values)

    def add(self, key: str, amount: int) -> Any:
        return self._call("add", key, amount)

    def append(self, key: str, value: Any) -> None:
        self._call("append", key, value)

    def check(self, keys: list[str]) -> Any:
        return self._call("check", keys)

    def compare_set(self, key: str, expected: Any, desired: Any) -> Any:
        return self._call("compare_set", key, expected, desired)

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        limit = self._inner.timeout if timeout is None else timeout
        deadline = time.monotonic() + limit.total_seconds()
        while not self._call("check", keys):
            if time.monotonic() >= deadline:
                raise DistStoreError(f"not all of these keys are there after {limit.total_seconds():g} s: {keys}")
            time.sleep(_POLL_S)

    def _call(self, method: str, *arguments: Any) -> Any:
        if self._lost:
            raise DistNetworkError(self._lost)
        call = BoundedCall(functools.partial(getattr(self._inner, method), *arguments), "launcher-store")
        is_main = threading.current_thread() is threading.main_thread()
        silent_s = 0.0
        while True:
            began = time.monotonic()
            try:
                return call.result(_SLICE_S)
            except TimeoutError:
                pass
            # If this process was stopped meanwhile, most of the time that has passed says nothing about the host.
            silent_s += min(time.monotonic() - began, 2 * _SLICE_S)
            if silent_s >= self._limit_s:
                self._lost = f"it has not answered for {self._limit_s:g} s"
                raise DistNetworkError(self._lost)
            if is_main and silent_s >= _SIGNAL_GRACE_S and self._has_signal():
                raise DistNetworkError(f"it has not answered for {silent_s:.1f} s, and a signal has arrived")
