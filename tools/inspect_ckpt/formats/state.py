"""An opened checkpoint of another format: named tensors that are read box by box, and values."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from ckpt.errors import StateError
from ckpt.paths import Path, display
from ckpt.planning.boxes import Box
from ckpt.storage.dtypes import names, stored

from ..output import CannotReadError

__all__ = ["Bytes", "LazyState", "LazyTensor", "ReadBox", "UnsafeError", "check_dtype"]

Bytes = np.ndarray[Any, np.dtype[np.uint8]]

ReadBox = Callable[[Box, Bytes], None]
"""Fills an array of uint8 with the elements of a box. Its shape is that of the box, then the bytes of an element; its
strides are any. Raises CheckpointCorruptError or OSError."""


class UnsafeError(CannotReadError):
    """Loading would run code that the file names."""


@dataclass(frozen=True, slots=True)
class LazyTensor:
    """A tensor whose elements stay in the file until they are read. `dtype` is torch's name."""

    dtype: str
    shape: tuple[int, ...]
    read: ReadBox

    @property
    def itemsize(self) -> int:
        """Bytes of an element."""
        return stored(self.dtype).itemsize

    @property
    def nbytes(self) -> int:
        """Bytes of all elements."""
        return math.prod(self.shape) * self.itemsize


@dataclass(frozen=True)
class LazyState:
    """An opened checkpoint of the format `kind`.

    `aliases` maps further names of tensors to the first; `notes` are messages for the user.
    """

    kind: str
    tensors: dict[Path, LazyTensor]
    values: dict[Path, Any] = field(default_factory=dict)
    aliases: dict[Path, Path] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return sum(tensor.nbytes for tensor in self.tensors.values())

    def under(self, prefix: Path) -> LazyState:
        """Return the same state with `prefix` before every name."""
        return replace(
            self,
            tensors={(*prefix, *path): tensor for path, tensor in self.tensors.items()},
            values={(*prefix, *path): value for path, value in self.values.items()},
            aliases={(*prefix, *path): (*prefix, *target) for path, target in self.aliases.items()},
        )


def check_dtype(dtype: str, path: Path, where: str) -> None:
    """CannotReadError, naming the tensor, if a step cannot hold `dtype`."""
    try:
        stored(dtype)
    except StateError:
        raise CannotReadError(
            f"{where}: {display(path)} is of dtype {dtype}, which a checkpoint cannot hold; it can hold "
            f"{', '.join(names())}"
        ) from None
