"""What the trainer and the writer process of a save tell each other: frozen dataclasses, free of torch.

    trainer --- WriteTask -----------------------------------------------▶ writer
    trainer ◀-- ReplicasDiffer, SlotFree --------------------------------- writer
    trainer ◀-- SharePublished, StepsRemoved, Abandoned, NotDurable ------ writer

The plan is made once for a structure of state. It is in memory of its own, which a writer gets with the first task that
refers to it; the writer keeps what it unpickles of that.
"""

from __future__ import annotations

import functools
import pickle
import weakref
from array import array
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np

from ckpt.native import CHECKSUM_BYTES
from ckpt.paths import Path
from ckpt.ranks.failure import Failure
from ckpt.saving.digests import Digests
from ckpt.saving.lineage import Lineage
from ckpt.saving.recover import Branch
from ckpt.saving.retention import Retention
from ckpt.storage.names import DATABASE_CHUNKS, SaveId
from ckpt.storage.outcomes import Abandoned
from ckpt.storage.pack_writers import ChunkToCompress
from ckpt.storage.stores.interface import StorageOptions
from inprocess.ipc.process import Process
from inprocess.ipc.shared_memory import SharedMemory

Array = np.ndarray[Any, np.dtype[np.int64]]

_STEPS_PER_REPORT = 1000  # of less than 20 bytes each

COORDINATOR = 0
"""The rank whose writer begins and publishes every save."""


@dataclass(frozen=True, slots=True)
class PlannedFile:
    """A file of this rank's pack: `nbytes` bytes at `offset` in the slot, with the chunks `first` to `end` (exclusive).

    With node-local files, one that `is_common` has what several ranks hold, and goes to the root.
    """

    number: int
    offset: int
    nbytes: int
    first: int
    end: int
    is_common: bool = False


@dataclass(frozen=True, eq=False)
class InnerChunks:
    """The inner chunks of all chunks, in the order of the pack, as columns with a row for each chunk.

    `counts` inner chunks of `sizes` bytes begin at `starts` in the slot, each with its checksum behind it.
    """

    starts: Array
    sizes: Array
    counts: Array

    def each(self, first: int, end: int) -> tuple[Array, Array]:
        """Return where the inner chunks of chunks `first` to `end` (exclusive) begin in the slot, and their sizes."""
        counts = self.counts[first:end]
        sizes = np.repeat(self.sizes[first:end], counts)
        within = np.arange(len(sizes)) - np.repeat(np.cumsum(counts) - counts, counts)
        return np.repeat(self.starts[first:end], counts) + within * (sizes + CHECKSUM_BYTES), sizes


@dataclass(frozen=True)
class WritePlan:
    """What a rank's writer does in every save of this structure.

    `to_compress` are the chunks, in the order of `inner_chunks`, if they are to be compressed; their offsets are those
    in their file. `index` is the index of the step, as the coordinator writes it, `aliases` and `containers` (the
    document of each, with the rank that it belongs to, or None) are what its part says of the whole state; empty on
    other ranks. `slot_bytes` is the room that all files need in a slot. With node-local files, `has_own_files` says
    whether any rank has some that are not common.
    """

    rank: int
    world_size: int
    plan_digest: str
    files: tuple[PlannedFile, ...]
    inner_chunks: InnerChunks
    to_compress: tuple[ChunkToCompress, ...]
    index: bytes
    aliases: tuple[tuple[Path, Path], ...]
    containers: tuple[tuple[Path, int | None, Mapping[str, Any]], ...]
    slot_bytes: int
    has_own_files: bool = True


def pickled_plan(plan: WritePlan) -> SharedMemory:
    """Return a plan as the tasks of all its saves hold it."""
    data = pickle.dumps(plan, protocol=pickle.HIGHEST_PROTOCOL)
    region = SharedMemory.create("ckpt-plan", len(data))
    region.buffer[:] = data
    return region


def unpickled_plan(region: SharedMemory) -> WritePlan:
    """Return the plan of a task, which the trainer of this writer has made.

    Kept from one save to the next, with all that it has computed; the region is not.
    """
    return _unpickled_plan(region.region_id, _Unhashed(weakref.ref(region)))


@dataclass(frozen=True)
class _Unhashed:
    """A region, that makes no difference for what is kept."""

    region: weakref.ref[SharedMemory] = field(compare=False)


@functools.lru_cache(maxsize=2)
def _unpickled_plan(_region_id: str, unhashed: _Unhashed) -> WritePlan:
    region = unhashed.region()
    assert region is not None
    plan: WritePlan = pickle.loads(region.buffer)
    return plan


@dataclass(frozen=True, slots=True)
class SaveOptions:
    """How a writer works.

    `commit_timeout_s` bounds every wait for other ranks; `threads` write at once in one process. While they wait, all
    nodes together look for the outcome `looks_per_s` times a second. `node_local` is the directory of this node for
    pack files; None: they are in the root. A step with more than `database_chunks` chunks has no database. With
    `link_unchanged` files that hold the same as in the step before are linked.
    """

    threads: int = 6
    commit_timeout_s: float = 600.0
    retention: Retention = field(default_factory=Retention)
    looks_per_s: float = 50.0
    node_local: str | None = None
    database_chunks: int = DATABASE_CHUNKS
    link_unchanged: bool = False


