"""The tensors of a state as leaves, with those found that have the same memory as an earlier one.

Of the many tensors that one dict holds, each property is read in a call for all of them. Python code runs only for
those that are not like others: a few microseconds for each of ten thousand tensors would cost more than their copies.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from operator import attrgetter, itemgetter
from typing import Any

import torch

from ckpt.errors import CheckpointError, StateError
from ckpt.paths import Path, display
from ckpt.planning.boxes import Sharding
from ckpt.planning.description import TensorSpec
from ckpt.planning.subclasses import is_storable_subclass, parts_of
from ckpt.planning.tensors import (
    PLAIN_TENSORS,
    DTensors,
    Known,
    LocalBox,
    check_initialized,
    check_storable,
    local_tensor,
    shares_elements,
    tensor_spec,
    whole_box,
    without_graph,
)
from ckpt.values.containers import Container
from ckpt.values.registry import name_of

_MANY = 8  # tensors, from which on it takes less time to read one property of all after the other
_shape, _dtype, _requires_grad = attrgetter("shape"), attrgetter("dtype"), attrgetter("requires_grad")


@dataclass(slots=True)
class TensorLeaf:
    """A tensor of the state: `local` is this rank's memory, with `boxes` of the global tensor and their local offsets.

    `after` is to be called when new bytes are in `local`. It is set where `local` is a copy of the user's object, a
    numpy array that torch cannot alias. If not `writeable`, that object is read-only, or has elements that share memory
    (an expanded tensor), and can only be saved.
    """

    local: torch.Tensor
    spec: TensorSpec
    boxes: list[LocalBox]
    after: Callable[[], None] | None = None
    writeable: bool = True


class TensorLeaves:
    """Adds tensors to the leaves of one state, by path; to `containers` those subclasses that are stored by parts.

    `_at` finds tensors with the same memory: the first one at each address, and `_others` there.
    """

    def __init__(
        self,
        tensors: dict[Path, TensorLeaf],
        aliases: dict[Path, Path],
        containers: dict[Path, tuple[Container, bool]],
    ) -> None:
        self._tensors = tensors
        self._aliases = aliases
        self._containers = containers
        self._at: dict[int, Path] = {}
        self._others: dict[int, list[Path]] = {}
        self._dtensors = DTensors()
        self._kinds = Known(partial(_kind_of, self._dtensors))

    def add(self, path: Path, tensor: torch.Tensor, per_rank: bool) -> None:
        """Add a tensor. StateError, naming the path, if it cannot be stored."""
        try:
            self._add(path, tensor, per_rank)
        except CheckpointError:
            raise
        except Exception as error:  # some kinds of tensors have no shape, no address, or no detach()
            raise StateError(
                f"{display(path)}: this {name_of(type(tensor))} cannot be stored: {error}; save a plain tensor"
            ) from error

    def _add(self, path: Path, tensor: torch.Tensor, per_rank: bool) -> None:
        # Looking up a missing attribute takes a microsecond.
        sharding = None
        if type(tensor) not in PLAIN_TENSORS:
            check_initialized(path, tensor)
            sharding = self._dtensors.sharding(path, tensor)
        local = without_graph(tensor) if sharding is None else local_tensor(tensor)
        if not per_rank and self._add_common(path, local, () if sharding is None else (tensor.shape, sharding)):
            return
        if type(local) not in PLAIN_TENSORS and is_storable_subclass(type(local)):
            self._add_parts(path, tensor, local, None if per_rank else sharding, per_rank)
            return
        check_storable(path, local)
        if per_rank or sharding is None:  # this rank's shard of a per-rank DTensor is a tensor of its own
            sharding, tensor = None, local
        self._add_leaf(path, local, tuple(tensor.shape), sharding, per_rank)

    def add_many(self, paths: Sequence[Path], tensors: list[Any]) -> None:
        """Add tensors of one type that are not per rank. StateError if one of them cannot be stored."""
        looked_at = self._look(tensors) if len(tensors) >= _MANY else None
        if looked_at is None:
            for path, tensor in zip(paths, tensors, strict=True):
                self.add(path, tensor, False)
            return
        locals_, addresses, kinds = looked_at
        begin = 0
        for number in [*self._uncommon(locals_, addresses, kinds), len(tensors)]:
            common = slice(begin, number)
            self._at.update(zip(addresses[common], paths[common], strict=True))
            specs, boxes = map(itemgetter(0), kinds[common]), map(itemgetter(1), kinds[common])
            leaves = map(TensorLeaf, locals_[common], specs, boxes)
            self._tensors.update(zip(paths[common], leaves, strict=True))
            if number < len(tensors):
                self.add(paths[number], tensors[number], False)
            begin = number + 1

    def _add_common(self, path: Path, local: torch.Tensor, whole: tuple[Any, ...]) -> bool:
        """Add a tensor if it is like most, and return whether it is. `whole` are shape and sharding of a DTensor."""
        if type(local) not in PLAIN_TENSORS or local.layout is not torch.strided or not local.is_contiguous():
            return False
        kind, address = self._kinds[(local.dtype, local.shape, *whole)], local.data_ptr()
        if kind is None or not address or address in self._at:
            return False
        self._at[address] = path
        self._tensors[path] = TensorLeaf(local, *kind)
        return True

    def _look(self, tensors: list[Any]) -> tuple[list[torch.Tensor], list[int], list[Any]] | None:
        """Return this rank's memory of each tensor, its address and kind; None if they are to be added one by one."""
        shardings: list[Any] = []
        locals_ = tensors
        if type(tensors[0]) not in PLAIN_TENSORS:
            if not hasattr(type(tensors[0]), "placements"):
                return None
            shardings = self._dtensors.shardings(tensors)
            locals_ = list(map(type(tensors[0]).to_local, tensors))
            if not all(shardings) or not PLAIN_TENSORS.issuperset(map(type, locals_)):
                return None
        if any(map(_requires_grad, locals_)):
            locals_ = list(map(without_graph, locals_))
        try:
            addresses, shapes = list(map(torch.Tensor.data_ptr, locals_)), list(map(_shape, locals_))
        except RuntimeError:  # some are sparse or nested, and do not have both
            return None
        whole = (map(_shape, tensors), shardings) if shardings else ()
        keys = zip(map(_dtype, locals_), shapes, *whole, strict=True)
        return locals_, addresses, list(map(self._kinds.__getitem__, keys))

    def _uncommon(self, locals_: list[torch.Tensor], addresses: list[int], kinds: list[Any]) -> list[int]:
        """Return the numbers of tensors that need a closer look: strided, without memory, perhaps an alias."""
        contiguous = list(map(torch.Tensor.is_contiguous, locals_))
        if all(contiguous) and all(addresses) and all(kinds):
            different = set(addresses)
            if len(different) == len(addresses) and self._at.keys().isdisjoint(different):
                return []
        times = Counter(addresses)
        return [
            number
            for number, at in enumerate(addresses)
            if not (contiguous[number] and at and kinds[number]) or times[at] > 1 or at in self._at
        ]

    def _add_parts(
        self, path: Path, tensor: torch.Tensor, local: torch.Tensor, sharding: Sharding | None, per_rank: bool
    ) -> None:
        """Add the parts of a tensor subclass. `local` is the tensor, or the local part of a DTensor."""
        shape = tuple(local.shape) if sharding is None else tuple(tensor.shape)
        container, parts = parts_of(path, local, shape, sharding)
        self._containers[path] = container, per_rank
        for part in parts:
            where = (*path, part.name)
            inner = without_graph(part.local)
            if type(inner) not in PLAIN_TENSORS and is_storable_subclass(type(inner)) and part.sharding is None:
                self._add_parts(where, inner, inner, None, per_rank)
                continue
            check_storable(where, inner)
            self._add_leaf(where, inner, part.shape, part.sharding, per_rank)

    def _add_leaf(
        self, path: Path, local: torch.Tensor, shape: tuple[int, ...], sharding: Sharding | None, per_rank: bool
    ) -> None:
        """Add a tensor, or an alias if an earlier one is the same. `local` is this rank's memory."""
        boxes = [whole_box(shape)] if sharding is None else self._dtensors.boxes(path, shape, local, sharding)
        spec = tensor_spec(local.dtype, shape, sharding, per_rank)
        writeable = local.is_contiguous() or not shares_elements(local.shape, local.stride())
        leaf = TensorLeaf(local, spec, boxes, writeable=writeable)
        earlier = self._earlier(path, leaf)
        if earlier is not None:
            self._aliases[path] = earlier
        else:
            self._tensors[path] = leaf

    def _earlier(self, path: Path, leaf: TensorLeaf) -> Path | None:
        """Return the path of an earlier tensor with the same elements of the same memory.

        None for an empty tensor; and for one that is per rank, since other ranks may have two tensors there.
        """
        if leaf.local.numel() == 0 or leaf.spec.per_rank:
            return None
        address = leaf.local.data_ptr()
        first = self._at.setdefault(address, path)
        if first is path:
            return None
        others = self._others.setdefault(address, [])
        for earlier in (first, *others):
            if _identity(self._tensors[earlier]) == _identity(leaf):
                return earlier
        others.append(path)
        return None


def _kind_of(dtensors: DTensors, key: tuple[Any, ...]) -> tuple[TensorSpec, list[LocalBox]] | None:
    """Return what contiguous tensors have in common: of a dtype and local shape, DTensors also of a shape and sharding.

    None for tensors without elements, quantized ones, and shards of another size than expected.
    """
    dtype, local_shape, *whole = key
    if 0 in local_shape or str(dtype).startswith("torch.q"):
        return None
    shape, sharding = whole or (local_shape, None)
    shape = tuple(shape)
    boxes = [whole_box(shape)]
    if sharding is not None:
        boxes, held = dtensors.expected_boxes(shape, sharding)
        if held != math.prod(local_shape):
            return None
    return tensor_spec(dtype, shape, sharding, False), boxes


def _identity(leaf: TensorLeaf) -> tuple[Any, ...]:
    """Return a key that is equal for tensors with the same elements of the same memory, saved in the same way."""
    local, spec = leaf.local, leaf.spec
    where = (local.device, local.data_ptr(), tuple(local.shape), local.stride(), local.dtype)
    return (*where, local.is_conj(), local.is_neg(), spec.shape, spec.sharding)
