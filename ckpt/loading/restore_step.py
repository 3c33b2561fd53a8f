"""Restore one step into a state, in phases that succeed on all ranks or on none.

open       hold the step, read its index; pair each leaf of the state with what is stored
match      compare names, shapes, dtypes
trial      assign values, have objects load that may refuse; undone if this or the next phase fails on any rank
read       fill the tensors, from memory or storage
load       have all objects load

Ranks agree at the end of a phase, but not of one that has nothing to do, or cannot fail, on any rank.
"""

from __future__ import annotations

import logging
import struct
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any, Literal, Protocol

import torch

from ckpt.collection import without_collection
from ckpt.errors import StateMismatchError
from ckpt.loading.bounce_buffer import BouncedRead, as_numpy, read_bounced
from ckpt.loading.consistency import read_index
from ckpt.loading.fetch import BoxRead, Fetch
from ckpt.loading.handover import Handovers
from ckpt.loading.index import CheckpointIndex
from ckpt.loading.match import Match, Read, is_below, known_names, match_state, unknown_on_all_ranks
from ckpt.loading.optimizers import Optimizers
from ckpt.loading.options import RestoreOptions, renamed
from ckpt.loading.overlaps import check_overlaps
from ckpt.loading.own_loading import check_inference_tensors
from ckpt.loading.parameter_names import with_parameters_of
from ckpt.loading.remedies import listed, misfit
from ckpt.loading.state_update import StateUpdate
from ckpt.loading.step_hold import HeldSource
from ckpt.loading.structure import Structure
from ckpt.loading.unkept import lost_names, warn_of_lost
from ckpt.loading.whole_tensors import divided
from ckpt.paths import Path, display
from ckpt.planning.boxes import Box
from ckpt.planning.state_dict import FlatState, TensorLeaf, flatten
from ckpt.progress import polled
from ckpt.ranks.group import Alone, CollectivePhase, Group
from ckpt.storage.memory_step import MemoryStep
from ckpt.storage.step_source import StepSource

_log = logging.getLogger("ckpt")
_FLAGS = struct.Struct("???")  # of a rank: there are problems, a trial to make, objects to load
_MIN_THREADS, _MAX_THREADS = 4, 16


