"""Does what the documents of a step say of its tensors agree, so that every element is stored exactly once?"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ckpt.paths import Path, display
from ckpt.planning.boxes import Box, make_up
from ckpt.storage.dtypes import stored
from ckpt.storage.names import PACK_DIRECTORY

if TYPE_CHECKING:
    from ckpt.loading.index import CheckpointIndex, StoredTensor

__all__ = ["Disagreement", "all_tensors", "disagreements"]


@dataclass(frozen=True, slots=True)
class Disagreement:
    """What is wrong with a tensor, or with all, according to the document `file`."""

    file: str
    tensor: str | None
    message: str


def disagreements(index: CheckpointIndex) -> Iterator[Disagreement]:
    """All that is wrong: boxes that do not make up their tensor, entries that do not fit the pack, aliases of nothing.

    Where there is none, every box of every tensor can be read from the arrays. Time grows with the number of boxes, but
    for sorting the entries of the pack.
    """
    entries: list[_Entry] = []
    for path, rank, tensor in _tensors(index):
        if not (_is_one_box(tensor) or make_up(tensor.shape, [Box(b.box_offset, b.shape) for b in tensor.boxes])):
            yield Disagreement("zarr.json", _name(path, rank), "the stored boxes do not make up the tensor exactly")
        for box in tensor.boxes:
            start = box.pack_offset
            if start is not None and 0 not in box.shape:
                nbytes = math.prod(box.shape) * stored(tensor.dtype).itemsize
                entries.append((start, start + nbytes, len(entries), path, rank))
    yield from _in_the_pack(index, entries)
    yield from _of_aliases(index)
    for path in index.tensors.keys() & index.values.keys():
        yield Disagreement("state.json", display(path), "is a tensor, but there is a value of this name as well")
    metas = index.arrays.values()
    chunks = sum([1 if meta.shape == meta.chunk_shape else math.prod(meta.grid_shape) for meta in metas])
    if chunks != index.summary["files"]:
        written = index.summary["files"]
        yield Disagreement("zarr.json", None, f"describes {chunks} chunks, but says that {written} were written")


def all_tensors(index: CheckpointIndex) -> Iterator[tuple[str, StoredTensor]]:
    """Every stored tensor under its name; those of single ranks as ``<name>@rank<r>``. Aliases are not among them."""
    return ((_name(path, rank), tensor) for path, rank, tensor in _tensors(index))


def _tensors(index: CheckpointIndex) -> Iterator[tuple[Path, int | None, StoredTensor]]:
    for path, tensor in index.tensors.items():
        yield path, None, tensor
    for path, own in index.per_rank_tensors.items():
        for rank, tensor in own.items():
            yield path, rank, tensor


def _name(path: Path, rank: int | None) -> str:
    return display(path) if rank is None else f"{display(path)}@rank{rank}"


def _is_one_box(tensor: StoredTensor) -> bool:
    box = tensor.boxes[0]
    return len(tensor.boxes) == 1 and box.shape == tensor.shape and not any(box.box_offset)


_Entry = tuple[int, int, int, Path, int | None]  # first byte, last byte (excluded), a number, and the tensor


def _in_the_pack(index: CheckpointIndex, entries: list[_Entry]) -> Iterator[Disagreement]:
    meta = index.arrays.get(PACK_DIRECTORY)
    size = 0 if meta is None else meta.shape[0]
    (unit,) = (1,) if meta is None else meta.inner_chunk_shape or meta.chunk_shape
    last = 0
    for start, end, _, path, rank in sorted(entries):
        if end > size:
            yield Disagreement("state.json", _name(path, rank), "lies outside the pack")
        elif start // unit != (end - 1) // unit:
            yield Disagreement("state.json", _name(path, rank), "lies across inner chunks of the pack")
        elif start < last:
            yield Disagreement("state.json", _name(path, rank), "overlaps with another tensor in the pack")
        last = max(last, end)


def _of_aliases(index: CheckpointIndex) -> Iterator[Disagreement]:
    for alias, target in index.aliases.items():
        if target not in index.tensors and target not in index.per_rank_tensors:
            message = f"is an alias of {display(target)}, which is not there"
        elif target in index.aliases:
            message = f"is an alias of {display(target)}, which is an alias itself"
        elif alias in index.tensors or alias in index.values:
            message = "is an alias, but is stored as well"
        else:
            continue
        yield Disagreement("state.json", display(alias), message)
