"""What happens in a checkpoint root now, for `watch`: read again and again, cheaply, and without changing anything.

A look costs a few listings, and at most `_MOST_STATS` looks at single files, however many ranks there are: with more
files, evenly spaced ranks stand for all. Documents of published steps are read once. Anything may vanish at any time.
"""

from __future__ import annotations

import os
import re
import shutil
import time
from collections.abc import Mapping
from dataclasses import dataclass

from ckpt.errors import CheckpointError
from ckpt.storage.commit import PartsWatch, PendingSave
from ckpt.storage.directories import names_in
from ckpt.storage.documents import ILL_FORMED, decode_document
from ckpt.storage.leases import EXPIRY_S
from ckpt.storage.names import INDEX, SaveId, pack_file
from ckpt.storage.pack_index import PackIndex
from ckpt.storage.pins import pinned_steps
from ckpt.storage.regular_files import read_document_at
from ckpt.storage.root import INTENT, CheckpointRoot

from .root import why_abandoned
from .step import evenly, part_times, summary_of

__all__ = ["AbandonedSave", "Owner", "PendingProgress", "RankProgress", "RootWatch", "Snapshot", "StepLine"]

_NEWEST_STEPS, _NEWEST_ABANDONED, _SLOWEST = 8, 3, 8
_MOST_STATS = 1000
_MOST_PARTS = 16  # whose times are read of each step
_MOST_FILES_OF_RANK = 10_000
_MAX_INDEX_BYTES = 32 << 20  # a larger one takes seconds to read; then all ranks count alike
_RECYCLED_S = 1.0  # a file older than its save by more than this has the bytes of an earlier one
_CLAIM = re.compile(r"(\d{8,18})\.json")


@dataclass(frozen=True)
class StepLine:
    """A published step. `write_s`: the time to write of the slowest rank of those looked at, None if unknown."""

    step: int
    age_s: float
    bytes: int
    ranks: int
    write_s: float | None
    rate: float | None
    pinned: bool
    note: str = ""


@dataclass(frozen=True)
class RankProgress:
    """How much of its pack a rank has written. `bytes` is None if it is not known how much there will be."""

    rank: int
    written: int
    bytes: int | None

    @property
    def fraction(self) -> float:
        """From 0 to 1; 0 if that is not known."""
        return min(1.0, self.written / self.bytes) if self.bytes else 0.0


@dataclass(frozen=True)
class PendingProgress:
    """A save in flight: how many ranks have completed their `parts`, and how much is written.

    `written` is estimated from `looked_at` ranks, of which `slowest` are some. `bytes` is None if no published step
    says how much there will be, and `about` if only another structure of the state does.
    """

    step: int
    age_s: float
    ranks: int | None
    parts: int
    written: int
    bytes: int | None
    about: bool
    rate: float
    looked_at: int
    slowest: tuple[RankProgress, ...]


@dataclass(frozen=True)
class AbandonedSave:
    """A save that can never be published, and why."""

    step: int
    age_s: float
    why: str


@dataclass(frozen=True)
class Owner:
    """The job that owns the root. `state`: running, finishing (only writers are left), or ended.

    `writers` counts ranks whose writer processes are alive; `lease_age_s` is the time since a process of the job last
    renewed a lease, None if there is none.
    """

    state: str
    who: str
    writers: int
    lease_age_s: float | None


@dataclass(frozen=True)
class Snapshot:
    """What was found at `time` (seconds since 1970). `problem` says why there is nothing to see, if so.

    `steps` counts all published steps, of which `newest` are listed. `fits`: how many more steps of the size of the
    newest one the file system has room for.
    """

    time: float
    root: str
    problem: str = ""
    steps: int = 0
    newest: tuple[StepLine, ...] = ()
    pending: tuple[PendingProgress, ...] = ()
    abandoned: tuple[AbandonedSave, ...] = ()
    owner: Owner | None = None
    free_bytes: int | None = None
    fits: int | None = None


