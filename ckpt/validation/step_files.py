"""Read the documents of an untrusted step, list the files that they describe, and check the files of packs.

Every document must have a correct checksum and be consistent with the others. Nothing outside the step is opened.
Of pack files every byte is checked: chunks, the zeros between them, and the checksum of the whole.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Protocol

import numpy as np

from ckpt.errors import CheckpointCorruptError, CheckpointError, FormatVersionError, StorageError
from ckpt.loading.consistency import array_name
from ckpt.loading.index import CheckpointIndex, chunk_table, items, parse_index, sizes
from ckpt.native import crc32c
from ckpt.planning.boxes import unravel_index
from ckpt.storage.chunk_codec import check_chunk
from ckpt.storage.documents import (
    FORMAT_VERSION,
    ILL_FORMED,
    MAX_DOCUMENT_BYTES,
    canonical_json,
    decode_document,
    decode_root,
    is_recorded,
)
from ckpt.storage.files import storage_errors
from ckpt.storage.names import INDEX, MANIFEST, NODES, REFERENCES, pack_file, part_name
from ckpt.storage.pack_index import StoredArray
from ckpt.storage.regular_files import DamagedFileError
from ckpt.storage.step_source import StepSource, step_source


@dataclass(frozen=True, slots=True)
class Problem:
    """A problem of a step. `file` is relative to the step, `rank` wrote it; unknown members are None.

    If it is `fatal`, a restore of this step fails. Other problems leave every tensor and value readable.
    """

    message: str
    file: str | None = None
    tensor: str | None = None
    chunk: tuple[int, ...] | None = None
    rank: int | None = None
    fatal: bool = False


@dataclass(frozen=True, slots=True)
class PackFile:
    """A file of a pack: `nbytes` and `crc32c` are as its writer recorded them, None if the writer's part is damaged."""

    name: str
    rank: int
    number: int
    nbytes: int | None = None
    crc32c: int | None = None


@dataclass
class StepFiles:
    """The files of a step according to its metadata: the parts by rank, the files of packs, the names of documents.

    Those that are `optional` are there all together or not at all.
    """

    index: CheckpointIndex
    parts: dict[int, dict[str, Any]] = field(default_factory=dict)
    packs: list[PackFile] = field(default_factory=list)
    documents: set[str] = field(default_factory=set)
    optional: set[str] = field(default_factory=set)


def read_step_files(step: str | StepSource, problems: list[Problem]) -> StepFiles:
    """Read all metadata of a step, a source or a directory, and add the problems of single documents to `problems`.

    Raises CheckpointCorruptError if the root, the index or the state document is damaged: nothing else can be checked
    then.
    """
    source = step_source(step)
    try:
        index = parse_index(source)
    except CheckpointCorruptError:
        _find_mixed_saves(source, problems)
        raise
    except FormatVersionError:
        _check_that_only_the_version_differs(source)
        raise
    files = StepFiles(index)
    summary = index.summary
    files.documents |= {"zarr.json", INDEX, "state.json", "intent.json"}
    intent = _read_json(source, "intent.json", None, problems, 0, fatal=False)
    if intent is not None and intent != {key: summary.get(key) for key in intent}:
        problems.append(Problem("the intent belongs to another save", "intent.json", rank=0))
    for name, member in ((REFERENCES, "references"), (MANIFEST, MANIFEST), (NODES, NODES)):
        if member in summary:
            _check_for_readers(source, name, summary[member], files, problems)
    if MANIFEST not in summary:
        files.optional |= {MANIFEST, NODES}
    expected = index.packs.files()
    for rank, checksum in enumerate(summary["parts"]):
        files.documents.add(part_name(rank))
        part = _read_json(source, part_name(rank), checksum, problems, rank, fatal=index.packs.compressed)
        if part is not None:
            _add_part(files, rank, part, expected, problems)
    for rank, number in expected:
        if rank in files.parts:
            problems.append(Problem("no rank wrote this file", pack_file(rank, number), rank=rank, fatal=True))
        else:
            files.packs.append(PackFile(pack_file(rank, number), rank, number))
    return files


