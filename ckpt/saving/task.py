"""What the trainer and the writer process of a save tell each other: frozen dataclasses, free of torch.

    trainer --- WriteTask -----------------------------------------------▶ writer
    trainer ◀-- BatchWritten, ReplicasDiffer, SlotFree, Abandoned, NotDurable --- writer

A task holds the plan as bytes that are made once for a structure of state; the writer keeps what it unpickles of them.
"""

from __future__ import annotations

import functools
import pickle
from array import array
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from ckpt.paths import Path
from ckpt.saving.recover import Branch
from ckpt.saving.replicas import Digests
from ckpt.saving.retention import Retention
from ckpt.storage.array_metadata import ArrayMeta
from ckpt.storage.chunk_codec import WrittenChunk
from ckpt.storage.commit import Abandoned, Reason
from ckpt.storage.documents import EncodedList
from ckpt.storage.names import SaveId
from inprocess.ipc.process import Process
from inprocess.ipc.shared_memory import SharedMemory

__all__ = [
    "COORDINATOR",
    "BatchWritten",
    "NotDurable",
    "PlannedChunk",
    "ReplicasDiffer",
    "Report",
    "SaveOptions",
    "SlotFree",
    "WritePlan",
    "WriteTask",
    "from_event",
    "pack_offsets",
    "to_event",
    "unpack_offsets",
    "unpickled_plan",
]

COORDINATOR = 0
"""The rank whose writer begins and publishes every save."""


@dataclass(frozen=True, slots=True)
class PlannedChunk:
    """One chunk file of this rank: chunk `index` of array number `array`.

    The bytes of the file are at `offset` in the slot of batch number `batch`. A save that fits one slot has
    one batch, number 0.
    """

    array: int
    index: tuple[int, ...]
    offset: int
    buffer_bytes: int
    batch: int


@dataclass(frozen=True)
class WritePlan:
    """What a rank's writer does in every save of this structure.

    `described` are the numbers of the arrays whose metadata this rank writes; `packed` are the entries of the part
    manifest about tensors (or boxes of them) in the pack; `slot_bytes` is what each batch needs at most.
    """

    rank: int
    world_size: int
    plan_digest: str
    directories: tuple[str, ...]
    metas: tuple[ArrayMeta, ...]
    described: tuple[int, ...]
    chunks: tuple[PlannedChunk, ...]
    packed: EncodedList
    aliases: tuple[tuple[Path, Path], ...]
    slot_bytes: int
    batches: int


@functools.lru_cache(maxsize=2)
def unpickled_plan(data: bytes) -> WritePlan:
    """Return the plan in the bytes of a task, which the trainer of this writer has made.

    Kept from one save to the next, with all that it has computed.
    """
    plan: WritePlan = pickle.loads(data)
    return plan


@dataclass(frozen=True, slots=True)
class SaveOptions:
    """How a writer works.

    `commit_timeout_s` bounds every wait for other ranks; `threads` write at once in one process. While they wait, all
    nodes together look for the outcome `looks_per_s` times a second.
    """

    threads: int = 6
    commit_timeout_s: float = 600.0
    retention: Retention = field(default_factory=Retention)
    looks_per_s: float = 50.0


# Thousands of offsets, the same in each save: pickled one by one they would take longer than a hundred tensors.
@functools.lru_cache(maxsize=2)
def pack_offsets(offsets: frozenset[int]) -> bytes:
    """Return a set of offsets as bytes, for a task."""
    return array("Q", offsets).tobytes()


@functools.lru_cache(maxsize=2)
def unpack_offsets(data: bytes) -> frozenset[int]:
    """Return the offsets in the bytes of a task."""
    return frozenset(array("Q", data))


@dataclass(frozen=True)
class WriteTask:
    """One rank's share of one save, or a batch of it, as its writer process gets it.

    `plan` is a pickled `WritePlan`. `region` is the slot with the chunks of batch number `batch`; they are complete
    when the 8 bytes at `flag_offset` hold `generation`: on CUDA that may be after the call was scheduled. `checksummed`
    are the packed offsets in the slot of what has its checksum behind it. `values` are the (encoded) leaves that are
    not tensors, `times` what the trainer measured, `replicas` the digests of what other ranks have, too. `earlier` are
    the chunks that were written with earlier batches. With a `branch` the coordinator first takes over what earlier
    owners of the root left.
    """

    root: str
    save: SaveId
    rank: int
    plan: bytes
    region: SharedMemory
    flag_offset: int
    generation: int
    batch: int
    last: bool
    values: list[Any]
    times: dict[str, float]
    options: SaveOptions
    trainer: Process
    branch: Branch | None = None
    checksummed: bytes = b""
    earlier: tuple[WrittenChunk, ...] = ()
    replicas: Digests | None = None


@dataclass(frozen=True, slots=True)
class SlotFree:
    """Nothing reads the slot any more."""


@dataclass(frozen=True, slots=True)
class BatchWritten:
    """These chunks of a batch are written and durable; the part manifest will list them."""

    chunks: tuple[WrittenChunk, ...]


@dataclass(frozen=True, slots=True)
class ReplicasDiffer:
    """Ranks have different values of these names; the step holds parts of each (`mixed`), or the lowest rank's."""

    names: tuple[str, ...]
    mixed: bool


@dataclass(frozen=True, slots=True)
class NotDurable:
    """The step is published, but may not survive a loss of power."""

    message: str


Report = SlotFree | BatchWritten | ReplicasDiffer | Abandoned | NotDurable
"""What a writer tells its trainer while it runs a task."""


def to_event(report: Report) -> dict[str, Any]:
    """Return the report as JSON."""
    match report:
        case SlotFree():
            return {"slot_free": True}
        case BatchWritten(chunks):
            return {"written": [[chunk.file, chunk.file_bytes, chunk.crc32c] for chunk in chunks]}
        case ReplicasDiffer(names, mixed):
            return {"differing": list(names), "mixed": mixed}
        case Abandoned(reason):
            return {"abandoned": reason.to_document()}
        case NotDurable(message):
            return {"not_durable": message}


def from_event(event: dict[str, Any]) -> Report:
    """Return the report that `to_event` made this of. ValueError for anything else."""
    match event:
        case {"slot_free": True}:
            return SlotFree()
        case {"written": chunks}:
            return BatchWritten(tuple(_written(chunks)))
        case {"differing": names, "mixed": mixed}:
            return ReplicasDiffer(tuple(map(str, names)), bool(mixed))
        case {"abandoned": reason}:
            return Abandoned(Reason.from_document(reason))
        case {"not_durable": message}:
            return NotDurable(str(message))
    raise ValueError(f"not a report of a writer: {event!r:.200}")


def _written(chunks: Iterable[Any]) -> Iterable[WrittenChunk]:
    return (WrittenChunk(str(file), int(file_bytes), int(crc32c)) for file, file_bytes, crc32c in chunks)