@dataclass(frozen=True, slots=True)
class RestoreReport:
    """What a restore did on this rank: the bytes of tensors by where they came from, and the time.

    `save` is the save that was published as this step, `root` the path or URL of the root that it was read from; of a
    step that was whole in memory (`in_memory`) it is the save or snapshot, and no root was read; it is `lingering` if
    the memory is of an earlier start of the job (its bytes count as those of neighbours). Of the pack files of a
    node-local step, `mirror_files` were read from the mirror: they are not on this node, or are damaged there.
    `damaged` are the steps that were tried first and could not be restored, because bytes of them are missing or wrong:
    newer ones, and this one, if it was read from the mirror after its first copy. `unreadable` are newer ones whose
    storage failed, or whose files are on other nodes. Of plain dicts and lists, `added` are the names of items that
    they have got, `removed` of those that they have lost. `left` are the published saves that training has left: newer
    ones than this, which do not count for this job from now on. `run` is the name that `Checkpointer.start_over` gave
    to the run that the step is of, or None; `pace` what the job had measured of its saves, if `save_every` needs that.
    """

    step: int
    save: str = ""
    root: str = ""
    own_memory_bytes: int = 0
    neighbour_memory_bytes: int = 0
    remote_memory_bytes: int = 0
    storage_bytes: int = 0
    mirror_files: int = 0
    seconds: float = 0.0
    damaged: tuple[int, ...] = ()
    unreadable: tuple[int, ...] = ()
    in_memory: bool = False
    lingering: bool = False
    left: tuple[str, ...] = field(default=(), repr=False)
    run: str | None = None
    pace: Mapping[str, Any] | None = field(default=None, repr=False)
    restored_paths: tuple[Path, ...] = field(default=(), repr=False)
    missing: tuple[str, ...] = ()
    unexpected: tuple[str, ...] = ()
    mismatched: tuple[str, ...] = ()
    cast: tuple[str, ...] = ()
    resized: tuple[str, ...] = ()
    added: tuple[str, ...] = ()
    removed: tuple[str, ...] = ()

    @property
    def tier(
        self,
    ) -> Literal["own memory", "neighbour memory", "lingering memory", "memory of another node", "storage"]:
        """The farthest place that bytes of tensors came from, or the step itself if this rank has none."""
        in_memory = self.own_memory_bytes or self.neighbour_memory_bytes or self.remote_memory_bytes
        if self.storage_bytes or not (self.in_memory or in_memory):
            return "storage"
        if self.remote_memory_bytes:
            return "memory of another node"
        if self.lingering:
            return "lingering memory"
        return "neighbour memory" if self.neighbour_memory_bytes else "own memory"

    @property
    def restored(self) -> tuple[str, ...]:
        """The names of the leaves that have what the step has."""
        return _names(self.restored_paths)

    def __str__(self) -> str:
        sources = {
            "own staging memory": self.own_memory_bytes,
            "staging memory of neighbours": self.neighbour_memory_bytes,
            "memory of other nodes": self.remote_memory_bytes,
            "storage": self.storage_bytes,
        }
        text = ", ".join(f"{nbytes} bytes from {source}" for source, nbytes in sources.items() if nbytes)
        names = {
            word: getattr(self, word)
            for word in ("missing", "unexpected", "mismatched", "cast", "resized", "added", "removed")
        }
        counts = "".join(f", {len(found)} {word}" for word, found in names.items() if found)
        counts = f", {self.mirror_files} pack files from the mirror{counts}" if self.mirror_files else counts
        return f"step {self.step}: {text or 'no tensors'}, {1000 * self.seconds:.0f} ms{counts}"


class FilledTensors(Protocol):
    """The tensors that a memory source has filled."""

    @property
    def paths(self) -> frozenset[Path]: ...
    @property
    def own_bytes(self) -> int: ...
    @property
    def neighbour_bytes(self) -> int: ...


class MemorySource(Protocol):
    """Memory that may hold tensors of a published step."""

    def fill(
        self, source: StepSource, summary: Mapping[str, Any], leaves: Mapping[Path, TensorLeaf], rank: int
    ) -> FilledTensors:
        """Fill those of `leaves` that are in memory."""
        ...


def restore_step(
    hold: HeldSource, state: Any, step: int, options: RestoreOptions, ranks: Group, memory: MemorySource | None
) -> RestoreReport:
    """Restore one step; see `ckpt.loading.restore.restore`. Collective."""
    begin = time.perf_counter()
    attempt = _Attempt(ranks, step, options, memory)
    with attempt.phase("open") as phase, without_collection():
        attempt.open(hold.open())
        phase.action = "match"
        phase.told = attempt.match(state)
    has_problems, tries, finishes = attempt.compare(phase.answers)
    with attempt.phase("match") if has_problems else nullcontext():
        attempt.check()
    try:
        if tries:
            with attempt.phase("load"):
                attempt.try_objects()
        if hold.is_node_local:  # nothing is overwritten unless all ranks can read what they need
            with attempt.phase("read"):
                attempt.reach()
        with attempt.phase("read"):
            attempt.read()
            hold.check()
    except Exception as error:
        attempt.roll_back(error)
        raise
    if finishes:
        with attempt.phase("load"):
            attempt.finish()
    warn_of_lost(attempt.lost, step)
    summary = attempt.index.summary
    report = replace(attempt.report, save=str(summary["save"]), run=summary.get("run"), pace=summary.get("pace"))
    return replace(report, mirror_files=hold.mirror_files, seconds=time.perf_counter() - begin)


