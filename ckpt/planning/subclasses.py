"""The parts of tensor subclasses, and how they are sharded when the tensor is the local part of a DTensor."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from ckpt.errors import StateError
from ckpt.paths import Path, display
from ckpt.planning.boxes import Placement, Sharding
from ckpt.values.containers import Container
from ckpt.values.registry import name_of
from ckpt.values.tensor_subclasses import Follows, class_named, rule_of


@dataclass(frozen=True, slots=True)
class TensorPart:
    """A part of a tensor subclass: `local` is this rank's memory of it, of the global `shape`."""

    name: str
    local: Any
    shape: tuple[int, ...]
    sharding: Sharding | None


def is_storable_subclass(kind: type[Any]) -> bool:
    """Return whether tensors of this class are stored by their parts."""
    return rule_of(kind) is not None


def parts_of(
    path: Path, local: Any, shape: tuple[int, ...], sharding: Sharding | None
) -> tuple[Container, list[TensorPart]]:
    """Return a tensor subclass as a container, and its parts. `local` is this rank's part of a DTensor of `shape`.

    StateError for a part that is not sharded in a known way.
    """
    names, context = local.__tensor_flatten__()
    container = Container.of_tensor(local, tuple(names), context, shape)
    rule = rule_of(type(local))
    assert rule is not None
    parts = []
    for name in names:
        part = getattr(local, name)
        if sharding is None:
            parts.append(TensorPart(name, part, tuple(part.shape), None))
            continue
        follows = rule.follows.get(name, "shape")
        try:
            parts.append(TensorPart(name, part, *_sharded(follows, part, local, shape, sharding)))
        except ValueError as error:
            raise StateError(
                f"{display((*path, name))}: this part of a sharded {name_of(type(local))} has the shape "
                f"{list(part.shape)}, and {error}. Say how it is sharded: ckpt.register_tensor_subclass(kind, follows)"
            ) from None
    return container, parts


def _sharded(
    follows: Follows, part: Any, local: Any, shape: tuple[int, ...], sharding: Sharding
) -> tuple[tuple[int, ...], Sharding]:
    """Return the global shape of a part, and its sharding."""
    own, outer = tuple(part.shape), tuple(local.shape)
    whole = Sharding(sharding.mesh_shape, sharding.ranks, (Placement(),) * len(sharding.placements))
    if follows == "whole" or outer == shape:
        return own, whole
    if follows == "elements":
        if any(placement.dim not in (None, 0) for placement in sharding.placements) or len(own) != 1:
            raise ValueError("it follows the elements, which only a tensor sharded along dimension 0 allows")
        return (_scaled(own[0], math.prod(outer), math.prod(shape)),), sharding
    if part.numel() == 1 and len(own) != len(outer):
        return own, whole
    if len(own) != len(outer):
        raise ValueError(f"the tensor has the shape {list(outer)}")
    replicated = {dim for dim, size in enumerate(own) if size == 1 and outer[dim] != 1}
    sizes = (
        size if dim in replicated or ours == all_ else _scaled(size, ours, all_)
        for dim, (size, ours, all_) in enumerate(zip(own, outer, shape, strict=True))
    )
    placements = tuple(Placement() if each.dim in replicated else each for each in sharding.placements)
    return tuple(sizes), Sharding(sharding.mesh_shape, sharding.ranks, placements)


def _scaled(size: int, ours: int, all_: int) -> int:
    """Return the size of a whole part: it has `size` items for `ours` of the tensor's `all_`."""
    if size == ours:
        return all_
    if not size or not ours or ours % size or all_ % (ours // size):
        raise ValueError(f"it has {size} items for {ours} of the tensor's, which has {all_} in all")
    return all_ // (ours // size)


def part_like(container: Container, sizes: dict[str, tuple[int, ...]], local: torch.Tensor) -> Iterator[Any]:
    """Yield the name and the local shape of each part of a tensor that is to be sharded like `local`.

    `sizes` are the global shapes of the parts; the container has that of the tensor.
    """
    kind = class_named(container.type)
    rule = None if kind is None else rule_of(kind)
    outer, shape = tuple(local.shape), container.shape
    for name, size in sizes.items():
        follows = "shape" if rule is None else rule.follows.get(name, "shape")
        if follows == "whole" or outer == shape or (follows == "shape" and len(size) != len(outer)):
            yield name, size
        elif follows == "elements":
            yield name, (size[0] * math.prod(outer) // max(math.prod(shape), 1),)
        else:
            yield (
                name,
                tuple(
                    own if own == 1 or ours == all_ else own * ours // max(all_, 1)
                    for own, ours, all_ in zip(size, outer, shape, strict=True)
                ),
            )
