"""The leaves of a step, for writers of other formats."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ckpt.loading.index import CheckpointIndex, StoredTensor
from ckpt.paths import Path, display
from ckpt.storage.documents import canonical_json
from ckpt.values.codec import encode_value

__all__ = ["StepLeaf", "StepTensor", "StepValue", "dotted", "same_value", "tensor_leaves", "value_leaves"]


@dataclass(frozen=True)
class StepLeaf:
    """A leaf of a step. `rank` is the only rank that it belongs to; None if it belongs to all."""

    path: Path
    rank: int | None

    @property
    def label(self) -> str:
        """The name that `inspect_ckpt show` lists."""
        return display(self.path) + self._suffix

    @property
    def dotted(self) -> str:
        """The keys joined by dots, as other formats name leaves."""
        return dotted(self.path) + self._suffix

    @property
    def _suffix(self) -> str:
        return "" if self.rank is None else f"@rank{self.rank}"


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
