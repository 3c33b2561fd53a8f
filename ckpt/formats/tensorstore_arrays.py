"""Zarr arrays in directories and in OCDBT databases, read by tensorstore, in boxes.

The specifications that tensorstore opens are built here: driver and path never come from a checkpoint, and tensorstore
refuses keys with "..", empty parts and absolute paths, also where an OCDBT manifest names data files by them.

A chunk is decoded as a whole. Boxes are read in C order, so where one row of the chunk grid is small, or one chunk, the
cache of tensorstore holds it until the boxes have passed. Otherwise every chunk is decoded once, into a temporary file
that has no name, and the boxes are read from there: that takes memory for one chunk, whatever the size of the array.
"""

from __future__ import annotations

import itertools
import math
import os
import re
import tempfile
import weakref
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import numpy as np
import psutil
import tensorstore

from ckpt.errors import CheckpointCorruptError, CheckpointError, ConversionError
from ckpt.formats.foreign_files import read_box
from ckpt.formats.lazy_state import Bytes, FileTensor, ReadBox, read_parts
from ckpt.planning.boxes import Box
from ckpt.storage.files import storage_errors

Driver = Literal["zarr", "zarr3"]

_DTYPES = frozenset(
    {"bool", "float16", "float32", "float64", "bfloat16", "complex64", "complex128"}
    | {f"{kind}int{bits}" for kind in ("", "u") for bits in (8, 16, 32, 64)}
    | {"float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2", "float8_e5m2fnuz", "float8_e8m0fnu"}
)
"""Names that are the same in tensorstore and torch, of elements with the same bits. int4 is not: torch's is a byte."""

_ROW_BYTES = 64 << 20  # of chunks that are kept decoded
_MAX_BYTES = 1 << 44  # of an array: metadata of a few bytes can describe any size
_SPARE_BYTES = 16 << 20
_NODE_BYTES = 32 << 20  # of an OCDBT database
_PIECE_BYTES = 16 << 20
_OPENED_AT_ONCE = 128
_MISSING_CHUNK = re.compile(r"NOT_FOUND: chunk .* is missing", re.DOTALL)
_LONGEST_REASON = 400


@dataclass(frozen=True)
class ArrayPlace:
    """An array of a database: its key there, `label` for messages, and what a chunk that is not stored means.

    Such a chunk is an error; or, if it `may_be_absent`, it is the fill value. With `zero_unless_given` an array without
    a fill value is filled with zeros.
    """

    label: str
    key: str
    driver: Driver
    may_be_absent: bool = True
    zero_unless_given: bool = False


