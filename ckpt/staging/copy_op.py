"""One copy between a tensor and a slot. Free of torch."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product
from typing import NamedTuple

from ckpt.native import CHECKSUM_BYTES
from ckpt.paths import Path

__all__ = ["CopyOp", "Rows"]

_MOST_ROW_BYTES = 1 << 30  # CUDA copies no rows of 2 GiB


class Rows(NamedTuple):
    """Some of the bytes of a box, from `first` on, as `rows` rows of `nbytes`.

    In the slot the first row is at `offset`, each other one `pitch` bytes behind the one before.
    """

    first: int
    offset: int
    nbytes: int
    rows: int
    pitch: int


@dataclass(frozen=True, slots=True)
class CopyOp:
    """One box of a local tensor and where its bytes go.

    `source` indexes the box in the local tensor. `flat` is (first element, elements) of the box when it is one run of
    memory in a contiguous local tensor of the planned shape.

    With `piece_bytes` the box fills, in C order, pieces of so many bytes from `offset` on, with room for a checksum
    behind each; behind the box there are zeros in the last one. Without, it lies somewhere in a piece: as one run if it
    is `flat`, else in the first corner of an array of `full_shape`.
    """

    path: Path
    source: tuple[slice, ...]
    flat: tuple[int, int] | None
    offset: int
    full_shape: tuple[int, ...]
    itemsize: int
    piece_bytes: int | None = None

    @property
    def nbytes(self) -> int:
        """The size of the box in bytes."""
        elements: int = math.prod(part.stop - part.start for part in self.source)
        return elements * self.itemsize

    def runs(self) -> Iterator[tuple[int, int, int]]:
        """Return where the bytes of the box go, if not to a corner: offset, first of the bytes, and how many."""
        nbytes = self.nbytes
        size = self.piece_bytes or nbytes
        for number, first in enumerate(range(0, nbytes, size) if size else ()):
            yield self.offset + number * (size + CHECKSUM_BYTES), first, min(size, nbytes - first)

    def rows(self) -> Iterator[Rows]:
        """Return where the bytes of the box go, with as few blocks of rows as possible."""
        nbytes = self.nbytes
        if self.piece_bytes is not None and self.piece_bytes <= _MOST_ROW_BYTES:
            yield from _rows(0, self.offset, nbytes, self.piece_bytes, self.piece_bytes + CHECKSUM_BYTES)
        elif self.piece_bytes is not None or self.flat is not None:
            for offset, first, size in self.runs():
                yield from _rows(first, offset, size, _MOST_ROW_BYTES, _MOST_ROW_BYTES)
        else:
            yield from self._rows_of_corner()

    def _rows_of_corner(self) -> Iterator[Rows]:
        """Cut at the last dimension that the box does not fill: a row spans it and those behind it."""
        shape = [part.stop - part.start for part in self.source]
        cut = max((dim for dim, size in enumerate(shape) if size != self.full_shape[dim]), default=0)
        row_bytes = math.prod(shape[cut:]) * self.itemsize
        pitch = math.prod(self.full_shape[cut:]) * self.itemsize
        rows = shape[cut - 1] if cut else 1
        strides = [math.prod(self.full_shape[dim + 1 :]) * self.itemsize for dim in range(len(shape))]
        for number, index in enumerate(product(*map(range, shape[: max(cut - 1, 0)]))):
            at = sum(i * stride for i, stride in zip(index, strides, strict=False))
            yield Rows(number * rows * row_bytes, self.offset + at, row_bytes, rows, pitch)


def _rows(first: int, offset: int, nbytes: int, row_bytes: int, pitch: int) -> Iterator[Rows]:
    """Return a run of bytes of a box as rows, and the rest behind the last one."""
    whole, rest = divmod(nbytes, row_bytes)
    if whole:
        yield Rows(first, offset, row_bytes, whole, pitch)
    if rest:
        yield Rows(first + nbytes - rest, offset + whole * pitch, rest, 1, rest)
