"""What the trainer keeps of a save while a writer process works on it."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from typing import Any

from ckpt.async_calls import CallTimer
from ckpt.errors import CheckpointError, FencedError
from ckpt.ranks.failure import Failure
from ckpt.saving.giving_up import Fenced, error_for, give_up
from ckpt.saving.observed_save import ObservedSave
from ckpt.saving.task import (
    NotDurable,
    ReplicasDiffer,
    Report,
    SharePublished,
    SlotFree,
    StepsRemoved,
    WriteTask,
    from_event,
)
from ckpt.saving.write import write_share
from ckpt.staging.arena import Slot
from ckpt.storage.outcomes import Abandoned, NotDurableError, Published
from ckpt.storage.roots import open_root

_log = logging.getLogger("ckpt")


class SaveHandle:
    """The trainer's end of a `WriteTask`: a `RecoverableCall`, of which the writer process gets the task alone.

    `on_decided` is called when the save is published or given up, `on_differing` when ranks have different values of
    some names, `on_removed` when steps were removed, `on_begun` when the writer begins. `first_reason` is given why the
    save is abandoned, as far as this rank knows, and returns why it is for all ranks. `on_failed` gets the error of a
    save that is not published, or not durably, before it is raised, and the class of its cause. `observed` is told how
    the save ends. All of it in the thread that uses the queue.
    """

    def __init__(
        self,
        task: WriteTask,
        slot: Slot,
        observed: ObservedSave,
        *,
        on_decided: Callable[[], None] = lambda: None,
        on_differing: Callable[[ReplicasDiffer], None] = lambda report: None,
        on_removed: Callable[[StepsRemoved], None] = lambda report: None,
        on_begun: Callable[[int], CallTimer | None] | None = None,
        first_reason: Callable[[Failure], Failure] = lambda reason: reason,
        on_failed: Callable[[CheckpointError, type[CheckpointError]], None] = lambda error, kind: None,
    ) -> None:
        self.task = task
        self.in_writer: Callable[[], None] = functools.partial(write_share, task)
        self.on_begun = on_begun
        self.on_decided = on_decided
        self._slot: Slot | None = slot
        self._on_differing = on_differing
        self._on_removed = on_removed
        self._first_reason = first_reason
        self._on_failed = on_failed
        self._observed = observed
        self._reported: Abandoned | NotDurable | None = None

    def __call__(self) -> None:
        """Run the task here, in the trainer (`AsyncRequest.execute_sync`). Raises what `ShareWriter.run` raises."""
        try:
            write_share(self.task, self._take)
        except Exception as error:
            if isinstance(error, NotDurableError):
                self._observed.published(durable=False)
            self._observed.failed(self.task.rank, error)
            raise
        finally:
            self.free_slot()

    def on_event(self, event: dict[str, Any]) -> None:
        """Take what the writer reports. ValueError if that is no report."""
        self._take(from_event(event))

    def abandoned(self, error: CheckpointError) -> CheckpointError | None:
        """Make sure the save is decided on all ranks, as its call cannot complete; return the error to raise.

        None if the step is published all the same, durably as far as is known.
        """
        self.free_slot()
        outcome = self._settled(error)
        self._observe(outcome)
        self.on_decided()
        result: CheckpointError
        kind: type[CheckpointError] = FencedError
        match outcome:
            case Published():
                step = self.task.save.step
                _log.warning("step %d is published, but its writer failed afterwards: %s", step, error)
                return None
            case NotDurable(message):
                result = NotDurableError(message, rank=self.task.rank, step=self.task.save.step)
                kind = NotDurableError
            case Abandoned(reason):
                result = error_for(self.task.save, outcome)
                kind = reason.error_class
            case Fenced():
                result = error_for(self.task.save, outcome)
        result.__cause__ = result.__cause__ or error
        self._on_failed(result, kind)
        return result

    def free_slot(self) -> None:
        """Give the slot back, as no process reads it any more. Idempotent."""
        slot, self._slot = self._slot, None
        if slot is not None:
            slot.release()

    def _settled(self, error: CheckpointError) -> Published | NotDurable | Abandoned | Fenced:
        """Return what became of the save; it is given up now if it is undecided."""
        if isinstance(self._reported, NotDurable):
            return self._reported
        reason = self._reported.reason if self._reported is not None else Failure.of(error, self.task.rank)
        outcome = give_up(open_root(self.task.root, self.task.storage).pending_save(self.task.save), reason)
        if self._reported is not None and isinstance(outcome, Published):
            return NotDurable(
                reason.message
            )  # another rank published it, and this one could not see that it is durable
        if isinstance(outcome, Abandoned):  # storage may not have taken the reason, as on a full disk
            return Abandoned(self._first_reason(outcome.reason))
        return outcome

    def _observe(self, outcome: Published | NotDurable | Abandoned | Fenced) -> None:
        match outcome:
            case Published() | NotDurable():
                self._observed.published(durable=isinstance(outcome, Published))
            case Abandoned(reason):
                self._observed.abandoned(reason.rank, reason.kind, reason.message)
            case Fenced(rank, message):
                self._observed.abandoned(rank, "FencedError", message)

    def _take(self, report: Report) -> None:
        match report:
            case SlotFree():
                self.free_slot()
            case ReplicasDiffer():
                self._on_differing(report)
            case SharePublished():
                self._observed.published(report)
            case StepsRemoved():
                self._on_removed(report)
            case Abandoned() | NotDurable():
                self._reported = report
