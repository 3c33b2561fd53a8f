"""Restore a published step into the state of a running program, in place.

    choose a step (the coordinator's view, told to all) -> match names, shapes, dtypes -> all ranks agree -> read into
    the tensors -> all ranks agree -> put back values, let stateful objects load

Nothing is written to the state before every rank has found that everything fits. Runs in the trainer; collective.
"""

from __future__ import annotations

import contextlib
import json
import logging
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from ckpt.collection import without_collection
from ckpt.errors import (
    CheckpointCorruptError,
    CheckpointError,
    CheckpointNotFoundError,
    StateMismatchError,
    StorageError,
)
from ckpt.loading.arrays import as_numpy
from ckpt.loading.by_way import Elsewhere, read_by_way
from ckpt.loading.fetch import Fetch, Wanted
from ckpt.loading.index import CheckpointIndex, read_index
from ckpt.loading.match import Match, known_to_nobody, match_state
from ckpt.loading.optimizers import fill_fresh_optimizer, keep_dtypes
from ckpt.loading.sources import Alone, Gather, MemorySource, RestoreReport
from ckpt.loading.together import Together
from ckpt.paths import Path, display
from ckpt.planning.boxes import Box
from ckpt.planning.state_dict import FlatState, flatten
from ckpt.storage.commit import CheckpointRoot
from ckpt.storage.readers import StepReader

__all__ = ["restore"]

_log = logging.getLogger("ckpt")
_SHOWN = 20
_MOST_REMOVED = 20  # steps that are removed while they are read; then something is wrong
_LEAST_THREADS, _MOST_THREADS = 4, 16


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
            with _reading(root, candidate, ranks, read_only) as attempt:
                report = _restore_step(attempt, state, candidate, strict, ranks, memory)
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
            payload = json.dumps(root.steps()).encode()
        except CheckpointError as error:
            payload = json.dumps(str(error)).encode()
    steps = json.loads(ranks(payload)[0])
    if isinstance(steps, str):
        raise CheckpointError(steps)
    if step is None:
        return sorted(steps, reverse=True)
    if step not in steps:
        raise CheckpointNotFoundError(f"{root.path} has no published step {step}; it has {steps or 'none'}", step=step)
    return [step]


@contextlib.contextmanager
def _reading(root: CheckpointRoot, step: int, ranks: Gather, read_only: bool) -> Iterator[_Reading]:
    """Hold a step for all ranks; turns an error that its removal caused into `_RemovedError`, on all of them.

    The coordinator has the lease, for all: it lets go last.
    """
    reading = _Reading(root, step, ranks, read_only)
    try:
        yield reading
    except (CheckpointCorruptError, CheckpointNotFoundError, StorageError) as error:
        if reading.was_removed(error):
            raise _RemovedError(f"step {step} of {root.path} was removed while it was read") from error
        raise
    finally:
        reading.close()


class _Reading:
    """The readers of one step, on all ranks."""

    def __init__(self, root: CheckpointRoot, step: int, ranks: Gather, read_only: bool) -> None:
        self.root = root
        self.path = root.step_path(step)
        self._ranks = ranks
        self._leads = not read_only and ranks.rank == 0 and not isinstance(ranks, Alone)
        self._reader: StepReader | None = None

    def open(self) -> None:
        """Begin to read. CheckpointNotFoundError if the step is not there any more."""
        self._reader = StepReader(self.path, self.root.path if self._leads else None, renewing=True)

    def check(self) -> None:
        """Raise CheckpointNotFoundError unless all that this rank has read is of this step."""
        if self._reader is not None:
            self._reader.check()

    def was_removed(self, error: CheckpointError) -> bool:
        """Whether any rank finds the step gone, or another one in its place. Collective."""
        gone = isinstance(error, CheckpointNotFoundError)
        there = not gone and (self._reader is None or self._reader.is_there)
        return b"-" in self._ranks(b"+" if there else b"-")

    def close(self) -> None:
        if self._reader is not None:
            self._reader.close()


