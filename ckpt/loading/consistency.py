"""Read the documents of a step, and check that every element of every tensor is stored exactly once."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from dataclasses import dataclass

from ckpt.collection import without_collection
from ckpt.errors import CheckpointCorruptError
from ckpt.loading.index import CheckpointIndex, StoredTensor, parse_index
from ckpt.paths import Path, display
from ckpt.planning.boxes import Box, tile_exactly
from ckpt.storage.names import INDEX, PUBLISHED_STEP, step_name
from ckpt.storage.pack_index import StoredArray
from ckpt.storage.step_source import StepSource

_log = logging.getLogger("ckpt")


def read_index(step: str | StepSource) -> CheckpointIndex:
    """Read the metadata of a published step, a source or a directory, and check that they are consistent.

    Every element of every tensor is then in exactly one box, and every alias has a target; only the bytes of the arrays
    remain to be checked. Nothing but three regular files of the step is opened. Logs a warning if the step lies under
    the number of another one.

    Raises CheckpointNotFoundError, FormatVersionError (before anything else is checked), CheckpointCorruptError,
    StorageError.
    """
    with without_collection():
        index = parse_index(step)
    named = PUBLISHED_STEP.fullmatch(os.path.basename(index.path.rstrip("/")))
    if named is not None and int(named[1]) != index.step:
        _log.warning(
            "%s has the name of step %d and holds step %d: it was copied or renamed; rename it to %s, or save it again",
            index.path,
            int(named[1]),
            index.step,
            step_name(index.step),
        )
    for problem in find_inconsistencies(index):
        what = "" if problem.tensor is None else f"tensor {problem.tensor}: "
        where = os.path.join(index.path, problem.file)
        raise CheckpointCorruptError(f"{where} is damaged: {what}{problem.message}; restore from another step or copy")
    return index


@dataclass(frozen=True, slots=True)
class Inconsistency:
    """A problem with a tensor, or with the whole step, in the document `file`."""

    file: str
    tensor: str | None
    message: str


def find_inconsistencies(index: CheckpointIndex) -> Iterator[Inconsistency]:
    """Yield all problems: boxes that do not tile their tensor, other files than recorded, aliases without a target.

    If there are none, every box of every tensor can be read from the packs. Takes time in proportion to the number of
    boxes, apart from sorting the regions.
    """
    for path, rank, tensor in index.stored_tensors():
        boxes = tensor.boxes
        if len(boxes) == 1 and boxes[0].meta.shape == tensor.shape:
            continue
        if not tile_exactly(tensor.shape, [Box(box.box_offset, box.meta.shape) for box in boxes]):
            yield Inconsistency(INDEX, _name(path, rank), "the stored boxes do not cover the tensor exactly")
    yield from _alias_problems(index)
    for path in index.tensors.keys() & index.values.keys():
        yield Inconsistency("state.json", display(path), "is a tensor, but there is a value of this name as well")
    summary, packs = index.summary, index.packs
    files = packs.files()
    found = {"files": len(files), "tensors": len(packs.arrays)}
    if not packs.compressed:
        found["bytes"] = sum(files.values())
    for key, number in found.items():
        if summary[key] != number:
            yield Inconsistency("zarr.json", None, f"says that there are {summary[key]} {key}, the index {number}")


def all_tensors(index: CheckpointIndex) -> Iterator[tuple[str, StoredTensor]]:
    """Yield every stored tensor with its name; those of single ranks as ``<name>@rank<r>``. Without aliases."""
    return ((_name(path, rank), tensor) for path, rank, tensor in index.stored_tensors())


def array_name(array: StoredArray) -> str:
    """Return the name of the tensor that an array belongs to, as `all_tensors` does."""
    return _name(array.path, array.rank)


def _name(path: Path, rank: int | None) -> str:
    return display(path) if rank is None else f"{display(path)}@rank{rank}"


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
