"""The exported part of a step: its leaves and their new names, and tensors as blocks of bounded memory."""

from __future__ import annotations

import difflib
import fnmatch
import math
import re
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import ml_dtypes
import numpy as np

from ckpt.errors import ConversionError
from ckpt.exporting.options import ExportForm
from ckpt.formats.lazy_state import Blocks, NewTensor
from ckpt.loading.fetch import Fetch
from ckpt.loading.index import CheckpointIndex, StoredTensor
from ckpt.paths import Path, display
from ckpt.planning.boxes import Box
from ckpt.storage.chunk_layout import indices
from ckpt.storage.documents import canonical_json
from ckpt.storage.dtypes import stored
from ckpt.values.codec import encode_value
from ckpt.values.containers import Container


@dataclass(frozen=True)
class StepLeaf:
    """A leaf of a step. `rank` is the only rank that it belongs to; None if it belongs to all."""

    path: Path
    rank: int | None

    @property
    def label(self) -> str:
        """The name that `inspect_ckpt show` lists."""
        return display(self.path) + ("" if self.rank is None else f"@rank{self.rank}")


@dataclass(frozen=True)
class StepTensor(StepLeaf):
    """A tensor of a step. `alias_of` is the name of the original if this is a further name of it."""

    tensor: StoredTensor
    alias_of: Path | None = None


@dataclass(frozen=True)
class StepValue(StepLeaf):
    """A leaf of a step that is not a tensor."""

    value: Any


def dotted(path: Path) -> str:
    """Join the keys of a path by dots."""
    return ".".join(map(str, path))


def tensor_leaves(index: CheckpointIndex) -> list[StepTensor]:
    """Return all tensors by name, including further names of a tensor."""
    leaves = [StepTensor(path, None, tensor) for path, tensor in index.tensors.items()]
    for path, own in index.per_rank_tensors.items():
        leaves += [StepTensor(path, rank, tensor) for rank, tensor in own.items()]
    for path, target in index.aliases.items():
        if target in index.tensors:
            leaves.append(StepTensor(path, None, index.tensors[target], alias_of=target))
        for rank, tensor in index.per_rank_tensors.get(target, {}).items():
            leaves.append(StepTensor(path, rank, tensor, alias_of=target))
    return sorted(leaves, key=lambda leaf: leaf.label)


def value_leaves(index: CheckpointIndex) -> list[StepValue]:
    """Return all leaves that are not tensors, by name."""
    leaves = [StepValue(path, None, value) for path, value in index.values.items()]
    for path, own in index.per_rank_values.items():
        leaves += [StepValue(path, rank, value) for rank, value in own.items()]
    return sorted(leaves, key=lambda leaf: leaf.label)


def same_value(one: Any, other: Any) -> bool:
    """Whether two values that are not tensors are of the same types and have the same bits."""
    try:
        return canonical_json(encode_value(one)) == canonical_json(encode_value(other))
    except TypeError:
        return False


# -- what is exported --------------------------------------------------------------------------------------------------

_BLOCK_BYTES = 16 << 20
_FLOATS = ("float16", "bfloat16", "float32", "float64")


@dataclass(frozen=True, eq=False)
class NewValue:
    """A leaf that is not a tensor. `keys` lead to it; those of a leaf of one rank are only its name."""

    label: str
    name: str
    keys: Path
    value: Any
    rank: int | None


@dataclass(frozen=True)
class Selection:
    """The leaves to export. `tied` are further names of tensors in the selection; `ranked` are of single ranks.

    `became_inf` counts, while blocks are made, the finite elements of tensors that the new dtype cannot hold.
    """

    tensors: list[NewTensor]
    values: list[NewValue]
    containers: dict[Path, Container]
    tied: list[str]
    ranked: list[str]
    became_inf: dict[str, int] = field(default_factory=dict)

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return sum(tensor.nbytes for tensor in self.tensors)


def select(index: CheckpointIndex, form: ExportForm) -> Selection:
    """Choose and name the leaves of a step. ConversionError if a pattern or the prefix matches nothing.

    Tensors are in the order of their names, with numbers in names in numerical order.
    """
    prefix = form.prefix or ""
    tensors, values = tensor_leaves(index), value_leaves(index)
    labels = [leaf.label for leaf in (*tensors, *values)]
    wanted = set(matching(labels, form.filter, index.path)) if form.filter else set(labels)
    wanted -= set(matching(labels, form.exclude, index.path))
    paths = {leaf.path: below for leaf in (*tensors, *values) if (below := _below(leaf.path, prefix)) is not None}
    if not paths:
        raise ConversionError(f"{index.path}: no name begins with {prefix!r}; the first is {min(labels, default='')!r}")
    tensors = sorted((leaf for leaf in tensors if leaf.label in wanted and leaf.path in paths), key=_natural)
    values = sorted((leaf for leaf in values if leaf.label in wanted and leaf.path in paths), key=_natural)
    tied = [leaf for leaf in tensors if leaf.alias_of is not None and _first_name_of(leaf, tensors) is not leaf]
    if form.drop_tied:
        tensors = [leaf for leaf in tensors if leaf not in tied]
    fetch = Fetch(index)
    changes: dict[str, int] = {}
    new_tensors = [_new_tensor(leaf, paths[leaf.path], fetch, form, changes) for leaf in tensors]
    new_values = [_new_value(leaf, paths[leaf.path]) for leaf in values]
    containers = {
        below: container
        for path, container in index.containers.items()
        if container.kind != "optimizer" and (below := path if not prefix else _below(path, prefix)) is not None
    }
    ranked = [leaf.label for leaf in (*tensors, *values) if leaf.rank is not None]
    return Selection(new_tensors, new_values, containers, [leaf.label for leaf in tied], ranked, changes)


