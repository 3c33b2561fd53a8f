"""Give the plain containers of a state the structure that a step has.

A dict of metrics that was empty when the program started, a list of tensors that has grown: a restore makes the items
that the step has in addition, and takes out those that it lacks. What must have the same names is compared instead:
modules, optimizers, and the other objects at their top level; dicts and lists that hold objects or parameters; dicts
that look like the state dict of a module; and the topmost level of the state.

Nothing is changed in the state before the trial of the restore: containers that become different are walked as copies,
whose items are put into the user's containers later (`ContainerUpdate`).
"""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from ckpt.errors import StateError, StateMismatchError
from ckpt.loading.index import CheckpointIndex, StoredTensor
from ckpt.loading.options import RestoreOptions
from ckpt.loading.stored_tree import Form, StoredTree
from ckpt.paths import Path, display
from ckpt.planning.state_dict import PerRank, holds_tensors
from ckpt.planning.tensors import tensor_over
from ckpt.storage.dtypes import torch_dtype, torch_dtype_name


@dataclass(slots=True)
class ContainerUpdate:
    """A container of the user, and the copy whose items it gets."""

    path: Path
    container: Any
    after: Any
    before: Any = field(init=False)

    def __post_init__(self) -> None:
        self.before = copy.copy(self.container)

    def apply(self) -> None:
        """Put the new items into the container. StateError if it does not accept them."""
        try:
            _refill(self.container, self.after)
        except Exception as error:
            raise StateError(f"{display(self.path)}: the container does not accept its new items: {error!r}") from error

    def undo(self) -> None:
        """Put the earlier items back. StateError if the container does not accept them."""
        try:
            _refill(self.container, self.before)
        except Exception as error:
            raise StateError(f"{display(self.path)}: the container does not accept its old items: {error!r}") from error


def _refill(container: Any, items: Any) -> None:
    items = copy.copy(items)
    container.clear()
    container.update(items) if isinstance(container, dict) else container.extend(items)


