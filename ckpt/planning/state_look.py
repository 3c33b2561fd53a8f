"""One look at a state: its structure and its tensors, level by level, without a name for each of them.

    containers of a level --> keys, types (the structure) and items --> tensors | objects | parts | the next level

Objects are asked for their state dicts before that, in the order in which `flatten` asks: see `_ask_in_order`. Two
looks with equal structures find the same names, in the same order. `parts` are left to `flatten`: values, arrays,
what belongs to a rank alone, containers of other kinds. A module whose state dict PyTorch makes by itself alone is not
asked for it, as that takes 4 microseconds for each of its modules: see `_look_at_module`. Runs in the trainer.
"""

from __future__ import annotations

from argparse import Namespace
from collections import OrderedDict, deque
from collections.abc import Iterable, Mapping, Sequence
from itertools import chain, compress, repeat
from operator import itemgetter
from types import MappingProxyType, NoneType
from typing import Any

import numpy as np
import torch

from ckpt.errors import StateError
from ckpt.paths import Path
from ckpt.planning.data_loaders import is_data_loader
from ckpt.planning.optimizer_classes import recorded_class
from ckpt.planning.state_dict import AskState, Owner, PerRank, RngState, holds_tensors, is_registered_value
from ckpt.planning.tensors import PLAIN_TENSORS

__all__ = ["StateLook"]

_MOST_LEVELS = 16
_ASKED = ("state_dict", "_save_to_state_dict", "get_extra_state", "__getattribute__")
_STANDARD = MappingProxyType({name: getattr(torch.nn.Module, name) for name in _ASKED})
_WHERE = torch.nn.Module.register_parameter.__code__.co_filename
_ARE_OF_PYTORCH = (
    all(  # else a program has replaced them before this was imported
        getattr(function, "__code__", None) is not None and function.__code__.co_filename == _WHERE
        for name, function in _STANDARD.items()
        if name != "__getattribute__"
    )
    and _STANDARD["__getattribute__"] is object.__getattribute__
)
_HOOKS = ("_state_dict_hooks", "_state_dict_pre_hooks")
_TABLES = ("_parameters", "_buffers", "_modules", "_non_persistent_buffers_set", *_HOOKS)
_tables_of = itemgetter(*_TABLES)
_MOST_NESTED = 200  # containers and objects
_LEAVES = PLAIN_TENSORS | {int, float, bool, str, bytes, NoneType, np.ndarray}
_NO_STATEFUL = (PerRank, RngState, torch.Tensor, np.ndarray, Mapping, list, deque, tuple, Namespace)


