"""Restore a step into the state of a running program, in place: one that is whole in memory, or a published one.

The coordinator tells all ranks which steps are published, and all tell each other what they hold in memory. They
restore the newest step (see `restore_step`); if it is damaged, the one before. Nothing is written to the state before
everything fits on every rank, and the trial is undone if it fails on any rank. Runs in the trainer; collective.
"""

from __future__ import annotations

import contextlib
import json
import logging
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

from ckpt.collection import without_collection
from ckpt.errors import (
    CheckpointCorruptError,
    CheckpointError,
    CheckpointNotFoundError,
    CheckpointUnreachableError,
    StorageError,
)
from ckpt.events import Restored, RestoreFailed
from ckpt.loading.candidates import Candidate, PublishedCandidates, in_order, published_candidates, saves_of
from ckpt.loading.options import RestoreOptions
from ckpt.loading.restore_step import MemorySource, RestoreReport, restore_step
from ckpt.loading.step_hold import HeldSource, StepHold
from ckpt.observing import emit, is_observed, shortened
from ckpt.ranks.group import Alone, Group
from ckpt.storage.interface import Root
from ckpt.storage.names import parse_save_name
from ckpt.storage.node_packs import NodePacks
from ckpt.storage.step_source import StepSource

_log = logging.getLogger("ckpt")
_MAX_REMOVED = 20  # steps that are removed while they are read, before giving up


class StepsInMemory(Protocol):
    """Steps that ranks hold in memory, whether they are published or not."""

    def offer(self, ranks: Group) -> bytes:
        """Return what this rank can read, for `choose` on all ranks. Collective."""

    def choose(self, offers: Sequence[bytes]) -> list[tuple[int, str]]:
        """Return the steps that are whole in memory, newest first, and their saves: the same on all ranks."""

    def before(self, save: str) -> int:
        """Return how many of the steps that `choose` returned are tried before a published save."""

    @property
    def left(self) -> frozenset[str]:
        """The published saves that training has left, by name: after `choose` the same on all ranks."""

    @property
    def began_anew(self) -> bool:
        """Whether training goes on from no step: after `choose` the same on all ranks."""

    def open(self, save: str, ranks: Group) -> StepSource:
        """Return one of them, to be read. Collective. Raises what it raises on all ranks."""

    def check(self, save: str) -> None:
        """Raise CheckpointCorruptError unless all that was read was of this step."""

    def failed(self, save: str) -> None:
        """Note, on all ranks, that one of them could not be restored."""


@dataclass(frozen=True, slots=True)
class Tiers:
    """Where steps may be: in a root, with node-local pack files in `packs`; in the mirror of the root; in memory.

    `left` are the published saves that training has left, and it `began_anew` if it goes on from no step, if there is
    no memory to tell.
    """

    root: Root
    mirror: Root | None = None
    packs: NodePacks | None = None
    memory: StepsInMemory | None = None
    left: frozenset[str] = frozenset()
    began_anew: bool = False

    def without_memory(self) -> Tiers:
        """Return these tiers without memory."""
        held = self.memory
        return self if held is None else replace(self, memory=None, left=held.left, began_anew=held.began_anew)


@dataclass(frozen=True, slots=True)
class Candidates:
    """The copies that a restore tries, in order, those `published`, and the saves that training has left.

    The same on all ranks.
    """

    ordered: list[Candidate]
    published: PublishedCandidates
    left: frozenset[str]


@dataclass(frozen=True, slots=True)
class Undecided:
    """How to decide the saves that are undecided when a restore begins.

    `decide_left` is called by the coordinator alone, for those of an ended job. `in_flight` returns the names of those
    that this rank has scheduled. If any rank has some, all call `settle`, with the names that all ranks have in common.
    """

    decide_left: Callable[[], object]
    in_flight: Callable[[], list[str]]
    settle: Callable[[Collection[str]], None]


def restore(
    tiers: Tiers,
    state: Any,
    step: int | None,
    options: RestoreOptions,
    ranks: Group,
    memory: MemorySource | None = None,
    undecided: Undecided | None = None,
    read_only: bool = False,
) -> RestoreReport | None:
    """Restore the newest step, or `step`, into `state`; None if there is none. See `Checkpointer.restore`.

    Published saves that training has left do not count, unless `step` says so. The report has those that it has left
    from now on: all that are newer than the step that was restored.

    Of a published step, tensors may be in `memory`.

    Saves that are `undecided` are decided first. With `read_only` no lease is made. If a step is removed while it is
    read, this starts again with the steps that are left. A rank that is `Alone` among several tries no older step,
    since the others would not do the same; a copy of the same step it may try.
    """
    begin = time.perf_counter()
    try:
        report = _restore(tiers, state, step, options, ranks, memory, undecided, read_only)
    except Exception as error:
        if is_observed():
            failed = step if step is not None or not isinstance(error, CheckpointError) else error.step
            why = type(error).__name__, shortened(str(error))
            emit(RestoreFailed(time.time(), ranks.rank, failed, *why, time.perf_counter() - begin))
        raise
    if report is not None and is_observed():
        nbytes = report.own_memory_bytes, report.neighbour_memory_bytes, report.storage_bytes
        seconds, remote = time.perf_counter() - begin, report.remote_memory_bytes
        emit(Restored(time.time(), ranks.rank, report.step, *nbytes, seconds, report.damaged, report.tier, remote))
    return report