def _check_for_readers(source: StepSource, name: str, recorded: Any, files: StepFiles, problems: list[Problem]) -> None:
    files.documents.add(name)
    try:
        data = read_document(source, name)
        if not is_recorded(data, recorded):
            problems.append(Problem("differs from what the root says", name, rank=0))
    except CheckpointCorruptError as error:
        problems.append(Problem(str(error), name, rank=0))


def _find_mixed_saves(source: StepSource, problems: list[Problem]) -> None:
    """Report whether root and intent are of different saves, after root and state were found not to match."""
    try:
        root = decode_root(read_document(source, "zarr.json"), "zarr.json")["attributes"]["ckpt"]
        intent = decode_document(read_document(source, "intent.json"), "intent.json")
        if intent["save"] != root["save"]:
            message = f"the root is of save {root['save']}, the intent of {intent['save']}: one is from another save"
            problems.append(Problem(message, "zarr.json", rank=0, fatal=True))
    except (CheckpointError, *ILL_FORMED):
        return


def _check_that_only_the_version_differs(source: StepSource) -> None:
    """Raise CheckpointCorruptError if only the version number is damaged: the checksum fits the current version."""
    where = os.path.join(source.path, "zarr.json")
    try:
        document = json.loads(read_document(source, "zarr.json"))
        summary = document["attributes"]["ckpt"]
        newer, summary["format"], checksum = summary["format"], FORMAT_VERSION, summary.pop("crc32c")
        if crc32c(canonical_json(document)) == checksum:
            raise CheckpointCorruptError(
                f"{where} is damaged: it says format {newer}, but its checksum fits {FORMAT_VERSION}"
            )
    except ILL_FORMED:
        return


def _read_json(
    source: StepSource, name: str, checksum: int | None, problems: list[Problem], rank: int, *, fatal: bool
) -> dict[str, Any] | None:
    try:
        data = read_document(source, name)
        if checksum is None:
            return decode_document(data, name)
        document = decode_document(data, name)
        if crc32c(data) == checksum:
            return document
        raise CheckpointCorruptError(f"{name} is not the one that belongs to this step: it is from another save")
    except CheckpointCorruptError as error:
        problems.append(Problem(str(error), name, rank=rank, fatal=fatal))
        return None


def read_document(step: str | StepSource, name: str) -> bytes:
    """Return the content of a document of a step, a source or a directory.

    CheckpointCorruptError if it is missing, too large or no regular file, or if there is a symbolic link in its path;
    StorageError if it cannot be read.
    """
    source = step_source(step)
    full = os.path.join(source.path, name)
    try:
        return source.read(name, MAX_DOCUMENT_BYTES)
    except DamagedFileError as damage:
        raise CheckpointCorruptError(f"{full} {damage}") from None
    except OSError as error:
        raise StorageError(f"cannot read {full}: {error.strerror}") from error


def _add_part(
    files: StepFiles,
    rank: int,
    part: dict[str, Any],
    missing: dict[tuple[int, int], int],
    problems: list[Problem],
) -> None:
    """Add the files that a part lists, and remove them from those that are `missing`."""
    name, summary = part_name(rank), files.index.summary
    expected = {key: summary[key] for key in ("save", "plan", "world_size")} | {"rank": rank}
    wrong = [key for key, value in expected.items() if part.get(key) != value]
    if wrong:
        fatal = files.index.packs.compressed  # then it says where the chunks are
        problems.append(Problem(f"the part differs from the root in {', '.join(wrong)}", name, rank=rank, fatal=fatal))
        return
    try:
        listed = [sizes(entry) for entry in items(part["files"])]
        packs = [PackFile(pack_file(rank, number), rank, number, nbytes, crc) for number, nbytes, crc in listed]
        chunk_table(part)
    except ILL_FORMED as error:
        message, fatal = f"the part is invalid: {error!r:.200}", files.index.packs.compressed
        problems.append(Problem(message, name, rank=rank, fatal=fatal))
        return
    files.parts[rank] = part
    for pack in packs:
        if missing.pop((rank, pack.number), None) is None:
            problems.append(
                Problem(f"the part lists {pack.name}, which has no chunks or is listed twice", name, rank=rank)
            )
        else:
            files.packs.append(pack)


