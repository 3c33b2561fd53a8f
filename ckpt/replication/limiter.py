"""The limit of bandwidth, a token bucket, and the way to end what it limits."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

__all__ = ["BLOCK_BYTES", "MIN_BANDWIDTH", "Limiter"]

BLOCK_BYTES = 256 << 10
"""What is sent, and checked, at once."""

MIN_BANDWIDTH = 64 << 10  # bytes per second: a block takes less time than a peer may be silent
_BURST_S = 0.05
_LONGER_S = 0.02  # than necessary, and less than a burst: the next blocks pass without a wait, so fewer wake-ups


class Limiter:
    """Lets at most `bandwidth` bytes per second pass, and a burst of 50 ms or one block; None for no limit.

    Any thread, several at once: they share the bandwidth. `clock` is in seconds.
    """

    def __init__(self, bandwidth: float | None, clock: Callable[[], float] = time.monotonic) -> None:
        if bandwidth is not None and not bandwidth >= MIN_BANDWIDTH:
            raise ValueError(f"the bandwidth must be at least {MIN_BANDWIDTH} bytes per second, not {bandwidth}")
        self._bandwidth = bandwidth
        self._clock = clock
        self._lock = threading.Lock()
        self._stopped = threading.Event()
        self._on_stop: list[Callable[[], None]] = []
        self._burst = max(BLOCK_BYTES, (bandwidth or 0) * _BURST_S)
        self._tokens = self._burst
        self._filled_at = clock()

    def reserve(self, nbytes: int) -> float:
        """Take the tokens for these bytes, and return in how many seconds they may be sent."""
        if self._bandwidth is None:
            return 0.0
        with self._lock:
            now = self._clock()
            self._tokens = min(self._burst, self._tokens + (now - self._filled_at) * self._bandwidth)
            self._filled_at = now
            self._tokens -= nbytes
            return max(0.0, -self._tokens / self._bandwidth)

    def wait(self, nbytes: int) -> bool:
        """Wait until these bytes may be sent. False if nothing more may be sent at all: `stop` was called."""
        delay_s = self.reserve(nbytes)
        return not (self._stopped.wait(delay_s + _LONGER_S) if delay_s > 0 else self._stopped.is_set())

    @property
    def is_stopped(self) -> bool:
        """Whether `stop` was called."""
        return self._stopped.is_set()

    @contextmanager
    def stopping(self, callback: Callable[[], None]) -> Iterator[None]:
        """Call `callback` when `stop` is called meanwhile, or was before."""
        with self._lock:
            self._on_stop.append(callback)
        try:
            if self._stopped.is_set():
                callback()
            yield
        finally:
            with self._lock:
                self._on_stop.remove(callback)

    def stop(self) -> None:
        """Let nothing more pass, and end every wait at once. Idempotent."""
        self._stopped.set()
        with self._lock:
            for callback in self._on_stop:
                callback()
