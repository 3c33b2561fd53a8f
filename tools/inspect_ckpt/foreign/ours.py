"""The leaves of a step of ours, each with a label of its own, for those who write them in another format."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from ckpt.loading.index import StoredTensor
from ckpt.paths import Path, display
from ckpt.planning.boxes import Box
from ckpt.storage.dtypes import stored

from ..blocks import Reader
from ..opening import CannotReadError, Step

__all__ = ["Leaf", "LeafReader", "dotted", "tensor_leaves", "unique_names", "value_leaves"]


@dataclass(frozen=True)
class Leaf:
    """A tensor or value of a step: `rank` is whose alone it is, if it is one's; `alias_of` the name it shares."""

    path: Path
    rank: int | None
    tensor: StoredTensor | None = None
    value: Any = None
    alias_of: Path | None = None

    @property
    def label(self) -> str:
        """The name that `inspect_ckpt show` lists."""
        return display(self.path) + self._suffix

    @property
    def dotted(self) -> str:
        """The keys joined by dots, as other formats name leaves."""
        return dotted(self.path) + self._suffix

    @property
    def nbytes(self) -> int:
        """Bytes of the tensor, 0 for a value."""
        if self.tensor is None:
            return 0
        return math.prod(self.tensor.shape) * stored(self.tensor.dtype).itemsize

    @property
    def _suffix(self) -> str:
        return "" if self.rank is None else f"@rank{self.rank}"


def dotted(path: Path) -> str:
    """The keys of a path joined by dots."""
    return ".".join(map(str, path))


def tensor_leaves(step: Step) -> list[Leaf]:
    """All tensors by name, further names of one included."""
    index = step.index
    leaves = [Leaf(path, None, tensor) for path, tensor in index.tensors.items()]
    for path, own in index.per_rank_tensors.items():
        leaves += [Leaf(path, rank, tensor) for rank, tensor in own.items()]
    for path, target in index.aliases.items():
        if target in index.tensors:
            leaves.append(Leaf(path, None, index.tensors[target], alias_of=target))
        for rank, tensor in index.per_rank_tensors.get(target, {}).items():
            leaves.append(Leaf(path, rank, tensor, alias_of=target))
    return sorted(leaves, key=lambda leaf: leaf.label)


def value_leaves(step: Step) -> list[Leaf]:
    """All leaves that are not tensors."""
    leaves = [Leaf(path, None, value=value) for path, value in step.index.values.items()]
    for path, own in step.index.per_rank_values.items():
        leaves += [Leaf(path, rank, value=value) for rank, value in own.items()]
    return sorted(leaves, key=lambda leaf: leaf.label)


def unique_names(pairs: Iterator[tuple[str, Leaf]], where: str) -> dict[str, Leaf]:
    """The leaves by the names they get. CannotReadError if two get the same."""
    named: dict[str, Leaf] = {}
    for name, leaf in pairs:
        other = named.setdefault(name, leaf)
        if other is not leaf:
            raise CannotReadError(
                f"{where}: {other.label} ({other.path}) and {leaf.label} ({leaf.path}) would both be named {name!r}; "
                "leave one out with --exclude, or rename it in the job"
            )
    return named


class LeafReader:
    """Reads boxes of the tensors of a step, by leaf, as bytes."""

    def __init__(self, step: Step, leaves: list[Leaf]) -> None:
        keys = {id(leaf): leaf.label for leaf in leaves}
        if len(set(keys.values())) != len(leaves):  # keys may hold a "/" themselves
            keys = {id(leaf): f"{leaf.label} {leaf.path}" for leaf in leaves}
        tensors = {keys[id(leaf)]: leaf.tensor for leaf in leaves if leaf.tensor is not None}
        self._keys = keys
        self._leaves = leaves  # an id is one's own only as long as the object lives
        self._reader = Reader(replace(step, tensors=tensors))

    def read(self, leaf: Leaf, box: Box) -> np.ndarray[Any, np.dtype[Any]]:
        """The elements of a box, in the stored dtype. CheckpointCorruptError if bytes are damaged."""
        return self._reader.read(self._keys[id(leaf)], box)
