"""After a fault: see that every save in flight is decided, without talking to the other ranks.

Every surviving rank does this for every save that it has a part in, and all come to the same end, because each save is
decided by one rename. A save is given up as soon as it is clear that it cannot become whole:

    this rank was interrupted before it had scheduled it       given up at once
    it is of other ranks, this one was not that far            given up at once (`refuse_others`)
    a part is missing, and its rank has no writer alive        that rank died before staging, or with its writer
    time is over

So only the dead are waited for.

Writers outlive their trainers, so a part that was staged gets written. When all parts are there and the coordinator's
writer is dead, one of the survivors publishes in its place. Runs in the trainer; makes no collective.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from ckpt.errors import CheckpointError
from ckpt.saving.publish import publish
from ckpt.storage.commit import Abandoned, Outcome, PendingSave, Reason
from ckpt.storage.names import SaveId
from ckpt.storage.root import CheckpointRoot

__all__ = ["InFlight", "refuse_others", "settle"]

_log = logging.getLogger("ckpt")
_COORDINATOR = 0
_GRACE_S = 3.0  # a writer begins with its work at once, but may have to be started first, on a machine that is busy
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.001, 0.02


@dataclass(frozen=True, slots=True)
class InFlight:
    """A save that this rank has staged its part of, or begun to. `scheduled`: a writer has got it, as far as known."""

    save: SaveId
    world_size: int
    scheduled: bool = False


def settle(
    root: CheckpointRoot, in_flight: InFlight, rank: int, deadline: float, pump: Callable[[float], None]
) -> Outcome:
    """Return what became of the save, at the latest soon after `deadline` (monotonic): it is decided then.

    `pump(seconds)` waits so long, and lets the answers of writers come in. StorageError when nothing can be decided.
    """
    pending = PendingSave(root, in_flight.save)
    problem: str | None = None
    since = time.monotonic()
    pause_s = _FIRST_PAUSE_S
    while (outcome := pending.outcome()) is None:
        now = time.monotonic()
        if now >= deadline:
            return _give_up(pending, rank, "it was not decided in time after a fault")
        if not in_flight.scheduled and rank not in pending.parts_present():
            return _give_up(pending, rank, f"rank {rank} was interrupted by a fault before it had scheduled the save")
        before, problem = problem, _problem(pending, in_flight.world_size)
        if problem != before:
            since = now
        if problem == _NO_COORDINATOR:
            _publish_in_its_place(pending, rank)
        elif problem is not None and now - since >= _GRACE_S:
            return _give_up(pending, rank, f"after a fault {problem}")
        pump(pause_s)
        pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)
    return outcome


def refuse_others(root: CheckpointRoot, owner: int, own: Iterable[SaveId], rank: int) -> None:
    """Give up all undecided saves of this `owner` but `own`: without the part of this rank, which it never gets, none
    can be whole."""
    for save in {save for save in root.pending() if save.owner == owner} - set(own):
        _give_up(PendingSave(root, save), rank, f"after a fault rank {rank} has no part in it")


_NO_COORDINATOR = "the coordinator's writer is gone"


def _problem(pending: PendingSave, world_size: int) -> str | None:
    """Return why the save makes no progress at the moment; None if it does, or if that cannot be known."""
    if not os.path.isdir(pending.path):
        return "it had not begun"
    missing = set(range(world_size)) - pending.parts_present()
    alive = pending.root.ownership.leases(pending.save.owner).alive_ranks()
    if gone := sorted(missing - alive):
        return f"no writer is left for the part(s) of rank(s) {gone}"
    return _NO_COORDINATOR if not missing and _COORDINATOR not in alive else None


def _give_up(pending: PendingSave, rank: int, why: str) -> Outcome:
    outcome = pending.abandon(Reason(rank, "SaveAbandonedError", why))
    if isinstance(outcome, Abandoned):
        _log.warning("rank %d: the save of step %d is given up: %s", rank, pending.save.step, outcome.reason.message)
    return outcome


def _publish_in_its_place(pending: PendingSave, rank: int) -> None:
    """Publish, as other survivors may do, too; on one host only one does the work."""
    try:
        lock = pending.try_lock()
    except CheckpointError:
        return  # decided meanwhile
    if lock is None:
        return
    try:
        _log.warning("rank %d publishes step %d: the coordinator's writer died", rank, pending.save.step)
        publish(pending, lambda: None)
    except CheckpointError as error:
        _give_up(pending, rank, str(error))
    finally:
        lock.close()
