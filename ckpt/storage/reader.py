"""Reads boxes of arrays straight into memory, and finds the file behind a damaged one."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import product
from typing import Any

import numpy as np

from ckpt.errors import CheckpointTimeoutError, StorageError
from ckpt.storage.metadata import ArrayMeta
from ckpt.storage.tensorstores import new_context, open_array
from ckpt.storage.verification import verify_chunk

__all__ = ["ArrayRead", "ArrayReader"]


class ArrayReader:
    """Reads arrays below `root`, a published step: a local directory or the URL of a store that tensorstore knows.

    At most `threads` files are read at once.
    """

    def __init__(self, root: str, *, threads: int = 16) -> None:
        self._root = root
        self._context = new_context(threads)

    def read_into(
        self,
        meta: ArrayMeta,
        directory: str,
        tensor: str,
        offset: tuple[int, ...],
        destination: np.ndarray[Any, np.dtype[Any]],
    ) -> ArrayRead:
        """Start to read the box at `offset` of the array in `directory` into `destination`, without another copy of it.

        `destination` is writable and aligned, with the stored dtype and the shape of the box (followed by the trailing
        dimension of a raw dtype). It must stay alive and untouched until the result is there. `tensor` is the name in
        errors.
        """
        import tensorstore as ts

        shape = destination.shape[: len(meta.shape)]
        expected = (*shape, *meta.stored.trailing)
        if destination.shape != expected or destination.dtype != meta.stored.numpy_dtype:
            raise ValueError(f"{tensor}: {destination.dtype}{destination.shape} is no box of {meta.stored}")
        if not len(offset) == len(shape) == len(meta.shape) or any(
            o < 0 or o + n > size for o, n, size in zip(offset, shape, meta.shape, strict=True)
        ):
            raise ValueError(f"{tensor}: box {offset} + {shape} is not inside {meta.shape}")
        box = _Box(self._root, directory, meta, tensor, offset, shape)
        store = open_array(self._root, directory, meta, self._context)
        source = store[tuple(slice(o, o + n) for o, n in zip(offset, shape, strict=True))]
        target = ts.array(destination, context=self._context, copy=False)
        return ArrayRead(box, target.write(source.translate_to[(0,) * source.rank]))


class ArrayRead:
    """A read that is on its way. After an error its destination holds undefined elements."""

    def __init__(self, box: _Box, future: Any) -> None:
        self._box = box
        self._future = future

    def result(self, timeout_s: float) -> None:
        """Wait until the destination is filled.

        `CheckpointCorruptError` with tensor, chunk and file if bytes are missing or not those that were written;
        `StorageError` if the store refuses; `CheckpointTimeoutError` after `timeout_s`.
        """
        try:
            self._future.result(timeout=timeout_s)
        except TimeoutError as error:
            raise CheckpointTimeoutError(
                f"tensor {self._box.tensor}: not read from {self._box.root} in {timeout_s} s; is the store overloaded?"
            ) from error
        except (ValueError, RuntimeError, OSError) as error:
            self._box.verify()
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

    def verify(self) -> None:
        """Raise for the first damaged chunk of this box. Chunks of other stores than files are not looked at."""
        if "://" in self.root:
            return
        chunks = (
            range(o // c, -(-(o + n) // c))
            for o, n, c in zip(self.offset, self.shape, self.meta.chunk_shape, strict=True)
        )
        for index in product(*chunks):
            verify_chunk(self.root, self.directory, self.meta, index, self.tensor)
