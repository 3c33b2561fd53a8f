"""What happens in a checkpoint root now, for `watch`: read again and again, cheaply, and without changing anything.

A look costs a few listings, and at most `_MOST_STATS` looks at single files, however many ranks there are: with more
files, evenly spaced ranks stand for all. In an object store, one list for each 1,000 objects of a save in flight tells
the same of all ranks. Documents of published steps are read once. Anything may vanish at any time.
"""

from __future__ import annotations

import os
import re
import shutil
import time
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from ckpt.errors import CheckpointError
from ckpt.storage.documents import ILL_FORMED, decode_document
from ckpt.storage.interface import Root
from ckpt.storage.names import INDEX, SaveId, pack_file, parse_save_name
from ckpt.storage.ownership import OwnerState
from ckpt.storage.pack_index import PackIndex
from ckpt.storage.parts_watch import PartsWatch
from ckpt.storage.regular_files import DamagedFileError
from ckpt.storage.root import CheckpointRoot
from ckpt.storage.roots import open_root
from ckpt.storage.step_source import LocalStep, StepSource

from .root import why_abandoned
from .step import evenly, part_times, summary_of

_NEWEST_STEPS, _NEWEST_ABANDONED, _SLOWEST = 8, 3, 8
_MOST_STATS = 1000
_MOST_PARTS = 16  # whose times are read of each step
_MOST_FILES_OF_RANK = 10_000
_MAX_INDEX_BYTES = 32 << 20  # a larger one takes seconds to read; then all ranks count alike
_RECYCLED_S = 1.0  # a file older than its save by more than this has the bytes of an earlier one
_STATES = MappingProxyType({OwnerState.ACTIVE: "running", OwnerState.FINISHING: "finishing", OwnerState.GONE: "ended"})
_PACK = re.compile(r"packs/\d+/rank_(\d{5,})_\d+")


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
    newest one the file system has room for; unknown, as `free_bytes`, in an object store.
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
        self._root = open_root(path)
        self._lines: dict[tuple[int, float], StepLine] = {}  # by step, and when it was published
        self._parts: dict[str, PartsWatch] = {}
        self._sizes: dict[str, dict[int, list[int]]] = {}  # of the files of each rank, by plan
        self._plan_of_newest = ""
        self._bytes_of_newest: int | None = None

    def look(self) -> Snapshot:
        """Look at everything once."""
        now, path = time.time(), self._root.path
        try:
            steps = self._root.steps()
            if not steps and (problem := _nothing_there(self._root)):
                return Snapshot(now, path, problem)
            pinned = self._root.pinned_steps()
            newest = [line for step in steps[: -_NEWEST_STEPS - 1 : -1] if (line := self._line(step, pinned, now))]
            saves = self._root.pending()
            self._parts = {name: watch for name, watch in self._parts.items() if name in {save.name for save in saves}}
            pending = [found for save in saves if (found := self._pending(save, now)) is not None]
            free = shutil.disk_usage(path).free if isinstance(self._root, CheckpointRoot) else None
            fits = free // self._bytes_of_newest if free is not None and self._bytes_of_newest else None
            owner = _owner(self._root, now)
            abandoned = _abandoned(self._root, now)
        except (CheckpointError, OSError) as error:
            return Snapshot(now, path, str(error))
        return Snapshot(now, path, "", len(steps), tuple(newest), tuple(pending), tuple(abandoned), owner, free, fits)

    # -- published steps -----------------------------------------------------------------------------------------------

    def _line(self, step: int, pinned: set[int], now: float) -> StepLine | None:
        try:
            source, published_s = self._root.source_of(step), self._root.published_s(step)
        except CheckpointError:
            return None  # removed meanwhile
        key = step, published_s
        line = self._lines.get(key) or self._read_line(step, source)
        self._lines = {known: other for known, other in self._lines.items() if known[0] != step} | {key: line}
        return StepLine(
            step,
            max(0.0, now - published_s),
            line.bytes,
            line.ranks,
            line.write_s,
            line.rate,
            step in pinned,
            line.note,
        )

    def _read_line(self, step: int, source: StepSource) -> StepLine:
        try:
            summary = summary_of(source)
            parts = part_times(source, summary, _MOST_PARTS)
        except (CheckpointError, OSError) as error:
            return StepLine(step, 0.0, 0, 0, None, None, False, str(error))
        if step >= max((known[0] for known in self._lines), default=0):
            self._plan_of_newest, self._bytes_of_newest = summary["plan"], summary["bytes"]
            self._learn_sizes(summary["plan"], source, summary["world_size"])
        write_s = max(part.write_s + part.sync_s for part in parts)
        seconds = max(part.written for part in parts) - min(part.write_begin for part in parts)
        rate = summary["bytes"] / max(seconds, 1e-6)
        return StepLine(step, 0.0, summary["bytes"], summary["world_size"], write_s, rate, False)

    def _learn_sizes(self, plan: str, source: StepSource, world_size: int) -> None:
        """Keep the sizes of the files of a plan, from the index of a step or save; of the last few plans."""
        if plan in self._sizes:
            return
        try:
            document = decode_document(source.read(INDEX, _MAX_INDEX_BYTES), os.path.join(source.path, INDEX))
            files = PackIndex.from_document(document, world_size, stored_bytes=lambda: source.usage()[0]).files()
        except (CheckpointError, DamagedFileError, OSError, *ILL_FORMED):
            return  # not written yet, or only in part; or too large
        sizes: dict[int, list[int]] = {}
        for (rank, _), nbytes in sorted(files.items()):
            sizes.setdefault(rank, []).append(nbytes)
        self._sizes = dict([*self._sizes.items()][-3:]) | {plan: sizes}

    # -- saves in flight -----------------------------------------------------------------------------------------------

    def _pending(self, save: SaveId, now: float) -> PendingProgress | None:
        pending = self._root.pending_save(save)
        try:
            intent, begun_s = pending.intent(), pending.begun_s()
        except CheckpointError:
            return None  # decided meanwhile
        age_s = max(0.0, now - begun_s)
        if intent is None:
            return PendingProgress(save.step, age_s, None, 0, 0, None, False, 0.0, 0, ())
        world_size, plan = int(intent["world_size"]), str(intent["plan"])
        watch = self._parts.setdefault(save.name, PartsWatch(pending, world_size))
        watch.look()
        self._learn_sizes(plan, pending.source, world_size)
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
        looked = self._look_at(ranks, pending.source, sizes, begun_s)
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

    def _look_at(
        self, ranks: list[int], source: StepSource, sizes: Mapping[int, list[int]], since: float
    ) -> dict[int, int]:
        """Return the bytes that ranks have written of a save; of evenly spaced ranks, if they have too many files."""
        if not isinstance(source, LocalStep):
            return _listed(source, ranks)
        path = source.path
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


