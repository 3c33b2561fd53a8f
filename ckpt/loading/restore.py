"""Restore a published step into the state of a running program, in place.

The coordinator tells all ranks which steps are published. They restore the newest one (see `restore_step`); if it is
damaged, the one before. Nothing is written to the state before everything fits on every rank, and the trial is undone
if it fails on any rank. Runs in the trainer; collective.
"""

from __future__ import annotations

import contextlib
import json
import logging
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

from ckpt.errors import (
    CheckpointCorruptError,
    CheckpointError,
    CheckpointNotFoundError,
    StorageError,
)
from ckpt.events import Restored, RestoreFailed
from ckpt.loading.all_or_none import Alone, Group, error_class
from ckpt.loading.candidates import Place, places
from ckpt.loading.options import RestoreOptions
from ckpt.loading.restore_step import MemorySource, RestoreReport, StepHold, restore_step
from ckpt.observing import emit, is_observed, shortened
from ckpt.storage.interface import Root

__all__ = ["candidates", "restore"]

_log = logging.getLogger("ckpt")
_MAX_REMOVED = 20  # steps that are removed while they are read, before giving up


def restore(
    root: Root,
    state: Any,
    step: int | None,
    options: RestoreOptions,
    ranks: Group,
    memory: MemorySource | None = None,
    before: Callable[[], object] | None = None,
    read_only: bool = False,
    mirror: Root | None = None,
) -> RestoreReport | None:
    """Restore the newest published step, or `step`, into `state`; None if there is none. See `Checkpointer.restore`.

    The step is looked for in `root` and in its `mirror`.

    The coordinator calls `before` first. With `read_only` no lease is made. If a step is removed while it is read, this
    starts again with the steps that are left. A rank that is `Alone` among several tries no older step, since the
    others would not do the same; a copy of the same step it may try.
    """
    begin = time.perf_counter()
    try:
        report = _restore(root, state, step, options, ranks, memory, before, read_only, mirror)
    except Exception as error:
        if is_observed():
            failed = step if step is not None or not isinstance(error, CheckpointError) else error.step
            why = type(error).__name__, shortened(str(error))
            emit(RestoreFailed(time.time(), ranks.rank, failed, *why, time.perf_counter() - begin))
        raise
    if report is not None and is_observed():
        nbytes = report.own_memory_bytes, report.neighbour_memory_bytes, report.storage_bytes
        seconds = time.perf_counter() - begin
        emit(Restored(time.time(), ranks.rank, report.step, *nbytes, seconds, report.damaged))
    return report


def _restore(
    root: Root,
    state: Any,
    step: int | None,
    options: RestoreOptions,
    ranks: Group,
    memory: MemorySource | None,
    before: Callable[[], object] | None,
    read_only: bool,
    mirror: Root | None,
) -> RestoreReport | None:
    damaged: list[int] = []
    first: CheckpointError | None = None
    removed = 0
    left = candidates(root, step, ranks, before, mirror)
    while left:
        candidate, in_mirror = left.pop(0)
        place = mirror if in_mirror and mirror is not None else root
        try:
            with _held(place, candidate, ranks, read_only) as hold:
                report = restore_step(hold, state, candidate, options, ranks, memory)
        except _RemovedError as gone:
            removed += 1
            if step is not None or isinstance(ranks, Alone) or removed == _MAX_REMOVED:
                raise CheckpointNotFoundError(str(gone), step=candidate) from gone
            _log.warning("%s; looking for the newest step again", gone)
            left = [other for other in candidates(root, None, ranks, None, mirror) if other[0] not in damaged]
        except CheckpointCorruptError as corrupt:
            if step is not None or isinstance(ranks, Alone):
                left = [other for other in left if other[0] == candidate]
            first = first or corrupt
            if not left:
                if step is None or first is None:
                    raise
                raise first from None
            damaged += [] if candidate in damaged else [candidate]
            what = "its copy in the mirror" if left[0][0] == candidate else "the step before"
            _log.warning("step %d cannot be restored, trying %s: %s", candidate, what, corrupt)
        else:
            report = replace(report, damaged=tuple(damaged), root=place.path)
            _log.info("rank %d restored %s%s", ranks.rank, report, " from the mirror" if in_mirror else "")
            return report
    return None


class _RemovedError(Exception):
    """The step was removed while it was read; raised on all ranks."""


def candidates(
    root: Root, step: int | None, ranks: Group, before: Callable[[], object] | None, mirror: Root | None = None
) -> list[Place]:
    """Return what to try, in this order, as seen by the coordinator, so that all ranks try the same. Collective.

    The coordinator calls `before` first. CheckpointNotFoundError if `step` is not there.
    """
    payload = b""
    if ranks.rank == 0 or isinstance(ranks, Alone):
        try:
            if before is not None:
                before()
            payload = json.dumps(places(root, mirror, needs_mirror=isinstance(ranks, Alone))).encode()
        except CheckpointError as error:
            payload = json.dumps({"kind": type(error).__name__, "text": str(error)}).encode()
    found = json.loads(ranks(payload)[0])
    if isinstance(found, dict):
        raise error_class(found["kind"])(found["text"])
    left = [(int(number), bool(in_mirror)) for number, in_mirror in found]
    if step is None or any(number == step for number, _ in left):
        return [place for place in left if step in (None, place[0])]
    steps = sorted({number for number, _ in left})
    where = root.path if mirror is None else f"{root.path}, with its mirror {mirror.path},"
    raise CheckpointNotFoundError(f"{where} has no published step {step}; it has {steps or 'none'}", step=step)


@contextlib.contextmanager
def _held(root: Root, step: int, ranks: Group, read_only: bool) -> Iterator[StepHold]:
    """Hold a step on all ranks, and raise `_RemovedError` on all of them for an error caused by its removal."""
    hold = StepHold(root, step, ranks, read_only)
    try:
        yield hold
    except (CheckpointCorruptError, CheckpointNotFoundError, StorageError) as error:
        if hold.was_removed(error):
            raise _RemovedError(f"step {step} of {root.path} was removed while it was read") from error
        raise
    finally:
        hold.close()