class ArrayDatabase:
    """A directory that is read only, with arrays in files or in an OCDBT database.

    `notes` are messages for the user, which reading adds to. Nothing is cached between arrays but nodes of the
    database.
    """

    def __init__(self, path: str, *, ocdbt: bool, notes: list[str]) -> None:
        self.path = path
        self.notes = notes
        self._ocdbt = ocdbt
        self._base = os.path.abspath(path)
        limits = {"file_io_concurrency": {"limit": 16}, "data_copy_concurrency": {"limit": "shared"}}
        caches = {"cache_pool": {"total_bytes_limit": 0}, "cache_pool#nodes": {"total_bytes_limit": _NODE_BYTES}}
        self._context = tensorstore.Context({**limits, **caches})

    def keys(self) -> list[str]:
        """Return the keys of an OCDBT database. CheckpointCorruptError, ConversionError."""
        try:
            store = tensorstore.KvStore.open(self._kvstore(""), context=self._context).result()
            return [key.decode() for key in store.list().result()]
        except UnicodeDecodeError as error:
            raise ConversionError(f"{self.path}: a key of the database is not UTF-8: {error.object!r:.100}") from None
        except Exception as error:  # tensorstore raises ValueError for most, and others for some codes
            raise CheckpointCorruptError(f"{self.path}: the database cannot be read: {_reason(error)}") from None

    def read(self, key: str) -> bytes:
        """Return the value of a key. CheckpointCorruptError."""
        try:
            store = tensorstore.KvStore.open(self._kvstore(""), context=self._context).result()
            return bytes(store.read(key).result().value)
        except Exception as error:
            raise CheckpointCorruptError(f"{self.path}: {key} cannot be read: {_reason(error)}") from None

    def tensors(self, places: Iterable[ArrayPlace]) -> Iterator[FileTensor]:
        """Open the arrays, and yield a tensor for each, in this order. CheckpointCorruptError, ConversionError."""
        for batch in _batches(places, _OPENED_AT_ONCE):
            opening = [(place, self.opening(place, 0)) for place in batch]
            for place, future in opening:
                yield self._tensor(place, self.opened(place, future))

    def opening(self, place: ArrayPlace, cache_bytes: int, *, filled: bool = False) -> Any:
        """Begin to open an array with a cache of its own for chunks. Absent chunks are errors unless `filled`."""
        spec = {
            "driver": place.driver,
            "kvstore": self._kvstore(f"{place.key}/" if place.key else ""),
            "recheck_cached_metadata": False,
            "recheck_cached_data": False,
            "fill_missing_data_reads": filled,
        }
        context = self._context
        if cache_bytes:
            context = tensorstore.Context({"cache_pool": {"total_bytes_limit": cache_bytes}}, self._context)
        try:
            return tensorstore.open(spec, read=True, open=True, context=context)
        except Exception as error:
            raise self.damaged(place, error) from None

    def opened(self, place: ArrayPlace, future: Any) -> Any:
        """Wait until an array is open. CheckpointCorruptError."""
        try:
            return future.result()
        except Exception as error:
            raise self.damaged(place, error) from None

    def damaged(self, place: ArrayPlace, error: Exception) -> CheckpointError:
        """Return the error for what tensorstore says of an array. MemoryError is raised as it is."""
        if isinstance(error, MemoryError):
            raise error
        return CheckpointCorruptError(f"{self.path}: {place.label} cannot be read: {_reason(error)}")

    def _kvstore(self, path: str) -> dict[str, Any]:
        directory = f"{self._base.rstrip('/')}/"
        if self._ocdbt:
            base = {"driver": "file", "path": directory}
            return {"driver": "ocdbt", "base": base, "path": path, "cache_pool": "cache_pool#nodes"}
        return {"driver": "file", "path": directory + path}

    def _tensor(self, place: ArrayPlace, array: Any) -> FileTensor:
        dtype, shape = array.dtype.name, tuple(array.shape)
        if dtype not in _DTYPES:
            raise ConversionError(
                f"{self.path}: {place.label} is of dtype {dtype}, which torch does not have with the same bits; read "
                "it where it was written, cast it to a larger dtype such as int8 or bfloat16, and save it again"
            )
        chunk = tuple(max(size, 1) for size in array.chunk_layout.read_chunk.shape or ())
        chunk_bytes = math.prod(chunk) * array.dtype.numpy_dtype.itemsize
        if math.prod(shape) * array.dtype.numpy_dtype.itemsize > _MAX_BYTES:
            raise ConversionError(
                f"{self.path}: {place.label} has the shape {list(shape)}: that is larger than any tensor, and "
                "chunks that are not stored would be written, too"
            )
        if chunk_bytes > _ROW_BYTES and chunk_bytes > psutil.virtual_memory().available:
            raise ConversionError(
                f"{self.path}: {place.label} has chunks of {chunk_bytes:,} bytes, and a chunk is read as a whole: that "
                "is more than the available memory"
            )
        return FileTensor(dtype, shape, _ArrayReader(self, place, shape, chunk, array.dtype.numpy_dtype.itemsize).read)


