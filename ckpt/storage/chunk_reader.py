"""Read boxes of arrays straight into memory, and name the damaged file if that fails.

Uncompressed arrays in local files are read directly (see `direct_reads`). All others, and boxes whose direct read
failed, are read through tensorstore.
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
    """Reads arrays below `root`, a published step: a local directory or the URL of a store that tensorstore supports.

    At most `threads` files are read at once.
    """

    def __init__(self, root: str, *, threads: int = 8) -> None:
        self._root = root
        self._context = new_context(threads)
        self._pool = ThreadPoolExecutor(threads, "ckpt-read")  # its threads end when it is garbage-collected

    def read_into(
        self,
        meta: ArrayMeta,
        directory: str,
        tensor: str,
        offset: tuple[int, ...],
        destination: Array,
    ) -> ArrayRead:
        """Start to read the box at `offset` of the array in `directory` into `destination`.

        Makes no copy where the box consists of whole inner chunks that are contiguous in `destination`, which is
        writable and aligned, with the stored dtype and the shape of the box (followed by the trailing dimension of a
        raw dtype). It must stay alive and untouched until the result is available. `tensor` is the name for errors.
        """
        shape = destination.shape[: len(meta.shape)]
        expected = (*shape, *meta.stored.trailing)
        if destination.shape != expected or destination.dtype != meta.stored.numpy_dtype:
            raise ValueError(f"{tensor}: {destination.dtype}{destination.shape} cannot hold a box of {meta.stored}")
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
        """Start to read `runs` of a 1-d array of bytes: pairs of an offset and the array to fill from there.

        The runs are in order, and none crosses the boundary of a chunk. The arrays to fill are 1-d, contiguous, and of
        bytes. Otherwise as `read_into`.
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
        """Check that the files of a box have possible sizes, without reading them. Raises as a read does."""
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
    """A pending read of a block, to be copied into several arrays when it is complete."""

    read: Any
    block: Array
    start: int
    runs: Sequence[tuple[int, Array]]

    def result(self, timeout: float) -> None:
        self.read.result(timeout=timeout)
        for offset, array in self.runs:
            array[:] = self.block[offset - self.start :][: array.nbytes]


class ArrayRead:
    """A pending read. After an error the elements of its destination are undefined."""

    def __init__(self, box: _Box, direct: Future[bool] | None, fallback: Any) -> None:
        """`fallback` is a future of tensorstore; with a `direct` read, a function that makes one if that fails."""
        self._box = box
        self._direct = direct
        self._fallback = fallback

    def result(self, timeout_s: float) -> None:
        """Wait until the destination is filled.

        Raises `CheckpointCorruptError`, naming tensor, chunk and file, if bytes are missing or damaged; `StorageError`
        if the store fails; `CheckpointTimeoutError` after `timeout_s`.
        """
        try:
            if self._direct is None:
                self._fallback.result(timeout=timeout_s)
            elif not self._direct.result(timeout_s):
                self._box.verify()  # tensorstore accepts some files that this does not
                self._box.check_room()
                self._fallback().result(timeout=timeout_s)
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
                    f"tensor {self._box.tensor}: the checksums of the files in {self._box.root}/{self._box.directory} "
                    f"are correct, but the files cannot be decoded: {error}; restore from another step or copy"
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
        """Raise for the first chunk of this box that is no regular file of a possible size; return the largest size."""
        return max(
            (check_size(self.root, self.directory, self.meta, index, self.tensor) for index in self._chunks()),
            default=0,
        )

    def check_room(self) -> None:
        """Raise unless it is safe to read this box with tensorstore.

        It would follow a link, wait for a pipe, and end the process if there is no memory for a file or an inner chunk.
        """
        try:
            np.empty(max(self.check_sizes(), self.meta.inner_chunk_bytes), np.uint8)
        except MemoryError:
            self.verify()
            raise

    def verify(self) -> None:
        """Raise for the first damaged chunk of this box. Only local files are checked."""
        for index in self._chunks():
            verify_chunk(self.root, self.directory, self.meta, index, self.tensor)

    def _chunks(self) -> Iterable[tuple[int, ...]]:
        if "://" in self.root:
            return ()
        boxes = zip(self.offset, self.shape, self.meta.chunk_shape, strict=True)
        return indices([range(o // c, -(-(o + n) // c)) for o, n, c in boxes])
