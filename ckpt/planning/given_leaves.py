"""A state that is given leaf by leaf, by programs that divide it in a way of their own. Imports torch.

leaves of this rank --> all ranks: problems, items of lists --> FlatState --> Checkpointer.save
"""

from __future__ import annotations

import hashlib
import json
from argparse import Namespace
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from ckpt.errors import StateError
from ckpt.paths import Path, display
from ckpt.planning.boxes import Box, OwnBoxes
from ckpt.planning.state_dict import FlatState, TensorLeaf, ValueLeaf, flatten, holds_tensors
from ckpt.planning.tensors import check_storable, tensor_spec, without_graph
from ckpt.ranks.failure import Failure
from ckpt.ranks.group import Group
from ckpt.values.codec import UnencodableError, decode_value, encode_value
from ckpt.values.containers import Container, rebuild

_LIST = Container("list")
_CONTAINERS = (Mapping, list, deque, tuple, Namespace)
_STATE, _GROUPS = "state", "param_groups"  # of the state dict of an optimizer


class Leaves:
    """A state given leaf by leaf: this rank's boxes of tensors, and values, each by the keys that lead to it.

    For frameworks that shard tensors in a way of their own. Every rank adds the leaves that it has; then all ranks call
    `state`, and save what that returns: ``checkpointer.save(leaves.state(ckpt.Ranks()), step)``. The step is like any
    other, for `Checkpointer.restore` and `ckpt.open`.

    `keys` is a tuple of str and int. `lists` are the positions in it at which the key is the index of an item of a
    list; the other keys are those of dicts. The items of a list may be on several ranks. A list without tensors becomes
    one value of the lowest rank that has an item of it.
    """

    def __init__(self) -> None:
        self._tensors: dict[Path, TensorLeaf] = {}
        self._values: dict[Path, Any] = {}  # encoded
        self._aliases: dict[Path, Path] = {}
        self._containers: dict[Path, Container] = {}  # of those that were given whole
        self._lists: dict[Path, tuple[int, ...]] = {}

    def add_tensor(
        self,
        keys: tuple[str | int, ...],
        shape: Sequence[int],
        boxes: Iterable[tuple[Sequence[int], torch.Tensor]],
        *,
        lists: Sequence[int] = (),
    ) -> None:
        """Add the boxes of a tensor of the global `shape` that this rank has: the offset and the elements of each.

        The boxes of all ranks must be equal or disjoint, and cover the tensor. Elements of a single box are not copied
        until the state is saved. StateError, naming the keys, for a tensor that cannot be stored.
        """
        tensors: list[torch.Tensor] = []
        held: list[Box] = []
        for offset, given in boxes:
            tensor = without_graph(given)
            check_storable(keys, tensor)
            box = Box(tuple(offset), tuple(tensor.shape))
            if box.elements or not tensors:
                tensors.append(tensor)
                held.append(box)
        if not tensors:
            raise StateError(f"{display(keys)}: no box of this tensor is given; only ranks that have one add it")
        local, offsets = (tensors[0], [(0,) * len(shape)]) if len(tensors) == 1 else _joined(tensors)
        own = [(box, at) for box, at in zip(held, offsets, strict=True) if box.elements]
        spec = tensor_spec(local.dtype, tuple(shape), OwnBoxes(tuple(sorted(box for box, _ in own))), False)
        self._tensors[keys] = TensorLeaf(local, spec, own)
        self._note(keys, lists)

    def add_value(self, keys: tuple[str | int, ...], value: Any, *, lists: Sequence[int] = ()) -> None:
        """Add a value, as a state may hold it: also a numpy array, and a container with arrays and tensors in it.

        Arrays and tensors are this rank's alone, and whole. StateError, naming the keys, if it cannot be stored.
        """
        if isinstance(value, np.ndarray) or (isinstance(value, _CONTAINERS) and holds_tensors(value)):
            self._add_parts(keys, value, lists)
            return
        try:
            self._values[keys] = encode_value(value)
        except UnencodableError as error:
            raise StateError(f"{display((*keys, *error.path))}: {error}") from error.__cause__
        self._note(keys, lists)

    def state(self, ranks: Group, problem: str | None = None) -> FlatState:
        """Return the state of this rank, to be given to `Checkpointer.save`. Collective, by `ranks`.

        `problem` says why this rank cannot save its leaves; then StateError is raised on all ranks.
        """
        own = json.dumps(self._document()).encode()
        answers = []
        for each in ranks.outcomes(own if problem is None else Failure(ranks.rank, StateError.__name__, problem)):
            if isinstance(each, Failure):
                raise each.error(f"rank {each.rank} cannot store its part, nothing was written: {each.message}")
            answers.append(json.loads(each))
        return self._flat(answers, ranks.rank)

    def _add_parts(self, keys: Path, value: Any, lists: Sequence[int]) -> None:
        """Add the leaves of a value, by the names that they have in a state with the value at `keys`."""
        state = value
        for key in reversed(keys):
            state = {key: state}
        flat = flatten(state)
        own = [owner.path for owner in flat.owners] + [path for path, leaf in flat.values.items() if leaf.per_rank]
        own += [path for path, leaf in flat.tensors.items() if leaf.spec.per_rank]
        if own:
            raise StateError(
                f"{display(own[0])}: an object with state_dict(), and what belongs to a rank alone, cannot be inside a "
                f"{type(value).__name__} here; put it into a dict, or its state_dict() in its place"
            )
        self._tensors |= flat.tensors
        self._values |= {path: leaf.encoded for path, leaf in flat.values.items()}
        self._aliases |= flat.aliases
        self._containers |= {path: container for path, (container, _) in flat.containers.items()}
        for path in flat.names():
            self._note(path, lists)

    def _note(self, keys: Path, lists: Sequence[int]) -> None:
        if lists:
            self._lists[keys] = tuple(lists)

    def _document(self) -> dict[str, Any]:
        """Return the leaves as JSON for the other ranks: a digest of all that are not in a list."""
        specs = [(path, leaf.spec) for path, leaf in self._tensors.items()]
        text = repr((specs, list(self._values), self._aliases, self._containers, self._lists))
        paths = (*self._tensors, *self._values)
        return {
            "structure": hashlib.blake2b(text.encode(), digest_size=16).hexdigest(),
            "in_lists": [
                (path, at, self._values.get(path), path not in self._values) for path, at in self._lists.items()
            ],
            "states": sorted({path[:at] for path in paths for at, key in enumerate(path) if key == _STATE}, key=repr),
        }

    def _flat(self, answers: list[Any], rank: int) -> FlatState:
        """Return the state of this rank. `answers` are the documents of all ranks."""
        in_lists = [
            _InList(holder, tuple(path), tuple(positions), encoded, is_tensor)
            for holder, answer in enumerate(answers)
            for path, positions, encoded, is_tensor in answer["in_lists"]
        ]
        containers = {item.path[:at] for item in in_lists if item.is_tensor for at in item.positions}
        values = {path: encoded for path, encoded in self._values.items() if path not in self._lists}
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
                if path and path[-1] == _GROUPS and path[:-1] not in states:
                    # An optimizer whose state is an empty dict, for which no leaf is given.
                    values[*path[:-1], _STATE] = {}
        structure = hashlib.blake2b("".join(answer["structure"] for answer in answers).encode(), digest_size=16)
        return FlatState(
            tensors=self._tensors,
            values={path: ValueLeaf(None, False, None, encoded) for path, encoded in values.items()},
            aliases=self._aliases,
            containers={
                **dict.fromkeys(sorted(containers, key=repr), (_LIST, False)),
                **{path: (container, False) for path, container in self._containers.items()},
            },
            structure=structure.hexdigest(),
        )


