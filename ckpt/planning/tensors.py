"""The tensors of a state: their memory, sharding and boxes on this rank."""

from __future__ import annotations

import functools
from collections.abc import Callable
from operator import attrgetter
from typing import Any, TypeVar

import numpy as np
import torch
from torch.nn.parameter import is_lazy

from ckpt.errors import StateError
from ckpt.paths import Path, display
from ckpt.planning.boxes import Box, OwnBoxes, Placement, Sharding, local_boxes
from ckpt.planning.description import TensorSpec
from ckpt.values.registry import name_of

LocalBox = tuple[Box, tuple[int, ...]]
"""A box of a global tensor, and its offset in the local one."""

PLAIN_TENSORS = frozenset({torch.Tensor, torch.nn.Parameter, torch.nn.Buffer})
"""The types of tensors that can be stored, besides DTensor."""

K = TypeVar("K")
V = TypeVar("V")

# One object for equal shardings, so that comparing them does not compare all their ranks.
_shared_sharding = functools.lru_cache(maxsize=256)(Sharding)


class MetaTensorError(StateError):
    """A tensor of the state is on the meta device."""


class Known(dict[K, V]):
    """A dict that calls `make` for the value of a key that it does not have."""

    def __init__(self, make: Callable[[K], V]) -> None:
        super().__init__()
        self._make = make

    def __missing__(self, key: K) -> V:
        value = self[key] = self._make(key)
        return value


class DTensors:
    """The DTensors of one state. Most share a mesh and a sharding, so these are looked up only once."""

    def __init__(self) -> None:
        self._shardings = Known(_sharding_of)
        self._last: _ShardingKey = (None, (), ())
        self._sharding: Sharding | None = None  # of the last one
        self._coordinates: dict[Sharding, tuple[int, ...] | None] = {}
        self._boxes: dict[tuple[tuple[int, ...], Sharding], tuple[list[LocalBox], int | None]] = {}

    def sharding(self, path: Path, tensor: Any) -> Sharding | None:
        """Return the sharding of a DTensor; None for any other tensor. StateError if it cannot be stored."""
        placements = getattr(tensor, "placements", None)
        mesh = getattr(tensor, "device_mesh", None)
        if placements is None or mesh is None:
            return None
        known = self._known(mesh, placements)
        if known is None:
            raise StateError(
                f"{display(path)}: a DTensor with pending partial sums cannot be stored; redistribute it first"
            )
        return known

    def shardings(self, tensors: list[Any]) -> list[Sharding | None]:
        """Return the shardings of many DTensors; None for one that cannot be stored."""
        return [self._known(*each) for each in map(attrgetter("device_mesh", "placements"), tensors)]

    def shardings_of_specs(self, specs: list[Any]) -> list[Sharding | None]:
        """Return the shardings of DTensors, given the attributes in which PyTorch notes them."""
        return [self._known(spec.mesh, spec.placements) for spec in specs]

    def _known(self, mesh: Any, placements: tuple[Any, ...]) -> Sharding | None:
        types = tuple(map(type, placements))
        last = self._last
        # Most are as the one before. To compare them takes less time than to hash them.
        if not (mesh is last[0] and types == last[2] and placements == last[1]):
            key = mesh, placements, types
            self._sharding = self._shardings[key]
            self._last = key
        return self._sharding

    def boxes(self, path: Path, shape: tuple[int, ...], local: torch.Tensor, sharding: Sharding) -> list[LocalBox]:
        """Return the boxes in `local`, this rank's shard. StateError if its size contradicts its sharding."""
        boxes, held = self.expected_boxes(shape, sharding)
        if held is not None and held != local.numel():
            raise StateError(
                f"{display(path)}: this DTensor's shard has {local.numel()} elements where {held} are expected; its "
                f"sharding {[placement.dim for placement in sharding.placements]} by dimensions is not supported"
            )
        return list(boxes)

    def expected_boxes(self, shape: tuple[int, ...], sharding: Sharding) -> tuple[list[LocalBox], int | None]:
        """Return this rank's boxes and the number of their elements, which is None if it is not in the mesh."""
        known = self._boxes.get((shape, sharding))
        if known is None:
            known = self._boxes[shape, sharding] = self._find_boxes(shape, sharding)
        return known

    def _find_boxes(self, shape: tuple[int, ...], sharding: Sharding) -> tuple[list[LocalBox], int | None]:
        if sharding not in self._coordinates:
            self._coordinates[sharding] = sharding.coordinate(torch.distributed.get_rank())
        coordinate = self._coordinates[sharding]
        if coordinate is None:
            return [], None
        boxes = list(local_boxes(shape, sharding, coordinate))
        return boxes, sum(box.elements for box, _ in boxes)


