"""Reads boxes of arrays straight into memory, and finds the file behind a damaged one.

Uncompressed arrays in local files are read directly (see `direct_reads`), all others, and what turns out to be damaged,
through tensorstore.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np

from ckpt.errors import CheckpointCorruptError, CheckpointTimeoutError, StorageError
from ckpt.storage.array_metadata import ArrayMeta, new_context, open_array
from ckpt.storage.chunk_codec import check_size, verify_chunk
from ckpt.storage.chunk_layout import indices
from ckpt.storage.direct_reads import read_box, read_runs

__all__ = ["ArrayRead", "ArrayReader"]

Array = np.ndarray[Any, np.dtype[Any]]


class ArrayReader:
    """Reads arrays below `root`, a published step: a local directory or the URL of a store that tensorstore knows.

    At most `threads` files are read at once.
    """

    def __init__(self, root: str, *, threads: int = 8) -> None:
        self._root = root
        self._context = new_context(threads)
        self._pool = ThreadPoolExecutor(threads, "ckpt-read")  # its threads end with it

    def read_into(
        self,
        meta: ArrayMeta,
        directory: str,
        tensor: str,
        offset: tuple[int, ...],
        destination: Array,
    ) -> ArrayRead:
        """Start to read the box at `offset` of the array in `directory` into `destination`, without another copy of it
        where the box is made of whole inner chunks that are runs of `destination`.

        `destination` is writable and aligned, with the stored dtype and the shape of the box (followed by the trailing
        dimension of a raw dtype). It must stay alive and untouched until the result is there. `tensor` is the name in
        errors.
        """
        shape = destination.shape[: len(meta.shape)]
        expected = (*shape, *meta.stored.trailing)
        if destination.shape != expected or destination.dtype != meta.stored.numpy_dtype:
            raise ValueError(f"{tensor}: {destination.dtype}{destination.shape} is no box of {meta.stored}")
        if not len(offset) == len(shape) == len(meta.shape) or any(
            o < 0 or o + n > size for o, n, size in zip(offset, shape, meta.shape, strict=True)
        ):
            raise ValueError(f"{tensor}: box {offset} + {shape} is not inside {meta.shape}")
        box = _Box(self._root, directory, meta, tensor, offset, shape)
        through_tensorstore = functools.partial(self._through_tensorstore, box, destination)
        if not self._is_direct(meta):
            box.check_room()
            return ArrayRead(box, None, through_tensorstore())
        direct = self._pool.submit(read_box, self._root, directory, meta, offset, destination)
        return ArrayRead(box, direct, through_tensorstore)

    def read_runs(self, meta: ArrayMeta, directory: str, tensor: str, runs: Sequence[tuple[int, Array]]) -> ArrayRead:
        """Start to read bytes of a 1-d array of bytes into several places: from an offset on, as many as fill an array.

        In order, and none across two chunks; arrays are 1-d, of bytes, and one run of memory. The rest is as in
        `read_into`.
        """
        start, end = runs[0][0], max(offset + array.nbytes for offset, array in runs)
        box = _Box(self._root, directory, meta, tensor, (start,), (end - start,))
        if end > meta.shape[0]:
            raise ValueError(f"{tensor}: bytes {start} to {end} are not inside {meta.shape}")

        def through_tensorstore() -> _Scattered:
            block = np.empty(end - start, np.uint8)
            return _Scattered(self._through_tensorstore(box, block), block, start, runs)

        if not self._is_direct(meta):
            box.check_room()
            return ArrayRead(box, None, through_tensorstore())
        direct = self._pool.submit(read_runs, self._root, directory, meta, runs)
        return ArrayRead(box, direct, through_tensorstore)

    def check_sizes(
        self, meta: ArrayMeta, directory: str, tensor: str, offset: tuple[int, ...], shape: tuple[int, ...]
    ) -> None:
        """Check that the files of a box can have what the metadata say, without reading them. Raises as a read does."""
        _Box(self._root, directory, meta, tensor, offset, shape).check_sizes()

    def _is_direct(self, meta: ArrayMeta) -> bool:
        return meta.compression is None and "://" not in self._root

    def _through_tensorstore(self, box: _Box, destination: Array) -> Any:
        import tensorstore as ts

        store = open_array(self._root, box.directory, box.meta, self._context)
        source = store[tuple(slice(o, o + n) for o, n in zip(box.offset, box.shape, strict=True))]
        target = ts.array(destination, context=self._context, copy=False)
        return target.write(source.translate_to[(0,) * source.rank])


@dataclass(frozen=True)
class _Scattered:
    """A read of a block that is on its way, and goes to several places when it is there."""

    read: Any
    block: Array
    start: int
    runs: Sequence[tuple[int, Array]]

    def result(self, timeout: float) -> None:
        self.read.result(timeout=timeout)
        for offset, array in self.runs:
            array[:] = self.block[offset - self.start :][: array.nbytes]


class ArrayRead:
    """A read that is on its way. After an error its destination holds undefined elements."""

    def __init__(self, box: _Box, direct: Future[bool] | None, otherwise: Any) -> None:
        """`otherwise` is a future of tensorstore; with a `direct` read, a function that makes one should that fail."""
        self._box = box
        self._direct = direct
        self._otherwise = otherwise

    def result(self, timeout_s: float) -> None:
        """Wait until the destination is filled.

        `CheckpointCorruptError` with tensor, chunk and file if bytes are missing or not those that were written;
        `StorageError` if the store refuses; `CheckpointTimeoutError` after `timeout_s`.
        """
        try:
            if self._direct is None:
                self._otherwise.result(timeout=timeout_s)
            elif not self._direct.result(timeout_s):
                self._box.verify()  # tensorstore believes more than this
                self._box.check_room()
                self._otherwise().result(timeout=timeout_s)
        except TimeoutError as error:
            raise CheckpointTimeoutError(
                f"tensor {self._box.tensor}: not read from {self._box.root} in {timeout_s} s; is the store overloaded?"
            ) from error
        except MemoryError:
            self._box.verify()
            raise
        except (ValueError, RuntimeError, OSError) as error:
            self._box.verify()
            if isinstance(error, ValueError) and "://" not in self._box.root:
                raise CheckpointCorruptError(
                    f"tensor {self._box.tensor}: the files in {self._box.root}/{self._box.directory} have the "
                    f"checksums of their bytes, but no data can be made of these: {error}; restore from another step "
                    "or copy"
                ) from error
            raise StorageError(
                f"tensor {self._box.tensor}: cannot read from {self._box.root}/{self._box.directory}: {error} "
                "(no damaged file was found: try again, and check the store)"
            ) from error


@dataclass(frozen=True)
class _Box:
    root: str
    directory: str
    meta: ArrayMeta
    tensor: str
    offset: tuple[int, ...]
    shape: tuple[int, ...]

    def check_sizes(self) -> int:
        """Raise for the first chunk of this box that is no regular file of a size it can have; return the largest."""
        return max(
            (check_size(self.root, self.directory, self.meta, index, self.tensor) for index in self._chunks()),
            default=0,
        )

    def check_room(self) -> None:
        """Raise unless tensorstore can be given this box: it would follow a link, wait for a pipe, and end the process
        if it has no memory for a file or for a piece."""
        try:
            np.empty(max(self.check_sizes(), self.meta.piece_bytes), np.uint8)
        except MemoryError:
            self.verify()
            raise

    def verify(self) -> None:
        """Raise for the first damaged chunk of this box. Chunks of other stores than files are not looked at."""
        for index in self._chunks():
            verify_chunk(self.root, self.directory, self.meta, index, self.tensor)

    def _chunks(self) -> Iterable[tuple[int, ...]]:
        if "://" in self.root:
            return ()
        boxes = zip(self.offset, self.shape, self.meta.chunk_shape, strict=True)
        return indices([range(o // c, -(-(o + n) // c)) for o, n, c in boxes])
