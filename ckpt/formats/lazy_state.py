"""Checkpoints of other formats, opened and new: named tensors that are read or made box by box, and values."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from ckpt.errors import CheckpointCorruptError, ConversionError, StateError
from ckpt.paths import Path, display
from ckpt.planning.boxes import Box
from ckpt.storage.dtypes import names, stored
from ckpt.values.containers import Container

Bytes = np.ndarray[Any, np.dtype[np.uint8]]

ReadBox = Callable[[Box, Bytes], None]
"""Fills an array of uint8 with the elements of a box. Its shape is that of the box, then the bytes of an element; its
strides are any. Raises CheckpointCorruptError or OSError."""

Blocks = Iterator[tuple[Box, np.ndarray[Any, np.dtype[Any]]]]
"""Boxes of a tensor, one after the other in C order, each with its elements."""


class UnsafeError(ConversionError):
    """Loading would run code that the file names."""


@dataclass(frozen=True, slots=True)
class FileTensor:
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
class NewTensor:
    """A tensor to write, `label` for messages. `keys` lead to it in formats that are nested.

    `blocks` yields a bounded number of bytes at once. `data` is equal for names of the same tensor.
    """

    label: str
    name: str
    keys: Path
    dtype: str
    shape: tuple[int, ...]
    data: object
    blocks: Callable[[], Blocks]

    @property
    def nbytes(self) -> int:
        """Bytes of all elements."""
        return math.prod(self.shape) * stored(self.dtype).itemsize


@dataclass(frozen=True)
class LazyState:
    """An opened checkpoint of the format `kind`.

    `aliases` maps further names of tensors to the first; `containers` are those that are not plain dicts; `notes` are
    messages for the user.
    """

    kind: str
    tensors: dict[Path, FileTensor]
    values: dict[Path, Any] = field(default_factory=dict)
    aliases: dict[Path, Path] = field(default_factory=dict)
    containers: dict[Path, Container] = field(default_factory=dict)
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
            containers={(*prefix, *path): container for path, container in self.containers.items()},
        )


def check_dtype(dtype: str, path: Path, where: str) -> None:
    """ConversionError, naming the tensor, if a step cannot hold `dtype`."""
    try:
        stored(dtype)
    except StateError:
        raise ConversionError(
            f"{where}: {display(path)} is of dtype {dtype}, which a checkpoint cannot hold; it can hold "
            f"{', '.join(names())}"
        ) from None


def read_parts(parts: Sequence[tuple[Box, ReadBox]], box: Box, out: Bytes) -> None:
    """Fill `out` with a box of a tensor whose parts, by their boxes, have readers of their own."""
    for part, read in parts:
        overlap = box.intersection(part)
        if overlap is not None:
            inner = Box(tuple(o - p for o, p in zip(overlap.offset, part.offset, strict=True)), overlap.shape)
            read(inner, out[tuple(overlap.slices(box.offset))])


# -- nested states -----------------------------------------------------------------------------------------------------


class _Node(dict[str | int, Any]):
    """A dict or list under construction. Its type tells it from dicts that are leaves."""


def nested_state(leaves: Mapping[Path, Any], where: str, *, numbers: bool) -> Any:
    """Return the nested state with these leaves. Keys that are int are places in lists; missing items become None.

    Some formats make strings of all keys of dicts. With `numbers`, a dict whose keys all read like numbers gets numbers
    back: the state of an optimizer is such a dict. CheckpointCorruptError if a leaf is below another leaf.
    """
    root = _Node()
    for path, leaf in leaves.items():
        node = root
        for key in path[:-1]:
            node = node.setdefault(key, _Node())
            if not isinstance(node, _Node):
                raise CheckpointCorruptError(f"{where}: {display(path)} is below another leaf")
        if path[-1] in node:
            raise CheckpointCorruptError(f"{where}: {display(path)} occurs twice, or has leaves below it")
        node[path[-1]] = leaf
    return _finished(root, where, len(leaves), numbers)


def _finished(node: _Node, where: str, most: int, numbers: bool) -> Any:
    items = {key: _finished(v, where, most, numbers) if isinstance(v, _Node) else v for key, v in node.items()}
    if items and all(type(key) is int for key in items):
        places = [int(key) for key in items]
        if min(places) < 0 or max(places) >= most:
            raise CheckpointCorruptError(
                f"{where}: a list has the place {max(places)}, but there are {most} leaves in all"
            )
        return [items.get(place) for place in range(max(places) + 1)]
    if any(type(key) is int for key in items):
        raise CheckpointCorruptError(f"{where}: a dict has both whole numbers and strings as keys: {list(items)[:4]}")
    if numbers and items and all(_is_number(str(key)) for key in items):
        return {int(key): item for key, item in items.items()}
    return items


def _is_number(key: str) -> bool:
    return key.isascii() and key.isdecimal() and len(key) <= 18 and (key == "0" or key[0] != "0")