# -- pack files --------------------------------------------------------------------------------------------------------


class Readable(Protocol):
    """A file that can be read at any place, such as an `OpenFile`."""

    def read(self, offset: int, nbytes: int) -> bytes | memoryview: ...
    def read_into(self, memory: memoryview, offset: int) -> int: ...


@dataclass(frozen=True, slots=True)
class _Chunk:
    """A chunk of an array, number `copy` in C order of the grid, and its place in a file."""

    array: StoredArray
    copy: int
    offset: int
    nbytes: int

    @property
    def index(self) -> tuple[int, ...]:
        return unravel_index(self.copy, self.array.meta.grid_shape)


@dataclass
class PackChecks:
    """The checks of the files of one step. Any thread."""

    index: CheckpointIndex
    _members: list[list[StoredArray]] = field(init=False)

    def __post_init__(self) -> None:
        self._members = self.index.packs.arrays_of_regions()

    @cached_property
    def _copies(self) -> dict[tuple[int, int], list[tuple[int, int]]]:
        """The regions in each file, by rank and number: the number of the region and of the copy."""
        copies: dict[tuple[int, int], list[tuple[int, int]]] = {}
        for number, region in enumerate(self.index.packs.regions):
            for copy, place in enumerate(zip(region.ranks.tolist(), region.files.tolist(), strict=True)):
                copies.setdefault(place, []).append((number, copy))
        return copies

    def table_problems(self, rank: int) -> Iterator[Problem]:
        """Yield what is wrong with the places of the compressed chunks of a rank whose part is valid."""
        packs, wanted = self.index.packs, self._compressed.get(rank, set())
        table = {} if packs.table is None or not wanted else packs.table(rank)
        for number, copy in sorted(table.keys() - wanted):
            message = f"the part lists chunk {copy} of array {number}, which this rank does not have"
            yield Problem(message, part_name(rank), rank=rank)
        for number, copy in sorted(wanted - table.keys()):
            array = packs.arrays[number]
            index = unravel_index(copy, array.meta.grid_shape)
            yield Problem("no part says where this chunk is", None, array_name(array), index, rank, fatal=True)
        for number, copy in sorted(wanted & table.keys()):
            file = table[number, copy][0]
            if (rank, file) not in self._copies:
                array = packs.arrays[number]
                index = unravel_index(copy, array.meta.grid_shape)
                message = f"the part says that this chunk is in {pack_file(rank, file)}, which the step does not have"
                yield Problem(message, part_name(rank), array_name(array), index, rank, fatal=True)

    @cached_property
    def _compressed(self) -> dict[int, set[tuple[int, int]]]:
        """The compressed chunks that each rank has: the number of the array and of the copy."""
        found: dict[int, set[tuple[int, int]]] = {}
        for (rank, _), copies in self._copies.items():
            for region, copy in copies:
                for array in self._members[region]:
                    if array.meta.compression is not None:
                        found.setdefault(rank, set()).add((array.number, copy))
        return found

    def check(self, pack: PackFile, size: int, buffer: memoryview) -> list[Problem]:
        """Read a file of `size` bytes, and return its problems. `buffer` is for this thread.

        StorageError if it cannot be read.
        """
        path = os.path.join(self.index.path, pack.name)
        try:
            with storage_errors("read", path):
                file = self.index.source.open(pack.name)
                try:
                    return self.check_file(pack, file, size, buffer)
                finally:
                    file.close()
        except DamagedFileError as damage:
            return [Problem(str(damage), pack.name, rank=pack.rank, fatal=True)]

    def check_file(self, pack: PackFile, file: Readable, size: int, buffer: memoryview) -> list[Problem]:
        """Check an open file, which may be a copy, as `check` does."""
        try:
            return _check(self._chunks(pack), pack, _Window(file, size, buffer))
        except (DamagedFileError, CheckpointCorruptError) as damage:
            return [Problem(str(damage), pack.name, rank=pack.rank, fatal=True)]

    def _chunks(self, pack: PackFile) -> list[_Chunk]:
        """Return the chunks in a file, in order. Raises as `PackIndex.table`."""
        packs, chunks = self.index.packs, []
        compressed = False
        for number, copy in self._copies.get((pack.rank, pack.number), ()):
            start = int(packs.regions[number].starts[copy])
            for array in self._members[number]:
                if array.meta.compression is not None:
                    compressed = True
                    continue
                nbytes = array.meta.encoded_bytes(unravel_index(copy, array.meta.grid_shape))
                chunks.append(_Chunk(array, copy, start + array.offset, nbytes))
        if compressed and packs.table is not None:
            wanted = self._compressed[pack.rank]
            for (array_number, copy), (file, offset, nbytes) in packs.table(pack.rank).items():
                if file == pack.number and (array_number, copy) in wanted:
                    chunks.append(_Chunk(packs.arrays[array_number], copy, offset, nbytes))
        return sorted(chunks, key=lambda chunk: chunk.offset)


