"""Bring the optimizers of a step to the form that the state has: parameters by number, or by name.

    state {"model": module, "optimizer": optimizer}      names of parameters: those of the modules in the state
      step by name, or flattened  ->  by number          `get_state_dict` and torchtitan, in steps and DCP directories
    state {"optimizer": get_optimizer_state_dict(...)}   names of parameters: those in the dict
      step by number              ->  by name, or flattened

This happens before the state is compared with the step: the index gets other names. Names decide where both sides have
them; a parameter is known by its identity. Where one side has numbers and the other is a dict, the order decides, as in
`Optimizer.load_state_dict`. What is ambiguous is a mismatch of that optimizer, never a guess.
"""

from __future__ import annotations

import re
from argparse import Namespace
from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from ckpt.errors import StateMismatchError
from ckpt.loading.index import CheckpointIndex, StoredTensor
from ckpt.loading.index_changes import IndexChanges
from ckpt.loading.match import Mismatch
from ckpt.loading.new_tensors import read_tensor
from ckpt.loading.optimizer_forms import Form, Items, Key, Pairs, StoredForm, form_of, names_in, stored_form, written
from ckpt.loading.optimizer_kinds import moved_parameter
from ckpt.loading.optimizer_plan import StoredOptimizer
from ckpt.loading.optimizer_tensors import of_other_shape, shard_of
from ckpt.loading.options import RestoreOptions, hints
from ckpt.paths import Path, display
from ckpt.planning.optimizer_classes import is_optimizer
from ckpt.planning.state_dict import FlatState, PerRank

_MAX_NESTING = 100
_SHOWN = 3
_WRAPPERS = re.compile(r"(?<![^.])(?:_orig_mod|_checkpoint_wrapped_module|_fsdp_wrapped_module)\.")


@dataclass
class NamedParameters:
    """The index with the optimizers in the form of the state; `refused` are those that cannot be brought to it."""

    index: CheckpointIndex
    mismatches: list[Mismatch] = field(default_factory=list)
    refused: set[Path] = field(default_factory=set)


def with_parameters_of(index: CheckpointIndex, state: Any, rank: int, options: RestoreOptions) -> NamedParameters:
    """Return the index with the optimizers of the step in the form that they have in `state`. Changes nothing."""
    found = NamedParameters(index)
    places = {of_rank: _places(index, of_rank) for of_rank in (None, rank)}
    if isinstance(state, FlatState) or not any(places.values()):
        return found
    walk = _StateWalk(options)
    walk.visit((), state, False)
    changes = IndexChanges(index)
    for target in walk.targets:
        of_rank = rank if target.per_rank and target.place(places[rank]) is not None else None
        at = target.place(places[of_rank])
        if at is None or (places[of_rank][at] == "numbered" and target.has_numbers()):
            continue
        try:
            items, absent = _items_for(target, StoredOptimizer.below(index, at, of_rank), of_rank, walk, index)
        except StateMismatchError as error:
            found.mismatches.append(Mismatch(target.path, f"parameter names: {display(target.path)} {error}"))
            found.refused.add(target.path)
            changes.refuse(at, of_rank)
        else:
            if items is not None:
                changes.move(at, of_rank, target.path, items)
            lacking = [(*target.path, "state", name) for name in absent]
            found.mismatches += [
                Mismatch(path, f"missing: {display(path)}") for path in lacking if options.selects(path)
            ]
    found.index = changes.applied()
    return found


def _places(index: CheckpointIndex, rank: int | None) -> dict[Path, Form | None]:
    """Return where the step has optimizers; the form is None where it is not known yet."""
    values: Mapping[Path, Any] = index.values
    names = (*index.tensors, *index.values)
    if rank is not None:
        values = {path: own[rank] for path, own in index.per_rank_values.items() if rank in own}
        names = (*index.per_rank_tensors, *values)
    found: dict[Path, Form | None] = {}
    for path in names:
        for at, key in enumerate(path):
            if key == "param_groups":
                value = values.get(path) if at == len(path) - 1 else None
                found[path[:at]] = form_of({"state": {}, "param_groups": value})
            elif isinstance(key, str) and key.startswith("param_groups."):
                found[path[:at]] = "flattened"
    return found