def matching(names: Collection[str], patterns: Sequence[str], where: str) -> list[str]:
    """Return the names that any of `patterns` equals or matches (`*`, `?`, `[...]`).

    ConversionError for a pattern that matches nothing.
    """
    chosen: dict[str, None] = {}
    for pattern in patterns:
        if pattern in names:
            chosen[pattern] = None
            continue
        found = [name for name in names if fnmatch.fnmatchcase(name, pattern)]
        if not found:
            near = difflib.get_close_matches(pattern, list(names), 3)
            hint = f"; did you mean {' or '.join(near)}?" if near else "; `inspect_ckpt show` lists all names"
            raise ConversionError(f"{where}: nothing matches {pattern!r}{hint}")
        chosen |= dict.fromkeys(found)
    return list(chosen)


def _below(path: Path, prefix: str) -> Path | None:
    """Return what is left of a path without the keys, or the beginning of a key, that `prefix` names, joined by dots.

    None if the path does not begin with it.
    """
    for number, key in enumerate(path):
        text = str(key)
        if not prefix:
            return path[number:]
        if text == prefix:
            return path[number + 1 :]
        if text.startswith(prefix + "."):
            return (text[len(prefix) + 1 :], *path[number + 1 :])
        if not prefix.startswith(text + "."):
            return None
        prefix = prefix[len(text) + 1 :]
    return None if prefix else path


def _natural(leaf: StepLeaf) -> list[tuple[int, str]]:
    return [(int(part), "") if part.isdecimal() else (-1, part) for part in re.split(r"(\d+)", leaf.label)]


def _first_name_of(leaf: StepTensor, leaves: list[StepTensor]) -> StepTensor:
    """Of the chosen leaves with the data of `leaf`, return the original, or else the first."""
    group = [other for other in leaves if other.tensor is leaf.tensor]
    return next((other for other in group if other.alias_of is None), group[0])


def _new_value(leaf: StepValue, below: Path) -> NewValue:
    return NewValue(leaf.label, *_name_and_keys(leaf, below), leaf.value, leaf.rank)


def _name_and_keys(leaf: StepLeaf, below: Path) -> tuple[str, Path]:
    """Return the new name of a leaf, and the keys that lead to it in a nested format."""
    if leaf.rank is None:
        return dotted(below), below
    name = f"{dotted(below)}@rank{leaf.rank}"
    return name, (name,)


# -- tensors in blocks -------------------------------------------------------------------------------------------------


def _new_tensor(leaf: StepTensor, below: Path, fetch: Fetch, form: ExportForm, changes: dict[str, int]) -> NewTensor:
    source = leaf.tensor.dtype
    target = form.dtype if form.dtype and source in _FLOATS else source
    blocks = partial(_blocks, leaf, fetch, source, target, changes)
    return NewTensor(leaf.label, *_name_and_keys(leaf, below), target, leaf.tensor.shape, id(leaf.tensor), blocks)


def _blocks(leaf: StepTensor, fetch: Fetch, source: str, target: str, changes: dict[str, int]) -> Blocks:
    for box in _runs(leaf.tensor):
        block = fetch.array(leaf.label, leaf.tensor, box)
        if source == target:
            yield box, block
            continue
        with np.errstate(all="ignore"):
            converted = block.astype(_numpy_dtype(target))
        if target != "float32" or source == "float64":
            lost = int(np.count_nonzero(np.isfinite(block) & ~np.isfinite(converted)))
            if lost:
                changes[leaf.label] = changes.get(leaf.label, 0) + lost
        yield box, converted


def _numpy_dtype(dtype: str) -> np.dtype[Any]:
    return np.dtype(ml_dtypes.bfloat16) if dtype == "bfloat16" else np.dtype(dtype)


def _runs(tensor: StoredTensor) -> Iterable[Box]:
    """Cut a tensor into boxes of some MB at most, one after the other in C order.

    They end between the chunks of the stored tensor where that is possible, so that no chunk is read twice.
    """
    shape = tensor.shape
    itemsize = stored(tensor.dtype).itemsize
    if 0 in shape:
        return
    row_bytes = [math.prod(shape[dim + 1 :]) * itemsize for dim in range(len(shape))]
    cut = next((dim for dim, size in enumerate(row_bytes) if size <= _BLOCK_BYTES), len(shape))
    if cut == len(shape):
        yield Box.whole(shape)
        return
    rows = max(1, _BLOCK_BYTES // row_bytes[cut])
    meta = tensor.boxes[0].meta
    unit = (meta.inner_chunk_shape or meta.chunk_shape)[cut]
    rows = rows // unit * unit or rows
    for lead in indices(list(map(range, shape[:cut]))):
        for start in range(0, shape[cut], rows):
            count = min(rows, shape[cut] - start)
            yield Box((*lead, start, *(0 for _ in shape[cut + 1 :])), (*(1 for _ in lead), count, *shape[cut + 1 :]))
