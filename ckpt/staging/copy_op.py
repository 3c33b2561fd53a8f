"""What to copy where. Free of torch, for plans are also read by writers."""

from __future__ import annotations

from dataclasses import dataclass

from ckpt.paths import Path

__all__ = ["CopyOp"]


@dataclass(frozen=True, slots=True)
class CopyOp:
    """One box of a local tensor and where its bytes go.

    `source` indexes the box in the local tensor. `flat` is (first element, elements) of the box when it is one run of
    memory in a contiguous local tensor of the planned shape and the destination has no padding inside. Otherwise the
    destination is an array of `full_shape` at `offset`, of which the box fills the first corner.

    `is_piece` says that the box is all there is between `offset` and a checksum of it.
    """

    path: Path
    source: tuple[slice, ...]
    flat: tuple[int, int] | None
    offset: int
    full_shape: tuple[int, ...]
    itemsize: int
    is_piece: bool = False