# -- the state ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Target:
    """An optimizer of the state, or the state dict of one; `per_rank` if it belongs to this rank alone."""

    path: Path
    node: Any
    per_rank: bool

    def place(self, places: Mapping[Path, Form | None]) -> Path | None:
        """Return where the step has it: at its path or, if it is one of several optimizers saved as one, above."""
        for at in range(len(self.path), -1, -1):
            place = self.path[:at]
            if place in places and (place == self.path or self._may_be_in(places[place])):
                return place
        return None

    def _may_be_in(self, form: Form | None) -> bool:
        return form != "numbered" and not isinstance(self.node, Mapping)

    @property
    def is_usual(self) -> bool:
        """Whether it makes its state dict by PyTorch's code."""
        return (
            isinstance(self.node, torch.optim.Optimizer)
            and type(self.node).state_dict is torch.optim.Optimizer.state_dict
        )

    def has_numbers(self) -> bool:
        """Return whether its parameters are numbered; also True if that needs a call of an unknown `state_dict`."""
        return not isinstance(self.node, Mapping) and (
            self.is_usual or not isinstance(self.node, torch.optim.Optimizer)
        )

    def state_dict(self) -> Any:
        """Return its state dict; None if it raises."""
        if isinstance(self.node, Mapping):
            return self.node
        try:
            return self.node.state_dict()
        except Exception:  # code of any program: it is called again when the state is flattened, which reports it
            return None


class _StateWalk:
    """The optimizers of a state, and the names of the parameters of its modules."""

    def __init__(self, options: RestoreOptions) -> None:
        self._options = options
        self._modules: list[torch.nn.Module] = []
        self._tensors: list[tuple[str, torch.Tensor]] = []
        self._by_identity: dict[int, dict[str, None]] = {}
        self._by_memory: dict[Any, dict[str, None]] = {}
        self._is_named = False
        self._members: list[dict[str, torch.Tensor]] | None = None
        self.targets: list[_Target] = []

    def visit(self, path: Path, node: Any, per_rank: bool) -> None:
        """Look at a part of the state. Modules are looked at although they are not to be restored: for their names."""
        if len(path) > _MAX_NESTING:
            return
        if isinstance(node, PerRank):
            self.visit(path, node.value, True)
        elif isinstance(node, torch.nn.Module):
            self._modules.append(node)
        elif is_optimizer(node) or (isinstance(node, Mapping) and form_of(node) is not None):
            if self._options.reaches(path):
                self.targets.append(_Target(path, node, per_rank))
        elif isinstance(node, Mapping | Namespace | list | tuple | deque):
            items = vars(node) if isinstance(node, Namespace) else node
            for key, item in items.items() if isinstance(items, Mapping) else enumerate(items):
                if isinstance(item, torch.Tensor):
                    self._tensors.append((str(key), item))
                else:
                    self.visit((*path, key), item, per_rank)

    def names_of(self, parameter: torch.Tensor) -> list[str]:
        """Return the names of a parameter in the modules of the state, and in dicts that have its memory."""
        if not self._is_named:
            self._is_named = True
            for module in self._modules:
                for name, member in _named_parameters(module):
                    self._by_identity.setdefault(id(member), {})[name] = None
            for name, tensor in self._tensors:
                self._by_memory.setdefault(_memory(tensor), {})[name] = None
        found = self._by_identity.get(id(parameter))
        if found is None and shard_of(parameter).numel():
            found = self._by_memory.get(_memory(parameter))
        return list(found or ())

    def members(self) -> list[dict[str, torch.Tensor]]:
        """Return the parameters of each module of the state, and the tensors in dicts, by name, in their order."""
        if self._members is None:
            self._members = [dict(_named_parameters(module)) for module in self._modules]
            self._members.append(dict(self._tensors))
        return self._members


