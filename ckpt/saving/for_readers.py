"""The files of a step for other programs: references for fsspec, and a database for tensorstore.

Both follow from the index, but for the places of compressed chunks, which the parts say. So the coordinator's writer
makes them while it writes its pack, once for all saves of a plan, and the database of a step with compressed chunks is
made at the commit. Nothing of a restore reads them.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from ckpt.errors import CheckpointCorruptError
from ckpt.storage.documents import decode_document, digest, well_formed
from ckpt.storage.names import INDEX, MANIFEST, NODES, REFERENCES
from ckpt.storage.ocdbt import MAX_TEXT_BYTES, database
from ckpt.storage.pack_index import PackIndex
from ckpt.storage.regions import Numbers
from ckpt.storage.zarr_entries import Hierarchy, chunk_count
from ckpt.storage.zarr_names import array_names, array_texts, references

ABSENT = "without_ocdbt"
"""The member of the summary that says why there is no database."""

IN_PART = "ocdbt"
"""The member of the coordinator's part: whether it has written the database, or the reason why there is to be none.

False: it is to be made at the commit. Parts of earlier versions have no such member.
"""


@dataclass(frozen=True, slots=True)
class PlanFiles:
    """The common parts of all saves of a plan: files by name, and the member `IN_PART`."""

    files: Mapping[str, bytes]
    in_part: bool | str


@functools.lru_cache(maxsize=2)
def files_of_plan(index: bytes, world_size: int, most_chunks: int, *, scattered: bool = False) -> PlanFiles:
    """Return the files for other programs that an index alone determines.

    Of steps with up to `most_chunks` chunks whose pack files are not `scattered` over several places, the database is
    one of them, unless chunks are compressed.
    """
    packs = PackIndex.from_document(decode_document(index, INDEX), world_size)
    texts = array_texts(array_names(packs))
    files = {REFERENCES: references(packs, texts)}
    if scattered:
        return PlanFiles(files, "pack files are on the disks of nodes: a copy in a mirror can have it")
    reason = _reason_against(packs, texts, most_chunks)
    if reason is None and not packs.compressed:
        return PlanFiles(files | database_files(Hierarchy.of(packs, texts)), True)
    return PlanFiles(files, reason or False)


def _reason_against(packs: PackIndex, texts: Mapping[str, bytes], most_chunks: int) -> str | None:
    """Return why a step is to have no database."""
    chunks, longest = chunk_count(packs), max(map(len, texts.values()), default=0)
    if chunks > most_chunks:
        return f"{chunks} chunks are more than {most_chunks}: inspect_ckpt index makes it"
    if longest > MAX_TEXT_BYTES:
        return f"the metadata of an array has {longest} bytes, and tensorstore takes {MAX_TEXT_BYTES}"
    return None


def database_files(hierarchy: Hierarchy, compressed: Numbers | None = None) -> dict[str, bytes]:
    """Return the two files of the database. Arguments and errors are those of `Hierarchy.entries`."""
    manifest, nodes = database(hierarchy.entries(compressed))
    return {MANIFEST: manifest, NODES: nodes}


class DatabaseOfParts:
    """The database of a save, for the process that publishes it: found, made, or absent.

    `made` has its files if these are to be written.
    """

    def __init__(self, index: bytes, world_size: int, read: Callable[[str], bytes]) -> None:
        self.made: dict[str, bytes] = {}
        self._index = index
        self._world_size = world_size
        self._read = read
        self._in_part: Any = None
        self._rows = list[Numbers]()

    def take(self, rank: int, part: Mapping[str, Any]) -> None:
        """Take in a part, in the order of ranks. One of `ILL_FORMED` if it is invalid."""
        if rank == 0:
            self._in_part = part.get(IN_PART)
        if not self._in_part:
            self._rows.append(np.array(part.get("chunks", []), np.int64).reshape(-1, 5))

    def summary(self, path: str) -> dict[str, Any]:
        """Return its members of the summary. CheckpointCorruptError if the parts of the save at `path` are damaged."""
        if self._in_part is None or isinstance(self._in_part, str):
            return {ABSENT: self._in_part or "an earlier version began the save: inspect_ckpt index makes it"}
        if self._in_part:
            with contextlib.suppress(CheckpointCorruptError):  # a file is missing: both are made again
                return {name: digest(self._read(name)) for name in (MANIFEST, NODES)}
        hierarchy = _hierarchy(self._index, self._world_size)
        with well_formed(f"{path}/parts"):
            self.made = database_files(hierarchy, np.concatenate(self._rows) if self._rows else None)
        return {name: digest(data) for name, data in self.made.items()}


# The places of compressed chunks differ from save to save, and nothing else does.
@functools.lru_cache(maxsize=1)
def _hierarchy(index: bytes, world_size: int) -> Hierarchy:
    return Hierarchy.of(PackIndex.from_document(decode_document(index, INDEX), world_size))
