"""Items of DCP's planners as leaves of a state, and leaves as entries of DCP's metadata.

DCP joins the keys of nested dicts by dots, and divides lists that hold dicts or tensors. The keys are stored, not the
joined names. A list without tensors is one value, as in every state, so its items are gathered on one rank. A numpy
array, and a tuple with tensors or arrays in it, is one object for DCP, and stored as in every state: by its tensors.
"""

from __future__ import annotations

import io
import re
from argparse import Namespace
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
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

from ckpt import Checkpoint, LazyTensor, Leaves, StateError, StateMismatchError

__all__ = ["ARRAYS", "DcpLeaves", "DcpObject", "add_leaves", "leaves_of", "nbytes_of"]

ARRAYS = "dcp_arrays"
"""The metric of a step that lists the keys of its numpy arrays: DCP must be given those as objects, not as tensors."""

Keys = tuple[str | int, ...]
_OBJECTS = ("tuple", "namedtuple", "deque", "Namespace")  # containers that DCP does not divide
_NUMBER = re.compile(r"0|[1-9]\d{0,17}", re.ASCII)

# -- from items to leaves ----------------------------------------------------------------------------------------------


def add_leaves(leaves: Leaves, plan: SavePlan, planner: SavePlanner, string_keys: bool) -> list[Keys]:
    """Resolve all items of a plan, and add them; return the keys of numpy arrays.

    StateError, naming the item, for one that cannot be stored.
    """
    arrays: list[Keys] = []
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
            value = _object(item, planner)
            leaves.add_value(path, value, lists=lists[path])
            arrays += _arrays_in(path, value)
        else:
            parts.setdefault(path, []).append((item, planner.resolve_data(item)))
    for path, own in parts.items():
        _add_tensor(leaves, path, names[path], own, lists[path])
    return arrays


def _arrays_in(path: Keys, value: Any) -> Iterator[Keys]:
    """Yield the keys of the numpy arrays in a value."""
    items: Iterable[tuple[Any, Any]] = ()
    if isinstance(value, np.ndarray):
        yield path
    elif isinstance(value, Mapping):
        items = value.items()
    elif isinstance(value, Namespace):
        items = vars(value).items()
    elif isinstance(value, list | tuple | deque):
        items = enumerate(value)
    for key, item in items:
        yield from _arrays_in((*path, key), item)


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


@dataclass(frozen=True, slots=True)
class DcpObject:
    """A numpy array, or a container with tensors or arrays in it that DCP does not divide, by its stored keys."""

    checkpoint: Checkpoint
    path: Keys
    arrays: frozenset[Keys]  # of the whole step

    def load(self) -> Any:
        """Return the object. StateMismatchError for a type that is not registered; raises what a read raises."""
        return self._finished(self.path, self.checkpoint.load(self.path))

    def _finished(self, path: Keys, node: Any) -> Any:
        """Return a part of the object with numpy arrays in place of their tensors."""
        if path in self.arrays and isinstance(node, torch.Tensor):
            return node.numpy()
        container = self.checkpoint.index.containers.get(path)
        if container is not None and container.kind == "namedtuple" and not isinstance(node, tuple):
            raise StateMismatchError(
                f"{'/'.join(map(str, path))} is a {container.type}, which this program has not registered, or which "
                "has other fields now; call ckpt.register_encoder before the load"
            )
        if isinstance(node, tuple):
            items = [self._finished((*path, number), item) for number, item in enumerate(node)]
            return node._make(items) if hasattr(node, "_make") else tuple(items)
        parts: Any = vars(node) if isinstance(node, Namespace) else node
        if isinstance(parts, dict | list | deque):
            for key in list(parts) if isinstance(parts, dict) else range(len(parts)):
                parts[key] = self._finished((*path, key), parts[key])
        return node


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
    objects: set[Keys] = set()

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

    arrays = _listed_arrays(checkpoint)
    whole = {path for path, container in checkpoint.index.containers.items() if container.kind in _OBJECTS} | arrays
    for path, rank, leaf in checkpoint.leaves():
        prefixes = (path[:at] for at in range(1, len(path) + 1)) if whole and rank is None else ()
        within = next((prefix for prefix in prefixes if prefix in whole), None)
        if within is not None:
            if within not in objects:
                objects.add(within)
                leaves.values[name(within, None)] = DcpObject(checkpoint, within, arrays)
        elif isinstance(leaf, LazyTensor):
            leaves.tensors[name(path, rank)] = leaf
        elif rank is None:
            for inner, part in _parts((), leaf):
                leaves.values[name(path, None, inner)] = part
        else:
            leaves.values[name(path, rank)] = leaf
    return leaves


def _listed_arrays(checkpoint: Checkpoint) -> frozenset[Keys]:
    """Return the keys of numpy arrays that DCP saved; a metric that a program gave itself may be anything."""
    listed = (checkpoint.summary.get("metrics") or {}).get(ARRAYS)
    if not isinstance(listed, list) or not listed:
        return frozenset()
    tensors = {path for path, rank, _ in checkpoint.leaves() if rank is None}
    paths = {tuple(keys) for keys in listed if isinstance(keys, list) and all(type(key) in (str, int) for key in keys)}
    return frozenset(paths & tensors)


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