def _named_parameters(module: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the parameters by all their names, without those of wrappers (as `get_state_dict` has them) and with."""
    parallel = (torch.nn.parallel.DistributedDataParallel, torch.nn.DataParallel)
    wrappers = [
        f"{name}." if name else ""
        for name, member in module.named_modules(remove_duplicate=False)
        if isinstance(member, parallel)
    ]
    for name, parameter in module.named_parameters(remove_duplicate=False):
        plain = name
        for prefix in reversed(wrappers):  # the innermost first
            if plain.startswith(f"{prefix}module."):
                plain = prefix + plain.removeprefix(f"{prefix}module.")
        yield _WRAPPERS.sub("", plain), parameter
        yield name, parameter


def _memory(tensor: torch.Tensor) -> Any:
    local = shard_of(tensor)
    return local.device, local.data_ptr(), tuple(local.shape), local.stride()


# -- one optimizer -----------------------------------------------------------------------------------------------------


def _items_for(
    target: _Target, below: StoredOptimizer, of_rank: int | None, walk: _StateWalk, index: CheckpointIndex
) -> tuple[Items | None, list[Key]]:
    """Return the items of the step for an optimizer of the state, in its form; None if they have it already.

    Also the names in the groups of a state dict that the step does not have. StateMismatchError, without the path.
    """
    stored = stored_form(below)
    state_dict: Any = None if target.is_usual else target.state_dict()
    form = "numbered" if target.is_usual else form_of(state_dict)
    if stored is None or form is None:
        return None, []
    names = names_in(state_dict) if form != "numbered" else ()
    absent: list[Key] = []
    if form == "named" and stored.form != "numbered" and isinstance(target.node, Mapping):
        absent = [name for group in names for name in group if name not in stored.parameters]
    if stored.form == form and not absent:  # else the groups of the step, which lack these, would replace those here
        return None, []
    if target.per_rank and of_rank is None:
        raise StateMismatchError(
            "is that of one rank in the state, and for all ranks by names of parameters in the checkpoint: restore "
            "into the optimizer itself instead of PerRank(optimizer)"
        )
    if form == "numbered" and isinstance(target.node, Mapping):
        raise StateMismatchError(
            "has parameters by number in the state, by name in the checkpoint: put the optimizer and its module into "
            "the state, not their state dicts"
        )
    if form == "numbered":
        pairs = _by_name(target.node, stored, walk)
    elif stored.form == "numbered":
        pairs = _by_order(names, stored, below.names(), form, walk)
    else:
        pairs = tuple(tuple((k if k in stored.parameters else None, k) for k in group) for group in names)
    return written(stored, pairs, state_dict, form == "flattened", _Comparison(index).same), absent


def _by_name(optimizer: Any, stored: StoredForm, walk: _StateWalk) -> Pairs:
    """Return the names in the step of the parameters of an optimizer, each with its number."""
    pairs: list[tuple[tuple[str, int], ...]] = []
    number, unknown = 0, 0
    missing: list[str] = []
    taken: set[str] = set()
    for group in optimizer.param_groups:
        names: list[str] = []
        for parameter in group["params"]:
            own = walk.names_of(parameter)
            found = [name for name in own if name in stored.parameters]
            if len(found) > 1 or taken.intersection(found):
                raise StateMismatchError(
                    f"has a parameter that may be {' or '.join(found)} in the checkpoint: the modules of the state "
                    "have that name more than once, or the checkpoint has a tied parameter twice; restore it with a "
                    "state that has only the module that it belongs to"
                )
            if found:
                taken.update(found)
                names += found
            elif own:
                missing.append(own[0])
            else:
                unknown += 1
        pairs.append(tuple((name, number + at) for at, name in enumerate(names)))
        number += len(names)
    if unknown:
        raise StateMismatchError(
            f"has {unknown} parameter(s) that are in no module of the state, and the checkpoint has parameters by "
            "name: put the module itself into the state, too (only=... leaves its weights alone)"
        )
    if missing:
        left = [str(name) for name in stored.parameters if name not in taken]
        hint = "".join(f"; {text}" for text in hints([(name,) for name in missing], [(name,) for name in left]))
        raise StateMismatchError(
            f"has {len(missing)} parameter(s) that the checkpoint does not have: {_shown(missing)}; left in the "
            f"checkpoint: {_shown(left) or 'none'}"
            + (hint or "; make it of the same parameters, or leave it out: restore(..., only=...)")
        )
    return tuple(pairs)


def _by_order(
    groups: tuple[tuple[Key, ...], ...], stored: StoredForm, names: list[Any], form: Form, walk: _StateWalk
) -> Pairs:
    """Return the numbers in the step and the names of the parameters, paired as `Optimizer.load_state_dict` does.

    `names` are those that the step has for the numbers.
    """
    sizes = list(map(len, groups)), list(map(len, stored.groups))
    if form == "flattened":  # which has no trace of an empty group
        sizes = sizes[0], [size for size in sizes[1] if size]
    if sizes[0] != sizes[1]:
        raise StateMismatchError(
            f"has parameter groups of {sizes[1]} numbered parameters in the checkpoint, of {sizes[0]} named ones in "
            "the state"
            + (f" {_NO_GROUPS}" if form == "flattened" else "")
            + "; make it of the same parameters, or leave it out: restore(..., only=...)"
        )
    moved = moved_parameter(names, [name for group in groups for name in group])
    if moved is not None:
        raise StateMismatchError(moved)
    members = walk.members()
    for group in groups if form == "flattened" else ():
        these = set(group)
        orders = [[name for name in own if name in these] for own in members if own.keys() >= these]
        if not orders:
            raise StateMismatchError(
                f"has numbered parameters in the checkpoint, and no module of the state has "
                f"{_shown(list(map(str, group)))}, to compare the order: put the module beside it {_NO_GROUPS}"
            )
        if list(group) not in orders:
            raise StateMismatchError(
                f"has numbered parameters in the checkpoint, and in the state, from {group[0]} on, another order than "
                f"the modules have, which may be that of several groups {_NO_GROUPS}"
            )
    numbers = iter([number for group in stored.groups for number in group])
    pairs = tuple(tuple((next(numbers), name) for name in group) for group in groups)
    for number, name in (pair for group in pairs for pair in group):
        _check_shape(number, name, stored, [own[str(name)] for own in members if name in own])
    return pairs


_NO_GROUPS = (
    "(flatten_optimizer_state_dict=True leaves no groups: parameters in a row with equal options count as one); put "
    "the optimizer itself into the state, or its state dict without that option"
)


def _check_shape(number: Key, name: Key, stored: StoredForm, parameters: list[torch.Tensor]) -> None:
    """StateMismatchError, without the path, if state has the shape of another parameter."""
    entry: dict[Path, StoredTensor] = {
        rest: tensor for rest, tensor in stored.parameters[number].state.tensors.items() if len(rest) == 1
    }
    shapes = [tuple(shape) for each in parameters for shape in (each.shape, shard_of(each).shape)]
    for rest in of_other_shape(entry, shapes) if shapes else ():
        raise StateMismatchError(
            f"has {display(rest)} {list(entry[rest].shape)} for parameter {number} in the checkpoint, which would be "
            f"that of {name} {list(shapes[0])} by the order; make it of the same parameters in the same order, or "
            "leave it out: restore(..., only=...)"
        )


def _shown(names: list[str]) -> str:
    return ", ".join(names[:_SHOWN]) + (f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else "")


class _Comparison:
    """Compares options that are tensors, such as a learning rate, which the flattened form has once per parameter."""

    def __init__(self, index: CheckpointIndex) -> None:
        self._index = index
        self._read: dict[int, torch.Tensor] = {}

    def same(self, one: StoredTensor, other: StoredTensor) -> bool:
        """Return whether two tensors of the step have the same elements."""
        if one is other:
            return True
        a, b = map(self._tensor, (one, other))
        return a.dtype == b.dtype and torch.equal(a, b)

    def _tensor(self, stored: StoredTensor) -> torch.Tensor:
        if id(stored) not in self._read:
            self._read[id(stored)] = read_tensor(self._index, "an option of an optimizer", stored, None, None)
        return self._read[id(stored)]