def local_tensor(tensor: Any) -> torch.Tensor:
    """Return this rank's memory of a DTensor. Call it under `no_grad`: detaching a DTensor takes ten times as long."""
    local: torch.Tensor = tensor.to_local()
    return without_graph(local)


def without_graph(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor over the same memory, detached from the autograd graph."""
    return tensor.detach() if tensor.requires_grad else tensor


_ShardingKey = tuple[Any, tuple[Any, ...], tuple[type[Any], ...]]
"""Mesh, placements, and their types: a strided shard may compare equal to a plain one."""


def _sharding_of(key: _ShardingKey) -> Sharding | None:
    """Return the sharding of DTensors. None if it cannot be stored: with partial sums."""
    mesh, placements, _ = key
    if any(placement.is_partial() for placement in placements):
        return None
    ranks = tuple(mesh.mesh.flatten().tolist())
    return _shared_sharding(tuple(mesh.mesh.shape), ranks, tuple(map(_placement, placements)))


def _placement(placement: Any) -> Placement:
    if placement.is_replicate():
        return Placement()
    return Placement(placement.dim, int(getattr(placement, "split_factor", 1)))


def shares_elements(shape: tuple[int, ...], strides: tuple[int, ...]) -> bool:
    """Return whether several elements are the same memory, as in an expanded tensor."""
    return 0 not in shape and any(n > 1 and stride == 0 for n, stride in zip(shape, strides, strict=True))


def check_initialized(path: Path, tensor: torch.Tensor) -> None:
    """Raise StateError for a parameter or a buffer of a lazy module that has no shape yet."""
    if is_lazy(tensor):
        raise StateError(
            f"{display(path)}: this {type(tensor).__name__} of a lazy module has no shape yet; call the module with a "
            f"batch, which initializes it, before a save or a restore"
        )


def check_storable(path: Path, tensor: torch.Tensor) -> None:
    """Raise StateError for a tensor that cannot be stored."""
    if tensor.is_meta:
        raise MetaTensorError(
            f"{display(path)}: this tensor is on the meta device and has no data; allocate it first, those of a module "
            f"by its to_empty(device=...)"
        )
    problem = None
    if tensor.layout != torch.strided:
        problem = f"has the layout {tensor.layout}; save its to_dense() or its parts"
    elif tensor.is_quantized:
        problem = "is quantized; save its int_repr() and scales"
    elif type(tensor) not in PLAIN_TENSORS:
        problem = (
            f"is a {name_of(type(tensor))}; of tensor subclasses DTensor, some of torchao and those given to "
            f"ckpt.register_tensor_subclass can be stored"
        )
    elif tensor.numel() and not tensor.data_ptr():
        problem = "has no memory: its storage was freed; save it while it has its elements"
    if problem:
        raise StateError(f"{display(path)}: this tensor {problem}")


# One object for equal specs, so that comparing them does not compare their fields.
@functools.lru_cache(maxsize=4096)
def tensor_spec(
    dtype: torch.dtype, shape: tuple[int, ...], sharding: Sharding | OwnBoxes | None, per_rank: bool
) -> TensorSpec:
    """Return the description of a tensor."""
    return TensorSpec(str(dtype).removeprefix("torch."), dtype.itemsize, shape, sharding, per_rank)


@functools.lru_cache(maxsize=4096)
def whole_box(shape: tuple[int, ...]) -> LocalBox:
    """Return the box that covers a tensor of `shape`, which is local as a whole."""
    return Box.whole(shape), (0,) * len(shape)


def check_array(path: Path, array: np.ndarray[Any, Any]) -> None:
    """Raise StateError for an array of numpy with a mask: only its elements would be stored."""
    if isinstance(array, np.ma.MaskedArray):
        raise StateError(
            f"{display(path)}: numpy arrays with a mask cannot be stored; put its data and its mask into the state, or "
            "what its filled() returns"
        )


def tensor_over(array: np.ndarray[Any, Any]) -> torch.Tensor | None:
    """Return a tensor over the memory of an array; None if torch cannot make one."""
    if not array.flags.writeable or not array.dtype.isnative or any(stride < 0 for stride in array.strides):
        return None
    try:
        return torch.from_numpy(array)
    except TypeError:
        dtype = getattr(torch, array.dtype.name, None)  # the types of ml_dtypes have the names of torch's
    if not isinstance(dtype, torch.dtype) or dtype.itemsize != array.dtype.itemsize:
        return None
    if not array.flags.c_contiguous:
        return None
    as_integers = {1: np.uint8, 2: np.int16, 4: np.int32, 8: np.int64}[array.dtype.itemsize]
    return torch.from_numpy(array.view(as_integers)).view(dtype)
