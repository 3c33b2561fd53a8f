"""A share: what a slot holds of a save or a snapshot, so that any process that has its memory can restore from it.

    | chunks ... | last page | about | index | part |
                               behind the mapped memory, see `SharedMemory.write_behind`

    last page, word 0    the generation, set behind the copies
    word 1               the generation that word 0 must have for the copies to be complete
    words 2 to 4         the sizes of the documents
    byte 64 on           the name of the save
    byte 1024 on         samples of tensors on a GPU (see `samples`)

`about` and the index of the step are the same for all saves of a plan, and written once. The part has what a part
manifest has. It is written last, and only with snapshots: a share with its part is whole, and needs no storage. Each
document has a checksum, and the part those of the chunks' checksums, so nothing is taken for a share that is none.

Free of torch; any process. One process writes at a time: the trainer that owns the slot.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import Any

import numpy as np

from ckpt.native import CHECKSUM_BYTES, crc32c
from ckpt.saving.task import WritePlan
from ckpt.storage.documents import MAX_DOCUMENT_BYTES, decode_document, encode_document, well_formed
from ckpt.storage.names import SaveId, parse_save_name
from inprocess.ipc.shared_memory import SharedMemory

Array = np.ndarray[Any, np.dtype[Any]]
HEADER_BYTES = 4096  # a page behind the chunks
SAMPLES_OFFSET = 1024
_WORDS = struct.Struct("<QQ")
_SIZES = struct.Struct("<QQQ")
_NAME_OFFSET = 64
_NAME_BYTES = 256


@dataclass(frozen=True, slots=True)
class PlanDocuments:
    """What all saves of a plan have in common: what a rank writes, and where; on the coordinator also the index."""

    about: bytes
    index: bytes

    @classmethod
    def of(cls, plan: WritePlan) -> PlanDocuments:
        """Return those of a rank."""
        about = {
            "rank": plan.rank,
            "world_size": plan.world_size,
            "plan": plan.plan_digest,
            "aliases": [[list(path), list(target)] for path, target in plan.aliases],
            "containers": [[list(path), rank, document] for path, rank, document in plan.containers],
            "places": [[file.number, file.offset, file.nbytes] for file in plan.files],
        }
        return cls(encode_document(about), _uncompressed(plan.index))


@dataclass(frozen=True, slots=True)
class ShareOf:
    """Whose share a slot holds of which save: that of `rank` among `world_size`, made in iteration `restart`.

    Of two of one rank and iteration, the one with the larger `order` was made later.
    """

    save: SaveId
    rank: int
    world_size: int
    restart: int
    order: int = 0


@dataclass(frozen=True, slots=True)
class ShareDocuments:
    """The documents of a share, decoded: `about`, and the part manifest. `index` is as it was written."""

    about: dict[str, Any]
    index: bytes
    part: dict[str, Any]

    @classmethod
    def decode(cls, about: bytes, index: bytes, part: bytes) -> ShareDocuments:
        """Return the documents in these bytes. CheckpointCorruptError if they are damaged."""
        return cls(decode_document(about, "a share in memory"), index, decode_document(part, "a share in memory"))

    @property
    def of(self) -> ShareOf:
        """Whose share it is. CheckpointCorruptError if the documents do not say."""
        with well_formed("a share in memory"):
            save = parse_save_name(self.part["save"])
            if save is None:
                raise ValueError(f"{self.part['save']!r:.80} is not the name of a save")
            numbers = self.about["rank"], self.about["world_size"], self.part["restart"], self.part.get("order", 0)
            if any(type(number) is not int for number in numbers) or not 0 <= numbers[0] < numbers[1]:
                raise ValueError(f"{numbers!r:.80} are not a rank, a world size, a restart index and an order")
            return ShareOf(save, *numbers)

    def manifest(self) -> dict[str, Any]:
        """Return the part manifest, as a writer would have written it."""
        members = {**self.about, "times": {}, **self.part}
        return {key: value for key, value in members.items() if key not in ("places", "restart", "order", "lineage")}

    @property
    def places(self) -> dict[int, tuple[int, int]]:
        """Where each file of the pack is: by its number, the offset in the slot and the size."""
        with well_formed("a share in memory"):
            return {int(number): (int(offset), int(nbytes)) for number, offset, nbytes in self.about["places"]}


@dataclass(frozen=True, slots=True)
class ShareHeader:
    """The last page of a slot: the name of the save whose copies are all there, and the sizes of the documents."""

    save_name: str | None
    about: int
    index: int
    part: int

    @classmethod
    def decode(cls, page: bytes | memoryview) -> ShareHeader:
        """Return what a page says, whatever is in it."""
        name, _, _ = bytes(page[_NAME_OFFSET : _NAME_OFFSET + _NAME_BYTES]).partition(b"\0")
        arrived, expected = _WORDS.unpack_from(page)
        is_there = name and arrived == expected != 0
        return cls(name.decode(errors="replace") if is_there else None, *_SIZES.unpack_from(page, 16))

    @property
    def is_whole(self) -> bool:
        """Whether the slot holds a share with its part."""
        return bool(self.part) and self.save_name is not None


class Share:
    """The slot with this memory. Reads are as of now: another process may stage over it at any time."""

    def __init__(self, region: SharedMemory) -> None:
        self.region = region

    @property
    def _header(self) -> memoryview:
        return self.region.buffer[self.region.size - HEADER_BYTES :]

    def clear(self) -> None:
        """Mark the slot as empty, before it is staged over, or when what it holds must not be restored any more."""
        header = self._header
        header[_NAME_OFFSET] = 0
        header[8:16] = bytes(8)
        header[32:40] = bytes(8)

    def label(self, save_name: str, generation: int) -> None:
        """Mark the slot as that of a save, whose copies are in it or will be when it has the generation."""
        header = self._header
        name = save_name.encode()
        header[_NAME_OFFSET : _NAME_OFFSET + len(name) + 1] = name + b"\0"
        header[8:16] = struct.pack("<Q", generation)

    @property
    def save_name(self) -> str | None:
        """The name of the save whose copies are all in the slot; None if there is none."""
        return ShareHeader.decode(self._header).save_name

    def describe(self, documents: PlanDocuments) -> None:
        """Write what all saves of a plan have in common. OSError if there is no memory for it."""
        self._header[32:40] = bytes(8)
        self.region.write_behind(0, documents.about + documents.index)
        self._header[16:40] = _SIZES.pack(len(documents.about), len(documents.index), 0)

    def add_part(self, part: dict[str, Any]) -> None:
        """Write the part: with it the share is whole. OSError if there is no memory for it."""
        about, index, _ = _SIZES.unpack_from(self._header, 16)
        data = encode_document(part)
        self.region.write_behind(about + index, data)
        self._header[32:40] = struct.pack("<Q", len(data))

    @property
    def is_whole(self) -> bool:
        """Whether the slot holds a share with its part."""
        return ShareHeader.decode(self._header).is_whole

    @property
    def nbytes(self) -> int:
        """The size of the slot and the documents behind it."""
        about, index, part = _SIZES.unpack_from(self._header, 16)
        return int(self.region.size + about + index + part)

    def raw(self) -> tuple[bytes, bytes, bytes] | None:
        """Return about, index and part as they were written; None if the slot holds no whole share."""
        about, index, part = _SIZES.unpack_from(self._header, 16)
        if not self.is_whole or max(about, index, part) > MAX_DOCUMENT_BYTES:
            return None
        data = self.region.read_behind(0, about + index + part)
        return data[:about], data[about : about + index], data[about + index :]

    def documents(self) -> ShareDocuments | None:
        """Return the documents of a whole share; None if the slot holds none. CheckpointCorruptError if damaged."""
        name, raw = self.save_name, self.raw()
        if name is None or raw is None:
            return None
        documents = ShareDocuments.decode(*raw)
        return documents if documents.part.get("save") == name else None


@dataclass(frozen=True, slots=True)
class ChunksInSlot:
    """The inner chunks in a slot, in order: where each is, its size, and the checksum that is behind it.

    `files` has size and checksum of each file of the pack by its number, as a part manifest.
    """

    starts: Array
    sizes: Array
    checksums: Array
    files: dict[int, tuple[int, int]]

    def numbers(self, offsets: Array) -> Array:
        """Return which of them are at these offsets of the slot."""
        return np.searchsorted(self.starts, offsets, "right") - 1


def chunks_in_slot(plan: WritePlan, region: SharedMemory) -> ChunksInSlot:
    """Return what a slot holds that was staged by this plan, as far as its checksums tell."""
    memory = np.frombuffer(region.buffer, np.uint8)
    starts, sizes = plan.inner_chunks.each(0, len(plan.inner_chunks.starts))
    behind = memory[(starts + sizes)[:, np.newaxis] + np.arange(CHECKSUM_BYTES)]
    ends = np.cumsum(plan.inner_chunks.counts)
    files = {}
    for file in plan.files:
        first = int(ends[file.first - 1]) if file.first else 0
        files[file.number] = file.nbytes, crc32c(behind[first : ends[file.end - 1]].tobytes())
    return ChunksInSlot(starts, sizes, behind.copy().view("<u4").reshape(-1), files)


def _uncompressed(index: bytes) -> bytes:
    """Return the index of what is in slots, which is never compressed."""
    document = decode_document(index, "the index") if b'"compression"' in index else None
    if document is None:
        return index
    arrays = [{key: value for key, value in array.items() if key != "compression"} for array in document["arrays"]]
    return encode_document({**document, "arrays": arrays})
