"""The end of a wait."""

from __future__ import annotations

import math
import time


class Deadline:
    """A time at which a wait ends, `timeout_s` seconds after this was made.

    Make one before a wait begins, and use it in every round: a loop that computes its deadline in the loop never ends.
    """

    __slots__ = ("_at", "timeout_s")

    def __init__(self, timeout_s: float) -> None:
        self.timeout_s = timeout_s
        self._at = time.monotonic() + timeout_s

    @property
    def left_s(self) -> float:
        """The seconds that are left; 0 when it is over."""
        return max(0.0, self._at - time.monotonic())

    @property
    def is_over(self) -> bool:
        """Whether no time is left."""
        return time.monotonic() >= self._at

    def within(self, timeout_s: float) -> Deadline:
        """Return the deadline `timeout_s` seconds from now, or one at the same time as this if that is earlier."""
        return Deadline(min(timeout_s, self.left_s))

    def before_end(self, reserve_s: float) -> Deadline:
        """Return an earlier deadline, which leaves `reserve_s` seconds for what follows."""
        return Deadline(max(0.0, self.left_s - reserve_s))

    def poll_ms(self, most_s: float = math.inf) -> int:
        """Return the time that is left, at most `most_s`, as a timeout of `select.poll`: rounded up, and finite."""
        return math.ceil(1000 * min(self.left_s, max(0.0, most_s), _LONGEST_POLL_S))


_LONGEST_POLL_S = 3600.0