class Structure:
    """The containers of one state that become different in a restore, collected while it is flattened.

    `added` and `removed` are the paths of items that the state gets, and loses. `new` are the paths of all items that
    were made, also in the state dicts of objects.
    """

    def __init__(self, index: CheckpointIndex, rank: int, options: RestoreOptions) -> None:
        self._index = index
        self._rank = rank
        self._options = options
        self._trees: dict[bool, StoredTree] = {}
        self.changes: list[ContainerUpdate] = []
        self.added: list[Path] = []
        self.removed: list[Path] = []
        self.new: list[Path] = []

    def tree(self, per_rank: bool) -> StoredTree | None:
        """Return the items for all ranks, or for this one alone; None if the step has no such rank."""
        if per_rank and self._rank >= self._index.world_size:
            return None
        if per_rank not in self._trees:
            self._trees[per_rank] = StoredTree(self._index, self._rank if per_rank else None)
        return self._trees[per_rank]

    def adapt(self, path: Path, node: Any, per_rank: bool) -> Any:
        """Return the container to be walked in place of one of the user: the same, or a copy with other items."""
        tree = self._tree_for(node, per_rank)
        after = None if tree is None else self._adapted(path, node, tree, is_top=not path)
        if after is None:
            return node
        self.changes.append(ContainerUpdate(path, node, after))
        return after

    def adapt_object(self, path: Path, state_dict: Any, per_rank: bool) -> Any:
        """Return the state dict that an object of the user's is to load, with containers like those of the step.

        The object decides about one that is empty, here or in the step.
        """
        tree = self._tree_for(state_dict, per_rank)
        if tree is None:
            return state_dict
        if isinstance(state_dict, dict) and tree.form(path) == "mapping" and not (state_dict and tree.keys(path)):
            made = self.make(path, tree, ()) if state_dict or tree.keys(path) else state_dict
            return state_dict if made is NOTHING else made
        return self._adapted_deeply(path, state_dict, tree, is_top=True)

    def _tree_for(self, node: Any, per_rank: bool) -> StoredTree | None:
        is_container = isinstance(node, dict | list | deque)
        return self.tree(per_rank) if is_container and self._options.structure == "step" else None

    def _adapted_deeply(self, path: Path, node: Any, tree: StoredTree, is_top: bool = False) -> Any:
        after = self._adapted(path, node, tree, is_top)
        result = node if after is None else after
        items = list(result.items() if isinstance(result, Mapping) else enumerate(result))
        for key, item in items:
            if isinstance(item, dict | list | deque):
                inner = self._adapted_deeply((*path, key), item, tree)
                if inner is not item:
                    result = copy.copy(node) if result is node else result
                    result[key] = inner
        return result

    def _adapted(self, path: Path, node: Any, tree: StoredTree, is_top: bool) -> Any:
        """Return a copy of a container with the items that it is to have; None if it has them."""
        if isinstance(node, dict):
            return self._mapping(path, node, tree, is_top) if tree.form(path) == "mapping" else None
        return self._list(path, node, tree, is_top) if tree.form(path) == "list" else None

    def _mapping(self, path: Path, node: dict[Any, Any], tree: StoredTree, is_top: bool) -> Any:
        keys = tree.keys(path)
        if node.keys() == keys.keys() and _are_tensors(node.values()) and tree.has_tensors(path, keys):
            return None  # most dicts of many items: each is matched by its name
        is_free = not is_top and (not node or (type(node) is dict and not _is_by_name(node, keys)))
        items: dict[Any, Any] = {}
        for key, item in node.items():
            if key in keys:
                items[key] = self._item((*path, key), item, tree, is_free, node.values())
            elif not (is_free and self._may_remove((*path, key), item)):
                items[key] = item
        if is_free:
            for key in keys:
                if key not in node and self._options.selects((*path, key)):
                    made = self._make((*path, key), tree, node.values())
                    if made is not NOTHING:
                        items[key] = made
        if items.keys() == node.keys() and all(items[key] is item for key, item in node.items()):
            return None
        after = copy.copy(node)
        _refill(after, items)
        return after

    def _list(self, path: Path, node: list[Any] | deque[Any], tree: StoredTree, is_top: bool) -> Any:
        stored = tree.items(path)
        if stored is None or (isinstance(node, deque) and node.maxlen is not None and len(stored) > node.maxlen):
            return None
        if not holds_tensors(node) and not tree.keys(path):
            return None  # one value, which is replaced as a whole
        is_free = not is_top and type(node) in (list, deque) and None not in map(form, node)
        items = []
        for number, item in enumerate(node):
            at = (*path, number)
            if number < len(stored):
                items.append(self._item(at, item, tree, is_free, node, in_list=True) if tree.keys(path) else item)
            elif not (is_free and self._may_remove(at, item)):
                items.append(item)
        if is_free and not tree.keys(path) and all(map(is_plain, node)):
            items = stored
        elif is_free:
            made = [self._make((*path, number), tree, node) for number in range(len(items), len(stored))]
            items += [] if any(item is NOTHING for item in made) else made
        if len(items) == len(node) and all(map(lambda new, old: new is old, items, node)):
            return None
        after = copy.copy(node)
        _refill(after, items)
        return after

    def _item(self, path: Path, item: Any, tree: StoredTree, is_free: bool, beside: Any, in_list: bool = False) -> Any:
        """Return the item for a path that both the state and the step have: that of the state, or a new one."""
        if not in_list and isinstance(item, torch.Tensor) and tree.tensor(path) is not None:
            return item  # most items: whatever its shape and dtype, it is matched by its name
        own, stored = form(item), tree.form(path)
        if own is None or stored is None or not self._options.selects(path):
            return item
        if own == stored:
            is_other = in_list and is_free and own == "tensor" and not _fits(item, tree.tensor(path))
        else:  # a value is replaced by another one in its container, whatever their types
            is_other = not (tree.is_value(path) and is_one_value(item))
        is_placeholder = item is None or (own in ("mapping", "list") and not item)
        if not is_other or not (is_placeholder or (is_free and is_plain(item))):
            return item
        made = self._make(path, tree, [item, *beside])
        return item if made is NOTHING else made

    def _may_remove(self, path: Path, item: Any) -> bool:
        """Return whether the step decides that an item is not there any more; note that it is removed."""
        if not (self._options.strict and self._options.selects(path) and is_plain(item)):
            return False
        self.removed.append(path)
        return True

    def _make(self, path: Path, tree: StoredTree, beside: Any) -> Any:
        made = self.make(path, tree, beside)
        self.added += [] if made is NOTHING else [path]
        return made

    def make(self, path: Path, tree: StoredTree, beside: Any) -> Any:
        """Return a new item like that of the step, with its tensors on the device of the first tensor `beside` it.

        `NOTHING` if it cannot be made: then it is reported as one that does not fit.
        """
        like = next((item for item in beside if isinstance(item, torch.Tensor | np.ndarray)), None)

        def new_tensor(stored: StoredTensor) -> Any:
            device = like.device if isinstance(like, torch.Tensor) else None
            tensor = torch.empty(stored.shape, dtype=torch_dtype(stored.dtype), device=device)
            return tensor.numpy() if isinstance(like, np.ndarray) and _is_numpy(tensor) else tensor

        try:
            made = tree.make(path, new_tensor)
        except StateMismatchError:
            return NOTHING
        self.new.append(path)
        return made


