"""Sharded state dicts of Megatron-core as leaves of a state, and the leaves of a step as Megatron asks for them.

    ShardedTensor(key)     the tensor `key`: its box is that of its data, with the prepended axes
    ShardedObject          megatron/objects/KEY/shard_.../value, and its tensors and arrays below .../tensors
    common state           megatron/common/NAME/value, and its tensors and arrays below .../tensors
    megatron/common.pt     the digest of common.pt when the step was saved

A value is stored as a whole, with a `TensorAt` in place of each tensor and array in it.
"""

from __future__ import annotations

import hashlib
import os
from argparse import Namespace
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import torch

from ckpt import Checkpoint, CheckpointCorruptError, LazyTensor, Leaves, StateError, StateMismatchError, Unregistered

try:
    from megatron.core.dist_checkpointing.core import CheckpointingException
    from megatron.core.dist_checkpointing.mapping import ShardedBase, ShardedObject, ShardedTensor, is_main_replica
except ImportError as error:
    raise ImportError(
        "ckpt.integrations.megatron needs megatron-core 0.16: pip install 'ckpt-inprocess[megatron]'"
    ) from error

__all__ = [
    "COMMON_FILE",
    "MegatronLeaves",
    "TensorAt",
    "add_leaves",
    "digest_of",
    "leaves_of",
    "nested_map",
    "object_keys",
    "sharded_values",
]

Keys = tuple[str | int, ...]

COMMON_FILE = "common.pt"
"""The file of Megatron with the common state, beside the step."""

_MEGATRON, _COMMON, _OBJECTS = "megatron", "common", "objects"
_VALUE, _TENSORS = "value", "tensors"


class TensorAt(NamedTuple):
    """The place of a tensor, or of an array of numpy, in a value: the keys that lead to it there."""

    library: str
    keys: tuple[str | int, ...]


# -- sharded state dicts -----------------------------------------------------------------------------------------------


def sharded_values(node: Any) -> Iterator[ShardedBase]:
    """Yield the sharded tensors and objects of a sharded state dict."""
    if isinstance(node, Mapping):
        for item in node.values():
            yield from sharded_values(item)
    elif isinstance(node, list):
        for item in node:
            yield from sharded_values(item)
    else:
        yield node


def nested_map(node: Any, leaf: Callable[[Any], Any]) -> Any:
    """Return a sharded state dict with other leaves."""
    if isinstance(node, Mapping):
        return {key: nested_map(item, leaf) for key, item in node.items()}
    if isinstance(node, list):
        return [nested_map(item, leaf) for item in node]
    return leaf(node)


def object_keys(sharded: ShardedObject) -> Keys:
    """Return the keys of a shard of an object."""
    return (_MEGATRON, _OBJECTS, sharded.key, str(sharded.unique_key).removeprefix(f"{sharded.key}/"))


# -- from a sharded state dict to leaves -------------------------------------------------------------------------------


def add_leaves(
    leaves: Leaves, sharded_state_dict: Any, common: Mapping[Any, Any] | None, common_digest: str | None
) -> None:
    """Add what this rank has of a sharded state dict: its main replicas; and the `common` state if it has that.

    StateError, naming the key, for what cannot be stored.
    """
    boxes: dict[str, list[ShardedTensor]] = {}
    for value in sharded_values(sharded_state_dict):
        if not is_main_replica(value.replica_id):
            continue
        if isinstance(value, ShardedTensor):
            boxes.setdefault(value.key, []).append(value)
        elif isinstance(value, ShardedObject):
            _add_value(leaves, object_keys(value), value.data)
        else:
            raise StateError(f"a {type(value).__name__} of Megatron cannot be stored: {value}")
    for key, own in boxes.items():
        _add_tensor(leaves, key, own)
    if common is not None:
        for name, value in common.items():
            if not isinstance(name, str | int):
                raise StateError(f"the common state has the key {name!r}; keys are str or int")
            _add_value(leaves, (_MEGATRON, _COMMON, name), value)
        leaves.add_value((_MEGATRON, COMMON_FILE), common_digest)


