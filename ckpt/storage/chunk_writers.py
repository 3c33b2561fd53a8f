"""Write the chunks of a save, directly or through tensorstore; the files are the same, byte for byte.

`DirectChunkWriter` completes an encoded chunk where it was staged and writes it with O_DIRECT: no copy, no page cache.
`TensorStoreChunkWriter` is for compressed arrays, and for stores other than a local file system.

Both run in a writer process. `write` and `describe` may be called from several threads at once (4 to 8 keep a local
disk busy). Nothing is durable before `finish`. After an error the save cannot be completed; its files are left for
clean-up.
"""

from __future__ import annotations

import os
from collections.abc import Collection
from dataclasses import dataclass
from threading import Lock
from typing import Any, Protocol

import numpy as np

from ckpt.errors import StorageError
from ckpt.storage.array_metadata import ArrayMeta, new_context, open_array
from ckpt.storage.chunk_codec import WrittenChunk, add_checksums, check_chunk_file, inner_chunk_array
from ckpt.storage.directories import make_directories
from ckpt.storage.files import holds, sync_files, write_new, write_pages
from ckpt.storage.regular_files import DamagedFileError

__all__ = ["ChunkJob", "ChunkWriter", "DirectChunkWriter", "TensorStoreChunkWriter"]


@dataclass(frozen=True)
class ChunkJob:
    """A chunk to write: the one at `index` of the array `meta` in `directory`, relative to the save.

    `encoded` is writable, starts at a page boundary and has ``meta.layout(index).buffer_bytes`` bytes. The elements are
    where the layout puts them. The rest is undefined and is filled in by the writer, except that the inner chunks whose
    offsets are in `checksummed` have their checksums already.
    """

    meta: ArrayMeta
    directory: str
    index: tuple[int, ...]
    encoded: memoryview
    checksummed: Collection[int] = ()


class ChunkWriter(Protocol):
    """A way to write the chunks of one rank's part of a save."""

    def write(self, job: ChunkJob) -> WrittenChunk:
        """Write one chunk. `StorageError` if that fails."""
        ...

    def describe(self, directory: str, meta: ArrayMeta) -> None:
        """Write the metadata of the array in `directory`. `StorageError` if that fails."""
        ...

    def finish(self) -> None:
        """Make everything written durable, including its directories. `StorageError` if that fails."""
        ...


class DirectChunkWriter:
    """Write uncompressed chunks below `root`, an existing local directory, straight from memory.

    Falls back to buffered writes on a file system without O_DIRECT. `threads` is the number of parallel syncs. With
    `reuse`, existing files are overwritten; those of metadata only if they differ.
    """

    def __init__(self, root: str, *, threads: int = 8, reuse: bool = False) -> None:
        self._tree = _Tree(root, threads, reuse)
        self._direct = True

    def write(self, job: ChunkJob) -> WrittenChunk:
        """Write one chunk. `StorageError` if the write fails, or if the chunk exists and files are not reused."""
        if job.meta.compression is not None:
            raise ValueError(f"{job.directory}: compressed chunks are written through tensorstore")
        layout = job.meta.layout(job.index)
        checksum = add_checksums(job.meta, layout, job.encoded, job.checksummed)
        key = job.meta.chunk_key(job.index)
        path, overwrite = self._tree.place(job.directory, key)
        encoded = job.encoded[: layout.buffer_bytes]
        self._direct = write_pages(path, encoded, layout.file_bytes, direct=self._direct, overwrite=overwrite)
        self._tree.written(path)
        return WrittenChunk(f"{job.directory}/{key}", layout.file_bytes, checksum)

    def describe(self, directory: str, meta: ArrayMeta) -> None:
        """Write the metadata of an array. `StorageError` if it exists and files are not reused."""
        self._tree.write(directory, "zarr.json", meta.document_bytes)

    def finish(self) -> None:
        """Make everything written durable, including its directories."""
        self._tree.finish()


