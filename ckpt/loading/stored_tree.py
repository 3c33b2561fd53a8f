"""The nesting that the names of a step describe. Imports torch."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import chain
from typing import Any, Literal, TypeVar

import torch

from ckpt.errors import StateMismatchError
from ckpt.loading.index import CheckpointIndex, StoredTensor
from ckpt.paths import Path, display
from ckpt.storage.dtypes import torch_dtype_name
from ckpt.values.codec import unregistered_in
from ckpt.values.containers import Container, rebuild

Form = Literal["tensor", "value", "mapping", "list", "container"]
"""The form of an item of a state. A "container" is a tuple or a namespace with members that are no plain values."""

_MAPPINGS = frozenset({"OrderedDict", "Counter", "optimizer"})
_LISTS = frozenset({"list", "deque"})
_T = TypeVar("_T")


class StoredTree:
    """The names of a step as a tree: those of all ranks, or with a `rank` those that belong to it alone."""

    def __init__(self, index: CheckpointIndex, rank: int | None) -> None:
        self._index = index
        self._rank = rank
        self._values: Mapping[Path, Any] = index.values
        self._containers: Mapping[Path, Container] = index.containers
        tensors: Mapping[Path, Any] = index.tensors
        if rank is not None:
            tensors = _of_rank(index.per_rank_tensors, rank)
            self._values = _of_rank(index.per_rank_values, rank)
            self._containers = _of_rank(index.per_rank_containers, rank)
        self._tensors = tensors
        aliases = (path for path in index.aliases if index.tensor(path, rank) is not None)
        self._children: dict[Path, dict[Any, None]] = {}
        for path in chain(tensors, aliases, self._values):
            while path:
                above = path[:-1]
                parent = self._children.get(above)
                if parent is None:
                    parent = self._children[above] = {}
                elif path[-1] in parent:
                    break
                parent[path[-1]] = None
                if len(parent) > 1:
                    break  # what is above is there
                path = above

    def keys(self, path: Path) -> dict[Any, None]:
        """Return the keys of the items below a path; none for a leaf."""
        return {} if self._is_leaf(path) else self._children.get(path, {})

    def tensor(self, path: Path) -> StoredTensor | None:
        """Return the plain tensor at a path."""
        return self._index.tensor(path, self._rank)

    def has_tensors(self, path: Path, keys: Iterable[Any]) -> bool:
        """Return whether there is a plain tensor at each of these keys below a path. False if one is an alias."""
        return all(map(self._tensors.__contains__, map(path.__add__, zip(keys))))

    def is_value(self, path: Path) -> bool:
        """Return whether one value is at a path."""
        return path in self._values

    def form(self, path: Path) -> Form | None:
        """Return the form of the item at a path; None if there is nothing."""
        if path in self._values:
            value = self._values[path]
            if isinstance(value, dict) and not value:
                return "mapping"
            return "list" if isinstance(value, list | deque) else "value"
        if self._is_leaf(path):
            return "tensor"
        if path not in self._children:
            return None
        container = self._containers.get(path)
        if container is None or container.kind in _MAPPINGS:
            return "mapping"
        return "list" if container.kind in _LISTS else "container"

    def items(self, path: Path) -> list[Any] | None:
        """Return the list at a path if it is one value, or its numbers as placeholders; None if they are invalid."""
        if path in self._values:
            return list(self._values[path])
        numbers = sorted(number for number in self.keys(path) if type(number) is int)
        return None if numbers != list(range(len(self.keys(path)))) else numbers

    def described(self, path: Path) -> str:
        """Return words for what is at a path."""
        form = self.form(path)
        tensor = self.tensor(path)
        if form == "tensor":
            if tensor is None:
                return f"a {self._containers[path].type}"
            return f"a tensor, {tensor.dtype}{list(tensor.shape)}"
        if path in self._values:
            return described(self._values[path])
        if form == "mapping":
            return f"a dict of {len(self.keys(path))} item(s)"
        container = self._containers.get(path)
        return f"a {'list' if container is None else container.kind} of {len(self.keys(path))} item(s)"

    def make(self, path: Path, new_tensor: Callable[[StoredTensor], Any]) -> Any:
        """Return the item at a path, its tensors made by `new_tensor`.

        StateMismatchError if it holds values of types that this program has not registered, or cannot be made.
        """
        at = len(path)
        leaves: dict[Path, Any] = {}
        for name in self._leaves(path):
            tensor = self._index.tensor(name, self._rank)
            leaves[name[at:]] = self._values[name] if tensor is None else new_tensor(tensor)
        if any(next(unregistered_in(leaf), None) is not None for leaf in leaves.values()):
            raise StateMismatchError(f"{display(path)} holds values of a type that this program has not registered")
        containers = {name[at:]: container for name, container in self._containers.items() if name[:at] == path}
        try:
            return rebuild(leaves, containers)
        except ValueError as error:
            raise StateMismatchError(f"{display(path)} cannot be made: {error}") from error

    def _leaves(self, path: Path) -> Iterator[Path]:
        if path in self._values or self._index.tensor(path, self._rank) is not None:
            yield path
            return
        for key in self._children.get(path, {}):
            yield from self._leaves((*path, key))

    def _is_leaf(self, path: Path) -> bool:
        """Return whether a tensor or a value is at a path. A tensor subclass is one, whatever its parts."""
        if path in self._values or self._index.tensor(path, self._rank) is not None:
            return True
        container = self._containers.get(path)
        return container is not None and container.kind == "tensor"


def described(item: Any) -> str:
    """Return words for an item of a state, as `StoredTree.described` does for one of a step."""
    if isinstance(item, torch.Tensor):
        return f"a tensor, {torch_dtype_name(item.dtype)}{list(item.shape)}"
    if isinstance(item, Mapping):
        return f"a dict of {len(item)} item(s)" if item else "an empty dict"
    return f"the value {item!r:.60}"


def _of_rank(items: Mapping[Path, Mapping[int, _T]], rank: int) -> dict[Path, _T]:
    return {path: own[rank] for path, own in items.items() if rank in own}