def _add_tensor(leaves: Leaves, key: str, own: list[ShardedTensor]) -> None:
    if key == _MEGATRON:
        raise StateError(f"the key of a tensor must not be {key!r}: objects and common state are stored there")
    shape = tuple(own[0].global_shape)
    for each in own:
        check_flat(each)
        if each.data is None:
            raise StateError(f"{key}: this rank has the box at {each.global_offset} without data")
        if tuple(each.global_shape) != shape:
            raise StateError(f"{key} has the global shapes {shape} and {tuple(each.global_shape)} on this rank")
    leaves.add_tensor((key,), shape, [(tuple(each.global_offset), with_axes(each, each.data)) for each in own])


def check_flat(sharded: ShardedTensor) -> None:
    """Refuse flattened ranges, which megatron-core refuses, too, since 0.14."""
    if sharded.flattened_range is not None:
        raise CheckpointingException(
            f"{sharded.key}: flattened ranges are not supported, neither here nor by megatron-core 0.16: save the "
            "distributed optimizer as fully_reshardable or dp_reshardable"
        )


def with_axes(sharded: ShardedTensor, data: torch.Tensor) -> torch.Tensor:
    """Return local data with the axes of the global tensor: a view."""
    view: torch.Tensor = data.detach()[(None,) * sharded.prepend_axis_num]
    return view


def _add_value(leaves: Leaves, keys: Keys, value: Any) -> None:
    """Add a value of any structure; its tensors and arrays become tensors of the step."""
    found: dict[Keys, torch.Tensor] = {}

    def put(at: Keys, node: Any) -> Any:
        if not isinstance(node, torch.Tensor | np.ndarray):
            return node
        if at in found:
            raise StateError(
                f"{'/'.join(map(str, (*keys, *at)))}: two tensors or arrays have this name, as the name of a key that "
                "is not a str or int is its repr; rename one of the keys"
            )
        if isinstance(node, torch.Tensor):
            found[at] = node
            return TensorAt("torch", at)
        found[at] = _as_tensor((*keys, *at), node)
        return TensorAt("numpy", at)

    leaves.add_value((*keys, _VALUE), _mapped((), value, put))
    for at, tensor in found.items():
        leaves.add_tensor((*keys, _TENSORS, *at), tuple(tensor.shape), [((0,) * tensor.dim(), tensor)])


def _as_tensor(keys: Keys, array: np.ndarray[Any, Any]) -> torch.Tensor:
    if isinstance(array, np.ma.MaskedArray):
        raise StateError(
            f"{'/'.join(map(str, keys))}: numpy arrays with a mask cannot be stored; store its data and its mask, or "
            "what its filled() returns"
        )
    try:
        return torch.from_numpy(np.array(array, order="C"))
    except (TypeError, ValueError) as error:  # no such dtype; a byte order that is not that of this machine
        dtype = array.dtype if array.dtype.isnative else f"{array.dtype} ({array.dtype.str}, another byte order)"
        raise StateError(f"{'/'.join(map(str, keys))}: numpy arrays of dtype {dtype} cannot be stored") from error


def _mapped(at: Keys, node: Any, leaf: Callable[[Keys, Any], Any]) -> Any:
    """Return a value with other leaves; containers without tensors and arrays are those of the value."""
    kind = type(node)
    if kind in (dict, OrderedDict):
        made = {key: _mapped((*at, _key(key)), item, leaf) for key, item in node.items()}
        return node if all(made[key] is item for key, item in node.items()) else kind(made)
    if kind is Namespace:
        inner = vars(node)
        made = _mapped(at, inner, leaf)
        return node if made is inner else Namespace(**made)
    if kind in (list, tuple):
        items = [_mapped((*at, number), item, leaf) for number, item in enumerate(node)]
        same = all(one is other for one, other in zip(items, node, strict=True))
        return node if same else kind(items)
    return leaf(at, node)