class _Attempt:
    """One attempt to restore one step, on this rank."""

    def __init__(self, ranks: Group, step: int, options: RestoreOptions, memory: MemorySource | None) -> None:
        self._ranks = ranks
        self._step = step
        self._options = options
        self._memory = None if options.rename else memory  # which knows the names of the save only
        self.report = RestoreReport(step)
        self.lost: list[str] = []
        self.index: CheckpointIndex
        self._match: Match
        self._state: Any = None
        self._flat = FlatState()
        self._unexpected: list[Path] = []
        self._update: StateUpdate
        self._handovers: Handovers
        self._reading = False
        self._filled: frozenset[Path] | None = None  # from memory, once that was tried

    def phase(self, action: str) -> AbstractContextManager[CollectivePhase]:
        """Run one phase of the attempt; see `Group.all_or_none`."""
        return self._ranks.all_or_none(action, self._step)

    def open(self, source: StepSource) -> None:
        """Read the index of the step."""
        self.index = read_index(source)
        if self._options.rename:
            self.index = renamed(self.index, self._options.rename)

    def match(self, state: Any) -> bytes:
        """Flatten the state and pair every leaf with what is stored; return what the other ranks need, to `compare`."""
        named = with_parameters_of(self.index, state, self._ranks.rank, self._options)
        if named.index is not self.index:
            self.index, self._memory = named.index, None  # memory knows the names of the save only
        optimizers = Optimizers(named, self._ranks.rank, state, self._options)
        structure = Structure(self.index, self._ranks.rank, self._options)
        handovers = self._handovers = Handovers(structure, self._options)

        def expand(path: Path, owner: Any, state_dict: Any, per_rank: bool) -> Any:
            state_dict = optimizers.expand(path, owner, state_dict, per_rank)
            return handovers.expand(path, owner, state_dict, per_rank)

        flat = flatten(state, expand=expand, adapt=structure.adapt, reaches=self._options.reaches)
        self._state, self._flat = state, flat
        self._match = match_state(self.index, flat, self._ranks.rank, optimizers.ignored, self._options)
        check_overlaps(self._match.reads, self._step)
        self._match.mismatches += optimizers.mismatches
        self._match.left_out += optimizers.left_out
        if self._options.only is not None:
            self._check_selection(state, flat, self._options.only)
        owners = [owner for owner in flat.owners if owner.path not in optimizers.not_loaded]
        check_inference_tensors(owners)
        self._note_structure(structure)
        if self._ranks.rank == 0:  # the others have lost the same
            changed = [*(each.path for each in self._match.assignments), *structure.added]
            self.lost = lost_names(self._options.unkept, changed)
        update = self._update = StateUpdate(self._match, owners, structure, handovers.by_path)
        flags = _FLAGS.pack(bool(self._match.mismatches), update.tries, update.finishes)
        return flags + known_names(self._match, str(self.index.summary["save"]))

    def _note_structure(self, structure: Structure) -> None:
        """Record which items containers get and lose."""
        self.report = replace(self.report, added=_names(structure.added), removed=_names(structure.removed))
        if structure.removed:
            _log.warning(
                "step %d does not have these items of dicts and lists, which are removed from the state:%s",
                self._step,
                listed(list(self.report.removed)),
            )

    def compare(self, answers: Sequence[bytes]) -> tuple[bool, bool, bool]:
        """Find the names that no rank has. Return whether any rank has problems, a trial to make, objects to load.

        Collective if ranks have different names.
        """
        names = [answer[_FLAGS.size :] for answer in answers]
        self._unexpected = unknown_on_all_ranks(self._match, names, self._ranks)
        has_problems, tries, finishes = map(any, zip(*map(_FLAGS.unpack_from, answers), strict=True))
        return has_problems, tries, finishes

    def _check_selection(self, state: Any, flat: FlatState, only: tuple[str, ...]) -> None:
        """StateMismatchError if nothing is selected, or a name is in neither this rank's state nor the step."""
        index = self.index
        stored = {*index.tensors, *index.aliases, *index.values, *index.per_rank_tensors, *index.per_rank_values}
        known = [*flat.names(), *stored]
        wrong = [name for name in only if not any(map(replace(self._options, only=(name,)).selects, known))]
        if wrong or not any(map(self._options.selects, flat.names())):
            raise StateMismatchError(
                f"only={wrong or list(only)!r} selects nothing of the state, whose items are "
                f"{sorted({display(path[:1]) for path in flatten(state).names()})}",
                step=self._step,
            )

    def check(self) -> None:
        """Raise StateMismatchError, listing all that does not fit; log it unless `strict`."""
        match, unexpected = self._match, self._unexpected
        self._note(unexpected)
        if match.separate:
            pairs = [f"{display(path)} (restored: {display(target)})" for path, target in match.separate]
            _log.warning(
                "step %d has two tensors each where the state has one with two names:%s", self._step, listed(pairs)
            )
        found = misfit(match, unexpected, self._flat, self._state, self._options, self._step)
        if found is None:
            return
        if self._options.strict:
            raise StateMismatchError(f"{found.text}\nNothing was restored", step=self._step)
        if found.too_little:
            raise StateMismatchError(f"{found.text}\n{found.too_little}: nothing was restored", step=self._step)
        left_out = [display(path) for path in match.left_out]
        with_them = f"\nand what belongs to them:{listed(left_out)}" if left_out else ""
        _log.warning("%s%s\nrestored without these", found.text, with_them)

    def _note(self, unexpected: list[Path]) -> None:
        """Record what becomes of each name."""
        match = self._match
        by_kind: dict[bool, list[Path]] = {True: [], False: list(match.left_out)}
        for problem in match.mismatches:
            if problem.kind == "unexpected":
                unexpected = [*unexpected, problem.path]
            else:
                by_kind[problem.kind == "missing"].append(problem.path)
        restored = [path for path, _, _ in match.reads]
        restored += [each.path for each in match.assignments] + match.same
        self.report = replace(
            self.report,
            restored_paths=tuple(restored),
            missing=_names(by_kind[True]),
            unexpected=_names(unexpected),
            mismatched=_names(by_kind[False]),
            cast=_names(match.cast),
            resized=_names(match.resized),
        )

    def try_objects(self) -> None:
        """Assign values, and have the objects load that may refuse; see `StateUpdate`."""
        self._update.try_objects(lambda reads: self._fetch(reads, frozenset(), is_trial=True))
        self._note_refused()

    def _note_refused(self) -> None:
        """Record, and log, the names that objects with loading code of their own have refused."""
        refused = [path for each in self._handovers.by_path.values() for path in each.refused]
        if not refused:
            return
        resized = [path for path in refused if self._options.resize]
        left_out = [path for path in refused if not self._options.resize]
        restored = [path for path in self.report.restored_paths if not is_below(path, left_out)]
        self.report = replace(
            self.report,
            restored_paths=tuple(restored),
            resized=tuple(sorted({*self.report.resized, *_names(resized)})),
            mismatched=tuple(sorted({*self.report.mismatched, *_names(left_out)})),
        )
        texts = [each.differences[path] for each in self._handovers.by_path.values() for path in each.refused]
        _log.warning("step %d has names that objects did not load:%s", self._step, listed(texts))

    def roll_back(self, error: Exception) -> None:
        """Undo the trial, and add a note to `error` about what could not be undone."""
        failed = self._update.roll_back()
        rank = self._ranks.rank
        if failed:
            error.add_note(f"rank {rank}: could not be restored to its state before: {'; '.join(failed)}")
        if self._reading:
            error.add_note(
                f"rank {rank}: tensors of the state may be partly overwritten; values and objects are as before"
            )
        elif not failed:
            error.add_note(f"rank {rank}: the state is as it was before")

    def reach(self) -> None:
        """Fill tensors from memory; CheckpointUnreachableError if the rest cannot be read here."""
        self._require(self._match.reads, self._fill())

    def _fill(self) -> frozenset[Path]:
        if self._filled is None:
            self._filled = self._from_memory()
            self._reading = bool(self._filled)
        return self._filled

    def read(self) -> None:
        """Fill the tensors from memory where it has them, the rest from storage."""
        nbytes = self._fetch(self._match.reads, self._fill())
        if isinstance(self.index.source, MemoryStep):
            remote = min(nbytes, self.index.source.bytes_fetched)
            neighbours = self.report.neighbour_memory_bytes + nbytes - remote
            self.report = replace(
                self.report,
                neighbour_memory_bytes=neighbours,
                remote_memory_bytes=remote,
                lingering=self.index.source.outlived,
            )
        else:
            self.report = replace(self.report, storage_bytes=nbytes)

    def _fetch(self, reads: list[Read], filled: frozenset[Path], *, is_trial: bool = False) -> int:
        """Read from storage what is not filled, and return the number of bytes; in a trial, into new tensors."""
        fetch = self._require(reads, filled)
        left = [read for read in reads if read[0] not in filled] if filled else reads
        whole, others = divided(self.index.packs, left)
        direct: list[BoxRead] = []
        bounced: list[BouncedRead] = []
        nbytes = fetch.whole_bytes(whole)
        for path, tensor, leaf in others:
            local = leaf.local
            plain = local.is_cpu and leaf.spec.dtype == tensor.dtype and not local.is_conj() and not local.is_neg()
            name = display(path)
            for box, at in leaf.boxes:
                target = local if box.shape == local.shape else local[Box(at, box.shape).slices((0,) * len(at))]
                if plain:
                    direct.append(BoxRead(name, tensor, box, as_numpy(target)))
                    nbytes += target.nbytes
                else:
                    bounced.append(BouncedRead(name, tensor, box, target))
                    nbytes += bounced[-1].nbytes
        self._reading = self._reading or not is_trial
        with self._progress(nbytes, fetch):
            fetch.read(direct, whole)
            read_bounced(fetch, bounced)
        return fetch.bytes_read

    def _require(self, reads: list[Read], filled: frozenset[Path]) -> Fetch:
        """Raise CheckpointUnreachableError if what is not filled cannot be read here; return what reads it."""
        fetch = Fetch(self.index, threads=min(max(_MIN_THREADS, torch.get_num_threads()), _MAX_THREADS))
        boxes = (
            (display(path), tensor, box) for path, tensor, leaf in reads if path not in filled for box, _ in leaf.boxes
        )
        self.index.source.require(lambda: fetch.files(boxes))
        return fetch

    def _progress(self, total: int, fetch: Fetch) -> AbstractContextManager[None]:
        """Show on a terminal of rank 0 how much is read; not in a restart, where a rank is alone."""
        if self._ranks.rank != 0 or isinstance(self._ranks, Alone):
            return nullcontext()
        return polled(f"restoring step {self._step} (rank 0)", total, lambda: fetch.bytes_done)

    def _from_memory(self) -> frozenset[Path]:
        if self._memory is None:
            return frozenset()
        changed = {*self._match.cast, *self._match.resized}
        leaves = {path: leaf for path, _, leaf in self._match.reads if path not in changed}
        with without_collection():
            filled = self._memory.fill(self.index.source, self.index.summary, leaves, self._ranks.rank)
        self.report = replace(
            self.report, own_memory_bytes=filled.own_bytes, neighbour_memory_bytes=filled.neighbour_bytes
        )
        return filled.paths

    def finish(self) -> None:
        """Have stateful objects load."""
        self._update.finish()


def _names(paths: Iterable[Path]) -> tuple[str, ...]:
    return tuple(sorted(map(display, paths)))
