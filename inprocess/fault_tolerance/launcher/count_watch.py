"""How long others have been silent, by this process's clock."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any, Generic, TypeVar

_Key = TypeVar("_Key")


class CountWatch(Generic[_Key]):
    """Watches counts that others increment while they run. One that has not changed for `limit_s` is silent."""

    def __init__(self, limit_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._limit_s = limit_s
        self._clock = clock
        self._observed_s = clock()
        self._seen: dict[_Key, tuple[Any, float]] = {}  # the count, and how long it has not changed

    def observe(self, counts: Mapping[_Key, Any]) -> set[_Key]:
        """Return the keys of those that are silent, of these counts."""
        now = self._clock()
        # This process may have been stopped itself, and others go on a little later: no pause counts much.
        passed_s = min(now - self._observed_s, self._limit_s / 3)
        self._observed_s = now
        seen = {}
        for key, count in counts.items():
            earlier, silent_s = self._seen.get(key, (None, 0.0))
            seen[key] = count, silent_s + passed_s if count == earlier else 0.0
        self._seen = seen
        return {key for key, (_, silent_s) in seen.items() if silent_s >= self._limit_s}
