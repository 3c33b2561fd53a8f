"""Items of DCP's planners as leaves of a state, and leaves as entries of DCP's metadata.

DCP joins the keys of nested dicts by dots, and divides lists that hold dicts or tensors. The keys are stored, not the
joined names. A list without tensors is one value, as in every state, so its items are gathered on one rank.
"""

from __future__ import annotations

import hashlib
import io
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItem, WriteItemType

from ckpt import StateError
from ckpt.formats.dcp_writer import DCP_VERSION
from ckpt.loading.index import CheckpointIndex, StoredTensor
from ckpt.paths import Path
from ckpt.planning.boxes import Box, OwnBoxes
from ckpt.planning.state_dict import FlatState, TensorLeaf, ValueLeaf
from ckpt.planning.tensors import check_storable, tensor_spec, without_graph
from ckpt.storage.dtypes import torch_dtype
from ckpt.values.codec import UnencodableError, decode_value, encode_value
from ckpt.values.containers import Container, rebuild

__all__ = ["Contents", "Leaves", "contents_of", "flat_state", "leaves_of", "nbytes_of"]

_NUMBER = re.compile(r"0|[1-9]\d{0,17}", re.ASCII)
_SEQUENCES = ("list", "tuple", "namedtuple", "deque")
_LIST = Container("list")
_STATE, _GROUPS = "state", "param_groups"  # of the state dict of an optimizer

# -- from items to leaves ----------------------------------------------------------------------------------------------


@dataclass
class Leaves:
    """What a rank has of a state, by path. `lists` are the positions in a path at which the key is that of a list."""

    tensors: dict[Path, TensorLeaf] = field(default_factory=dict)
    values: dict[Path, Any] = field(default_factory=dict)  # encoded
    lists: dict[Path, tuple[int, ...]] = field(default_factory=dict)

    def to_document(self) -> dict[str, Any]:
        """Return what the other ranks need to know, as JSON: no more than a digest of what is not in a list."""
        text = repr(([(path, leaf.spec) for path, leaf in self.tensors.items()], list(self.values), self.lists))
        paths = (*self.tensors, *self.values)
        return {
            "structure": hashlib.blake2b(text.encode(), digest_size=16).hexdigest(),
            "in_lists": [(path, at, self.values.get(path), path in self.tensors) for path, at in self.lists.items()],
            "states": sorted({path[:at] for path in paths for at, key in enumerate(path) if key == _STATE}, key=repr),
        }


@dataclass(frozen=True, slots=True)
class _InList:
    """A leaf in a list, of the rank `holder`; encoded unless it is a tensor."""

    holder: int
    path: Path
    positions: tuple[int, ...]
    encoded: Any
    is_tensor: bool


def leaves_of(plan: SavePlan, planner: SavePlanner, string_keys: bool) -> Leaves:
    """Resolve all items of a plan. StateError, naming the item, for one that cannot be stored."""
    leaves = Leaves()
    parts: dict[Path, list[tuple[WriteItem, Any]]] = {}
    names: dict[Path, str] = {}
    for item in plan.items:
        name = item.index.fqn
        keys = _keys(name, plan.planner_data)
        path = tuple(int(key) if not string_keys and _NUMBER.fullmatch(str(key)) else key for key in keys)
        if names.setdefault(path, name) != name:
            raise StateError(f"{name} and {names[path]} have the same keys {list(path)}; rename one of them")
        positions = tuple(position for position, key in enumerate(keys) if type(key) is int)
        if positions:
            leaves.lists[path] = positions
        if item.type is WriteItemType.BYTE_IO:
            leaves.values[path] = _encoded(name, _object(item, planner))
        else:
            parts.setdefault(path, []).append((item, planner.resolve_data(item)))
    leaves.tensors = {path: _tensor_leaf(path, names[path], own) for path, own in parts.items()}
    return leaves


def _keys(name: str, planner_data: Any) -> Path:
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


def _encoded(name: str, value: Any) -> Any:
    try:
        return encode_value(value)
    except UnencodableError as error:
        where = ".".join(map(str, (name, *error.path)))
        raise StateError(
            f"{where}: {error}. Of tensors, DCP hands over those in dicts and lists; it hands over no numpy arrays: "
            "make tensors of them"
        ) from None


def _tensor_leaf(path: Path, name: str, parts: list[tuple[WriteItem, Any]]) -> TensorLeaf:
    """Return the leaf of a tensor of which this rank writes some boxes."""
    tensors: list[torch.Tensor] = []
    boxes: list[Box] = []
    size: tuple[int, ...] = ()
    for item, tensor in parts:
        about = item.tensor_data
        if about is None or not isinstance(tensor, torch.Tensor):
            raise StateError(f"{name}: its planner resolves it to a {type(tensor).__name__}, not to a tensor")
        check_storable(path, without_graph(tensor))
        box, size = Box(tuple(about.chunk.offsets), tuple(about.chunk.sizes)), tuple(about.size)
        if tuple(tensor.shape) != box.shape:
            raise StateError(
                f"{name}: its planner resolves the box of shape {list(box.shape)} to a tensor of shape "
                f"{list(tensor.shape)}"
            )
        if box.elements or not tensors:
            tensors.append(without_graph(tensor))
            boxes.append(box)
    local, offsets = (tensors[0], [(0,) * len(size)]) if len(tensors) == 1 else _joined(tensors)
    held = [(box, at) for box, at in zip(boxes, offsets, strict=True) if box.elements]
    spec = tensor_spec(local.dtype, size, OwnBoxes(tuple(sorted(box for box, _ in held))), False)
    return TensorLeaf(local, spec, held)


