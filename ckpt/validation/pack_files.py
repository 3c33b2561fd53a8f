"""Check every byte of the files of a pack: chunks, the zeros between them, and the checksum of the whole."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Protocol

import numpy as np

from ckpt.errors import CheckpointCorruptError
from ckpt.loading.consistency import array_name
from ckpt.loading.index import CheckpointIndex
from ckpt.native import crc32c
from ckpt.planning.boxes import unravel_index
from ckpt.storage.chunk_codec import check_chunk
from ckpt.storage.files import storage_errors
from ckpt.storage.names import pack_file, part_name
from ckpt.storage.pack_index import StoredArray
from ckpt.storage.regular_files import DamagedFileError
from ckpt.validation.step_files import PackFile, Problem

__all__ = ["PackChecks", "Readable"]


class Readable(Protocol):
    """What can be read at any place, as an `OpenFile`."""

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
