"""What to copy where. Free of torch, for plans are also read by writers."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from ckpt.native import CHECKSUM_BYTES
from ckpt.paths import Path

__all__ = ["CopyOp"]


@dataclass(frozen=True, slots=True)
class CopyOp:
    """One box of a local tensor and where its bytes go.

    `source` indexes the box in the local tensor. `flat` is (first element, elements) of the box when it is one run of
    memory in a contiguous local tensor of the planned shape.

    With `piece_bytes` the box fills, in C order, pieces of so many bytes from `offset` on, with room for a checksum
    behind each. Without, it lies somewhere in a piece: as one run if it is `flat`, else in the first corner of an array
    of `full_shape`.
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
        """The bytes of the box."""
        elements: int = math.prod(part.stop - part.start for part in self.source)
        return elements * self.itemsize

    def runs(self) -> Iterator[tuple[int, int, int]]:
        """Where the bytes of the box go, if not to a corner: offset, first of the bytes, and how many."""
        nbytes = self.nbytes
        size = self.piece_bytes or nbytes
        for number, first in enumerate(range(0, nbytes, size) if size else ()):
            yield self.offset + number * (size + CHECKSUM_BYTES), first, min(size, nbytes - first)
