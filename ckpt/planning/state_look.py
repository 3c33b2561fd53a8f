"""One look at a state: its structure and its tensors, in one pass in C, without a name for each of them.

    node --> tensor | part | container: keys, and its items | module: tables | object: its state dict, asked for now

Two looks with equal structures find the same names, in the same order. Objects are asked in the order in which
`flatten` asks them. `parts` are left to `flatten`: values, arrays, what belongs to a rank alone, containers of other
kinds. A module whose state dict PyTorch makes by itself alone is not asked for it: of thousands of modules that would
take most of the time of a save. Runs in the trainer.
"""

from __future__ import annotations

import sys
from argparse import Namespace
from collections import OrderedDict, deque
from collections.abc import Iterable, Iterator, Mapping
from enum import IntEnum
from types import MappingProxyType, NoneType
from typing import Any

import numpy as np
import torch

from ckpt.errors import StateError
from ckpt.native import can_look, look
from ckpt.paths import Path
from ckpt.planning.data_loaders import is_data_loader
from ckpt.planning.optimizer_classes import recorded_class
from ckpt.planning.state_dict import AskState, Owner, PerRank, RngState, holds_tensors, is_registered_value
from ckpt.planning.tensors import PLAIN_TENSORS

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
_TABLES = (
    "_parameters",
    "_buffers",
    "_modules",
    "_non_persistent_buffers_set",
    "_state_dict_hooks",
    "_state_dict_pre_hooks",
)
_NAMES = (*_TABLES, *_ASKED[:2])  # as NAMES in look.c
_MOST_NESTED = 200  # containers and objects
_LEAVES: frozenset[type[Any]] = PLAIN_TENSORS | {int, float, bool, str, bytes, NoneType, np.ndarray}
_NO_STATEFUL = (PerRank, RngState, torch.Tensor, np.ndarray, Mapping, list, deque, tuple, Namespace)


class _Kind(IntEnum):
    """The kind of a node of a state, as in look.c. Those up to `ABSENT` are also in structures."""

    TENSOR = 0
    PART = 1
    DICT = 2
    ORDERED = 3
    LIST = 4
    TUPLE = 5
    MODULE = 6
    ASKED = 7
    ABSENT = 8
    DTENSOR = 9
    UNKNOWN = 10
    EACH = 11  # the type does not tell


_MARKS = tuple(range(_Kind.UNKNOWN))
_CONTAINERS: Mapping[type[Any], _Kind] = MappingProxyType({dict: _Kind.DICT, OrderedDict: _Kind.ORDERED})
_KINDS: Mapping[type[Any], int] = MappingProxyType(
    {**dict.fromkeys(_LEAVES, _Kind.PART), **dict.fromkeys(PLAIN_TENSORS, _Kind.TENSOR), **_CONTAINERS}
)


class StateLook:
    """The result of one look at `state`. `ask` returns the state dicts of objects, and what it raises is raised.

    With the structure of another state, `is_known` says whether this one has the same; otherwise, whether it can be
    compared with later ones, and `structure` is to be given to those looks. It cannot with tensors that are neither
    plain nor DTensors. Of a DTensor, `dtensors` has the object, `tensors` the local tensor, and `specs` its attribute
    with mesh and placements, unless the DTensor before has the same one. `parts` are the other items; only their paths
    depend on the structure.
    """

    def __init__(self, state: Any, ask: AskState, structure: list[Any] | None = None) -> None:
        self.structure: list[Any] = [] if structure is None else structure
        self.tensors: list[torch.Tensor] = []
        self.dtensors: list[Any] = []
        self.specs: list[Any] = []
        self.parts: list[Any] = []
        self.stateful: list[Any] = []
        self._ask_for = ask
        self._before: dict[int, Any] = {}  # state dicts of `stateful`, by number
        self._kinds = dict(_KINDS)
        self._kinds.update(dict.fromkeys(filter(is_registered_value, _CONTAINERS), _Kind.PART))
        dtensor = getattr(sys.modules.get("torch.distributed.tensor"), "DTensor", None)
        if dtensor is not None:  # else there are none
            self._kinds[dtensor] = _Kind.DTENSOR
        self._hook_of_fsdp = _hook_of_fsdp()
        self.is_known = False
        if can_look():
            self.is_known = not look(state, self._arguments(0 if structure else -1)) and bool(self.tensors)

    def _arguments(self, at: int) -> dict[str, Any]:
        """Return those of `look`, which compares the structure from `at` on, or makes it if that is -1."""
        functions = {"kinds": self._kinds, "classify": self._kind_of, "ask": self._ask, "call_hook": self._call_hook}
        objects = {"marks": _MARKS, "names": _NAMES, "none": None, "dict": dict, "text": str, "number": int}
        attributes = {"local": "_local_tensor", "spec": "_spec"}
        found = {"tensors": self.tensors, "dtensors": self.dtensors, "specs": self.specs}
        found |= {"parts": self.parts, "read": self.stateful}
        structure = {"structure": self.structure, "at": at, "length": len(self.structure) if at >= 0 else -1}
        return {**functions, **objects, **attributes, **found, **structure}

    def owners(self, paths: list[Path]) -> list[Owner]:
        """Return the objects, innermost first, given their paths."""
        numbered = enumerate(zip(self.stateful, paths, strict=True))
        owners = [Owner(path, each, self._before.get(n), self._before.get(n)) for n, (each, path) in numbered]
        return owners[::-1]

    def _kind_of(self, node: Any) -> int:
        """Return the kind of a node, whose type does not tell it, or is seen for the first time."""
        kind = type(node)
        if issubclass(kind, torch.Tensor):
            return _Kind.UNKNOWN
        if is_registered_value(kind):
            return _Kind.PART
        if kind is list or kind is tuple:
            walked = _Kind.LIST if kind is list else _Kind.TUPLE
            return walked if holds_tensors(node) else _Kind.PART
        if _is_standard(kind):
            self._kinds[kind] = _Kind.MODULE
            return _Kind.MODULE
        if not issubclass(kind, _NO_STATEFUL) and _is_stateful(node) and not is_data_loader(kind):
            return _Kind.ASKED
        self._ask_in_order(node)
        return _Kind.PART

    def _ask(self, stateful: Any) -> tuple[Any, Any]:
        """Return the record of an object for a save, and its state dict."""
        before = self._before[len(self.stateful)] = self._ask_for((), stateful)
        self.stateful.append(stateful)
        return recorded_class(stateful, before), before

    def _call_hook(self, hook: Any, module: torch.nn.Module) -> bool | None:
        """Call the hook before the state dict of a module, if it is that of FSDP2; else return None."""
        if getattr(hook, "__code__", None) is not self._hook_of_fsdp:
            return None
        try:
            hook(module, "", False)
        except Exception:
            return None  # `state_dict` raises it again
        return True

    def _ask_in_order(self, node: Any, depth: int = 0) -> None:
        """Ask the objects in a part, also those in their state dicts, in the order in which `flatten` does.

        What they do may be a collective, and other ranks may have nothing to know: they call `flatten`. StateError if
        the node is nested too deep.
        """
        if depth > _MOST_NESTED:
            raise StateError("the state is nested too deep, or contains itself")
        kind = type(node)
        if kind in _LEAVES or issubclass(kind, torch.Tensor) or is_registered_value(kind):
            return
        items: Iterable[Any] = ()
        if issubclass(kind, PerRank):
            items = (node.value,)
        elif issubclass(kind, Mapping):
            items = node.values()
        elif issubclass(kind, list | deque | tuple | Namespace) and not (
            _is_stateful(node) and not holds_tensors(node)
        ):
            items = vars(node).values() if issubclass(kind, Namespace) else node
        elif _is_stateful(node):
            before = self._ask_for((), node)
            items = () if is_data_loader(kind) else (before,)
        for item in items:
            self._ask_in_order(item, depth + 1)