class _ArrayReader:
    """Reads boxes of an array. What it needs for that exists from the first box until the last one, in C order."""

    def __init__(
        self, database: ArrayDatabase, place: ArrayPlace, shape: tuple[int, ...], chunk: tuple[int, ...], itemsize: int
    ) -> None:
        self._database, self._place = database, place
        self._shape, self._chunk, self._itemsize = shape, chunk, itemsize
        self._array: Any = None
        self._cache_bytes, self._filled = 0, False  # of `_array`
        self._reader: ReadBox | None = None
        self._close: Callable[[], object] = lambda: None  # of the temporary file

    def read(self, box: Box, out: Bytes) -> None:
        """Fill `out` with a box. CheckpointCorruptError, StorageError."""
        if box.elements == 0:
            return
        if self._reader is None:
            self._reader = self._prepare()
        self._reader(box, out)
        if all(o + n == size for o, n, size in zip(box.offset, box.shape, self._shape, strict=True)):
            self._array = self._reader = None
            self._close()

    def _prepare(self) -> ReadBox:
        row_bytes = math.prod((*self._chunk[:1], *self._shape[1:])) * self._itemsize
        one_chunk_wide = all(part >= size for part, size in zip(self._chunk[1:], self._shape[1:], strict=True))
        if row_bytes <= _ROW_BYTES or one_chunk_wide:
            self._open(row_bytes + _SPARE_BYTES)
            return self._read_array
        self._open(0)
        parts = self._spooled()
        self._array = None
        return partial(read_parts, parts)

    def _open(self, cache_bytes: int, *, filled: bool = False) -> None:
        self._cache_bytes, self._filled = cache_bytes, filled
        future = self._database.opening(self._place, cache_bytes, filled=filled)
        self._array = self._database.opened(self._place, future)

    def _read_array(self, box: Box, out: Bytes) -> None:
        elements = self._elements(box)
        out[...] = elements.reshape(-1).view(np.uint8).reshape(out.shape)

    def _elements(self, box: Box) -> np.ndarray[Any, np.dtype[Any]]:
        """Read a box into memory, in C order."""
        where = tuple(box.slices((0,) * len(box.shape)))
        try:
            read = self._array[where].read(order="C").result()
        except Exception as error:
            if self._filled or not (self._place.may_be_absent and _MISSING_CHUNK.match(str(error))):
                raise self._database.damaged(self._place, error) from None
            self._fill_from_now_on()
            return self._elements(box)
        return np.ascontiguousarray(read)

    def _fill_from_now_on(self) -> None:
        """Open the array again so that absent chunks are read as its fill value."""
        fill = self._array.fill_value
        if fill is None and not self._place.zero_unless_given:
            raise CheckpointCorruptError(
                f"{self._database.path}: a chunk of {self._place.label} is missing, and the array has no fill value"
            )
        value = "zero" if fill is None else f"the fill value, {fill}"
        note = f"{self._place.label} has chunks that are not stored: they are {value}"
        if note not in self._database.notes:
            self._database.notes.append(note)
        self._open(self._cache_bytes, filled=True)

    def _spooled(self) -> list[tuple[Box, ReadBox]]:
        """Decode all chunks into a temporary file. Return the boxes in it, and how to read each."""
        parts: list[tuple[Box, ReadBox]] = []
        piece = _enlarged(self._chunk, self._shape, _PIECE_BYTES // self._itemsize)
        starts = itertools.product(*(range(0, size, step) for size, step in zip(self._shape, piece, strict=True)))
        with storage_errors("write a temporary file in (TMPDIR names another place)", tempfile.gettempdir()):
            spool = tempfile.TemporaryFile(prefix="ckpt-convert-", buffering=0)  # noqa: SIM115
            self._close = weakref.finalize(self, spool.close)  # also where a conversion fails in the middle
            name, offset = f"/proc/self/fd/{spool.fileno()}", 0
            for start in starts:
                shape = tuple(min(step, size - at) for step, size, at in zip(piece, self._shape, start, strict=True))
                data = self._elements(Box(start, shape)).reshape(-1).view(np.uint8).data
                parts.append((Box(start, shape), partial(read_box, name, offset, shape)))
                offset += len(data)
                while data:
                    data = data[spool.write(data) :]
        return parts


def _enlarged(chunk: tuple[int, ...], shape: tuple[int, ...], elements: int) -> tuple[int, ...]:
    """Multiply a chunk by whole numbers, last dimension first, up to `elements` in all and no further than `shape`."""
    piece = list(chunk)
    for dim in reversed(range(len(piece))):
        most = max(1, elements // math.prod(piece))
        piece[dim] *= min(most, -(-shape[dim] // piece[dim]))
    return tuple(piece)


def _reason(error: Exception) -> str:
    """Return the message of tensorstore, without the places in its source."""
    text = str(error).split(" [source locations=")[0].split(" [tensorstore_spec=")[0]
    return text if len(text) <= _LONGEST_REASON else f"{text[:_LONGEST_REASON]}..."


def _batches(places: Iterable[ArrayPlace], size: int) -> Iterator[list[ArrayPlace]]:
    every = iter(places)
    while batch := list(itertools.islice(every, size)):
        yield batch
