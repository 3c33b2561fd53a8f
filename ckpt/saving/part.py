"""A rank's part of a save: which arrays it describes, which chunk files it writes, and where in the slot their bytes
are.

Made once from the plan and used for every save of the same structure. The half that the writer needs (`PartPlan`) is
free of torch and is sent as one block of bytes; the half that the trainer needs are the copies (`CopyOp`).
"""

from __future__ import annotations

from dataclasses import dataclass

from ckpt.paths import Path
from ckpt.planning.boxes import Box
from ckpt.staging.copies import Copies
from ckpt.storage.array_metadata import ArrayMeta
from ckpt.storage.documents import EncodedList

__all__ = ["Image", "LocalBoxes", "Part", "PartPlan"]

LocalBoxes = dict[Path, list[tuple[Box, tuple[int, ...]]]]
"""What a rank holds of each tensor: boxes of the global one, and the offset of each in the local one."""


@dataclass(frozen=True, slots=True)
class Image:
    """One chunk file of this rank: of array number `array`, chunk `index`; its image is at `offset` in the slot of its
    `piece`.

    A save that fits one slot has one piece, number 0.
    """

    array: int
    index: tuple[int, ...]
    offset: int
    image_bytes: int
    piece: int


@dataclass(frozen=True)
class PartPlan:
    """What a rank's writer does in every save of this structure.

    `described` are the numbers of the arrays whose metadata this rank writes; `packed` are the entries of the part
    manifest about tensors (or boxes of them) in the pack; `slot_bytes` is what each piece needs at most.
    """

    rank: int
    world_size: int
    plan_digest: str
    directories: tuple[str, ...]
    metas: tuple[ArrayMeta, ...]
    described: tuple[int, ...]
    images: tuple[Image, ...]
    packed: EncodedList
    aliases: tuple[tuple[Path, Path], ...]
    slot_bytes: int
    pieces: int


@dataclass(frozen=True)
class Part:
    """A rank's part: the writer's half, and for each piece the copies that fill it.

    Bytes that must be zero, in the pack and behind the last elements of an array, are `gaps`: offset and number of
    bytes.
    """

    plan: PartPlan
    copies: tuple[Copies, ...]
    gaps: tuple[tuple[tuple[int, int], ...], ...]

    def clear_gaps(self, piece: int, slot: memoryview) -> None:
        """Make them zero in the slot of a piece."""
        for offset, nbytes in self.gaps[piece]:
            slot[offset : offset + nbytes] = bytes(nbytes)
