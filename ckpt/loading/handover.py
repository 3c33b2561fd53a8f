"""State dicts for objects that load by code of their own: what the step has, in whichever shape and form.

An observer resizes its buffers, a bank of samples grows, extra state is a tensor now and a dict another time. Such an
object is not compared with the step: it is given what the step has, and decides, in the trial of the restore
(`ckpt.loading.state_update`). If it refuses, the restore fails; or, where the caller wants what fits, the object gets
its own content at the names that differ.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass, field
from typing import Any

import torch

from ckpt.errors import StateError, StateMismatchError
from ckpt.loading.options import RestoreOptions
from ckpt.loading.own_loading import own_names
from ckpt.loading.stored_tree import StoredTree, described
from ckpt.loading.structure import NOTHING, Structure, form, is_one_value, is_plain
from ckpt.paths import Path, display
from ckpt.planning.state_dict import Owner, RngState
from ckpt.storage.dtypes import torch_dtype_name


@dataclass(slots=True)
class Handover:
    """The items that one object gets at names that differ from its own.

    `differences` are words for each; the `own` tensors of a module at names that it has, too, are kept in case that it
    refuses. `refused` are the paths of what it has refused.
    """

    path: Path
    options: RestoreOptions
    differences: dict[Path, str]
    own: dict[str, torch.Tensor] = field(default_factory=dict)
    refused: list[Path] = field(default_factory=list)
    _common: list[tuple[torch.Tensor, torch.Tensor]] = field(default_factory=list)

    def keep(self, owner: Owner) -> None:
        """Keep copies of the tensors that the object may change or replace when it is tried."""
        if self.own:
            owner.before = copy.copy(owner.before)
            owner.before.update({key: tensor.clone() for key, tensor in self.own.items()})

    def take_back(self, owner: Owner, error: StateError) -> None:
        """Give an object that has refused what it has itself. StateMismatchError if the caller wants all or nothing."""
        if self.options.strict and not (self.options.resize and self._may_resize(owner)):
            listed = "".join(f"\n  {text}" for text in self.differences.values())
            raise StateMismatchError(f"{error}\nwhat the step has in another form:{listed}") from error.__cause__
        self.refused = list(self.differences)
        owner.load(owner.before)
        if not isinstance(owner.stateful, torch.nn.Module):
            owner.state_dict = owner.before
            return
        present = owner.stateful.state_dict()
        for key in self.own:
            if self.options.resize and self._has_common(present[key], owner.state_dict[key]):
                self._common.append((present[key], owner.state_dict[key]))
            owner.state_dict[key] = present[key]

    def fill_common(self) -> None:
        """With `resize`, fill tensors that the object would not resize with what they have in common with the step."""
        for target, source in self._common:
            common = tuple(slice(min(sizes)) for sizes in zip(target.shape, source.shape, strict=True))
            with torch.no_grad():
                target[common].copy_(source[common])

    def _may_resize(self, owner: Owner) -> bool:
        return self.own.keys() == {path[-1] for path in self.differences} and all(
            self._has_common(tensor, owner.state_dict[key]) for key, tensor in self.own.items()
        )

    def _has_common(self, tensor: torch.Tensor, other: Any) -> bool:
        """Return whether two tensors have elements in common, for `resize`."""
        return (
            isinstance(other, torch.Tensor)
            and tensor.dim() == other.dim()
            and all(min(sizes) > 0 for sizes in zip(tensor.shape, other.shape, strict=True))
        )


class Handovers:
    """Those of one state, by the path of the object; collected while the state is flattened."""

    def __init__(self, structure: Structure, options: RestoreOptions) -> None:
        self._structure = structure
        self._options = options
        self.by_path: dict[Path, Handover] = {}

    def expand(self, path: Path, owner: Any, state_dict: Any, per_rank: bool) -> Any:
        """Return the state dict that an object is to load: what the step has where the object decides about it."""
        tree = self._structure.tree(per_rank)
        if tree is None or isinstance(owner, torch.optim.Optimizer | RngState) or not isinstance(state_dict, dict):
            return state_dict
        if isinstance(owner, torch.nn.Module):
            return self._module(path, owner, state_dict, tree)
        adapted = self._structure.adapt_object(path, state_dict, per_rank)
        if adapted is not state_dict:
            stored, own = tree.described(path), described(state_dict)
            text = f"form: {display(path)} is {stored} in the checkpoint, {own} in the state"
            if stored == own:
                text = f"form: containers in {display(path)} have other items in the checkpoint"
            self.by_path[path] = Handover(path, self._options, {path: text})
        return adapted

    def _module(self, path: Path, module: torch.nn.Module, state_dict: dict[str, Any], tree: StoredTree) -> Any:
        is_own = own_names(module)
        keys = tree.keys(path)
        if is_own is None or not keys:
            return state_dict
        handover = Handover(path, self._options, {})
        made: dict[str, Any] = {}
        for key, item in state_dict.items():
            at = (*path, key)
            made[key] = item
            if not (is_own(key) and self._options.selects(at)):
                continue
            if key in keys:
                made[key] = self._item(handover, at, item, tree, is_extra=key.endswith("_extra_state"))
            elif self._options.strict:
                handover.differences[at] = f"missing: {display(at)}"
                del made[key]
        for key in keys:
            at = (*path, key)
            if key not in state_dict and is_own(key) and self._options.strict and self._options.selects(at):
                new = self._structure.make(at, tree, state_dict.values())
                if new is not NOTHING:
                    handover.differences[at] = f"unexpected: {display(at)}"
                    made[key] = new
        if not handover.differences:
            return state_dict
        self.by_path[path] = handover
        result = copy.copy(state_dict)  # with its `_metadata`
        result.clear()
        result.update(made)
        return result

    def _item(self, handover: Handover, path: Path, item: Any, tree: StoredTree, is_extra: bool) -> Any:
        """Return the item that a module loads at a name that the step has, too."""
        if not self._differs(path, item, tree, is_extra):
            return item
        made = self._structure.make(path, tree, [item])
        if made is NOTHING:
            return item
        handover.differences[path] = (
            f"form: {display(path)} is {tree.described(path)} in the checkpoint, {described(item)} in the state"
        )
        if isinstance(item, torch.Tensor):
            handover.own[str(path[-1])] = item
        return made

    def _differs(self, path: Path, item: Any, tree: StoredTree, is_extra: bool) -> bool:
        if tree.form(path) is None or not is_plain(item):
            return False
        tensor = tree.tensor(path)
        if form(item) != "tensor" or tensor is None:
            return not (tree.is_value(path) and is_one_value(item))  # containers are made anew, whatever they hold
        dtype = torch_dtype_name(item.dtype)
        if is_extra:
            return (dtype, tuple(item.shape)) != (tensor.dtype, tensor.shape)
        return tuple(item.shape) != tensor.shape and (dtype == tensor.dtype or self._options.cast)
