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
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
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
from ckpt.loading.match import Match, Read, known_to_nobody, match_state
from ckpt.loading.optimizers import Optimizers
from ckpt.loading.placement import Placement
from ckpt.loading.sources import Alone, Gather, MemorySource, RestoreReport
from ckpt.loading.together import Together, error_of
from ckpt.paths import Path, display
from ckpt.planning.boxes import Box
from ckpt.planning.state_dict import flatten
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
            with _reading(root, candidate, ranks, read_only) as reading:
                report = _restore_step(reading, state, candidate, strict, ranks, memory)
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
    try:
        with attempt.together("load"):
            attempt.try_objects()
        with attempt.together("read"):
            attempt.read()
            reading.check()
    except Exception as error:
        attempt.put_back(error)
        raise
    with attempt.together("load"):
        attempt.finish()
    save = str(attempt.index.summary["save"])
    return replace(attempt.report, save=save, seconds=time.perf_counter() - begin)


class _Attempt:
    """One try to restore one step; every phase ends with the ranks telling each other whether it worked."""

    def __init__(self, ranks: Gather, step: int, memory: MemorySource | None) -> None:
        self._ranks = ranks
        self._step = step
        self._memory = memory
        self.report = RestoreReport(step)
        self.index: CheckpointIndex
        self._match: Match
        self._placement: Placement
        self._reading = False

    def together(self, what: str) -> Together:
        return Together(self._ranks, self._step, what)

    def match(self, state: Any) -> None:
        """Flatten the state and pair every leaf with what is stored."""
        optimizers = Optimizers(self.index, self._ranks.rank)
        flat = flatten(state, expand=optimizers.expand)
        self._match = match_state(self.index, flat, self._ranks.rank, optimizers.ignored, optimizers.unit)
        self._match.problems += optimizers.problems
        owners = [owner for owner in flat.owners if owner.path not in optimizers.not_loaded]
        self._placement = Placement(self._match, owners)

    def check(self, strict: bool) -> None:
        """Raise StateMismatchError listing all that does not fit; log it if not `strict`. Collective."""
        unexpected = known_to_nobody(self._match.unknown, self._ranks)
        problems = [problem.text for problem in self._match.problems]
        problems += [f"unexpected: {display(path)}" for path in unexpected]
        if not problems:
            return
        problems.sort(key=lambda problem: (problem.split(":")[0], problem))
        text = f"{len(problems)} name(s) of the state do not fit step {self._step}:{_listed(problems)}"
        if strict:
            raise StateMismatchError(text + "\nNothing was restored; strict=False restores what fits", step=self._step)
        left_out = [display(path) for path in self._match.left_out]
        with_them = f"\nand what belongs to them:{_listed(left_out)}" if left_out else ""
        _log.warning("%s%s\nrestored without these", text, with_them)

    def try_objects(self) -> None:
        """Put values in place and ask the objects that may refuse; see `Placement`."""
        self._placement.try_objects(lambda reads: self._fetch(reads, frozenset()))

    def put_back(self, error: Exception) -> None:
        """Undo what the trial did, and say in `error` what is different from before all the same."""
        failed = self._placement.put_back()
        rank = self._ranks.rank
        if failed:
            error.add_note(f"rank {rank}: could not be put back as it was: {'; '.join(failed)}")
        if self._reading:
            error.add_note(
                f"rank {rank}: tensors of the state are perhaps overwritten in part; numbers and objects are as before"
            )
        elif not failed:
            error.add_note(f"rank {rank}: the state is as it was before")

    def read(self) -> None:
        """Fill the tensors: from memory what is there, the rest from storage."""
        self._reading = True
        nbytes = self._fetch(self._match.reads, self._from_memory())
        self.report = replace(self.report, storage_bytes=nbytes)

    def _fetch(self, reads: list[Read], filled: frozenset[Path]) -> int:
        """Read from storage what is not filled; returns how many bytes."""
        fetch = Fetch(self.index, threads=min(max(_LEAST_THREADS, torch.get_num_threads()), _MOST_THREADS))
        direct: list[Wanted] = []
        elsewhere: list[Elsewhere] = []
        for path, tensor, leaf in reads:
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
        return fetch.bytes_read

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
        """Have stateful objects load."""
        self._placement.finish()


def _listed(lines: list[str]) -> str:
    more = [f"and {len(lines) - _SHOWN} more"] if len(lines) > _SHOWN else []
    return "".join(f"\n  {line}" for line in (*lines[:_SHOWN], *more))
