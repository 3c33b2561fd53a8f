"""Files that are read with requests to another machine: blocks near each other are fetched with one."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np

from ckpt.native import CHECKSUM_BYTES, check_pieces
from ckpt.storage.step_source import OpenFile

__all__ = ["RangedFile"]

Array = np.ndarray[Any, np.dtype[Any]]

_NEAR_BYTES = 1 << 20  # what lies between two ranges that are fetched as one: a request costs as much time


class RangedFile(OpenFile):
    """A file whose blocks are checked in the memory of this process."""

    def read_checked(self, segments: Array) -> bool:
        """See `OpenFile.read_checked`."""
        return all(check_pieces(self.read(start, end - start), start, part) for part, start, end in _ranges(segments))


def _ranges(segments: Array) -> list[tuple[Array, int, int]]:
    """Return groups of segments, each with the first and the last byte (excluded) of its blocks."""
    segments = segments[(segments["bytes"] > 0) & (segments["rows"] > 0)]
    if not len(segments):
        return []
    block, at = segments["block_bytes"], segments["at"]
    last = at + (segments["rows"] - 1) * segments["at_step"] + segments["bytes"] - 1
    pitch = block + CHECKSUM_BYTES
    first_byte, end_byte = segments["base"] + at // block * pitch, segments["base"] + (last // block + 1) * pitch
    ends = np.maximum.accumulate(end_byte)
    cuts = [0, *(np.flatnonzero(first_byte[1:] > ends[:-1] + _NEAR_BYTES) + 1).tolist(), len(segments)]
    return [
        (np.ascontiguousarray(segments[low:high]), int(first_byte[low:high].min()), int(end_byte[low:high].max()))
        for low, high in itertools.pairwise(cuts)
    ]
