"""Read the documents of a step, and check that every element of every tensor is stored exactly once."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from dataclasses import dataclass

from ckpt.errors import CheckpointCorruptError
from ckpt.loading.index import CheckpointIndex, StoredTensor, parse_index
from ckpt.paths import Path, display
from ckpt.planning.boxes import Box, tile_exactly
from ckpt.storage.dtypes import stored
PACK_DIRECTORY = "packed"

__all__ = ["Inconsistency", "all_tensors", "find_inconsistencies", "read_index"]


def read_index(path: str) -> CheckpointIndex:
    """Read the metadata of the published step in directory `path`, and check that they are consistent.

    Every element of every tensor is then in exactly one box, and every alias has a target; only the bytes of the arrays
    remain to be checked. Nothing but two regular files of the step is opened.

    Raises CheckpointNotFoundError, FormatVersionError (before anything else is checked), CheckpointCorruptError,
    StorageError.
    """
    index = parse_index(path)
    for problem in find_inconsistencies(index):
        what = "" if problem.tensor is None else f"tensor {problem.tensor}: "
        where = os.path.join(path, problem.file)
        raise CheckpointCorruptError(f"{where} is damaged: {what}{problem.message}; restore from another step or copy")
    return index


@dataclass(frozen=True, slots=True)
class Inconsistency:
    """A problem with a tensor, or with the whole step, in the document `file`."""

    file: str
    tensor: str | None
    message: str


def find_inconsistencies(index: CheckpointIndex) -> Iterator[Inconsistency]:
    """Yield all problems: boxes that do not tile their tensor, entries outside the pack, aliases without a target.

    If there are none, every box of every tensor can be read from the arrays. Takes time in proportion to the number of
    boxes, apart from sorting the entries of the pack.
    """
    entries: list[_Entry] = []
    for path, rank, tensor in _tensors(index):
        if not (_is_one_box(tensor) or tile_exactly(tensor.shape, [Box(b.box_offset, b.shape) for b in tensor.boxes])):
            yield Inconsistency("zarr.json", _name(path, rank), "the stored boxes do not cover the tensor exactly")
        for box in tensor.boxes:
            start = box.pack_offset
            if start is not None and 0 not in box.shape:
                nbytes = math.prod(box.shape) * stored(tensor.dtype).itemsize
                entries.append((start, start + nbytes, len(entries), path, rank))
    yield from _pack_problems(index, entries)
    yield from _alias_problems(index)
    for path in index.tensors.keys() & index.values.keys():
        yield Inconsistency("state.json", display(path), "is a tensor, but there is a value of this name as well")
    metas = index.arrays.values()
    chunks = sum([1 if meta.shape == meta.chunk_shape else math.prod(meta.grid_shape) for meta in metas])
    if chunks != index.summary["files"]:
        written = index.summary["files"]
        yield Inconsistency("zarr.json", None, f"describes {chunks} chunks, but says that {written} were written")


def all_tensors(index: CheckpointIndex) -> Iterator[tuple[str, StoredTensor]]:
    """Yield every stored tensor with its name; those of single ranks as ``<name>@rank<r>``. Without aliases."""
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


_Entry = tuple[int, int, int, Path, int | None]  # first byte, last byte (excluded), number, tensor


def _pack_problems(index: CheckpointIndex, entries: list[_Entry]) -> Iterator[Inconsistency]:
    meta = index.arrays.get(PACK_DIRECTORY)
    size = 0 if meta is None else meta.shape[0]
    (unit,) = (1,) if meta is None else meta.inner_chunk_shape or meta.chunk_shape
    last = 0
    for start, end, _, path, rank in sorted(entries):
        if end > size:
            yield Inconsistency("state.json", _name(path, rank), "lies outside the pack")
        elif start // unit != (end - 1) // unit:
            yield Inconsistency("state.json", _name(path, rank), "lies across inner chunks of the pack")
        elif start < last:
            yield Inconsistency("state.json", _name(path, rank), "overlaps with another tensor in the pack")
        last = max(last, end)


def _alias_problems(index: CheckpointIndex) -> Iterator[Inconsistency]:
    for alias, target in index.aliases.items():
        if target not in index.tensors and target not in index.per_rank_tensors:
            message = f"is an alias of {display(target)}, which does not exist"
        elif target in index.aliases:
            message = f"is an alias of {display(target)}, which is an alias itself"
        elif alias in index.tensors or alias in index.values:
            message = "is an alias, but is stored as well"
        else:
            continue
        yield Inconsistency("state.json", display(alias), message)