class StateLook:
    """What one look at `state` has found. `ask` returns the state dicts of objects.

    `structure` is None if the state cannot be compared with a later one: with tensors that are not plain. With `named`,
    `paths` are those of the `tensors`. `parts` are the other items; only their paths depend on the structure.
    """

    def __init__(self, state: Any, ask: AskState, *, named: bool) -> None:
        self.structure: list[Any] | None = []
        self.tensors: list[torch.Tensor] = []
        self.paths: list[Path] = []
        self.parts: list[Any] = []
        self.part_paths: list[Path] = []
        self.owners: list[Owner] = []
        self._ask = ask
        self._named = named
        self._modules: dict[int, tuple[Any, _Module | None]] = {}
        if not named:  # else `flatten` has asked
            self._ask_in_order(state)
        nodes: list[Any] = [state]
        paths: list[Path] = [()] if named else []
        for _ in range(_MOST_LEVELS):
            if not nodes or self.structure is None:
                break
            nodes, paths = self._level(nodes, paths)
        if nodes or not self.tensors:
            self.structure = None

    def _ask_in_order(self, node: Any, depth: int = 0) -> None:
        """Ask the objects in a node, also those in their state dicts, in the order in which `flatten` does.

        What they do may be a collective, and other ranks may have nothing to know: they call `flatten`. StateError if
        the node is nested too deep.
        """
        if depth > _MOST_NESTED:
            raise StateError("the state is nested too deep, or contains itself")
        kind = type(node)
        if kind in _LEAVES or issubclass(kind, torch.Tensor) or is_registered_value(kind):
            return
        items: Iterable[Any]
        if issubclass(kind, PerRank):
            items = (node.value,)
        elif issubclass(kind, Mapping):
            items = node.values()
        elif issubclass(kind, list | deque | tuple | Namespace) and not (
            _is_stateful(node) and not holds_tensors(node)
        ):
            items = vars(node).values() if issubclass(kind, Namespace) else node
        else:
            if not _is_stateful(node):
                return
            if is_data_loader(kind):
                self._ask((), node)
                return
            if not issubclass(kind, _NO_STATEFUL) and self._module(node) is not None:
                return  # PyTorch alone makes its state dict
            items = (self._ask((), node),)
        kinds = set(map(type, items))
        if kinds == {dict}:  # as for each parameter in the state of an optimizer
            kinds = set(map(type, chain.from_iterable(map(dict.values, items))))
        if not _LEAVES.issuperset(kinds):
            for item in items:
                self._ask_in_order(item, depth + 1)

    def _module(self, module: Any) -> _Module | None:
        """Return what a look at a module finds, without names. It is looked at once."""
        found = self._modules.get(id(module))
        if found is None:
            found = self._modules[id(module)] = module, _look_at_module(module, (), named=False)
        return found[1]

    def _level(self, nodes: list[Any], paths: list[Path]) -> tuple[list[Any], list[Path]]:
        """Look at the items of the containers before, and return the items of those among them."""
        assert self.structure is not None
        if PLAIN_TENSORS.issuperset(map(type, nodes)):  # of most dicts all items
            self.structure.append(len(nodes))
            self.tensors += nodes
            self.paths += paths
            return [], []
        kinds = list(map(type, nodes))
        if len(set(kinds)) == 1:
            return self._items(kinds[0], nodes, paths)
        # Which kind of tensor one is makes no difference.
        self.structure.append([torch.Tensor if kind in PLAIN_TENSORS else kind for kind in kinds])
        below: tuple[list[Any], list[Path]] = [], []
        groups: dict[type[Any], list[int]] = {}
        for number, kind in enumerate(kinds):
            groups.setdefault(torch.Tensor if kind in PLAIN_TENSORS else kind, []).append(number)
        for kind, numbers in groups.items():
            some, named = [nodes[n] for n in numbers], [paths[n] for n in numbers] if self._named else []
            if self.structure is None:
                break
            if kind is torch.Tensor:
                self.tensors += some
                self.paths += named
                continue
            items, their_paths = self._items(kind, some, named)
            below[0].extend(items)
            below[1].extend(their_paths)
        return below

    def _items(self, kind: type[Any], nodes: list[Any], paths: list[Path]) -> tuple[list[Any], list[Path]]:
        """Return the items of containers of one kind, and the state dicts of objects."""
        assert self.structure is not None
        self.structure.append(kind)
        if issubclass(kind, torch.Tensor):
            self.structure = None
        elif is_registered_value(kind):
            self._leave(nodes, paths)
        elif kind is dict or kind is OrderedDict:
            return self._items_of_dicts(nodes, paths)
        elif kind is list or kind is tuple:
            return self._items_of_sequences(nodes, paths)
        elif not issubclass(kind, _NO_STATEFUL) and all(map(_is_stateful, nodes)) and not is_data_loader(kind):
            return self._state_dicts(nodes, paths)
        else:
            self._leave(nodes, paths)
        return [], []

    def _leave(self, nodes: Iterable[Any], paths: Iterable[Path]) -> None:
        self.parts += nodes
        self.part_paths += paths

    def _items_of_dicts(self, nodes: list[Any], paths: list[Path]) -> tuple[list[Any], list[Path]]:
        assert self.structure is not None
        if not all(nodes):
            filled, empty = [bool(node) for node in nodes], [not node for node in nodes]
            self.structure.append(filled)
            self._leave(compress(nodes, empty), compress(paths, empty))
            nodes, paths = list(compress(nodes, filled)), list(compress(paths, filled))
        keys = list(map(tuple, nodes))
        if not {str, int}.issuperset(map(type, chain.from_iterable(keys))):  # True is equal to 1
            self.structure = None
            return [], []
        self.structure.append(keys)
        items = list(chain.from_iterable(node.values() for node in nodes))
        return items, [(*path, key) for path, own in zip(paths, keys, strict=False) for key in own]

    def _items_of_sequences(self, nodes: list[Any], paths: list[Path]) -> tuple[list[Any], list[Path]]:
        """Return the items of those that hold tensors; the others are values."""
        assert self.structure is not None
        walked = list(map(holds_tensors, nodes))
        values = [not is_walked for is_walked in walked]
        self._leave(compress(nodes, values), compress(paths, values))
        nodes, paths = list(compress(nodes, walked)), list(compress(paths, walked))
        self.structure += [walked, list(map(len, nodes))]
        numbered = [(*path, number) for path, node in zip(paths, nodes, strict=False) for number in range(len(node))]
        return list(chain.from_iterable(nodes)), numbered

    def _state_dicts(self, nodes: list[Any], paths: list[Path]) -> tuple[list[Any], list[Path]]:
        assert self.structure is not None
        below: tuple[list[Any], list[Path]] = [], []
        for stateful, path in zip(nodes, paths or repeat(()), strict=False):
            found = _look_at_module(stateful, path, named=True) if self._named else self._module(stateful)
            if found is not None:
                structure, tensors, names = found
                self.structure.append(structure)
                self.tensors += tensors
                self.paths += names
                before = None
            else:
                before = self._ask(path, stateful)
                self.structure.append(recorded_class(stateful, before))
                below[0].append(before)
                below[1].extend([path] if self._named else [])
            self.owners.insert(0, Owner(path, stateful, before, before))
        return below


