"""Items of DCP's planners as leaves of a state, and leaves as entries of DCP's metadata.

DCP joins the keys of nested dicts by dots, and divides lists that hold dicts or tensors. The keys are stored, not the
joined names. A list without tensors is one value, as in every state, so its items are gathered on one rank.
"""

from __future__ import annotations

import io
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import CURRENT_DCP_VERSION
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItem, WriteItemType

from ckpt import Checkpoint, LazyTensor, Leaves, StateError

__all__ = ["DcpLeaves", "add_leaves", "leaves_of", "nbytes_of"]

Keys = tuple[str | int, ...]
_NUMBER = re.compile(r"0|[1-9]\d{0,17}", re.ASCII)

# -- from items to leaves ----------------------------------------------------------------------------------------------


def add_leaves(leaves: Leaves, plan: SavePlan, planner: SavePlanner, string_keys: bool) -> None:
    """Resolve all items of a plan, and add them. StateError, naming the item, for one that cannot be stored."""
    parts: dict[Keys, list[tuple[WriteItem, Any]]] = {}
    names: dict[Keys, str] = {}
    lists: dict[Keys, tuple[int, ...]] = {}
    for item in plan.items:
        name = item.index.fqn
        keys = _keys(name, plan.planner_data)
        path = tuple(int(key) if not string_keys and _NUMBER.fullmatch(str(key)) else key for key in keys)
        if names.setdefault(path, name) != name:
            raise StateError(f"{name} and {names[path]} have the same keys {list(path)}; rename one of them")
        lists[path] = tuple(position for position, key in enumerate(keys) if type(key) is int)
        if item.type is WriteItemType.BYTE_IO:
            _add_value(leaves, path, _object(item, planner), lists[path])
        else:
            parts.setdefault(path, []).append((item, planner.resolve_data(item)))
    for path, own in parts.items():
        _add_tensor(leaves, path, names[path], own, lists[path])


def _keys(name: str, planner_data: Any) -> Keys:
    """Return the nested keys of a name; the name itself if its planner does not say. Only those of lists are int."""
    if not name.isascii() and any("\ud800" <= character <= "\udfff" for character in name):
        raise StateError(f"{name!r} is not valid Unicode and cannot be a name in a file")
    keys = planner_data.get(name) if isinstance(planner_data, Mapping) else None
    is_path = isinstance(keys, tuple) and keys and all(type(key) in (str, int) for key in keys)
    return keys if is_path and keys is not None else (name,)


def _object(item: WriteItem, planner: SavePlanner) -> Any:
    """Return the object of an item, which a planner makes bytes."""
    if isinstance(planner, DefaultSavePlanner):
        own: type[DefaultSavePlanner] = type(planner)
        default = DefaultSavePlanner
        if (own.resolve_data, own.transform_object) == (default.resolve_data, default.transform_object):
            return planner.lookup_object(item.index)
    data = planner.resolve_data(item)
    try:
        assert isinstance(data, io.BytesIO)
        data.seek(0)
        return torch.load(data, weights_only=False)  # what this process has just made of its own object
    except Exception as error:
        raise StateError(
            f"{item.index.fqn}: {type(planner).__name__}.resolve_data did not make what torch.load reads "
            f"({error!r:.200}); ckpt stores values, not bytes in a format of the planner"
        ) from error


def _add_value(leaves: Leaves, path: Keys, value: Any, lists: tuple[int, ...]) -> None:
    try:
        leaves.add_value(path, value, lists=lists)
    except StateError as error:
        raise StateError(
            f"{error}. Of tensors, DCP hands over those in dicts and lists; it hands over no numpy arrays: "
            "make tensors of them"
        ) from None