def _key(key: Any) -> str | int:
    return key if isinstance(key, str | int) and not isinstance(key, bool) else repr(key)


def digest_of(checkpoint_dir: str) -> str | None:
    """Return a digest of the file with the common state; None if there is none, as in a save of sharded parts alone."""
    try:
        with open(os.path.join(checkpoint_dir, COMMON_FILE), "rb") as file:
            return hashlib.file_digest(file, "blake2b").hexdigest()
    except FileNotFoundError:
        return None


# -- from a step to what Megatron asks for -----------------------------------------------------------------------------


@dataclass
class MegatronLeaves:
    """The leaves of a step: tensors by the keys of Megatron, values and the tensors in them by all their keys."""

    tensors: dict[str, LazyTensor] = field(default_factory=dict)
    _values: dict[Keys, Any] = field(default_factory=dict)
    _inner: dict[Keys, LazyTensor] = field(default_factory=dict)

    @property
    def common_digest(self) -> str | None:
        """The digest of the file with the common state; None if the step was not saved by Megatron."""
        digest = self._values.get((_MEGATRON, COMMON_FILE))
        return None if digest is None else str(digest)

    def objects(self) -> Iterator[ShardedObject]:
        """Yield all shards of objects, without their data."""
        for keys in self._values:
            if len(keys) == 5 and keys[:2] == (_MEGATRON, _OBJECTS):
                yield _without_data(str(keys[2]), str(keys[3]))

    def common(self) -> dict[Any, Any]:
        """Return the common state."""
        return {
            keys[2]: self.value(keys[:3])
            for keys in self._values
            if len(keys) == 4 and keys[:2] == (_MEGATRON, _COMMON)
        }

    def has_value(self, keys: Keys) -> bool:
        """Return whether there is a value at these keys."""
        return (*keys, _VALUE) in self._values

    def value(self, keys: Keys) -> Any:
        """Return a value with its tensors and arrays.

        StateMismatchError if it has types that are not registered; CheckpointCorruptError if a tensor is not there.
        """
        value = self._values[(*keys, _VALUE)]
        unknown = next(Unregistered.within(value), None)
        if unknown is not None:
            raise StateMismatchError(
                f"{'/'.join(map(str, keys))} holds a value of the type {unknown.name}, which this program has not "
                "registered; call ckpt.register_encoder before the load"
            )

        def read(at: Keys, node: Any) -> Any:
            if not isinstance(node, TensorAt):
                return node
            is_path = isinstance(node.keys, tuple) and all(type(key) in (str, int) for key in node.keys)
            tensor = self._inner.get((*keys, _TENSORS, *node.keys)) if is_path else None
            if tensor is None or node.library not in ("torch", "numpy"):
                raise CheckpointCorruptError(
                    f"{'/'.join(map(str, (*keys, _VALUE)))} refers to {repr(node)[:200]}, which the step does not "
                    "have: load another step"
                )
            return tensor.torch() if node.library == "torch" else tensor.read()

        return _mapped((), value, read)


def leaves_of(checkpoint: Checkpoint) -> MegatronLeaves:
    """Return the leaves of a step. Reads nothing but its metadata."""
    leaves = MegatronLeaves()
    for keys, rank, leaf in checkpoint.leaves():
        if rank is not None:
            continue
        if not isinstance(leaf, LazyTensor):
            leaves._values[keys] = leaf
        elif len(keys) == 1:
            leaves.tensors[str(keys[0])] = leaf
        else:
            leaves._inner[keys] = leaf
    return leaves


def _without_data(key: str, shard: str) -> ShardedObject:
    """Return a shard by its name, ``shard_0.1_2.2`` for the offset (0, 1) in the shape (2, 2)."""
    _, offset, shape = shard.split("_")
    numbers = [tuple(int(number) for number in text.split(".") if number) for text in (shape, offset)]
    return ShardedObject(key, None, *numbers)
