"""Decide every save in flight, after a fault or before a restore, without communication between the ranks.

Every rank, or every surviving one, does this for every save that it has a part in. All come to the same result, because
each save is decided by one rename.

Before a restore all trainers are alive, so `drain` waits for the writers, which decide. It gives up at once what only
some ranks have scheduled, and at the deadline what is undecided.

Writers outlive their trainers, so after a fault, too, what was staged is written, and waited for (`settle`). But a save
is given up as soon as it is certain that it cannot be completed:

    this rank was interrupted before it had scheduled the save     given up at once
    only other ranks have begun the save, not this one             given up at once (`refuse_others`)
    a part is missing, and its rank has no writer alive            given up after a grace period
    the deadline is reached                                        given up

When all parts are there and the coordinator's writer is dead, one of the survivors publishes in its place. Runs in the
trainer; makes no collective.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass

from ckpt.async_calls import AsyncCallsQueue
from ckpt.errors import CheckpointError, StorageError
from ckpt.ranks.failure import Failure
from ckpt.ranks.rounds import named
from ckpt.saving.publish import publish
from ckpt.storage.interface import Pending, Root
from ckpt.storage.names import SaveId
from ckpt.storage.node_lock import NodeLock
from ckpt.storage.outcomes import Abandoned, SaveOutcome

_log = logging.getLogger("ckpt")
_COORDINATOR = 0
_ANSWER_S = 5.0  # for writers to report saves that are already decided
_GRACE_S = 3.0  # a writer may have to be started first, on a busy machine
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.001, 0.02
_LOOKS_PER_S, _LONGEST_OF_MANY_S = 500.0, 1.0  # of all ranks together; the pause of one rank among very many
_CHECKS_PER_S = 50.0  # of all ranks together, for what is missing


@dataclass(frozen=True, slots=True)
class InFlight:
    """A save that this rank has staged, or begun to stage. `scheduled`: as far as known, a writer has its task."""

    save: SaveId
    world_size: int
    scheduled: bool = False


def drain(
    root: Root,
    queue: AsyncCallsQueue,
    saves: Mapping[SaveId, object],
    common: Collection[str],
    rank: int,
    deadline: float,
) -> None:
    """Wait until these saves are decided, at most until `deadline`, then give them up; finalize what is published.

    Each save has the function of its call in the queue. Those that are not in `common`, the names of the saves that all
    ranks have scheduled, are given up at once.
    Failures of saves are raised by the next `maybe_finalize_async_calls`. Logs what goes wrong otherwise, and raises
    nothing.
    """
    if not saves:
        return
    try:
        undecided = {save: each for save, each in saves.items() if root.pending_save(save).outcome() is None}
        for save in [save for save in undecided if save.name not in common]:
            _give_up(root.pending_save(save), rank, "not all ranks had scheduled it when a restore began")
            del undecided[save]
        queue.wait_for(list(undecided.values()), deadline - time.monotonic())
        for save in undecided:
            if (pending := root.pending_save(save)).outcome() is None:
                _give_up(pending, rank, "it was not decided in time when a restore began")
        # A writer may be stuck, also since an earlier restore: then its call stays in the queue.
        queue.settle(list(saves.values()), min(_ANSWER_S, deadline - time.monotonic()))
    except CheckpointError as error:
        _log.warning("rank %d: saves in flight are left undecided: %s", rank, error)


def settle(root: Root, in_flight: InFlight, rank: int, deadline: float, pump: Callable[[float], None]) -> SaveOutcome:
    """Wait until the save is decided, at the latest soon after `deadline` (monotonic), and return the outcome.

    `pump(seconds)` waits so long, and takes in messages of writers. StorageError when nothing can be decided.
    """
    pending = root.pending_save(in_flight.save)
    problem: str | None = None
    since = check_at = time.monotonic()
    pause_s = _FIRST_PAUSE_S
    longest_s = max(_LONGEST_PAUSE_S, root.least_look_s, min(in_flight.world_size / _LOOKS_PER_S, _LONGEST_OF_MANY_S))
    while (outcome := pending.outcome()) is None:
        now = time.monotonic()
        if now >= deadline:
            return _give_up(pending, rank, "it was not decided in time after a fault")
        if not in_flight.scheduled and not pending.has_part(rank):
            return _give_up(pending, rank, f"rank {rank} was interrupted by a fault before it had scheduled the save")
        if now >= check_at:
            check_at = now + in_flight.world_size / _CHECKS_PER_S
            before, problem = problem, _problem(pending, in_flight.world_size)
            if problem != before:
                since = now
        if problem == _NO_COORDINATOR:
            _publish_in_its_place(pending, rank)
        elif problem is not None and now - since >= _GRACE_S:
            return _give_up(pending, rank, f"after a fault {problem}")
        pump(pause_s)
        pause_s = min(2 * pause_s, longest_s)
    return outcome


def refuse_others(root: Root, owner: int, own: Iterable[SaveId], rank: int) -> None:
    """Give up all undecided saves of this `owner` but `own`: this rank will never write its parts of them."""
    for save in {save for save in root.pending() if save.owner == owner} - set(own):
        _give_up(root.pending_save(save), rank, f"after a fault rank {rank} has no part in it")


_NO_COORDINATOR = "the coordinator's writer is dead"


def _problem(pending: Pending, world_size: int) -> str | None:
    """Return why the save makes no progress at the moment; None if it does, or if that is unknown."""
    if not pending.has_begun():
        return "it had not begun"
    missing = set(range(world_size)) - pending.parts_present()
    alive = pending.root.ownership.leases(pending.save.owner).alive_ranks()
    if lost := sorted(missing - alive):
        return f"no writer is alive for the missing parts of {named(lost)}"
    return _NO_COORDINATOR if not missing and _COORDINATOR not in alive else None


def _give_up(pending: Pending, rank: int, why: str) -> SaveOutcome:
    outcome = pending.abandon(Failure(rank, "SaveAbandonedError", why))
    if isinstance(outcome, Abandoned):
        _log.warning("rank %d: the save of step %d was given up: %s", rank, pending.save.step, outcome.reason.message)
    return outcome


def _publish_in_its_place(pending: Pending, rank: int) -> None:
    """Publish the save. Other survivors may do the same; on each host only one does the work."""
    lock = NodeLock(f"decide {pending.path}")
    if not lock.take():
        return
    try:
        _log.warning("rank %d publishes step %d: the coordinator's writer died", rank, pending.save.step)
        publish(pending, lambda: None)
    except StorageError as error:  # the save may be complete: it is tried again until the deadline
        _log.warning("rank %d could not publish step %d yet: %s", rank, pending.save.step, error)
    except CheckpointError as error:
        _give_up(pending, rank, str(error))
    finally:
        lock.release()