NOTHING = object()
"""In place of an item that cannot be made."""


def form(item: Any) -> Form | None:
    """Return the form of an item of a state; None if it is an object or one of a rank, or a parameter."""
    if isinstance(item, torch.Tensor | np.ndarray):
        return None if _is_parameter(item) else "tensor"
    if isinstance(item, PerRank) or hasattr(item, "state_dict"):
        return None
    if isinstance(item, Mapping):
        return "mapping"
    if isinstance(item, list | deque):
        return "list"
    return "container" if holds_tensors(item) else "value"


def is_one_value(item: Any) -> bool:
    """Return whether an item is one value of a state, which is replaced by any other value in its container."""
    own = form(item)
    return own == "value" or (own == "mapping" and not item) or (own == "list" and not holds_tensors(item))


def is_plain(item: Any) -> bool:
    """Return whether an item is a value, a plain tensor, or a container of such."""
    own = form(item)
    if own == "tensor":
        return type(item) in (torch.Tensor, np.ndarray)
    if own == "mapping":
        return all(map(is_plain, item.values()))
    if own == "list" or isinstance(item, tuple):
        return all(map(is_plain, item))
    return own == "value"


def _is_parameter(item: Any) -> bool:
    if type(item) is torch.Tensor:
        return item.requires_grad
    return isinstance(item, torch.nn.Parameter) or (isinstance(item, torch.Tensor) and item.requires_grad)


def _are_tensors(items: Collection[Any]) -> bool:
    return all(issubclass(kind, torch.Tensor) for kind in set(map(type, items)))


def _is_by_name(node: Mapping[Any, Any], keys: Mapping[Any, Any]) -> bool:
    """Return whether the names in a dict matter: of objects and parameters, or of members such as ``layer.weight``."""
    return None in map(form, node.values()) or any(type(key) is str and "." in key for key in (*node, *keys))


def _fits(item: Any, stored: StoredTensor | None) -> bool:
    tensor = tensor_over(item) if isinstance(item, np.ndarray) else item
    if stored is None or tensor is None:
        return True
    return (torch_dtype_name(tensor.dtype), tuple(tensor.shape)) == (stored.dtype, stored.shape)


def _is_numpy(tensor: torch.Tensor) -> bool:
    try:
        tensor.numpy()
    except TypeError:
        return False
    return True