@dataclass(frozen=True, slots=True)
class _InList:
    """A leaf in a list, of the rank `holder`; encoded unless it is a tensor."""

    holder: int
    path: Path
    positions: tuple[int, ...]
    encoded: Any
    is_tensor: bool  # or another name of one


def _joined(tensors: list[torch.Tensor]) -> tuple[torch.Tensor, list[tuple[int, ...]]]:
    """Return one tensor that holds all of these, one behind the other in its first dimension; and the offsets."""
    rows = [tensor.shape[0] for tensor in tensors]
    rest = [max(sizes) for sizes in zip(*(tensor.shape[1:] for tensor in tensors), strict=True)]
    joined = tensors[0].new_zeros((sum(rows), *rest))
    offsets = [(sum(rows[:number]), *(0 for _ in rest)) for number in range(len(rows))]
    for tensor, offset in zip(tensors, offsets, strict=True):
        joined[Box(offset, tuple(tensor.shape)).slices((0,) * len(offset))] = tensor
    return joined, offsets


def _list_of(items: list[tuple[int, _InList]]) -> Any:
    """Return a list made of its items. One without leaves is an empty dict, for which no leaf is given."""
    leaves = {item.path[begin:]: decode_value(item.encoded) for begin, item in items}
    lists = {item.path[begin:at] for begin, item in items for at in item.positions if at >= begin}
    for path in lists:
        numbers = {int(leaf[len(path)]) for leaf in leaves if leaf[: len(path)] == path}
        leaves |= {(*path, number): {} for number in range(max(numbers)) if number not in numbers}
    return rebuild(leaves, dict.fromkeys(lists, _LIST))
