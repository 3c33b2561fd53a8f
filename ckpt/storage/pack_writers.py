"""Write the files of a pack: straight from memory, or with compressed chunks.

A file is staged as it is to be on disk, but for checksums that are not known yet. They are filled in where the file
lies in memory, and it is written with O_DIRECT: no copy, no page cache. Of compressed chunks each inner chunk is
compressed from there, and they are written one behind the other, a few MiB at a time.

Runs in a writer process. `write` may be called from several threads at once (4 to 8 keep a local disk busy). Nothing is
durable before `finish`. After an error the save cannot be completed; its files are left for clean-up.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from threading import Lock
from typing import Any

import numpy as np

from ckpt.errors import StorageError
from ckpt.native import CHECKSUM_BYTES, RUN, copy_runs, crc32c
from ckpt.storage.array_metadata import ArrayMeta
from ckpt.storage.attempts import TriesAgain, never, until_written
from ckpt.storage.chunk_layout import PAGE_BYTES, checksum_to_bytes, in_pages
from ckpt.storage.compression import Compressor
from ckpt.storage.directories import make_directories
from ckpt.storage.files import (
    FileIdentity,
    exists_alone,
    holds,
    identity,
    link,
    remove,
    sync_files,
    write_new,
    write_pages,
)
from ckpt.storage.links import refuse_link
from ckpt.storage.names import pack_file
from ckpt.storage.pack_index import ALIGNMENT

Array = np.ndarray[Any, np.dtype[Any]]
_BUFFER_BYTES = 4 << 20  # so much is compressed before it is written
StoresBlock = Callable[[memoryview, int, int], None]  # whole pages, how many bytes of them count, and where they begin
_LEFT_OUT = np.uint64(2**64 - 1)  # of an inner chunk that lies outside of the array


@dataclass(frozen=True, slots=True)
class WrittenFile:
    """File `number` of a pack, of `nbytes` bytes; `crc32c` is the checksum of its inner chunks' checksums, in order.

    `chunks` are those that are compressed: number of the array, number of the chunk, offset in the file, bytes. If it
    `is_linked`, it was not written: it is the file of an earlier step.
    """

    number: int
    nbytes: int
    crc32c: int
    chunks: tuple[tuple[int, int, int, int], ...] = ()
    is_linked: bool = False


@dataclass(frozen=True, slots=True)
class ChunkToCompress:
    """The chunk number `copy`, at `index` of the grid of array number `array`; its layout begins at `offset`."""

    array: int
    copy: int
    index: tuple[int, ...]
    meta: ArrayMeta
    offset: int


@dataclass(frozen=True)
class FileJob:
    """A file to write: number `number` of the pack, the first `nbytes` of `memory`.

    `memory` is writable and consists of whole pages. Its inner chunks begin at `starts` and have `sizes` bytes. Behind
    each is its checksum if it is `checksummed`, else room for it. If there are chunks `to_compress`, all are, and the
    file consists of these instead. `content` is a name for the bytes of this file: the same name, the same bytes.
    """

    number: int
    nbytes: int
    memory: memoryview
    starts: Array
    sizes: Array
    checksummed: Array
    to_compress: Sequence[ChunkToCompress] = ()
    content: bytes | None = None

    def checksums(self) -> bytes:
        """Fill in the checksums that are missing, and return all, in order. Not of chunks to compress."""
        memory: Array = np.frombuffer(self.memory, np.uint8)
        missing = np.flatnonzero(~self.checksummed)
        if len(missing):
            runs = np.zeros(len(missing), RUN)
            runs["from"] = memory.ctypes.data + self.starts[missing]
            runs["bytes"] = self.sizes[missing]
            runs["checksum_at"] = runs["from"] + runs["bytes"]
            copy_runs(runs)
            self.checksummed[missing] = True
        behind = (self.starts + self.sizes)[:, np.newaxis] + np.arange(CHECKSUM_BYTES)
        return memory[behind].tobytes()


class PackWriter:
    """Writes the pack of one rank below `root`, the directory of a save.

    Falls back to buffered writes on a file system without O_DIRECT. `threads` is the number of parallel syncs. With
    `reuse`, existing files are overwritten; documents only if they differ.
    """

    def __init__(self, root: str, rank: int, *, threads: int = 8, reuse: bool = False) -> None:
        self.tries_again: TriesAgain = never
        self._root = root
        self._rank = rank
        self._threads = threads
        self._reuse = reuse
        self._direct = True
        self._lock = Lock()
        self._made: set[str] = set()
        self._files: list[str] = []

    def write(self, job: FileJob) -> WrittenFile:
        """Write one file. `StorageError` if that fails, or if it exists and files are not reused."""
        if job.to_compress:
            return self._write_compressed(job)
        checksum = crc32c(job.checksums())
        self._store(job.number, job.memory, job.nbytes)
        return WrittenFile(job.number, job.nbytes, checksum)

    def link(self, number: int, folder: str, expected: FileIdentity) -> bool:
        """Let a file of the pack be the `expected` one with this name in the step at `folder`; see `files.link`.

        That file is durable, and `finish` syncs the directory with its new name.
        """
        name = pack_file(self._rank, number)
        try:
            self._place(name)
        except StorageError:
            return False  # `write` tries again, where that may help
        return link(folder, name, self._root, expected)

    def identity(self, number: int) -> FileIdentity | None:
        """Return the identity of a file of the pack. StorageError if it cannot be looked at."""
        return identity(os.path.join(self._root, pack_file(self._rank, number)))

    def _store(self, number: int, pages: memoryview, nbytes: int) -> None:
        """Write the first `nbytes` of whole pages as a file of the pack."""

        def write(path: str, overwrite: bool) -> bool:
            self._direct = write_pages(path, pages, nbytes, direct=self._direct, overwrite=overwrite)
            return True

        self._write_file(pack_file(self._rank, number), write)

    def write_documents(self, documents: Mapping[str, bytes]) -> None:
        """Write documents, by their paths in the save. `StorageError` if that fails."""
        for name, data in documents.items():

            def write(path: str, overwrite: bool, data: bytes = data) -> bool:
                if overwrite and holds(path, data):
                    return False
                write_new(path, data, replace=overwrite)
                return True

            self._write_file(name, write)

    def _write_file(self, name: str, write: Callable[[str, bool], bool]) -> None:
        """Call ``write(path, overwrite)``, which returns whether it has written the file, until it does not fail."""
        path = os.path.join(self._root, name)
        has_failed = False

        def attempt() -> None:
            nonlocal path, has_failed
            if has_failed:
                remove(path)
            has_failed = True
            path, overwrite = self._place(name)
            if write(path, overwrite):
                self._files.append(path)

        until_written(attempt, self.tries_again)

    def finish(self) -> None:
        """Make everything written durable, including its directories. `StorageError` if that fails."""
        sync_files(self._files, self._made, threads=self._threads)

    def _place(self, name: str) -> tuple[str, bool]:
        """Return the path of a file to be written, and whether it exists and is to be overwritten.

        Its directory exists when this returns, and `finish` syncs it: the name of a recycled file is new in it, too.
        """
        path = os.path.join(self._root, name)
        parent, relative = os.path.dirname(path), os.path.dirname(name)
        if relative and parent not in self._made:
            with self._lock:
                self._made.update(make_directories(refuse_link(self._root), relative, self._made))
        return path, self._reuse and exists_alone(path)

    def _write_compressed(self, job: FileJob) -> WrittenFile:
        return self._store_blocks(job.number, lambda store: _write_chunks(job, _Pages(store)))

    def _store_blocks(self, number: int, write_with: Callable[[StoresBlock], WrittenFile]) -> WrittenFile:
        """Write a file of the pack in blocks: `write_with` is called with the function that writes one."""
        written: list[WrittenFile] = []

        def write(path: str, overwrite: bool) -> bool:
            def store(pages: memoryview, nbytes: int, at: int) -> None:
                self._direct = write_pages(path, pages, nbytes, direct=self._direct, overwrite=overwrite, at=at)

            written.append(write_with(store))
            return True

        self._write_file(pack_file(self._rank, number), write)
        return written[-1]


class _Pages:
    """Bytes on their way into a file, in a few whole pages of memory: ``store(pages, nbytes, at)`` writes them.

    A file may have 64 MiB, and each thread writes one: so much memory would be mapped anew for each of them.
    """

    def __init__(self, store: StoresBlock) -> None:
        self._store = store
        self._pages = memoryview(mmap.mmap(-1, _BUFFER_BYTES))
        self._filled = 0
        self._at = 0

    @property
    def end(self) -> int:
        """How many bytes the file has so far."""
        return self._at + self._filled

    def append(self, data: bytes) -> None:
        """Put bytes at the end of the file."""
        self.room(len(data))[:] = data
        self.keep(len(data))

    def room(self, nbytes: int) -> memoryview:
        """Return memory for `nbytes` bytes at the end of the file, to which they belong when `keep` has been called."""
        if self._filled + nbytes > len(self._pages):
            self._make_room(nbytes)
        return self._pages[self._filled : self._filled + nbytes]

    def keep(self, nbytes: int) -> None:
        """Let the first `nbytes` bytes of the memory that `room` has returned last belong to the file."""
        self._filled += nbytes

    def finish(self) -> None:
        """Write what is left."""
        whole = in_pages(self._filled)
        self._pages[self._filled : whole] = bytes(whole - self._filled)
        self._store(self._pages[:whole], self._filled, self._at)

    def _make_room(self, nbytes: int) -> None:
        """Write the pages that are full."""
        whole = self._filled // PAGE_BYTES * PAGE_BYTES
        if whole:
            self._store(self._pages[:whole], whole, self._at)
        rest = bytes(self._pages[whole : self._filled])
        if len(rest) + nbytes > len(self._pages):
            self._pages = memoryview(mmap.mmap(-1, in_pages(len(rest) + nbytes)))
        self._pages[: len(rest)] = rest
        self._at, self._filled = self._at + whole, len(rest)


def _write_chunks(job: FileJob, pages: _Pages) -> WrittenFile:
    """Write the chunks of a file one behind the other."""
    chunks: list[tuple[int, int, int, int]] = []
    checksums: list[bytes] = []
    how = job.to_compress[0].meta.compression  # of all chunks of a save
    assert how is not None
    compressor = Compressor(how)
    for chunk in job.to_compress:
        pages.append(bytes(-pages.end % ALIGNMENT))
        start = pages.end
        checksums += _write_chunk(chunk, job.memory[chunk.offset :], compressor, pages)
        chunks.append((chunk.array, chunk.copy, start, pages.end - start))
    pages.finish()
    return WrittenFile(job.number, pages.end, crc32c(b"".join(checksums)), tuple(chunks))


def _write_chunk(chunk: ChunkToCompress, memory: memoryview, compressor: Compressor, pages: _Pages) -> list[bytes]:
    """Write a compressed chunk; return the checksums of its inner chunks, in their order.

    Its elements are in `memory` as its layout puts them before compression.
    """
    meta, layout = chunk.meta, chunk.meta.layout(chunk.index)
    checksums: list[bytes] = []
    index: Array = np.full((layout.index_entries, 2), _LEFT_OUT, "<u8")
    end = 0
    for inner in layout.inner_chunks:
        content = memory[inner.offset : inner.offset + layout.inner_chunk_bytes]
        room = pages.room(compressor.room(len(content)) + CHECKSUM_BYTES)
        size = compressor.compress(content, meta.stored.itemsize, room)
        checksums.append(checksum_to_bytes(crc32c(room[:size])))
        room[size : size + CHECKSUM_BYTES] = checksums[-1]
        pages.keep(size + CHECKSUM_BYTES)
        if meta.sharded:
            index[inner.position] = end, size + CHECKSUM_BYTES
        end += size + CHECKSUM_BYTES
    if meta.sharded:
        table = index.tobytes()
        pages.append(table + checksum_to_bytes(crc32c(table)))
    return checksums
