"""`SaveFailures`: the failed saves of a Checkpointer, and whether training goes on after one.

    writer, trainer   a save is given up on all ranks, or cannot be made ─▶ note(error)
    queue             raises that error ─▶ check(error) ─▶ logged, or raised on all ranks

A save is abandoned on all ranks, so each of them gets here. When that is depends on the rank, and so do times: what the
first rank says about a save counts for all.
"""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass, replace

from ckpt.errors import (
    CheckpointError,
    CheckpointExistsError,
    CheckpointTimeoutError,
    FencedError,
    SaveAbandonedError,
    StateError,
    StorageError,
)
from ckpt.options import FailedSaves
from ckpt.ranks.collectives import Ranks
from ckpt.ranks.failure import Failure
from ckpt.saving.giving_up import abandoned
from ckpt.saving.task import COORDINATOR
from ckpt.storage.outcomes import NotDurableError

_log = logging.getLogger("ckpt")

# No later save makes these good: the state or the step is a mistake of the program, or the root is another job's.
_FINAL = (CheckpointExistsError, FencedError, StateError)
_GOES_ON, _ENDS = "goes on", "ends"
_SHOWN = 8  # steps in a message


@dataclass(frozen=True, slots=True)
class _Noted:
    """The error of a save that is about to be raised. `name` is the same on all ranks."""

    error: CheckpointError
    name: str
    step: int
    is_past: bool = False  # training has gone back since, and repeats it


class SaveFailures:
    """The failed saves since the newest published step. For the thread that trains.

    `allowed` says after which of them training goes on; None: after none.
    """

    def __init__(self, allowed: FailedSaves | None, ranks: Ranks) -> None:
        self.steps: list[int] = []
        """The steps of the saves that have failed, in this order."""
        self._allowed = allowed
        self._ranks = ranks
        self._newest: int | None = None
        self._since: float | None = None  # when the first of them was known
        self._noted: dict[str, _Noted] = {}  # by the name of the save

    def note(self, error: CheckpointError, kind: type[CheckpointError], name: str, step: int) -> None:
        """Note that `error` will be raised for a save, which failed by an error of the class `kind`."""
        if not issubclass(kind, _FINAL):
            self._noted[name] = _Noted(error, name, step)

    def of_call(self, error: Exception, name: str, step: int, *, is_staging: bool) -> CheckpointError:
        """Return the error to raise for a save that this rank has not begun to write, noted if training may go on.

        Other ranks may have begun it, and then note under the same `name` that it was abandoned: so does this one for
        what is no error of ckpt, such as a RuntimeError of torch or a MemoryError.

        No slot is free in time if the storage does not answer. Before that ranks wait for each other: one that does
        not come is no failure of the storage.
        """
        if not isinstance(error, CheckpointError):
            failed = abandoned(step, Failure.of(error, self._ranks.rank))
            self.note(failed, CheckpointError, name, step)
            return failed
        if isinstance(error, SaveAbandonedError):  # another rank has told why
            self.note(error, self.first_reason(name, Failure.of(error, self._ranks.rank)).error_class, name, step)
        elif isinstance(error, StorageError) or (is_staging and isinstance(error, CheckpointTimeoutError)):
            self.note(error, type(error), name, step)
        return error

    def published(self, step: int) -> None:
        """Note a published step: what failed before it is not lost."""
        self._newest = step
        self.steps = [other for other in self.steps if other > step]
        if not self.steps:
            self._since = None

    def restored(self) -> None:
        """Note a restore: training repeats what failed. Errors of saves that are not raised yet will be."""
        self.steps, self._since = [], None
        self._noted = {name: replace(each, is_past=True) for name, each in self._noted.items()}

    def forget(self) -> None:
        """After a fault: no error is raised any more that was noted."""
        self._noted.clear()

    def first_reason(self, name: str, reason: Failure) -> Failure:
        """Return why a save is abandoned, the same on all ranks: what the first rank said that knew it."""
        if self._ranks.world_size == 1:
            return reason
        first = self._ranks.tell_first(name, reason.to_bytes().decode() if reason.is_known else None)
        return reason if first is None else Failure.from_bytes(first)

    def check(self, error: Exception) -> None:
        """Count an error, and return if training goes on after it. Otherwise raise it, or the error that says why."""
        noted = next((each for each in self._noted.values() if each.error is error), None)
        if noted is None:
            raise error
        del self._noted[noted.name]
        is_published = isinstance(error, NotDurableError)
        if not noted.is_past and not is_published:
            self.steps.append(noted.step)
            self._since = time.monotonic() if self._since is None else self._since
        if self._allowed is None:
            raise error
        if noted.is_past or is_published:
            _log.warning("rank %d: %s", self._ranks.rank, error)
            return
        if self._is_over(noted.name, self._allowed):
            limit = type(noted.error)(
                f"{self._said}, and on_failed_save allows {self._allowed}. The last failure: {error}",
                rank=noted.error.rank,
                step=noted.step,
            )
            limit.finalized = noted.error.finalized
            raise limit from error
        level = logging.WARNING if self._ranks.rank == COORDINATOR else logging.INFO
        _log.log(level, "%s. %s; training goes on (on_failed_save)", error, self._said)

    def say_what_is_lost(self) -> None:
        """Log, at the end, which saves have failed since the newest published step."""
        if self.steps and self._ranks.last_rank in (None, COORDINATOR):
            _log.error("%s: what was trained since then is in no checkpoint", self._said)
            self.steps = []

    @property
    def _said(self) -> str:
        number, since = len(self.steps), "the start" if self._newest is None else f"step {self._newest} was published"
        shown = ", ".join(map(str, self.steps[-_SHOWN:]))
        steps = f"step {shown}" if number == 1 else f"steps {'..., ' if number > _SHOWN else ''}{shown}"
        return f"{number} save{'s have' if number > 1 else ' has'} failed since {since} ({steps})"

    def _is_over(self, name: str, allowed: FailedSaves) -> bool:
        """Return whether training ends after this save, the same on all ranks."""
        assert self._since is not None
        own = _ENDS if allowed.is_over(len(self.steps), time.monotonic() - self._since) else _GOES_ON
        if self._ranks.world_size == 1:
            return own == _ENDS
        return self._ranks.tell_first(f"failed/{name}", own) == _ENDS
