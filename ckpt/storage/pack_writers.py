"""Write the files of a pack: straight from memory, or with compressed chunks.

A file is staged as it is to be on disk, but for checksums that are not known yet. They are filled in where the file
lies in memory, and it is written with O_DIRECT: no copy, no page cache. Of compressed chunks each inner chunk is
compressed from there, and they are written one behind the other.

Runs in a writer process. `write` may be called from several threads at once (4 to 8 keep a local disk busy). Nothing is
durable before `finish`. After an error the save cannot be completed; its files are left for clean-up.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from threading import Lock
from typing import Any

import numpy as np

from ckpt.native import CHECKSUM_BYTES, RUN, copy_runs, crc32c
from ckpt.storage.array_metadata import ArrayMeta
from ckpt.storage.attempts import TriesAgain, never, until_written
from ckpt.storage.chunk_layout import PAGE_BYTES, checksum_to_bytes
from ckpt.storage.compression import compressed
from ckpt.storage.directories import make_directories
from ckpt.storage.files import exists, holds, remove, sync_files, write_new, write_pages
from ckpt.storage.links import refuse_link
from ckpt.storage.names import pack_file
from ckpt.storage.pack_index import ALIGNMENT

__all__ = ["ChunkToCompress", "FileJob", "PackWriter", "WrittenFile"]

Array = np.ndarray[Any, np.dtype[Any]]
_LEFT_OUT = np.uint64(2**64 - 1)  # of an inner chunk that lies outside of the array


@dataclass(frozen=True, slots=True)
class WrittenFile:
    """File `number` of a pack, of `nbytes` bytes; `crc32c` is the checksum of its inner chunks' checksums, in order.

    `chunks` are those that are compressed: number of the array, number of the chunk, offset in the file, bytes.
    """

    number: int
    nbytes: int
    crc32c: int
    chunks: tuple[tuple[int, int, int, int], ...] = ()


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
    file consists of these instead.
    """

    number: int
    nbytes: int
    memory: memoryview
    starts: Array
    sizes: Array
    checksummed: Array
    to_compress: Sequence[ChunkToCompress] = ()


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
        memory: Array = np.frombuffer(job.memory, np.uint8)
        missing = np.flatnonzero(~job.checksummed)
        if len(missing):
            runs = np.zeros(len(missing), RUN)
            runs["from"] = memory.ctypes.data + job.starts[missing]
            runs["bytes"] = job.sizes[missing]
            runs["checksum_at"] = runs["from"] + runs["bytes"]
            copy_runs(runs)
        behind = (job.starts + job.sizes)[:, np.newaxis] + np.arange(CHECKSUM_BYTES)
        checksum = crc32c(memory[behind].tobytes())
        self._store(job.number, job.memory, job.nbytes)
        return WrittenFile(job.number, job.nbytes, checksum)

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
        return path, self._reuse and exists(path)

    def _write_compressed(self, job: FileJob) -> WrittenFile:
        pieces: list[bytes] = []
        chunks: list[tuple[int, int, int, int]] = []
        checksums = b""
        end = 0
        for chunk in job.to_compress:
            encoded, of_chunk = _encoded(chunk, job.memory[chunk.offset :])
            nbytes = sum(map(len, encoded))
            checksums += of_chunk
            chunks.append((chunk.array, chunk.copy, end, nbytes))
            padding = -nbytes % ALIGNMENT
            pieces += [*encoded, bytes(padding)]
            end += nbytes + padding
        nbytes = end - padding
        self._store(job.number, _pages(pieces, nbytes), nbytes)
        return WrittenFile(job.number, nbytes, crc32c(checksums), tuple(chunks))


def _encoded(chunk: ChunkToCompress, memory: memoryview) -> tuple[list[bytes], bytes]:
    """Return the bytes of a compressed chunk, in pieces, and the checksums of its inner chunks, in their order.

    Its elements are in `memory` as its layout puts them before compression.
    """
    meta, layout = chunk.meta, chunk.meta.layout(chunk.index)
    assert meta.compression is not None
    pieces: list[bytes] = []
    checksums: list[bytes] = []
    index: Array = np.full((layout.index_entries, 2), _LEFT_OUT, "<u8")
    end = 0
    for inner in layout.inner_chunks:
        content = memory[inner.offset : inner.offset + layout.inner_chunk_bytes]
        frame = compressed(content, meta.stored.itemsize, meta.compression)
        checksums.append(checksum_to_bytes(crc32c(frame)))
        pieces += [frame, checksums[-1]]
        if meta.sharded:
            index[inner.position] = end, len(frame) + CHECKSUM_BYTES
        end += len(frame) + CHECKSUM_BYTES
    if meta.sharded:
        table = index.tobytes()
        pieces += [table, checksum_to_bytes(crc32c(table))]
    return pieces, b"".join(checksums)


def _pages(pieces: list[bytes], nbytes: int) -> memoryview:
    """Return pieces joined in whole pages of memory, at a page boundary."""
    size = -(-nbytes // PAGE_BYTES) * PAGE_BYTES
    memory: Array = np.zeros(size + PAGE_BYTES, np.uint8)
    first = -memory.ctypes.data % PAGE_BYTES
    pages = memory[first : first + size].data
    at = 0
    for piece in pieces:
        pages[at : at + len(piece)] = piece
        at += len(piece)
    return pages
