"""A save that is given up, by its writer or by its trainer, and the error for it."""

from __future__ import annotations

from dataclasses import dataclass

from ckpt.errors import CheckpointError, CheckpointExistsError, FencedError, SaveAbandonedError
from ckpt.ranks.failure import Failure
from ckpt.storage.interface import Pending
from ckpt.storage.names import SaveId
from ckpt.storage.outcomes import Abandoned, Published


@dataclass(frozen=True, slots=True)
class Fenced:
    """A later job owns the root, and decides about the save. `rank` found that out."""

    rank: int | None
    message: str


def give_up(pending: Pending, reason: Failure) -> Published | Abandoned | Fenced:
    """Make sure the save is decided: abandoned for `reason`, unless it was decided before.

    Fenced if another owner is to decide, or has abandoned it: this job can publish nothing any more, and is told so.
    """
    try:
        return pending.abandon(reason)
    except FencedError as error:
        outcome = pending.outcome()
        return outcome if isinstance(outcome, Published) else Fenced(reason.rank, str(error))
    except CheckpointError:  # the storage is unusable; the other ranks find that out by themselves
        return Abandoned(reason)


def error_for(save: SaveId, outcome: Abandoned | Fenced) -> CheckpointError:
    """Return the error in the trainer for a save that is not published."""
    if isinstance(outcome, Fenced):
        return FencedError(f"rank {outcome.rank}: {outcome.message}", rank=outcome.rank, step=save.step)
    return abandoned(save.step, outcome.reason)


def abandoned(step: int, reason: Failure) -> CheckpointError:
    """Return the error in the trainer for a save that was given up for a reason."""
    where = "" if reason.rank is None else f"rank {reason.rank}: "
    kind = CheckpointExistsError if reason.error_class is CheckpointExistsError else SaveAbandonedError
    message = (
        f"the save of step {step} was abandoned on all ranks: {where}{reason.text} "
        "(training can go on; the next save is not affected)"
    )
    return reason.error(message, kind, step=step)