def _restore_step(
    reading: _Reading, state: Any, step: int, strict: bool, ranks: Gather, memory: MemorySource | None
) -> RestoreReport:
    begin = time.perf_counter()
    attempt = _Attempt(ranks, step, memory)
    with attempt.together("look at"), without_collection():
        reading.open()
        attempt.index = read_index(reading.path)
    with attempt.together("match"), without_collection():
        attempt.match(state)
    with attempt.together("fit"):
        attempt.check(strict)
    with attempt.together("read"):
        attempt.read()
        reading.check()
    with attempt.together("load"):
        attempt.finish()
    return replace(attempt.report, seconds=time.perf_counter() - begin)


class _Attempt:
    """One try to restore one step; every phase ends with the ranks telling each other whether it worked."""

    def __init__(self, ranks: Gather, step: int, memory: MemorySource | None) -> None:
        self._ranks = ranks
        self._step = step
        self._memory = memory
        self.report = RestoreReport(step)
        self.index: CheckpointIndex
        self._flat: FlatState
        self._match: Match

    def together(self, what: str) -> Together:
        return Together(self._ranks, self._step, what)

    def match(self, state: Any) -> None:
        """Flatten the state and pair every leaf with what is stored."""
        self._flat = flatten(state, expand=partial(fill_fresh_optimizer, self.index, self._ranks.rank))
        self._match = match_state(self.index, self._flat, self._ranks.rank)

    def check(self, strict: bool) -> None:
        """Raise StateMismatchError listing all that does not fit; log it if not `strict`. Collective."""
        unexpected = known_to_nobody(self._match.unknown, self._ranks)
        problems = [*self._match.problems, *(f"unexpected: {display(path)}" for path in unexpected)]
        if not problems:
            return
        problems.sort(key=lambda problem: (problem.split(":")[0], problem))
        listed = "\n  ".join(problems[:_SHOWN])
        more = f"\n  and {len(problems) - _SHOWN} more" if len(problems) > _SHOWN else ""
        text = f"{len(problems)} name(s) of the state do not fit step {self._step}:\n  {listed}{more}"
        if strict:
            raise StateMismatchError(text + "\nNothing was restored; strict=False restores what fits", step=self._step)
        _log.warning("%s\nrestored without these", text)

    def read(self) -> None:
        """Fill the tensors: from memory what is there, the rest from storage."""
        filled = self._from_memory()
        fetch = Fetch(self.index, threads=min(max(_LEAST_THREADS, torch.get_num_threads()), _MOST_THREADS))
        direct: list[Wanted] = []
        elsewhere: list[Elsewhere] = []
        for path, tensor, leaf in self._match.reads:
            if path in filled:
                continue
            name = display(path)
            for box, at in leaf.boxes:
                target = leaf.local[Box(at, box.shape).slices((0,) * len(at))]
                if target.is_cpu and not target.is_conj() and not target.is_neg():
                    direct.append(Wanted(name, tensor, box, as_numpy(target)))
                else:
                    elsewhere.append(Elsewhere(name, tensor, box, target))
        fetch.read(direct)
        read_by_way(fetch, elsewhere)
        self.report = replace(self.report, storage_bytes=fetch.bytes_read)

    def _from_memory(self) -> frozenset[Path]:
        if self._memory is None:
            return frozenset()
        leaves = {path: leaf for path, _, leaf in self._match.reads}
        with without_collection():
            filled = self._memory.fill(self.index.path, self.index.summary, leaves, self._ranks.rank)
        self.report = replace(
            self.report, own_memory_bytes=filled.own_bytes, neighbour_memory_bytes=filled.neighbour_bytes
        )
        return filled.paths

    def finish(self) -> None:
        """Put the values in place and have stateful objects load."""
        for _, _, leaf in self._match.reads:
            if leaf.after is not None:
                leaf.after()
        for assign in self._match.assignments:
            assign()
        self._flat.load_owners()
        for _, owner, state_dict in self._flat.owners:
            keep_dtypes(owner, state_dict)
