"""Tensors in blocks of bounded memory, along the chunks they are stored in."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import numpy as np

from ckpt.loading.fetch import Fetch
from ckpt.loading.index import StoredTensor
from ckpt.planning.boxes import Box
from ckpt.storage.chunk_layout import indices
from ckpt.storage.dtypes import stored

from .opening import Step

__all__ = ["Reader", "boxes_of"]

_BLOCK_BYTES = 16 << 20

Array = np.ndarray[Any, np.dtype[Any]]


class Reader:
    """Reads boxes of the tensors of a step. Holds one box at a time."""

    def __init__(self, step: Step) -> None:
        self._step = step
        self._fetch = Fetch(step.index)

    def read(self, name: str, box: Box) -> Array:
        """The elements of a box, in the stored dtype. CheckpointCorruptError if bytes are damaged or lead elsewhere."""
        return self._fetch.array(name, self._step.tensors[name], box)


def boxes_of(tensor: StoredTensor, block_bytes: int = _BLOCK_BYTES) -> Iterator[Box]:
    """Boxes that make up a tensor, each of whole chunks (inner ones, where there are) and at most `block_bytes`.

    A single chunk larger than that is a box of its own: it cannot be read in parts.
    """
    itemsize = stored(tensor.dtype).itemsize
    for box in tensor.boxes:
        if 0 in box.shape:
            continue
        cell = (1,) * len(box.shape)
        if box.pack_offset is None:
            cell = box.meta.inner_chunk_shape or box.meta.chunk_shape
        block = _grown(cell, box.shape, block_bytes // itemsize)
        for start in indices([range(0, size, step) for size, step in zip(box.shape, block, strict=True)]):
            shape = tuple(min(step, size - at) for step, size, at in zip(block, box.shape, start, strict=True))
            yield Box(tuple(a + b for a, b in zip(start, box.box_offset, strict=True)), shape)


def _grown(cell: tuple[int, ...], shape: tuple[int, ...], elements: int) -> tuple[int, ...]:
    """`cell` times whole numbers, last dimension first, as far as `elements` allow and `shape` needs."""
    block = list(cell)
    for dim in reversed(range(len(block))):
        others = math.prod(block) // block[dim]
        most = max(1, elements // (others * cell[dim]))
        block[dim] = cell[dim] * min(most, -(-shape[dim] // cell[dim]))
    return tuple(block)