def _is_stateful(node: Any) -> bool:
    return callable(getattr(node, "state_dict", None)) and callable(getattr(node, "load_state_dict", None))


_Module = tuple[list[Any], list[torch.Tensor], list[Path]]
"""The structure of a module, the tensors of its state dict, and their paths."""


def _look_at_module(module: Any, path: Path, *, named: bool) -> _Module | None:
    """Return the structure of a module, the tensors of its state dict and, if `named`, their paths.

    None if its state dict cannot be told without asking for it: if a class, an object or a hook changes what PyTorch
    does, or if there are tensors that are not plain, or none.
    """
    structure: list[Any] = []
    tensors: list[torch.Tensor] = []
    names: list[Path] = []
    modules, prefixes = [module], [""]
    for _ in range(4 * _MOST_LEVELS):
        if not modules:
            return (structure, tensors, names) if tensors else None
        kinds = list(map(type, modules))
        if not all(map(_is_standard, set(kinds))):
            return None
        attributes = list(map(vars, modules))
        if any(any(map(dict.__contains__, attributes, repeat(name))) for name in _ASKED[:2]):
            return None
        try:
            parameters, buffers, children, skipped, *hooks = zip(*map(_tables_of, attributes), strict=True)
        except KeyError:
            return None
        if any(map(any, hooks)) or {dict} != set(map(type, chain(parameters, buffers, children))):
            return None
        if any(skipped):
            buffers = tuple(
                {name: buffer for name, buffer in own.items() if name not in skip}
                for own, skip in zip(buffers, skipped, strict=True)
            )
        for tables in (parameters, buffers):
            keys, items, present = _items_of_tables(tables)
            if not PLAIN_TENSORS.issuperset(map(type, items)):
                return None
            structure += [keys, present]
            tensors += items
            if named:
                all_names = ((*path, prefix + key) for prefix, own in zip(prefixes, keys, strict=False) for key in own)
                names += all_names if present is None else compress(all_names, present)
        keys, modules, present = _items_of_tables(children)
        structure += [keys, present]
        if named:
            below = [f"{prefix}{key}." for prefix, own in zip(prefixes, keys, strict=False) for key in own]
            prefixes = below if present is None else list(compress(below, present))
    return None


def _is_standard(kind: type[Any]) -> bool:
    """Return whether the state dicts of modules of this class are as PyTorch makes them, of what is in `_TABLES`."""
    if (
        not issubclass(kind, torch.nn.Module)
        or is_registered_value(kind)
        or any(hasattr(kind, name) for name in _TABLES)
    ):
        return False
    return _ARE_OF_PYTORCH and all(getattr(kind, name) is function for name, function in _STANDARD.items())


def _items_of_tables(tables: Sequence[dict[str, Any]]) -> tuple[list[tuple[str, ...]], list[Any], list[bool] | None]:
    """Return the keys and all items of dicts, without None; and which items are not None, if one is.

    If all are empty, as most are, there are no keys.
    """
    if not any(tables):
        return [], [], None
    keys, items = list(map(tuple, tables)), list(chain.from_iterable(map(dict.values, tables)))
    if NoneType not in set(map(type, items)):
        return keys, items, None
    return keys, [item for item in items if item is not None], [item is not None for item in items]
