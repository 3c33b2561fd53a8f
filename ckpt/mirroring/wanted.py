"""Which steps the mirror process is to copy, and which of them it holds in the first root."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable

from ckpt.errors import CheckpointError
from ckpt.mirroring.messages import Due
from ckpt.storage.interface import HeldStep

__all__ = ["Wanted"]


class Wanted:
    """The steps to copy. Held in the first root are the newest, from when it is due, and the one being copied.

    Any thread; `next` and `drop` are for the one that copies.
    """

    def __init__(self, hold: Callable[[int], HeldStep]) -> None:
        self._hold = hold
        self._changed = threading.Condition()
        self._steps: dict[int, Due] = {}
        self._held: dict[int, HeldStep] = {}
        self._copying: int | None = None
        self._closed = False

    def add(self, due: Due) -> None:
        """Want a step."""
        with self._changed:
            self._steps[due.step] = due
            if due.step == max(self._steps):
                with contextlib.suppress(CheckpointError):  # the copy finds out what is the matter
                    self.held(due.step)
                self._release()
            self._changed.notify_all()

    def close(self) -> None:
        """There are no more to come."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def next(self) -> Due | None:
        """Wait for a step to copy, and return the newest; None after the last one."""
        with self._changed:
            self._changed.wait_for(lambda: self._steps or self._closed)
            self._copying = max(self._steps, default=None)
            self._release()
            return None if self._copying is None else self._steps[self._copying]

    def has_newer(self, step: int) -> bool:
        """Return whether a newer step is wanted."""
        with self._changed:
            return max(self._steps, default=step) > step

    def pause(self, seconds: float) -> None:
        """Wait, but not longer than until another step is wanted, or no more are to come."""
        with self._changed:
            self._changed.wait(seconds)

    def held(self, step: int) -> HeldStep:
        """Return the step, held. CheckpointNotFoundError if it does not exist any more."""
        with self._changed:
            if step not in self._held:
                self._held[step] = self._hold(step)
            return self._held[step]

    def drop(self, due: Due) -> None:
        """Want a step no more, unless it was added again."""
        with self._changed:
            self._copying = None
            if self._steps.get(due.step) == due:
                del self._steps[due.step]
            self._release()

    def release_all(self) -> None:
        """Hold nothing any more."""
        with self._changed:
            self._steps, self._copying = {}, None
            self._release()

    def _release(self) -> None:
        for step in self._held.keys() - {max(self._steps, default=None), self._copying}:
            self._held.pop(step).close()
