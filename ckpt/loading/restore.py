"""Restore a published step into the state of a running program, in place.

    choose a step (the coordinator's view, told to all) -> match names, shapes, dtypes -> all ranks agree -> try what
    may fail (values, objects) -> all ranks agree -> read into the tensors -> all ranks agree -> let all objects load

Nothing is written to the state before every rank has found that everything fits; what the trial changed is put back
when it fails on any rank. Runs in the trainer; collective.
"""

from __future__ import annotations

import contextlib
import json
import logging
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

from ckpt.errors import (
    CheckpointCorruptError,
    CheckpointError,
    CheckpointNotFoundError,
    StorageError,
)
from ckpt.loading.all_or_none import Alone, Gather, error_of
from ckpt.loading.restore_step import MemorySource, RestoreReport, StepHold, restore_step
from ckpt.storage.root import CheckpointRoot

__all__ = ["restore"]

_log = logging.getLogger("ckpt")
_MOST_REMOVED = 20  # steps that are removed while they are read; then something is wrong


def restore(
    root: CheckpointRoot,
    state: Any,
    step: int | None,
    strict: bool,
    ranks: Gather,
    memory: MemorySource | None = None,
    before: Callable[[], None] | None = None,
    read_only: bool = False,
) -> RestoreReport | None:
    """Put the newest published step (or `step`) into `state`. See `Checkpointer.restore`.

    The coordinator calls `before` first. With `read_only` no lease is made. A step that is removed while it is read is
    no damage: then it starts again with the steps that are there. One of several ranks that is `Alone` goes back to no
    older step: the others would not.
    """
    damaged: list[int] = []
    error: CheckpointError | None = None
    removed = 0
    candidates = _candidates(root, step, ranks, before)
    while candidates:
        candidate = candidates.pop(0)
        try:
            with _reading(root, candidate, ranks, read_only) as reading:
                report = restore_step(reading, state, candidate, strict, ranks, memory)
        except _RemovedError as gone:
            removed += 1
            if step is not None or isinstance(ranks, Alone) or removed == _MOST_REMOVED:
                raise CheckpointNotFoundError(str(gone), step=candidate) from gone
            _log.warning("%s; looking for the newest step again", gone)
            candidates = [other for other in _candidates(root, None, ranks, None) if other not in damaged]
        except CheckpointCorruptError as corrupt:
            if step is not None or isinstance(ranks, Alone):
                raise
            error = corrupt
            damaged.append(candidate)
            _log.warning("step %d cannot be restored, going back to the step before: %s", candidate, corrupt)
        else:
            report = replace(report, damaged=tuple(damaged))
            _log.info("rank %d restored %s", ranks.rank, report)
            return report
    if error is not None:
        raise error
    return None


class _RemovedError(Exception):
    """The step was removed while it was read, on the storage as the coordinator sees it; raised on all ranks."""


def _candidates(root: CheckpointRoot, step: int | None, ranks: Gather, before: Callable[[], None] | None) -> list[int]:
    """The steps to try, best first: what the coordinator sees, so that all ranks try the same."""
    payload = b""
    if ranks.rank == 0 or isinstance(ranks, Alone):
        try:
            if before is not None:
                before()
            payload = json.dumps(_steps(root)).encode()
        except CheckpointError as error:
            payload = json.dumps({"kind": type(error).__name__, "text": str(error)}).encode()
    steps = json.loads(ranks(payload)[0])
    if isinstance(steps, dict):
        raise error_of(steps["kind"])(steps["text"])
    if step is None:
        return sorted(steps, reverse=True)
    if step not in steps:
        raise CheckpointNotFoundError(f"{root.path} has no published step {step}; it has {steps or 'none'}", step=step)
    return [step]


def _steps(root: CheckpointRoot) -> list[int]:
    """The published steps. CheckpointNotFoundError if there is none but such as were moved aside: then a run that
    begins from nothing is not what anybody wants."""
    steps = root.steps()
    superseded = [] if steps else root.superseded()
    if superseded:
        raise CheckpointNotFoundError(
            f"{root.path} has no published step, but superseded ones: a job was killed just before it published the "
            f"first step of another branch. Make one the newest again: inspect_ckpt restore-branch {root.path} "
            f"{superseded[-1]}; or remove them: inspect_ckpt rm"
        )
    return steps


@contextlib.contextmanager
def _reading(root: CheckpointRoot, step: int, ranks: Gather, read_only: bool) -> Iterator[StepHold]:
    """Hold a step for all ranks; turns an error that its removal caused into `_RemovedError`, on all of them.

    The coordinator has the lease, for all: it lets go last.
    """
    reading = StepHold(root, step, ranks, read_only)
    try:
        yield reading
    except (CheckpointCorruptError, CheckpointNotFoundError, StorageError) as error:
        if reading.was_removed(error):
            raise _RemovedError(f"step {step} of {root.path} was removed while it was read") from error
        raise
    finally:
        reading.close()
