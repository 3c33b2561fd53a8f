"""Restore a published step into the state of a running program, in place.

    choose a step (the coordinator's view, told to all) -> match names, shapes, dtypes -> all ranks agree -> read into
    the tensors -> all ranks agree -> put back values, let stateful objects load

Nothing is written to the state before every rank has found that everything fits. Runs in the trainer; collective.
"""

from __future__ import annotations

import json
import logging
import time
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from ckpt.collection import without_collection
from ckpt.errors import CheckpointCorruptError, CheckpointError, CheckpointNotFoundError, StateMismatchError
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
from ckpt.storage.locks import lock_shared

__all__ = ["restore"]

_log = logging.getLogger("ckpt")
_SHOWN = 20
_LEAST_THREADS, _MOST_THREADS = 4, 16


def restore(
    root: CheckpointRoot,
    state: Any,
    step: int | None,
    strict: bool,
    ranks: Gather,
    memory: MemorySource | None = None,
) -> RestoreReport | None:
    """Put the newest published step (or `step`) into `state`. See `Checkpointer.restore`.

    One of several ranks that is `Alone` goes back to no older step: the others would not.
    """
    candidates = _candidates(root, step, ranks)
    damaged: CheckpointError | None = None
    for candidate in candidates:
        try:
            report = _restore_step(root, state, candidate, strict, ranks, memory)
        except CheckpointCorruptError as error:
            if step is not None or isinstance(ranks, Alone):
                raise
            damaged = error
            _log.warning("step %d cannot be restored, going back to the step before: %s", candidate, error)
            continue
        _log.info("rank %d restored %s", ranks.rank, report)
        return report
    if damaged is not None:
        raise damaged
    return None


def _candidates(root: CheckpointRoot, step: int | None, ranks: Gather) -> list[int]:
    """The steps to try, best first: what the coordinator sees, so that all ranks try the same."""
    payload = b""
    if ranks.rank == 0 or isinstance(ranks, Alone):
        try:
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


def _restore_step(
    root: CheckpointRoot, state: Any, step: int, strict: bool, ranks: Gather, memory: MemorySource | None
) -> RestoreReport:
    begin = time.perf_counter()
    path = root.step_path(step)
    attempt = _Attempt(ranks, step, memory)
    try:
        with attempt.together("look at"), without_collection():
            attempt.lock = lock_shared(path)
            attempt.index = read_index(path)
        with attempt.together("match"), without_collection():
            attempt.match(state)
        with attempt.together("fit"):
            attempt.check(strict)
        with attempt.together("read"):
            attempt.read()
        with attempt.together("load"):
            attempt.finish()
    finally:
        attempt.close()
    return replace(attempt.report, seconds=time.perf_counter() - begin)


class _Attempt:
    """One try to restore one step; every phase ends with the ranks telling each other whether it worked."""

    def __init__(self, ranks: Gather, step: int, memory: MemorySource | None) -> None:
        self._ranks = ranks
        self._step = step
        self._memory = memory
        self.report = RestoreReport(step)
        self.index: CheckpointIndex
        self.lock: Any = None
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

    def close(self) -> None:
        if self.lock is not None:
            self.lock.close()