class Names:
    """The paths of all that a look has found with a structure, in its order."""

    def __init__(self, structure: list[Any]) -> None:
        self.tensors: list[Path] = []
        self.parts: list[Path] = []
        self.stateful: list[Path] = []
        self._noted: Iterator[Any] = iter(structure)
        self._walk(())

    def _walk(self, path: Path) -> None:
        match next(self._noted):
            case _Kind.TENSOR:
                self.tensors.append(path)
            case _Kind.DTENSOR:
                next(self._noted)  # which spec
                self.tensors.append(path)
            case _Kind.PART:
                self.parts.append(path)
            case _Kind.DICT | _Kind.ORDERED:
                for key in [next(self._noted) for _ in range(next(self._noted))]:
                    self._walk((*path, key))
            case _Kind.LIST | _Kind.TUPLE:
                for number in range(next(self._noted)):
                    self._walk((*path, number))
            case _Kind.MODULE:
                self.stateful.append(path)
                self._walk_module(path, "")
            case _Kind.ASKED:
                self.stateful.append(path)
                next(self._noted)  # what is recorded of it
                self._walk(path)

    def _walk_module(self, path: Path, prefix: str) -> None:
        for _ in range(2):  # parameters and buffers
            self.tensors += ((*path, prefix + key) for key in self._present())
        for key in list(self._present()):
            self._walk_module(path, f"{prefix}{key}.")

    def _present(self) -> Iterator[str]:
        """Yield the keys of a table of a module whose items are in its state dict."""
        for _ in range(next(self._noted)):
            key, kind = next(self._noted), next(self._noted)
            if kind == _Kind.DTENSOR:
                next(self._noted)  # which spec
            if kind != _Kind.ABSENT:
                yield key


def _is_stateful(node: Any) -> bool:
    return callable(getattr(node, "state_dict", None)) and callable(getattr(node, "load_state_dict", None))


def _hook_of_fsdp() -> object:
    """Return the code of the hook that FSDP2 registers on modules with parameters; of no hook if there is none.

    It shards the parameters of the module again, if they are not, and has no other effect.
    """
    fsdp = sys.modules.get("torch.distributed.fsdp._fully_shard._fsdp_param_group")
    register = getattr(getattr(fsdp, "FSDPParamGroup", None), "_register_state_dict_hooks", None)
    inner = getattr(getattr(register, "__code__", None), "co_consts", ())
    return next((code for code in inner if getattr(code, "co_name", None) == "to_sharded_hook"), object())


def _is_standard(kind: type[Any]) -> bool:
    """Return whether the state dicts of modules of this class are as PyTorch makes them, of what is in `_TABLES`."""
    if not issubclass(kind, torch.nn.Module) or any(hasattr(kind, name) for name in _TABLES):
        return False
    return _ARE_OF_PYTORCH and all(getattr(kind, name) is function for name, function in _STANDARD.items())