class RootWatch:
    """Looks at a root again and again. One thread. `look` never raises for what is damaged, missing or vanishes."""

    def __init__(self, path: str) -> None:
        self._root = CheckpointRoot(path)
        self._lines: dict[tuple[int, int, float], StepLine] = {}  # by step, inode and time of its root document
        self._parts: dict[str, PartsWatch] = {}
        self._sizes: dict[str, dict[int, list[int]]] = {}  # of the files of each rank, by plan
        self._plan_of_newest = ""
        self._bytes_of_newest: int | None = None

    def look(self) -> Snapshot:
        """Look at everything once."""
        now, path = time.time(), self._root.path
        try:
            steps = self._root.steps()
            if not steps and not os.path.isdir(self._root.pending_path):
                problem = "has no step and no save yet" if os.path.isdir(path) else "does not exist yet"
                return Snapshot(now, path, problem)
            pinned = pinned_steps(path)
            newest = [line for step in steps[: -_NEWEST_STEPS - 1 : -1] if (line := self._line(step, pinned, now))]
            saves = self._root.pending()
            self._parts = {name: watch for name, watch in self._parts.items() if name in {save.name for save in saves}}
            pending = [found for save in saves if (found := self._pending(save, now)) is not None]
            free = shutil.disk_usage(path).free
            fits = free // self._bytes_of_newest if self._bytes_of_newest else None
            owner = _owner(self._root, now)
            abandoned = _abandoned(self._root, now)
        except (CheckpointError, OSError) as error:
            return Snapshot(now, path, str(error))
        return Snapshot(now, path, "", len(steps), tuple(newest), tuple(pending), tuple(abandoned), owner, free, fits)

    # -- published steps -----------------------------------------------------------------------------------------------

    def _line(self, step: int, pinned: set[int], now: float) -> StepLine | None:
        path = self._root.step_path(step)
        try:
            about = os.stat(os.path.join(path, "zarr.json"))
        except OSError:
            return None  # removed meanwhile
        key = step, about.st_ino, about.st_mtime
        line = self._lines.get(key) or self._read_line(step, path)
        self._lines = {known: other for known, other in self._lines.items() if known[0] != step} | {key: line}
        return StepLine(
            step,
            max(0.0, now - about.st_mtime),
            line.bytes,
            line.ranks,
            line.write_s,
            line.rate,
            step in pinned,
            line.note,
        )

    def _read_line(self, step: int, path: str) -> StepLine:
        try:
            summary = summary_of(path)
            parts = part_times(path, summary, _MOST_PARTS)
        except (CheckpointError, OSError) as error:
            return StepLine(step, 0.0, 0, 0, None, None, False, str(error))
        if step >= max((known[0] for known in self._lines), default=0):
            self._plan_of_newest, self._bytes_of_newest = summary["plan"], summary["bytes"]
            self._learn_sizes(summary["plan"], path, summary["world_size"])
        write_s = max(part.write_s + part.sync_s for part in parts)
        seconds = max(part.written for part in parts) - min(part.write_begin for part in parts)
        rate = summary["bytes"] / max(seconds, 1e-6)
        return StepLine(step, 0.0, summary["bytes"], summary["world_size"], write_s, rate, False)

    def _learn_sizes(self, plan: str, path: str, world_size: int) -> None:
        """Keep the sizes of the files of a plan, from the index of a step or save; of the last few plans."""
        where = os.path.join(path, INDEX)
        if plan in self._sizes:
            return
        try:
            if os.stat(where).st_size > _MAX_INDEX_BYTES:
                return
            data = read_document_at(where, _MAX_INDEX_BYTES)
            if data is None:
                return
            files = PackIndex.from_document(decode_document(data, where), world_size).files()
        except (CheckpointError, OSError, *ILL_FORMED):
            return  # not written yet, or only in part
        sizes: dict[int, list[int]] = {}
        for (rank, _), nbytes in sorted(files.items()):
            sizes.setdefault(rank, []).append(nbytes)
        self._sizes = dict([*self._sizes.items()][-3:]) | {plan: sizes}

    # -- saves in flight -----------------------------------------------------------------------------------------------

    def _pending(self, save: SaveId, now: float) -> PendingProgress | None:
        pending = PendingSave(self._root, save)
        try:
            intent = pending.intent()
            about = os.stat(os.path.join(pending.path, INTENT) if intent else pending.path)
        except (CheckpointError, OSError):
            return None  # decided meanwhile
        age_s = max(0.0, now - about.st_mtime)
        if intent is None:
            return PendingProgress(save.step, age_s, None, 0, 0, None, False, 0.0, 0, ())
        world_size, plan = int(intent["world_size"]), str(intent["plan"])
        watch = self._parts.setdefault(save.name, PartsWatch(pending, world_size))
        watch.look()
        self._learn_sizes(plan, pending.path, world_size)
        sizes, total = self._sizes.get(plan, {}), None
        about_total = not sizes
        if sizes:
            total = sum(map(sum, sizes.values()))
        elif self._bytes_of_newest is not None:
            total, about_total = self._bytes_of_newest, plan != self._plan_of_newest
        expected = {rank: sum(files) for rank, files in sizes.items()}
        share = None if total is None or sizes else total // world_size

        def wanted(rank: int) -> int | None:
            return expected.get(rank, 0) if sizes else share

        missing = sorted(watch.missing)
        ranks = missing if total is not None else list(range(world_size))
        written = sum(wanted(rank) or 0 for rank in range(world_size)) - sum(wanted(rank) or 0 for rank in ranks)
        looked = self._look_at(ranks, pending.path, sizes, about.st_mtime)
        sample = [RankProgress(rank, nbytes, wanted(rank)) for rank, nbytes in looked.items()]
        if sample:
            written += sum(each.written for each in sample) * len(ranks) // len(sample)
        slowest = sorted(sample, key=lambda each: (each.fraction, each.written, each.rank))
        unfinished = tuple(each for each in slowest if each.rank in watch.missing)[:_SLOWEST]
        rate = written / max(age_s, 1e-3)
        parts = world_size - len(missing)
        return PendingProgress(
            save.step, age_s, world_size, parts, written, total, about_total, rate, len(sample), unfinished
        )

    def _look_at(self, ranks: list[int], path: str, sizes: Mapping[int, list[int]], since: float) -> dict[int, int]:
        """Return the bytes that ranks have written of a save; of evenly spaced ranks, if they have too many files."""
        files_of = max(map(len, sizes.values()), default=1)
        chosen = [ranks[number] for number in evenly(len(ranks), max(1, _MOST_STATS // files_of))]
        return {rank: _written(path, rank, len(sizes.get(rank, ())) or None, since) for rank in chosen}


def _written(path: str, rank: int, files: int | None, since: float) -> int:
    """Return the bytes that a rank has written since a time. A recycled file counts as soon as it is being changed."""
    total = 0
    for number in range(_MOST_FILES_OF_RANK if files is None else files):
        try:
            about = os.stat(os.path.join(path, pack_file(rank, number)))
        except OSError:
            if files is None:
                break
            continue
        if about.st_mtime >= since - _RECYCLED_S:
            total += about.st_size
    return total


# -- what else there is ------------------------------------------------------------------------------------------------


def _abandoned(root: CheckpointRoot, now: float) -> list[AbandonedSave]:
    """Return the saves that were abandoned last, the newest first."""
    found = []
    for save in root.abandoned():
        try:
            found.append((os.stat(os.path.join(root.abandoned_path, save.name)).st_mtime, save))
        except OSError:
            continue
    rows = []
    for at, save in sorted(found, key=lambda each: -each[0])[:_NEWEST_ABANDONED]:
        try:
            why = why_abandoned(root, save)
        except (CheckpointError, OSError) as error:
            why = str(error)
        rows.append(AbandonedSave(save.step, max(0.0, now - at), why))
    return rows


def _owner(root: CheckpointRoot, now: float) -> Owner | None:
    """Return the owner of the root; None if there is none.

    Unlike `Ownership.state` this writes nothing, so it knows other hosts' processes by the clock of this host.
    """
    ownership = root.ownership
    tokens = [int(match[1]) for name in names_in(ownership.path) if (match := _CLAIM.fullmatch(name))]
    if not tokens:
        return None
    leases = ownership.leases(max(tokens))
    ages = {name: now - at for name in names_in(leases.path) if (at := _changed(leases.path, name)) is not None}
    writers = [w for name, age in ages.items() for w in leases.of_host(name, lambda limit, age=age: abs(age) < limit)]  # type: ignore[misc]
    claim_age = _changed(ownership.path, f"{max(tokens)}.json")
    claimer = ownership.claimer(max(tokens))
    running = any(writer.has_trainer for writer in writers)
    if claimer is not None and not leases.has_left(claimer):
        alive = claimer.alive
        running |= alive if alive is not None else claim_age is not None and now - claim_age < EXPIRY_S
    alive_ranks = {writer.rank for writer in writers if writer.alive}
    state = "running" if running else "finishing" if alive_ranks else "ended"
    newest = min([*ages.values(), *([] if claim_age is None else [now - claim_age])], default=None)
    lease_age_s = None if newest is None else max(0.0, newest)
    return Owner(state, ownership.describe(max(tokens)), len(alive_ranks), lease_age_s)


def _changed(*path: str) -> float | None:
    try:
        return os.stat(os.path.join(*path)).st_mtime
    except OSError:
        return None