def _restore(
    tiers: Tiers,
    state: Any,
    step: int | None,
    options: RestoreOptions,
    ranks: Group,
    memory: MemorySource | None,
    undecided: Undecided | None,
    read_only: bool,
) -> RestoreReport | None:
    damaged: list[int] = []
    unreadable: list[int] = []
    failed: list[Candidate] = []
    insists = step is not None or isinstance(ranks, Alone) or not options.fall_back
    first: CheckpointError | None = None
    removed = 0
    tiers = tiers.without_memory() if isinstance(ranks, Alone) else tiers
    found = candidates(tiers, step, ranks, undecided)
    left = found.ordered
    while left:
        candidate = left.pop(0)
        mirror = tiers.mirror if candidate.in_mirror else None
        root, packs = (tiers.root, tiers.packs) if mirror is None else (mirror, None)
        try:
            step_hold = StepHold(root, candidate.step, ranks, read_only, packs)
            # The index is gone before the next collection, which would walk through all of it.
            with _held(candidate, step_hold, ranks, tiers.memory) as hold, without_collection():
                report = restore_step(hold, state, candidate.step, options, ranks, memory)
        except _RemovedError as gone:
            removed += 1
            if step is not None or isinstance(ranks, Alone) or removed == _MAX_REMOVED:
                raise CheckpointNotFoundError(str(gone), step=candidate.step) from gone
            _log.warning("%s; looking for the newest step again", gone)
            tiers = tiers.without_memory()
            found = candidates(tiers, None, ranks, None)
            left = [other for other in found.ordered if other not in failed]
        except (CheckpointCorruptError, CheckpointUnreachableError, StorageError) as error:
            failed.append(candidate)
            if candidate.save is not None and tiers.memory is not None:
                tiers.memory.failed(candidate.save)
            if insists:
                left = [other for other in left if other.step == candidate.step]
            first = first or error
            if not left:
                if step is None or first is None:
                    raise
                raise first from None
            skipped = damaged if isinstance(error, CheckpointCorruptError) else unreadable
            skipped += [candidate.step] if candidate.save is None and candidate.step not in skipped else []
            what = _described(left[0]) if left[0].step == candidate.step else f"the step before, {left[0].step}"
            advice = _advice(error, candidate.step, left[0].step)
            _log.warning("step %d cannot be restored, trying %s: %s%s", candidate.step, what, error, advice)
        else:
            in_memory = candidate.save is not None
            report = replace(report, root="" if in_memory else root.path, in_memory=in_memory)
            newer = tuple(each for each in unreadable if each != report.step)
            report = replace(report, damaged=tuple(damaged), unreadable=newer)
            if not read_only:
                report = replace(report, left=_left(tiers, found, report, ranks))
            _log.info("rank %d restored %s%s", ranks.rank, report, " from the mirror" if candidate.in_mirror else "")
            return report
    return None


def _advice(error: CheckpointError, step: int, instead: int) -> str:
    """Return the advice about a step that the storage failed to give, instead of which an older one was restored."""
    if step == instead or not isinstance(error, StorageError):
        return ""
    return (
        f". To go on from step {step}, end this run before it saves, mend the storage and start again; the next save "
        f"moves step {step} to .superseded/ (inspect_ckpt restore-branch brings it back)"
    )


def _described(candidate: Candidate) -> str:
    if candidate.save is not None:
        return "another snapshot of it"
    return "its copy in the mirror" if candidate.in_mirror else "the published one"


class _RemovedError(Exception):
    """The step was removed while it was read; raised on all ranks."""


