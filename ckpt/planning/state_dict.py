"""Flatten a state into tensors and values with stable names, and put a restored state back in place.

A state is any nesting of dicts, lists and tuples with tensors, numpy arrays, numbers, strings and None, or objects with
``state_dict``/``load_state_dict``. A list or tuple without tensors in it is one value. Runs in the trainer; imports
torch.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from ckpt.collection import without_collection
from ckpt.errors import StateError
from ckpt.paths import Path, display
from ckpt.planning.boxes import Box, Sharding
from ckpt.planning.description import StateDescription, TensorSpec
from ckpt.planning.dtensors import DTensors, LocalBox, local_tensor, without_graph
from ckpt.planning.leaves import PerRank

__all__ = ["FlatState", "TensorLeaf", "flatten"]


@dataclass(slots=True)
class TensorLeaf:
    """A tensor of the state: `local` is this rank's memory, made of `boxes` of the global tensor (each with its local
    offset).

    `after` runs when new bytes are in `local`; it is set where `local` is a stand-in for the user's object (a numpy
    array that torch cannot alias). Not `writeable`: that object is read-only, or has elements
    that share memory (an expanded tensor), and can only be saved.
    """

    local: torch.Tensor
    spec: TensorSpec
    boxes: list[LocalBox]
    after: Callable[[], None] | None = None
    writeable: bool = True


@dataclass(slots=True)
class ValueLeaf:
    """A leaf that is not a tensor; `assign` puts another value in its place."""

    value: Any
    per_rank: bool
    assign: Callable[[Any], None]


@dataclass(slots=True)
class FlatState:
    """A state as named leaves. `owners` are the stateful objects in it with the state dict that each gave, innermost
    first."""

    tensors: dict[Path, TensorLeaf] = field(default_factory=dict)
    values: dict[Path, ValueLeaf] = field(default_factory=dict)
    aliases: dict[Path, Path] = field(default_factory=dict)
    owners: list[tuple[Path, Any, Any]] = field(default_factory=list)

    def describe(self) -> StateDescription:
        """The state without its bytes."""
        return StateDescription(
            {path: leaf.spec for path, leaf in self.tensors.items()},
            {path: leaf.per_rank for path, leaf in self.values.items()},
            dict(self.aliases),
        )

    def load_owners(self) -> None:
        """Hand every stateful object its state dict, whose leaves hold the restored state by now."""
        for path, owner, state_dict in self.owners:
            try:
                owner.load_state_dict(state_dict)
            except Exception as error:
                raise StateError(f"{display(path)}: {type(owner).__name__}.load_state_dict failed: {error}") from error


def flatten(state: Any, *, expand: Callable[[Path, Any, Any, bool], Any] | None = None) -> FlatState:
    """Name every leaf of `state`; the tensors alias the user's memory where that is possible.

    `expand(path, owner, state_dict, per_rank)` may return another state dict for a stateful object (a restore gives a
    fresh optimizer the tensors it does not have yet). Raises StateError, naming the key path, for a leaf that cannot be
    stored.
    """
    flat = FlatState()
    with without_collection(), torch.no_grad():
        _Walk(flat, expand).visit((), state, per_rank=False, assign=_cannot_assign)
    return flat


def _cannot_assign(value: Any) -> None:
    raise StateError("a state that is a single number or string cannot be restored in place; put it into a dict")


_Seen = tuple[Path, torch.Tensor, tuple[int, ...], Sharding | None, bool]
"""A tensor, and how it is to be saved: path, memory, global shape, sharding, per rank."""


def _identity(seen: _Seen) -> tuple[Any, ...]:
    """Equal for two tensors exactly if they are the same elements of the same memory, saved in the same way."""
    local = seen[1]
    where = (local.device, local.data_ptr(), tuple(local.shape), local.stride(), local.dtype)
    return (*where, local.is_conj(), local.is_neg(), *seen[2:])


_PLAIN_TENSORS = frozenset({torch.Tensor, torch.nn.Parameter, torch.nn.Buffer})


class _Walk:
    """One pass over a state. `_seen` finds tensors that are the same memory: first by its address, then exactly."""

    def __init__(self, flat: FlatState, expand: Callable[[Path, Any, Any, bool], Any] | None) -> None:
        self._flat = flat
        self._expand = expand
        self._seen: dict[int, list[_Seen]] = {}
        self._dtensors = DTensors()

    def visit(self, path: Path, node: Any, per_rank: bool, assign: Callable[[Any], None]) -> None:
        if isinstance(node, PerRank):
            self.visit(path, node.value, True, lambda value: setattr(node, "value", value))
        elif isinstance(node, torch.Tensor):
            self._tensor(path, node, per_rank)
        elif isinstance(node, np.ndarray):
            self._array(path, node, per_rank)
        elif isinstance(node, Mapping):
            self._mapping(path, node, per_rank, assign)
        elif isinstance(node, list | tuple) and _holds_tensors(node):
            for number, item in enumerate(node):
                self.visit((*path, number), item, per_rank, _item_setter(node, number, path))
        elif callable(getattr(node, "state_dict", None)) and callable(getattr(node, "load_state_dict", None)):
            state_dict = node.state_dict()
            if self._expand is not None:
                state_dict = self._expand(path, node, state_dict, per_rank)
            self.visit(path, state_dict, per_rank, _cannot_assign)
            self._flat.owners.append((path, node, state_dict))
        else:
            _check_value(path, node)
            self._flat.values[path] = ValueLeaf(node, per_rank, assign)

    def _mapping(self, path: Path, node: Mapping[Any, Any], per_rank: bool, assign: Callable[[Any], None]) -> None:
        if not node:
            self._flat.values[path] = ValueLeaf({}, per_rank, assign)
        for key, item in node.items():
            if type(key) is not str and type(key) is not int:
                raise StateError(f"{display(path)}: keys must be str or int, not {type(key).__name__} {key!r}")
            if isinstance(key, str) and not _is_unicode(key):
                raise StateError(
                    f"{display(path)}: the key {key!r} is not valid Unicode and cannot be a name in a file"
                )
            if isinstance(item, torch.Tensor):  # most are, and there are many
                self._tensor((*path, key), item, per_rank)
            else:
                self.visit((*path, key), item, per_rank, _item_setter(node, key, path))

    def _array(self, path: Path, array: np.ndarray[Any, Any], per_rank: bool) -> None:
        aliased = _tensor_over(array)
        if aliased is not None:
            self._tensor(path, aliased, per_rank)
            return
        contiguous = np.array(array, order="C", copy=True)
        local = _tensor_over(contiguous)
        if local is None:
            raise StateError(f"{display(path)}: numpy arrays of dtype {array.dtype} cannot be stored")
        self._tensor(path, local, per_rank)
        if path in self._flat.tensors:
            leaf = self._flat.tensors[path]
            leaf.after = lambda: np.copyto(array, contiguous)
            leaf.writeable = array.flags.writeable and not _shares_elements(array.shape, array.strides)

    def _tensor(self, path: Path, tensor: torch.Tensor, per_rank: bool) -> None:
        # A look at an attribute that is not there takes a microsecond.
        sharding = None if type(tensor) in _PLAIN_TENSORS else self._dtensors.sharding(path, tensor)
        local = without_graph(tensor) if sharding is None else local_tensor(tensor)
        _check_tensor(path, local)
        if per_rank or sharding is None:  # what this rank has of a DTensor that is per rank is its own
            sharding, tensor = None, local
        shape = tuple(tensor.shape)
        earlier = self._seen_before(path, local, shape, sharding, per_rank)
        if earlier is not None:
            self._flat.aliases[path] = earlier
            return
        boxes = [_whole(shape)] if sharding is None else self._dtensors.boxes(path, tensor, local, sharding)
        spec = _spec(local.dtype, shape, sharding, per_rank)
        writeable = local.is_contiguous() or not _shares_elements(local.shape, local.stride())
        self._flat.tensors[path] = TensorLeaf(local, spec, boxes, writeable=writeable)

    def _seen_before(
        self, path: Path, local: torch.Tensor, shape: tuple[int, ...], sharding: Sharding | None, per_rank: bool
    ) -> Path | None:
        """The path under which the same elements of the same memory were seen; None for a tensor without elements."""
        if local.numel() == 0:
            return None
        this = path, local, shape, sharding, per_rank
        same_address = self._seen.setdefault(local.data_ptr(), [])
        for other in same_address:
            if _identity(other) == _identity(this):
                return other[0]
        same_address.append(this)
        return None


def _is_unicode(text: str) -> bool:
    """False for half a surrogate pair, which no JSON reader but Python's takes."""
    return text.isascii() or not any("\ud800" <= character <= "\udfff" for character in text)