class TensorStoreChunkWriter:
    """Write chunks below `root`, an existing local directory or the URL of a store that tensorstore supports.

    `threads` is the number of parallel writes and syncs.
    """

    def __init__(self, root: str, *, threads: int = 8) -> None:
        self._root = root
        self._tree = None if "://" in root else _Tree(root, threads)
        self._context = new_context(threads)

    def write(self, job: ChunkJob) -> WrittenChunk:
        """Write one chunk. `StorageError` if that fails."""
        key = job.meta.chunk_key(job.index)
        path = None if self._tree is None else self._tree.place(job.directory, key)[0]
        layout = job.meta.layout(job.index)
        checksum, file_bytes = add_checksums(job.meta, layout, job.encoded, job.checksummed), layout.file_bytes
        try:
            store = self._write(job)
            if job.meta.compression is not None:
                content = store.kvstore.read(key).result().value
                file_bytes = len(content)
                checksum = check_chunk_file(job.meta, job.index, file_bytes, lambda at, size: content[at : at + size])
        except (ValueError, RuntimeError, OSError, DamagedFileError) as error:
            raise StorageError(f"cannot write {self._root}/{job.directory}/{key}: {error} (check the store)") from error
        if self._tree is not None and path is not None:
            self._tree.written(path)
        return WrittenChunk(f"{job.directory}/{key}", file_bytes, checksum)

    def describe(self, directory: str, meta: ArrayMeta) -> None:
        """Write the metadata of the array in `directory`. `StorageError` if that fails."""
        if self._tree is not None:
            self._tree.write(directory, "zarr.json", meta.document_bytes)
            return
        try:
            open_array(self._root, directory, meta, self._context).kvstore.write(
                "zarr.json", meta.document_bytes
            ).result()
        except (ValueError, RuntimeError, OSError) as error:
            raise StorageError(f"cannot write {self._root}/{directory}/zarr.json: {error} (check the store)") from error

    def finish(self) -> None:
        """Make everything written durable. Nothing to do in stores other than local files."""
        if self._tree is not None:
            self._tree.finish()

    def _write(self, job: ChunkJob) -> Any:
        import tensorstore as ts

        store = open_array(self._root, job.directory, job.meta, self._context)
        layout = job.meta.layout(job.index)
        with ts.Transaction() as transaction:  # writes the file once, however many inner chunks it has
            for inner in layout.inner_chunks:
                box = tuple(slice(o, o + n) for o, n in zip(inner.origin, inner.shape, strict=True))
                elements = np.require(inner_chunk_array(job.meta, layout, inner, job.encoded), requirements="A")
                store.with_transaction(transaction)[box].write(elements).result()
        return store


class _Tree:
    """The files that a writer has written below its root, and the directories to sync with them."""

    def __init__(self, root: str, threads: int, reuse: bool = False) -> None:
        self._root = root
        self._lock = Lock()
        self._made: set[str] = set()
        self._files: list[str] = []
        self._threads = threads
        self._reuse = reuse

    def place(self, directory: str, name: str) -> tuple[str, bool]:
        """Return the path of a file to be written, and whether it exists and is to be overwritten.

        Otherwise its directory exists when this returns.
        """
        parent = os.path.join(self._root, directory)
        path = os.path.join(parent, name)
        if self._reuse and os.path.lexists(path):
            return path, True
        if parent not in self._made:
            with self._lock:
                self._made.update(make_directories(self._root, directory, self._made))
        return path, False

    def write(self, directory: str, name: str, data: bytes) -> None:
        """Write a file, unless it is reused and has this content already."""
        path, overwrite = self.place(directory, name)
        if not (overwrite and holds(path, data)):
            write_new(path, data, replace=overwrite)
            self.written(path)

    def written(self, path: str) -> None:
        """Note that a file is complete."""
        self._files.append(path)

    def finish(self) -> None:
        """Make all files and directories durable."""
        sync_files(self._files, self._made, threads=self._threads)
