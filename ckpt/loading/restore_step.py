"""Restore one step, phase by phase."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch

from ckpt.collection import without_collection
from ckpt.errors import (
    CheckpointError,
    CheckpointNotFoundError,
    StateMismatchError,
)
from ckpt.loading.all_or_none import Alone, Gather, Together
from ckpt.loading.bounce_buffer import Elsewhere, as_numpy, read_by_way
from ckpt.loading.fetch import Fetch, Wanted
from ckpt.loading.index import CheckpointIndex, read_index
from ckpt.loading.match import Match, Read, known_to_nobody, match_state
from ckpt.loading.optimizers import Optimizers
from ckpt.loading.state_update import Placement
from ckpt.paths import Path, display
from ckpt.planning.boxes import Box
from ckpt.planning.state_dict import TensorLeaf, flatten
from ckpt.storage.root import CheckpointRoot
from ckpt.storage.step_reader import StepReader

__all__ = ["Filled", "MemorySource", "RestoreReport"]

_log = logging.getLogger("ckpt")


@dataclass(frozen=True, slots=True)
class RestoreReport:
    """What a restore put where it belongs: bytes of tensors on this rank, by where they came from, and the time.

    `save` is the save that was published as this step. `damaged` are the newer steps that it went back from, because
    bytes of them are missing or wrong.
    """

    step: int
    save: str = ""
    own_memory_bytes: int = 0
    neighbour_memory_bytes: int = 0
    storage_bytes: int = 0
    seconds: float = 0.0
    damaged: tuple[int, ...] = ()

    def __str__(self) -> str:
        sources = {
            "own staging memory": self.own_memory_bytes,
            "staging memory of neighbours": self.neighbour_memory_bytes,
            "storage": self.storage_bytes,
        }
        text = ", ".join(f"{nbytes} bytes from {source}" for source, nbytes in sources.items() if nbytes)
        return f"step {self.step}: {text or 'no tensors'}, {1000 * self.seconds:.0f} ms"


class Filled(Protocol):
    """What a memory source has put into tensors."""

    @property
    def paths(self) -> frozenset[Path]: ...
    @property
    def own_bytes(self) -> int: ...
    @property
    def neighbour_bytes(self) -> int: ...


class MemorySource(Protocol):
    """Where tensors of a published step may be, besides storage."""

    def fill(
        self, step_path: str, summary: Mapping[str, Any], leaves: Mapping[Path, TensorLeaf], rank: int
    ) -> Filled: ...


_SHOWN = 20
_LEAST_THREADS, _MOST_THREADS = 4, 16


class StepHold:
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


def restore_step(
    reading: StepHold, state: Any, step: int, strict: bool, ranks: Gather, memory: MemorySource | None
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
