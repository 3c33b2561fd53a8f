"""Two ways to write the chunks of a save, which leave the same files, byte for byte.

`DirectChunkWriter` completes the file's image where it was staged and hands it to the device (O_DIRECT): no copy, no
page cache. `TensorStoreChunkWriter` goes through tensorstore: for compressed arrays, and for stores that are not a
local file system.

Both run in a writer process. `write` and `describe` may be called from several threads at once (4 to 8 keep a local
disk busy);
nothing is durable before `finish`. After an error the save cannot be completed any more; the files are left for
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
from ckpt.storage.chunk_codec import WrittenChunk, check_chunk_file, piece_array, seal
from ckpt.storage.directories import make_directories
from ckpt.storage.files import holds, sync_files, write_image, write_new
from ckpt.storage.regular_files import DamagedFileError

__all__ = ["ChunkJob", "ChunkWriter", "DirectChunkWriter", "TensorStoreChunkWriter"]


@dataclass(frozen=True)
class ChunkJob:
    """A chunk to write: of the array `meta` in `directory` (relative to the save), the one at `index` of the grid.

    `image` is writable, starts at a page boundary and has ``meta.layout(index).image_bytes``. The elements are in the
    places of the layout's pieces; the rest is undefined, and is filled in by the writer, but for the checksums of the
    pieces whose offsets are in `sealed`.
    """

    meta: ArrayMeta
    directory: str
    index: tuple[int, ...]
    image: memoryview
    sealed: Collection[int] = ()


class ChunkWriter(Protocol):
    """Writes the chunks of one rank's part of a save."""

    def write(self, job: ChunkJob) -> WrittenChunk:
        """Write one chunk. `StorageError` if the store refuses."""
        ...

    def describe(self, directory: str, meta: ArrayMeta) -> None:
        """Write the metadata of the array in `directory`. `StorageError` if the store refuses."""
        ...

    def finish(self) -> None:
        """Make all that was written durable, with the directories it is in. `StorageError` if the store refuses."""
        ...


class DirectChunkWriter:
    """Writes uncompressed chunks below `root`, an existing local directory, straight from their images.

    Falls back to buffered writes on a file system without O_DIRECT. `threads` is the number of parallel syncs. With
    `reuse` files that are there are written over; those of metadata only if they differ.
    """

    def __init__(self, root: str, *, threads: int = 8, reuse: bool = False) -> None:
        self._tree = _Tree(root, threads, reuse)
        self._direct = True

    def write(self, job: ChunkJob) -> WrittenChunk:
        """Write one chunk. `StorageError` if the file system refuses, or if the chunk is there already and files are
        not reused."""
        if job.meta.compression is not None:
            raise ValueError(f"{job.directory}: compressed chunks are written through tensorstore")
        layout = job.meta.layout(job.index)
        checksum = seal(job.meta, layout, job.image, job.sealed)
        key = job.meta.chunk_key(job.index)
        path, over = self._tree.place(job.directory, key)
        image = job.image[: layout.image_bytes]
        self._direct = write_image(path, image, layout.file_bytes, direct=self._direct, over=over)
        self._tree.written(path)
        return WrittenChunk(f"{job.directory}/{key}", layout.file_bytes, checksum)

    def describe(self, directory: str, meta: ArrayMeta) -> None:
        """Write the metadata of the array in `directory`. `StorageError` if it is there already and files are not
        reused."""
        self._tree.write(directory, "zarr.json", meta.document_bytes)

    def finish(self) -> None:
        """Make all that was written durable, with the directories it is in."""
        self._tree.finish()


class TensorStoreChunkWriter:
    """Writes chunks below `root`, an existing local directory or the URL of a store that tensorstore knows.

    `threads` is the number of parallel writes and syncs.
    """

    def __init__(self, root: str, *, threads: int = 8) -> None:
        self._root = root
        self._tree = None if "://" in root else _Tree(root, threads)
        self._context = new_context(threads)

    def write(self, job: ChunkJob) -> WrittenChunk:
        """Write one chunk. `StorageError` if the store refuses."""
        key = job.meta.chunk_key(job.index)
        path = None if self._tree is None else self._tree.place(job.directory, key)[0]
        layout = job.meta.layout(job.index)
        checksum, file_bytes = seal(job.meta, layout, job.image, job.sealed), layout.file_bytes
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
        """Write the metadata of the array in `directory`. `StorageError` if the store refuses."""
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
        """Make all that was written durable, with the directories it is in. Other stores than files are so at once."""
        if self._tree is not None:
            self._tree.finish()

    def _write(self, job: ChunkJob) -> Any:
        import tensorstore as ts

        store = open_array(self._root, job.directory, job.meta, self._context)
        layout = job.meta.layout(job.index)
        with ts.Transaction() as transaction:  # one write of the file, whatever the number of its pieces
            for piece in layout.pieces:
                box = tuple(slice(o, o + n) for o, n in zip(piece.origin, piece.shape, strict=True))
                elements = np.require(piece_array(job.meta, layout, piece, job.image), requirements="A")
                store.with_transaction(transaction)[box].write(elements).result()
        return store


class _Tree:
    """The files a writer has written below its root, and the directories that it may have added a name to."""

    def __init__(self, root: str, threads: int, reuse: bool = False) -> None:
        self._root = root
        self._lock = Lock()
        self._made: set[str] = set()
        self._files: list[str] = []
        self._threads = threads
        self._reuse = reuse

    def place(self, directory: str, name: str) -> tuple[str, bool]:
        """Return the path of a file to be written, and whether it is there, to be written over. If not, its directory
        is."""
        parent = os.path.join(self._root, directory)
        path = os.path.join(parent, name)
        if self._reuse and os.path.lexists(path):
            return path, True
        if parent not in self._made:
            with self._lock:
                self._made.update(make_directories(self._root, directory, self._made))
        return path, False

    def write(self, directory: str, name: str, data: bytes) -> None:
        """Write a file, unless it is reused and holds that already."""
        path, over = self.place(directory, name)
        if not (over and holds(path, data)):
            write_new(path, data, replace=over)
            self.written(path)

    def written(self, path: str) -> None:
        """The file is complete."""
        self._files.append(path)

    def finish(self) -> None:
        """Make all of it durable."""
        sync_files(self._files, self._made, threads=self._threads)
