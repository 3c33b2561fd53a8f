"""Look into a published checkpoint without torch: lazy arrays by name."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from ckpt.errors import CheckpointNotFoundError
from ckpt.loading.fetch import Fetch
from ckpt.loading.index import CheckpointIndex, StoredTensor, read_index
from ckpt.paths import display
from ckpt.planning.boxes import Box
from ckpt.storage.commit import CheckpointRoot

__all__ = ["Checkpoint", "LazyTensor", "open_checkpoint"]


@dataclass(frozen=True)
class LazyTensor:
    """A tensor of a checkpoint; nothing is read before it is indexed. `dtype` is torch's name, `shape` the global
    shape."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    _index: CheckpointIndex
    _stored: StoredTensor

    def __getitem__(self, key: Any) -> np.ndarray[Any, np.dtype[Any]]:
        """Read the elements that `key` (integers, slices with step 1, ...) selects.

        The array has the numpy dtype of the same name (that of ml_dtypes for bfloat16 and float8), or uint8 with a last
        dimension of the size of an element for a dtype that numpy has no name for. Raises CheckpointCorruptError if
        bytes are damaged.
        """
        probe = np.lib.stride_tricks.as_strided(np.zeros((), np.uint8), self.shape, (0,) * len(self.shape))
        shape = probe[key].shape
        box = _box_of(key, self.shape)
        result = Fetch(self._index).array(self.name, self._stored, box)
        return result.reshape((*shape, *result.shape[len(box.shape) :]))

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray[Any, np.dtype[Any]]:
        """`numpy.asarray` reads all of it."""
        if copy is False:
            raise ValueError("the elements are on disk: an array of them is a copy")
        return np.asarray(self[...], dtype=dtype)

    def read(self) -> np.ndarray[Any, np.dtype[Any]]:
        """Read all of it."""
        return self[...]


class Checkpoint(Mapping[str, LazyTensor]):
    """A published step: tensors by name (keys joined by "/"), including aliases. `values` are the leaves that are not
    tensors.

    What belongs to single ranks is under ``<name>@rank<r>``.
    """

    def __init__(self, index: CheckpointIndex) -> None:
        self.step = index.step
        self.path = index.path
        self.summary = index.summary
        self.values_by_name = {display(path): value for path, value in index.values.items()}
        for path, by_rank in index.per_rank_values.items():
            self.values_by_name |= {f"{display(path)}@rank{rank}": value for rank, value in by_rank.items()}
        tensors = {display(path): tensor for path, tensor in index.tensors.items()}
        tensors |= {
            display(path): index.tensors[target] for path, target in index.aliases.items() if target in index.tensors
        }
        for path, own in index.per_rank_tensors.items():
            tensors |= {f"{display(path)}@rank{rank}": tensor for rank, tensor in own.items()}
        self._tensors = {
            name: LazyTensor(name, tensor.dtype, tensor.shape, index, tensor)
            for name, tensor in sorted(tensors.items())
        }

    def __getitem__(self, name: str) -> LazyTensor:
        return self._tensors[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._tensors)

    def __len__(self) -> int:
        return len(self._tensors)


def open_checkpoint(path: str | os.PathLike[str], step: int | None = None) -> Checkpoint:
    """Open a published step: `path` is its directory, or a checkpoint root (then `step`, or the newest one).

    Reads metadata only. Raises CheckpointNotFoundError, CheckpointCorruptError, FormatVersionError.
    """
    where = os.fspath(path)
    root = CheckpointRoot(where)
    steps = root.steps()
    if step is not None or steps:
        chosen = steps[-1] if step is None else step
        if chosen not in steps:
            raise CheckpointNotFoundError(f"{where} has no published step {chosen}; it has {steps}")
        where = root.step_path(chosen)
    return Checkpoint(read_index(where))


def _box_of(key: Any, shape: tuple[int, ...]) -> Box:
    """The box of the elements that `key` selects."""
    keys = key if isinstance(key, tuple) else (key,)
    if Ellipsis in keys:
        at = keys.index(Ellipsis)
        missing = len(shape) - (len(keys) - 1)
        keys = (*keys[:at], *(slice(None),) * missing, *keys[at + 1 :])
    keys = (*keys, *(slice(None),) * (len(shape) - len(keys)))
    offset, sizes = [], []
    for part, size in zip(keys, shape, strict=True):
        if isinstance(part, slice):
            start, stop, stride = part.indices(size)
            if stride != 1:
                raise IndexError("only slices with step 1 can be read; index the result instead")
            offset.append(start)
            sizes.append(max(0, stop - start))
        else:
            offset.append(int(part) % size)
            sizes.append(1)
    return Box(tuple(offset), tuple(sizes))