# Thousands of offsets, the same in each save: pickled one by one they would take longer than a hundred tensors.
@functools.lru_cache(maxsize=8)  # a program may save several states
def pack_offsets(offsets: frozenset[int]) -> bytes:
    """Return a set of offsets as bytes, for a task."""
    return array("Q", offsets).tobytes()


def are_in(data: bytes, offsets: Array) -> np.ndarray[Any, np.dtype[np.bool_]]:
    """Return which of some offsets are among those that `pack_offsets` made these bytes of."""
    packed = _sorted_offsets(data)
    if not len(packed):
        return np.zeros(len(offsets), np.bool_)
    at = np.minimum(np.searchsorted(packed, offsets), len(packed) - 1)
    found: np.ndarray[Any, np.dtype[np.bool_]] = packed[at] == offsets
    return found


@functools.lru_cache(maxsize=2)
def _sorted_offsets(data: bytes) -> Array:
    return np.sort(np.frombuffer(data, np.int64))


@dataclass(frozen=True)
class WriteTask:
    """One rank's share of one save, as its writer process gets it.

    `plan` is of `pickled_plan`. `region` is the slot with the files; they are complete when the 8 bytes at
    `flag_offset` hold `generation`: on CUDA that may be after the call was scheduled. `checksummed` are the offsets in
    the slot, as bytes, of what has its checksum behind it, `contents` names for the bytes of the files, or None: the
    same name of the same file, the same bytes. `values` are the (encoded) leaves that are not tensors,
    `times` what the trainer measured, `replicas` the digests of what other ranks have, too. `lineage` is what the
    coordinator records of the save; with a `branch` it first takes over what earlier owners of the root left.
    `storage` is what else is needed to open the `root`. Steps that were published as the saves in `held` are not
    removed by the coordinator.
    """

    root: str
    save: SaveId
    rank: int
    plan: SharedMemory
    region: SharedMemory
    flag_offset: int
    generation: int
    values: list[Any]
    times: dict[str, float]
    options: SaveOptions
    trainer: Process
    branch: Branch | None = None
    lineage: Lineage = field(default_factory=Lineage)
    checksummed: bytes = b""
    replicas: Digests | None = None
    storage: StorageOptions | None = None
    held: tuple[str, ...] = ()
    contents: tuple[bytes | None, ...] = ()


@dataclass(frozen=True, slots=True)
class SlotFree:
    """Nothing reads the slot any more."""


@dataclass(frozen=True, slots=True)
class ReplicasDiffer:
    """Ranks have different values of these names; the step holds parts of each (`mixed`), or the lowest rank's."""

    names: tuple[str, ...]
    mixed: bool


@dataclass(frozen=True, slots=True)
class SharePublished:
    """The step is published. `nbytes` are what this rank has written.

    `at` is when the writer knew that, `write_begin` when it began to write, by `time.time`; `write_s` and `sync_s` are
    how long that took.
    """

    at: float
    nbytes: int
    write_begin: float
    write_s: float
    sync_s: float


@dataclass(frozen=True, slots=True)
class StepsRemoved:
    """These steps were removed, as the retention says; `left` are published."""

    left: int
    removed: tuple[int, ...]

    @classmethod
    def reports(cls, left: int, removed: Sequence[int]) -> Iterator[StepsRemoved]:
        """Yield the reports of removed steps. Each is small enough for a message."""
        for first in range(0, len(removed), _STEPS_PER_REPORT):
            yield cls(left, tuple(removed[first : first + _STEPS_PER_REPORT]))


@dataclass(frozen=True, slots=True)
class NotDurable:
    """The step is published, but may not survive a loss of power."""

    message: str


Report = SlotFree | ReplicasDiffer | SharePublished | StepsRemoved | Abandoned | NotDurable
"""What a writer tells its trainer while it runs a task."""


def to_event(report: Report) -> dict[str, Any]:
    """Return the report as JSON."""
    match report:
        case SlotFree():
            return {"slot_free": True}
        case ReplicasDiffer(names, mixed):
            return {"differing": list(names), "mixed": mixed}
        case SharePublished():
            return {"published": asdict(report)}
        case StepsRemoved(left, removed):
            return {"removed": list(removed), "left": left}
        case Abandoned(reason):
            return {"abandoned": reason.to_document()}
        case NotDurable(message):
            return {"not_durable": message}


def from_event(event: dict[str, Any]) -> Report:
    """Return the report that `to_event` made this of. ValueError for anything else."""
    match event:
        case {"slot_free": True}:
            return SlotFree()
        case {"differing": names, "mixed": mixed}:
            return ReplicasDiffer(tuple(map(str, names)), bool(mixed))
        case {"published": times}:
            return SharePublished(**times)
        case {"removed": removed, "left": left}:
            return StepsRemoved(int(left), tuple(map(int, removed)))
        case {"abandoned": reason}:
            return Abandoned(Failure.from_document(reason))
        case {"not_durable": message}:
            return NotDurable(str(message))
    raise ValueError(f"not a report of a writer: {event!r:.200}")
