"""Which steps the mirror worker is to copy, which of them it holds in the first root, and its messages.

trainer --- Run + pickled arguments, then Due for each step ---------------▶ worker
trainer ◀-- CopyEnded, Notice; Finished, if the worker failed -------------- worker
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import get_args

from ckpt.async_calls.writer_main import Run
from ckpt.errors import CheckpointError
from ckpt.keeper.messages import Finished, Notice
from ckpt.saving.recover import Branch
from ckpt.storage.names import SaveId
from ckpt.storage.step_source import HeldStep
from inprocess.ipc.packets import Codec

MIRROR = 0
"""The number of the order that begins the work. Notices about it are

* ``{"owner": token}``: the worker of rank 0 owns the mirror with this token;
* ``{"begun": save}``: the worker of another rank copies its share of this save;
* ``{"not_due": save}``: rank 0 does not want this save to be copied.
"""


@dataclass(frozen=True, slots=True)
class Due:
    """A published save whose step is to be copied. `branch` is what the steps of its job continue.

    `token` is that of the job in the first root that wants it: not the one that saved it, if an earlier job began the
    copy. `is_helped`: the workers of other ranks were told, too. Without `is_due` the worker reads from the step
    whether rank 0 wants it.
    """

    save: SaveId
    token: int
    branch: Branch
    is_helped: bool = False
    is_due: bool = True

    @property
    def order(self) -> tuple[int, int]:
        """The key by which later saves are larger: those of another branch are of another owner."""
        return self.save.owner, self.save.step


@dataclass(frozen=True, slots=True)
class CopyEnded:
    """A copy has ended: the step is in the mirror, or `error` says why not; with `again` it is tried again.

    In these seconds so many bytes were copied.
    """

    save: SaveId
    nbytes: int
    seconds: float
    error: str = ""
    again: bool = False


Report = Notice | CopyEnded | Finished
MirrorMessage = Run | Due | Notice | CopyEnded | Finished
CODEC: Codec[MirrorMessage] = Codec(*get_args(MirrorMessage))


class Wanted:
    """The saves to copy. Held in the first root are the newest, from when it is due, and the one being copied.

    A save is wanted, not the number of its step: after a restore of an older step there may be another save of it. Any
    thread; `next` and `drop` are for the one that copies.
    """

    def __init__(self, hold: Callable[[SaveId], HeldStep]) -> None:
        self._hold = hold
        self._changed = threading.Condition()
        self._due: dict[SaveId, Due] = {}
        self._held: dict[SaveId, HeldStep] = {}
        self._copying: SaveId | None = None
        self._closed = False

    def add(self, due: Due) -> None:
        """Want a save."""
        with self._changed:
            self._due[due.save] = due
            if due.save == self._newest():
                with contextlib.suppress(CheckpointError):  # the copy finds out what is the matter
                    self.held(due.save)
                self._release()
            self._changed.notify_all()

    def close(self) -> None:
        """There are no more to come."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    @property
    def is_closed(self) -> bool:
        """Whether there are no more to come."""
        return self._closed

    def next(self) -> Due | None:
        """Wait for a save to copy, and return the newest; None after the last one."""
        with self._changed:
            self._changed.wait_for(lambda: self._due or self._closed)
            self._copying = self._newest()
            self._release()
            return None if self._copying is None else self._due[self._copying]

    def has(self, save: SaveId) -> bool:
        """Return whether a save is wanted."""
        with self._changed:
            return save in self._due

    def has_newer(self, due: Due) -> bool:
        """Return whether a newer save is wanted."""
        with self._changed:
            return any(other.order > due.order for other in self._due.values())

    def pause(self, seconds: float) -> None:
        """Wait, but not longer than until another save is wanted, or no more are to come."""
        with self._changed:
            self._changed.wait(seconds)

    def held(self, save: SaveId) -> HeldStep:
        """Return the step, held. CheckpointNotFoundError if it does not exist any more, or was saved anew."""
        with self._changed:
            if save not in self._held:
                self._held[save] = self._hold(save)
            return self._held[save]

    def drop(self, due: Due) -> None:
        """Want a save no more, unless it was added again."""
        with self._changed:
            self._copying = None
            if self._due.get(due.save) == due:
                del self._due[due.save]
            self._release()

    def release_all(self) -> None:
        """Hold nothing any more."""
        with self._changed:
            self._due, self._copying = {}, None
            self._release()

    def _newest(self) -> SaveId | None:
        return max(self._due, key=lambda save: self._due[save].order, default=None)

    def _release(self) -> None:
        for save in self._held.keys() - {self._newest(), self._copying}:
            self._held.pop(save).close()
