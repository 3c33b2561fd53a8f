"""States made of objects that torch has loaded, and of tensors that are still where they were. Imports torch.

`flatten` of the library names the leaves, so that a converted step has the names that a save of the same state has.
"""

from __future__ import annotations

import io
import pickle
from collections import OrderedDict
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from ckpt.errors import StateError
from ckpt.paths import Path, display
from ckpt.planning.boxes import Box
from ckpt.planning.state_dict import flatten

from ..opening import CannotReadError
from .state import Bytes, ForeignState, ForeignTensor, ReadBox, check_dtype

__all__ = ["loads_without_code", "memory_reader", "placeholder", "state_of"]

_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def placeholder(dtype: str, shape: tuple[int, ...]) -> torch.Tensor:
    """A tensor of any size that takes no memory: it stands in a state for one that is read later."""
    return torch.empty((1,) * len(shape), dtype=getattr(torch, dtype)).expand(shape)


def loads_without_code(value: Any) -> bool:
    """Whether `torch.load` with ``weights_only`` reads it again."""
    if value is None or type(value) in (bool, int, float, str):
        return True
    file = io.BytesIO()
    try:
        torch.save(value, file)
        file.seek(0)
        torch.load(file, weights_only=True)
    except (pickle.PicklingError, pickle.UnpicklingError, TypeError, AttributeError):
        return False
    return True


def state_of(
    kind: str, nested: Any, readers: Mapping[int, ReadBox], where: str, skip_unsafe: bool, notes: list[str]
) -> ForeignState:
    """The leaves of `nested`. `readers` are those of placeholders, by id; other tensors are read from memory.

    CannotReadError for a leaf that a state cannot hold, unless those are to be skipped.
    """
    dropped: list[tuple[Path, str]] = []
    nested = _storable((), nested, dropped)
    if dropped:
        shown = "; ".join(f"{display(path)}: {why}" for path, why in dropped[:3])
        more = f"; and {len(dropped) - 3} more" if len(dropped) > 3 else ""
        if not skip_unsafe:
            raise CannotReadError(f"{where}: {shown}{more}; --skip-unsafe leaves such leaves out")
        notes.append(f"left out, because a checkpoint cannot hold it: {shown}{more}")
    try:
        flat = flatten(nested)
    except StateError as error:
        raise CannotReadError(f"{where}: {error}") from None
    tensors = {}
    for path, leaf in flat.tensors.items():
        check_dtype(leaf.spec.dtype, path, where)
        reader = readers.get(id(_leaf_of(nested, path))) or memory_reader(leaf.local)
        tensors[path] = ForeignTensor(leaf.spec.dtype, leaf.spec.shape, reader)
    values = {path: leaf.value for path, leaf in flat.values.items()}
    return ForeignState(kind, tensors, values, dict(flat.aliases), notes)


def _leaf_of(nested: Any, path: Path) -> Any:
    """The object at `path`."""
    for key in path:
        nested = nested[key]
    return nested


def memory_reader(tensor: torch.Tensor) -> ReadBox:
    """Reads boxes of a tensor in memory (or of a mapped file), bit by bit."""

    def read(box: Box, out: Bytes) -> None:
        part = tensor.detach()[tuple(box.slices((0,) * len(box.shape)))]
        if part.is_conj() or part.is_neg():
            part = part.resolve_conj().resolve_neg()
        if out.shape[-1] in _INTEGERS:
            part = part.view(_INTEGERS[out.shape[-1]])  # there are dtypes that numpy does not know
        elements = np.ascontiguousarray(part.numpy())
        out[...] = elements.reshape(-1).view(np.uint8).reshape(out.shape)

    return read


def _storable(path: Path, node: Any, dropped: list[tuple[Path, str]]) -> Any:
    """`node` without the leaves that a state cannot hold; in a list, None is where one was."""
    if isinstance(node, Mapping):
        kept: dict[Any, Any] = OrderedDict() if type(node) is OrderedDict else {}
        for key, item in node.items():
            if type(key) in (str, int):
                before = len(dropped)
                result = _storable((*path, key), item, dropped)
                if len(dropped) == before or result is not None:
                    kept[key] = result
            else:
                dropped.append((path, f"the key {key!r} is neither a string nor a whole number"))
        return kept
    if isinstance(node, list | tuple):
        items = [_storable((*path, number), item, dropped) for number, item in enumerate(node)]
        return items if isinstance(node, list) else tuple(items)
    try:
        flatten({"leaf": node})
    except StateError as error:
        dropped.append((path, str(error).removeprefix("leaf: ")))
        return None
    except Exception as error:  # a subclass of a tensor may need what is not there, such as a process group
        dropped.append((path, f"{type(node).__name__}: {error}"))
        return None
    return node
