"""Stage arrays as a trainer does, for tests of writers and readers."""

import mmap
from dataclasses import dataclass
from itertools import product
from typing import Any

import numpy as np

from ckpt.storage.array_metadata import ArrayMeta
from ckpt.storage.chunk_codec import WrittenChunk, inner_chunk_array
from ckpt.storage.chunk_writers import ChunkJob, ChunkWriter

Array = np.ndarray[Any, np.dtype[Any]]


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


def staged(meta: ArrayMeta, index: tuple[int, ...], array: Array) -> memoryview:
    """Return an encoded chunk without checksums, in page-aligned memory that held other data before."""
    layout = meta.layout(index)
    image = memoryview(mmap.mmap(-1, layout.buffer_bytes))
    image[:] = b"\xaa" * len(image)
    for piece in layout.inner_chunks:
        box = tuple(slice(o, o + n) for o, n in zip(piece.origin, piece.shape, strict=True))
        inner_chunk_array(meta, layout, piece, image)[...] = array[box]
    return image


def write_array(writer: ChunkWriter, meta: ArrayMeta, directory: str, array: Array) -> list[WrittenChunk]:
    jobs = [ChunkJob(meta, directory, index, staged(meta, index, array)) for index in meta.chunk_indices()]
    written = [writer.write(job) for job in jobs]
    writer.finish()
    return written


def boxes(shape: tuple[int, ...]) -> list[tuple[slice, ...]]:
    """Yield boxes of an array: the whole array, and random ones."""
    parts = [{(0, n), (n // 3, n - n // 4), (n // 2, n)} for n in shape]
    return [tuple(slice(a, b) for a, b in box) for box in product(*(sorted(part) for part in parts))]