def _check(chunks: list[_Chunk], pack: PackFile, window: _Window) -> list[Problem]:
    problems: list[Problem] = []
    checksums = b""
    end = 0
    for chunk in chunks:
        try:
            if chunk.offset < end:
                raise DamagedFileError(f"has another chunk in the same place, offset {chunk.offset}")
            if chunk.offset + chunk.nbytes > window.size:
                raise DamagedFileError(f"ends at offset {window.size}")
            if not window.is_zero(end, chunk.offset):
                message = f"has other bytes than zeros before offset {chunk.offset}"
                problems.append(Problem(message, pack.name, rank=pack.rank))
            checksums += check_chunk(chunk.array.meta, chunk.index, chunk.nbytes, window.of_chunk(chunk))
        except DamagedFileError as damage:
            message = f"{damage}; the chunk is at offset {chunk.offset}"
            name = array_name(chunk.array)
            problems.append(Problem(message, pack.name, name, chunk.index, pack.rank, fatal=True))
        end = max(end, chunk.offset + chunk.nbytes)
    if end != window.size:
        problems.append(Problem(f"has {window.size} bytes instead of {end}", pack.name, rank=pack.rank))
    if not problems and pack.crc32c is not None and crc32c(checksums) != pack.crc32c:
        message = "holds other data than its writer recorded: a file of another place, step or save"
        problems.append(Problem(message, pack.name, rank=pack.rank, fatal=True))
    return problems


class _Window:
    """A file that is read in order, with a buffer. What is returned is overwritten by the next read."""

    def __init__(self, file: Readable, size: int, buffer: memoryview) -> None:
        self.size = size
        self._file = file
        self._buffer = buffer
        self._start = 0
        self._bytes = 0

    def of_chunk(self, chunk: _Chunk) -> Any:
        """Return a function that reads bytes of a chunk, and have the chunk in the buffer if it fits."""
        if chunk.nbytes <= len(self._buffer):
            self.read(chunk.offset, chunk.nbytes)
        return lambda offset, size: self.read(chunk.offset + offset, size)

    def read(self, offset: int, size: int) -> bytes | memoryview:
        """Return bytes of the file, fewer at its end."""
        if not self._start <= offset <= offset + size <= self._start + self._bytes:
            if size > len(self._buffer):
                return self._file.read(offset, size)
            self._bytes = 0
            while self._bytes < size:  # a file system may return less
                count = self._file.read_into(self._buffer[self._bytes :], offset + self._bytes)
                self._bytes += count
                if not count:
                    break
            self._start = offset
        return self._buffer[offset - self._start : min(offset - self._start + size, self._bytes)]

    def is_zero(self, start: int, end: int) -> bool:
        """Return whether all bytes of a range are zero."""
        while start < end:
            part = self.read(start, min(end - start, len(self._buffer)))
            if not len(part) or np.frombuffer(part, np.uint8).any():
                return False
            start += len(part)
        return True