def candidates(tiers: Tiers, step: int | None, ranks: Group, undecided: Undecided | None) -> Candidates:
    """Return the copies to try for the newest step, or for `step`. Collective.

    What is published is as seen by the coordinator; what is whole in memory, and what training has left, follow from
    what all ranks tell. Saves that are `undecided` are decided first. CheckpointNotFoundError if `step` is not there,
    or if only steps are there that training has left.
    """
    root, mirror, held = tiers.root, tiers.mirror, tiers.memory
    offer = b"" if held is None else held.offer(ranks)

    in_flight = "" if undecided is None else " ".join(undecided.in_flight())
    with ranks.all_or_none("look for steps") as phase:
        own: list[Candidate] = []
        if _looks(ranks):
            if undecided is not None:
                undecided.decide_left()
            own = published_candidates(root, mirror, needs_mirror=isinstance(ranks, Alone))
        phase.told = b"\n".join((json.dumps(own).encode(), in_flight.encode(), offer))
    said = [answer.split(b"\n", 2) for answer in phase.answers]
    scheduled = [set(names.decode().split()) for _, names, _ in said]
    if undecided is not None and any(scheduled):
        undecided.settle(set.intersection(*scheduled))
        return candidates(tiers, step, ranks, None)
    offers = [offered for _, _, offered in said]
    listed = tuple(Candidate(int(number), bool(in_mirror)) for number, in_mirror, _ in json.loads(said[0][0]))
    in_memory = [] if held is None else held.choose(offers)
    left, began_anew = (tiers.left, tiers.began_anew) if held is None else (held.left, held.began_anew)
    unknown = {number for number, _ in in_memory} | _steps_of(left)
    published = _with_saves(tiers, PublishedCandidates(listed, {}), unknown, ranks)
    ordered = in_order(published, in_memory, (lambda save: 0) if held is None else held.before, left)
    if step is None:
        counts = [each for each in ordered if each.save is not None or published.saves.get(each.step) not in left]
        if counts or not ordered or began_anew:
            return Candidates(counts, published, left)
        raise CheckpointNotFoundError(
            f"{root.path} has no step that training could go on from: the one that was restored last is gone, and "
            f"steps {published.newer_than(-1)} are of the branch that was left then. To go on from one of these, call "
            "restore with its number"
        )
    if any(candidate.step == step for candidate in ordered):
        return Candidates([candidate for candidate in ordered if candidate.step == step], published, left)
    steps = sorted({candidate.step for candidate in ordered})
    where = root.path if mirror is None else f"{root.path}, with its mirror {mirror.path},"
    raise CheckpointNotFoundError(f"{where} has no published step {step}; it has {steps or 'none'}", step=step)


def published_saves(tiers: Tiers, found: Candidates, ranks: Group) -> list[str]:
    """Return the names of all published saves, as far as they are known. Collective."""
    steps = found.published.newer_than(-1)
    saves = _with_saves(tiers, found.published, steps, ranks).saves
    return [save for step in steps if (save := saves.get(step)) is not None]


def _looks(ranks: Group) -> bool:
    """Return whether this rank looks at the root, for all."""
    return ranks.rank == 0 or isinstance(ranks, Alone)


def _with_saves(
    tiers: Tiers, published: PublishedCandidates, steps: Iterable[int], ranks: Group
) -> PublishedCandidates:
    """Return `published` with the saves of these steps, as far as they are published. Collective if any is unknown."""
    unknown = {candidate.step for candidate in published.candidates} & set(steps) - published.saves.keys()
    if not unknown:
        return published

    def look() -> list[tuple[int, str | None]]:
        return list(saves_of(tiers.root, tiers.mirror, unknown).items()) if _looks(ranks) else []

    told = ranks.result_of_first("look for steps", look)
    return PublishedCandidates(published.candidates, {**published.saves, **{int(step): save for step, save in told}})


def _steps_of(saves: Iterable[str]) -> set[int]:
    return {save.step for save in map(parse_save_name, saves) if save is not None}


def _left(tiers: Tiers, found: Candidates, report: RestoreReport, ranks: Group) -> tuple[str, ...]:
    """Return the published saves that training has left with this restore, by name. Collective.

    If it has gone to a step that it had left before, the others of that branch count again.
    """
    newer = found.published.newer_than(report.step)
    published = _with_saves(tiers, found.published, newer, ranks)
    saves = {save for step in newer if (save := published.saves.get(step)) is not None}
    if report.save not in found.left:
        there = set(published.newer_than(-1))
        saves |= {save for save in found.left if _steps_of([save]) & there}
    return tuple(sorted(saves))


@contextlib.contextmanager
def _held(candidate: Candidate, hold: StepHold, ranks: Group, held: StepsInMemory | None) -> Iterator[HeldSource]:
    """Hold a step on all ranks, and raise `_RemovedError` on all of them for an error caused by its removal."""
    if candidate.save is not None and held is not None:
        yield _InMemory(held, candidate.save, ranks)
        return
    try:
        yield hold
    except (CheckpointCorruptError, CheckpointNotFoundError, StorageError) as error:
        if hold.was_removed(error):
            raise _RemovedError(f"step {candidate.step} of {hold.root.path} was removed while it was read") from error
        raise
    finally:
        hold.close()


@dataclass(frozen=True, slots=True)
class _InMemory:
    """A step in memory while it is read."""

    tier: StepsInMemory
    save: str
    ranks: Group
    is_node_local: bool = False
    mirror_files: int = 0

    def open(self) -> StepSource:
        return self.tier.open(self.save, self.ranks)

    def check(self) -> None:
        self.tier.check(self.save)