def _add_tensor(
    leaves: Leaves, path: Keys, name: str, parts: list[tuple[WriteItem, Any]], lists: tuple[int, ...]
) -> None:
    """Add a tensor of which this rank writes some boxes."""
    boxes: list[tuple[tuple[int, ...], torch.Tensor]] = []
    size: tuple[int, ...] = ()
    for item, tensor in parts:
        about = item.tensor_data
        if about is None or not isinstance(tensor, torch.Tensor):
            raise StateError(f"{name}: its planner resolves it to a {type(tensor).__name__}, not to a tensor")
        size = tuple(about.size)
        if tensor.shape != about.chunk.sizes:
            raise StateError(
                f"{name}: its planner resolves the box of shape {list(about.chunk.sizes)} to a tensor of shape "
                f"{list(tensor.shape)}"
            )
        boxes.append((tuple(about.chunk.offsets), tensor))
    leaves.add_tensor(path, size, boxes, lists=lists)


def nbytes_of(item: WriteItem) -> int:
    about = item.tensor_data
    return 0 if about is None else about.chunk.sizes.numel() * about.properties.dtype.itemsize


# -- from leaves to entries --------------------------------------------------------------------------------------------


@dataclass
class DcpLeaves:
    """The leaves of a step by their names in DCP, and their nested keys: those of lists are numbers, others strings."""

    tensors: dict[str, LazyTensor] = field(default_factory=dict)
    values: dict[str, Any] = field(default_factory=dict)
    keys: dict[str, Keys] = field(default_factory=dict)

    def metadata(self, path: str, save: str) -> Metadata:
        """Return the description of all leaves for planners."""
        entries: dict[str, TensorStorageMetadata | BytesStorageMetadata] = {}
        for name, tensor in self.tensors.items():
            size = torch.Size(tensor.shape)
            whole = ChunkStorageMetadata(torch.Size([0] * len(size)), size)
            entries[name] = TensorStorageMetadata(TensorProperties(_dtype_of(tensor)), size, [whole])
        entries |= {name: BytesStorageMetadata() for name in self.values}
        meta, version = StorageMeta(path, load_id=save), CURRENT_DCP_VERSION
        return Metadata(entries, planner_data=self.keys, storage_data={}, storage_meta=meta, version=version)


def leaves_of(checkpoint: Checkpoint) -> DcpLeaves:
    leaves = DcpLeaves()

    def name(path: Keys, rank: int | None, inner: Keys = ()) -> str:
        keys = tuple(key if checkpoint.is_sequence(path[:at]) else str(key) for at, key in enumerate(path)) + inner
        dotted = ".".join(map(str, keys)) + ("" if rank is None else f"@rank{rank}")
        if dotted in leaves.keys:
            raise StateError(
                f"{checkpoint.path}: the keys {list(leaves.keys[dotted])} and {list(keys)} are the same for DCP, "
                f"{dotted}; use Checkpointer.restore or ckpt.open"
            )
        leaves.keys[dotted] = keys if rank is None else (dotted,)
        return dotted

    for path, rank, leaf in checkpoint.leaves():
        if isinstance(leaf, LazyTensor):
            leaves.tensors[name(path, rank)] = leaf
        elif rank is None:
            for inner, part in _parts((), leaf):
                leaves.values[name(path, None, inner)] = part
        else:
            leaves.values[name(path, rank)] = leaf
    return leaves


def _dtype_of(tensor: LazyTensor) -> torch.dtype:
    dtype = vars(torch).get(tensor.dtype)
    if not isinstance(dtype, torch.dtype):
        raise StateError(f"{tensor.name}: torch {torch.__version__} has no dtype {tensor.dtype!r}")
    return dtype


def _parts(path: Keys, value: Any) -> Iterator[tuple[Keys, Any]]:
    """Divide a value as DCP does: dicts, and lists that hold a dict at any depth."""
    if isinstance(value, Mapping):
        for key, item in value.items():
            yield from _parts((*path, str(key)), item)
    elif isinstance(value, list) and _holds_dict(value):
        for number, item in enumerate(value):
            yield from _parts((*path, number), item)
    else:
        yield path, value


def _holds_dict(value: Any) -> bool:
    return isinstance(value, Mapping) or (isinstance(value, list) and any(map(_holds_dict, value)))