def _shares_elements(shape: tuple[int, ...], strides: tuple[int, ...]) -> bool:
    return 0 not in shape and any(n > 1 and stride == 0 for n, stride in zip(shape, strides, strict=True))


def _item_setter(container: Any, key: Any, path: Path) -> Callable[[Any], None]:
    def assign(value: Any) -> None:
        try:
            container[key] = value
        except TypeError:
            raise StateError(
                f"{display((*path, key))}: a {type(container).__name__} cannot be restored in place; use a list or a "
                f"dict"
            ) from None

    return assign


def _holds_tensors(node: Any) -> bool:
    """Whether a list or tuple must be walked: it has something in it that is not a plain value."""
    if isinstance(node, Mapping):
        return any(map(_holds_tensors, node.values()))
    if isinstance(node, list | tuple):
        return any(map(_holds_tensors, node))
    return isinstance(node, torch.Tensor | np.ndarray | PerRank) or hasattr(node, "state_dict")


_PLAIN_VALUES = (type(None), bool, int, float, complex, str, bytes, np.generic, torch.dtype)


def _check_value(path: Path, value: Any) -> None:
    if isinstance(value, list | tuple):
        for number, item in enumerate(value):
            _check_value((*path, number), item)
    elif isinstance(value, Mapping):
        for key, item in value.items():
            _check_value((*path, key), item)
    elif not isinstance(value, _PLAIN_VALUES):
        raise StateError(
            f"{display(path)}: a {type(value).__module__}.{type(value).__qualname__} cannot be stored; a state holds "
            f"tensors, numpy "
            "arrays, numbers, strings, None, dicts and lists of these, and objects with state_dict() and "
            "load_state_dict()"
        )