def _joined(tensors: list[torch.Tensor]) -> tuple[torch.Tensor, list[tuple[int, ...]]]:
    """Return one tensor that holds all of these, one behind the other in its first dimension; and the offsets."""
    rows = [tensor.shape[0] for tensor in tensors]
    rest = [max(sizes) for sizes in zip(*(tensor.shape[1:] for tensor in tensors), strict=True)]
    joined = tensors[0].new_zeros((sum(rows), *rest))
    offsets = [(sum(rows[:number]), *(0 for _ in rest)) for number in range(len(rows))]
    for tensor, offset in zip(tensors, offsets, strict=True):
        joined[Box(offset, tuple(tensor.shape)).slices((0,) * len(offset))] = tensor
    return joined, offsets


def flat_state(own: Leaves, answers: list[Any], rank: int) -> FlatState:
    """Return the state of this rank. `answers` are the documents of all ranks.

    A list without tensors becomes a value of the lowest rank that has any of its items.
    """
    in_lists = [
        _InList(holder, tuple(path), tuple(positions), encoded, is_tensor)
        for holder, answer in enumerate(answers)
        for path, positions, encoded, is_tensor in answer["in_lists"]
    ]
    containers = {item.path[:at] for item in in_lists if item.is_tensor for at in item.positions}
    values = {path: encoded for path, encoded in own.values.items() if path not in own.lists}
    lists: dict[Path, list[tuple[int, _InList]]] = {}  # where each item begins in its path
    for item in in_lists:
        inner = [at for at in item.positions if item.path[:at] not in containers]
        if inner:
            lists.setdefault(item.path[: inner[0]], []).append((inner[0], item))
        elif item.holder == rank and not item.is_tensor:
            values[item.path] = item.encoded
    states = {tuple(path) for answer in answers for path in answer["states"]}
    for path, items in lists.items():
        value = encode_value(_list_of(items))
        if items[0][1].holder == rank:
            values[path] = value
            if path[-1] == _GROUPS and path[:-1] not in states:  # of an optimizer, whose state is an empty dict
                values[*path[:-1], _STATE] = {}
    structure = hashlib.blake2b("".join(answer["structure"] for answer in answers).encode(), digest_size=16)
    return FlatState(
        tensors=own.tensors,
        values={path: ValueLeaf(None, False, None, encoded) for path, encoded in values.items()},
        containers=dict.fromkeys(sorted(containers, key=repr), (_LIST, False)),
        structure=structure.hexdigest(),
    )


def _list_of(items: list[tuple[int, _InList]]) -> Any:
    """Return a list made of its items. One without leaves is an empty dict: DCP hands nothing over for it."""
    leaves = {item.path[begin:]: decode_value(item.encoded) for begin, item in items}
    lists = {item.path[begin:at] for begin, item in items for at in item.positions if at >= begin}
    for path in lists:
        numbers = {int(leaf[len(path)]) for leaf in leaves if leaf[: len(path)] == path}
        leaves |= {(*path, number): {} for number in range(max(numbers)) if number not in numbers}
    return rebuild(leaves, dict.fromkeys(lists, _LIST))


def nbytes_of(item: WriteItem) -> int:
    about = item.tensor_data
    return 0 if about is None else about.chunk.sizes.numel() * about.properties.dtype.itemsize


# -- from leaves to entries --------------------------------------------------------------------------------------------


@dataclass
class Contents:
    """The leaves of a step by their names in DCP, and their nested keys: those of lists are numbers, others strings."""

    tensors: dict[str, StoredTensor] = field(default_factory=dict)
    values: dict[str, Any] = field(default_factory=dict)
    keys: dict[str, Path] = field(default_factory=dict)

    def metadata(self, path: str, save: str) -> Metadata:
        """Return the description of all leaves for planners."""
        entries: dict[str, TensorStorageMetadata | BytesStorageMetadata] = {}
        for name, tensor in self.tensors.items():
            size = torch.Size(tensor.shape)
            whole = ChunkStorageMetadata(torch.Size([0] * len(size)), size)
            entries[name] = TensorStorageMetadata(TensorProperties(torch_dtype(tensor.dtype)), size, [whole])
        entries |= {name: BytesStorageMetadata() for name in self.values}
        meta = StorageMeta(path, load_id=save)
        return Metadata(entries, planner_data=self.keys, storage_data={}, storage_meta=meta, version=DCP_VERSION)


def contents_of(index: CheckpointIndex) -> Contents:
    contents = Contents()

    def name(path: Path, rank: int | None = None, inner: Path = ()) -> str:
        keys = tuple(key if _is_sequence(index, path[:at]) else str(key) for at, key in enumerate(path)) + inner
        dotted = ".".join(map(str, keys)) + ("" if rank is None else f"@rank{rank}")
        if dotted in contents.keys:
            raise StateError(
                f"{index.path}: the keys {list(contents.keys[dotted])} and {list(keys)} are the same for DCP, "
                f"{dotted}; use Checkpointer.restore or ckpt.open"
            )
        contents.keys[dotted] = keys if rank is None else (dotted,)
        return dotted

    for path, rank, tensor in index.stored_tensors():
        contents.tensors[name(path, rank)] = tensor
    for path, target in index.aliases.items():
        if target in index.tensors:
            contents.tensors[name(path)] = index.tensors[target]
    for path, value in index.values.items():
        for inner, part in _parts((), value):
            contents.values[name(path, None, inner)] = part
    for path, own in index.per_rank_values.items():
        for rank, value in own.items():
            contents.values[name(path, rank)] = value
    return contents


def _is_sequence(index: CheckpointIndex, path: Path) -> bool:
    container = index.containers.get(path)
    return container is not None and container.kind in _SEQUENCES


def _parts(path: Path, value: Any) -> Iterator[tuple[Path, Any]]:
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