def _listed(source: StepSource, ranks: list[int]) -> dict[int, int]:
    """Return the bytes of the pack files of ranks, by a list of all files of a save in an object store."""
    found = dict.fromkeys(ranks, 0)
    for name, nbytes in source.scan()[0].items():
        if (match := _PACK.fullmatch(name)) is not None and int(match[1]) in found:
            found[int(match[1])] += nbytes
    return found


# -- what else there is ------------------------------------------------------------------------------------------------


def _nothing_there(root: Root) -> str:
    """Return why there is nothing to see in a root without steps; "" if there are saves."""
    if isinstance(root, CheckpointRoot):
        if os.path.isdir(root.pending_path):
            return ""
        return "has no step and no save yet" if os.path.isdir(root.path) else "does not exist yet"
    return "" if root.ownership.newest() else "has no step and no save yet"


def _abandoned(root: Root, now: float) -> list[AbandonedSave]:
    """Return the saves that were abandoned last, the newest first."""
    rows = []
    for moved in sorted(root.moved("abandoned"), key=lambda each: -each.since_s)[:_NEWEST_ABANDONED]:
        save = parse_save_name(moved.name)
        if save is None:
            continue
        try:
            why = why_abandoned(root, save)
        except (CheckpointError, OSError) as error:
            why = str(error)
        rows.append(AbandonedSave(save.step, max(0.0, now - moved.since_s), why))
    return rows


def _owner(root: Root, now: float) -> Owner | None:
    """Return the owner of the root; None if there is none. Unlike `Ownership.state` this writes nothing."""
    found = root.ownership.overview(now)
    if found is None:
        return None
    return Owner(_STATES[found.state], root.ownership.describe(found.token), found.writers, found.renewed_s)
