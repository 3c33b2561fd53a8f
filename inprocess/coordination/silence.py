"""How long a peer has been silent, as far as this process can tell."""

from __future__ import annotations

import time

__all__ = ["Silence"]

_DELAY_S = 0.25  # by which a busy machine may delay a look


class Silence:
    """For how long nothing was heard, of the time in which somebody listened.

    A process that was stopped, or whose interpreter was held by others, has heard nothing meanwhile; that says nothing
    about the server.
    """

    def __init__(self) -> None:
        self._seconds = 0.0
        self._looked_at = time.monotonic()
        self._expected_s = 0.0

    def seconds(self) -> float:
        now = time.monotonic()
        self._seconds += min(now - self._looked_at, self._expected_s + _DELAY_S)
        self._looked_at, self._expected_s = now, 0.0
        return self._seconds

    def expect(self, seconds: float) -> None:
        """The next look will be so much later."""
        self.seconds()
        self._expected_s = seconds

    def end(self) -> None:
        """Something was heard."""
        self._seconds, self._looked_at = 0.0, time.monotonic()