def _check_tensor(path: Path, tensor: torch.Tensor) -> None:
    problem = None
    if tensor.layout != torch.strided:
        problem = f"has the layout {tensor.layout}; save its to_dense() or its parts"
    elif tensor.is_quantized:
        problem = "is quantized; save its int_repr() and scales"
    elif tensor.is_meta:
        problem = "is on the meta device and has no data"
    elif type(tensor) not in _PLAIN_TENSORS:
        problem = f"is a {type(tensor).__qualname__}; of tensor subclasses only DTensor can be stored"
    if problem:
        raise StateError(f"{display(path)}: this tensor {problem}")


# One object for equal ones, so that comparing two descriptions takes a look at each, and not at all that is in it.
@functools.lru_cache(maxsize=4096)
def _spec(dtype: torch.dtype, shape: tuple[int, ...], sharding: Sharding | None, per_rank: bool) -> TensorSpec:
    return TensorSpec(str(dtype).removeprefix("torch."), dtype.itemsize, shape, sharding, per_rank)


@functools.lru_cache(maxsize=4096)
def _whole(shape: tuple[int, ...]) -> LocalBox:
    return Box.whole(shape), (0,) * len(shape)


def _tensor_over(array: np.ndarray[Any, Any]) -> torch.Tensor | None:
    """A tensor over the memory of an array; None if torch cannot have one."""
    if not array.flags.writeable or not array.dtype.isnative or any(stride < 0 for stride in array.strides):
        return None
    try:
        return torch.from_numpy(array)
    except TypeError:
        dtype = getattr(torch, array.dtype.name, None)  # ml_dtypes names its types as torch does
    if not isinstance(dtype, torch.dtype) or dtype.itemsize != array.dtype.itemsize:
        return None
    if not array.flags.c_contiguous:
        return None
    as_integers = {1: np.uint8, 2: np.int16, 4: np.int32, 8: np.int64}[array.dtype.itemsize]
    return torch.from_numpy(array.view(as_integers)).view(dtype)
