"""Stage arrays as a trainer does, for tests of writers and readers."""

import mmap
from dataclasses import dataclass
from itertools import product
from typing import Any, NamedTuple

import google_crc32c
import numpy as np

from ckpt.native import CHECKSUM_BYTES
from ckpt.storage.array_metadata import ArrayMeta
from ckpt.storage.chunk_layout import PAGE_BYTES, ChunkLayout, InnerChunk
from ckpt.storage.pack_index import ALIGNMENT
from ckpt.storage.pack_writers import ChunkToCompress, FileJob

Array = np.ndarray[Any, np.dtype[Any]]


class ChunkPlan(NamedTuple):
    """A chunk in a file: its index, where it begins, and its size."""

    index: tuple[int, ...]
    offset: int
    nbytes: int


@dataclass(frozen=True)
class Case:
    name: str
    meta: ArrayMeta

    def __str__(self) -> str:
        return self.name


CASES = [
    Case("plain", ArrayMeta((6, 4), "float32", (3, 4))),
    Case("plain-edge", ArrayMeta((7, 5), "float32", (3, 4))),
    Case("sharded", ArrayMeta((8, 6), "float32", (8, 6), (2, 3))),
    Case("sharded-edge", ArrayMeta((5, 7), "int16", (6, 6), (2, 3))),
    Case("sharded-unaligned-float64", ArrayMeta((5, 7), "float64", (6, 6), (1, 3))),
    Case("sharded-unaligned-complex128", ArrayMeta((5,), "complex128", (6,), (1,))),
    Case("0-d", ArrayMeta((), "float64", ())),
    Case("0-d-raw", ArrayMeta((), "complex32", ())),
    Case("raw", ArrayMeta((3, 5), "complex32", (2, 4), (1, 2))),
    Case("raw-bytes", ArrayMeta((3, 5), "float8_e4m3fn", (2, 4))),
    Case("bfloat16", ArrayMeta((9,), "bfloat16", (4,), (2,))),
    Case("bool", ArrayMeta((9,), "bool", (4,))),
    Case("e8m0-has-no-zero", ArrayMeta((9,), "float8_e8m0fnu", (4,), (2,))),
    Case("several-pages", ArrayMeta((3000, 5), "float32", (2000, 5), (500, 5))),
    Case("empty", ArrayMeta((0, 5), "float32", (2, 5))),
]


def elements(meta: ArrayMeta, *, seed: int = 0) -> Array:
    """Return random bits as the stored elements of an array, including nan."""
    rng = np.random.default_rng(seed)
    shape = (*meta.shape, *meta.stored.trailing)
    count = int(np.prod(shape)) * meta.stored.numpy_dtype.itemsize
    raw = rng.integers(0, 2 if meta.dtype == "bool" else 256, count, np.uint8)
    return np.ndarray(shape, meta.stored.numpy_dtype, raw.tobytes())


def bits(array: Array) -> bytes:
    return np.ascontiguousarray(array).tobytes()


def inner_chunk_array(meta: ArrayMeta, layout: ChunkLayout, inner: InnerChunk, encoded: memoryview) -> Array:
    """Return the elements of `inner`, without padding, as a view of an encoded chunk before compression."""
    full: Array = np.ndarray(
        (*layout.full_shape, *meta.stored.trailing), meta.stored.numpy_dtype, encoded, inner.offset
    )
    return full[(*(slice(size) for size in inner.shape), ...)]  # with the ellipsis a view, also without dimensions


def job(meta: ArrayMeta, array: Array, number: int = 0, checksummed: int = 0) -> tuple[FileJob, list[ChunkPlan]]:
    """Return a file with all chunks of an array, staged as a trainer does, and where each chunk is.

    The first `checksummed` inner chunks have their checksums already.
    """
    layouts = [(index, meta.layout(index)) for index in meta.chunk_indices()]
    offsets, end = [], 0
    for _, layout in layouts:
        offsets.append(end)
        end += -(-layout.encoded_bytes // ALIGNMENT) * ALIGNMENT
    memory = memoryview(mmap.mmap(-1, -(-end // PAGE_BYTES) * PAGE_BYTES))
    starts: list[int] = []
    to_compress = []
    for offset, (index, layout) in zip(offsets, layouts, strict=True):
        encoded = memory[offset:]
        for inner in layout.inner_chunks:
            box = tuple(slice(o, o + n) for o, n in zip(inner.origin, inner.shape, strict=True))
            inner_chunk_array(meta, layout, inner, encoded)[...] = array[box]
            starts.append(offset + inner.offset)
        encoded[layout.index_offset : layout.index_offset + len(layout.index)] = layout.index
        if meta.compression is not None:
            to_compress.append(ChunkToCompress(0, len(to_compress), index, meta, offset))
    nbytes = offsets[-1] + layouts[-1][1].encoded_bytes
    size = meta.inner_chunk_bytes
    done = np.arange(len(starts)) < checksummed
    for start in starts[:checksummed]:
        checksum = google_crc32c.value(bytes(memory[start : start + size]))
        memory[start + size : start + size + CHECKSUM_BYTES] = checksum.to_bytes(CHECKSUM_BYTES, "little")
    file = FileJob(number, nbytes, memory, np.array(starts), np.full(len(starts), size), done, to_compress)
    return file, [ChunkPlan(i, at, layout.encoded_bytes) for at, (i, layout) in zip(offsets, layouts, strict=True)]


def boxes(shape: tuple[int, ...]) -> list[tuple[slice, ...]]:
    """Yield boxes of an array: the whole array, and random ones."""
    parts = [{(0, n), (n // 3, n - n // 4), (n // 2, n)} for n in shape]
    return [tuple(slice(a, b) for a, b in box) for box in product(*(sorted(part) for part in parts))]
