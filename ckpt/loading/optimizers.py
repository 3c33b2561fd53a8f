"""Prepare the optimizers of a state for a restore: make the state dicts that they are to load.

An optimizer gets what its `load_state_dict` would make of the state dict that was saved: state that it has and the step
has not is removed, and what the step has is made. So the structure is that of the step. Tensors of the optimizer that
are like those of the step are in their places, to be filled where they are; the others are made as the step describes
them, and like the parameter they belong to where the shapes are equal. No step is run.
"""

from __future__ import annotations

import copy
from collections import deque
from typing import Any

import torch

from ckpt.errors import StateError
from ckpt.loading.match import Mismatch
from ckpt.loading.optimizer_kinds import groups_problem, moved_parameter, other_kind, stored_options
from ckpt.loading.optimizer_plan import Models, StateDictPlan, StoredOptimizer
from ckpt.loading.optimizer_tensors import group_members, is_usual, parameters_by_number
from ckpt.loading.options import RestoreOptions
from ckpt.loading.parameter_names import NamedParameters
from ckpt.paths import Path, display
from ckpt.planning.optimizer_classes import is_optimizer
from ckpt.planning.state_dict import FlatState, PerRank, flatten


class Optimizers:
    """The optimizers of a state, collected while it is flattened.

    A state dict has PyTorch's form (`state` by parameter, `param_groups`), or that of an optimizer class with another
    one. `left_out` are names that would fit but belong to what does not; nothing is restored at or below the paths in
    `ignored`, and the objects at those in `not_loaded` do not load.
    """

    def __init__(self, named: NamedParameters, rank: int, state: Any, options: RestoreOptions) -> None:
        self._index = index = named.index
        self._rank = rank
        self._options = options
        self._models = Models(index, state, options)
        self.mismatches: list[Mismatch] = list(named.mismatches)
        self.left_out: list[Path] = []
        self.ignored: set[Path] = set(named.refused)
        self.not_loaded: set[Path] = set(named.refused)

    def expand(self, path: Path, owner: Any, state_dict: Any, per_rank: bool) -> Any:
        """Return the state dict that an optimizer is to load, with tensors to be filled.

        With `per_rank`, of this rank alone. What is not to be restored is as it is in `state_dict`, and so is all of a
        state dict that is not an optimizer's, or that the step does not have.
        """
        if not is_optimizer(owner) or not isinstance(state_dict, dict) or path in self.not_loaded:
            return state_dict
        stored = StoredOptimizer.below(self._index, path, self._rank if per_rank else None)
        if not stored.tensors and not stored.values:
            return state_dict
        problem = _misfit_as_a_whole(stored, owner, state_dict) if is_usual(state_dict) else None
        if problem is not None:
            return self._refused(path, state_dict, f"parameter groups: {display(path)} {problem}")
        own, cannot_be_kept = _flattened(path, state_dict, per_rank)
        if own.owners or any(leaf.spec.per_rank is not per_rank for leaf in own.tensors.values()):
            return state_dict
        plan = StateDictPlan(path, owner, state_dict, own, stored, self._options)
        if plan.is_equal():
            return state_dict
        plan.find_problems(self._models)
        if cannot_be_kept is not None and (plan.mismatches or not self._options.selects(path)):
            raise cannot_be_kept
        try:
            made = plan.made()
        except ValueError as error:
            return self._refused(path, state_dict, f"structure: {display(path)} cannot be made of both: {error}")
        self.mismatches += plan.mismatches
        spoiled, names = plan.spoiled_names(), {problem.path for problem in plan.mismatches}
        self.left_out += [name for name in spoiled if name not in names]
        self.ignored.update(spoiled)
        return made

    def _refused(self, path: Path, state_dict: Any, text: str) -> Any:
        self.mismatches.append(Mismatch(path, text))
        self.ignored.add(path)
        self.not_loaded.add(path)
        return state_dict


def keep_dtypes(owner: Any, state_dict: Any) -> None:
    """Undo the casts of `Optimizer.load_state_dict`.

    It casts state to the dtype of its parameter, also in containers, which it makes anew, and some of them wrong.
    """
    if not isinstance(owner, torch.optim.Optimizer) or not is_usual(state_dict):
        return
    numbers = parameters_by_number(owner, group_members(state_dict))
    for number, restored in state_dict["state"].items():
        own = owner.state[numbers[number]] if number in numbers else {}
        for key, value in restored.items() if isinstance(restored, dict) else ():
            if key in own:
                own[key] = _as_given(own[key], value)


def _as_given(loaded: Any, given: Any) -> Any:
    """Return an item of the state as it was given to an optimizer, its tensors on the devices that it put them on."""
    if isinstance(given, torch.Tensor):
        if not isinstance(loaded, torch.Tensor):
            return given
        return loaded if loaded.dtype == given.dtype else given.to(loaded.device)
    if isinstance(given, dict):
        result = copy.copy(given)
        result.update({key: _as_given(_item(loaded, key), item) for key, item in given.items()})
        return result
    if type(given) in (list, tuple, deque):
        items = [_as_given(_item(loaded, number), item) for number, item in enumerate(given)]
        return deque(items, given.maxlen) if isinstance(given, deque) else type(given)(items)
    # A number may have become a tensor: optimizers of PyTorch have their steps in tensors.
    return given if type(loaded) is type(given) else loaded


def _item(container: Any, key: Any) -> Any:
    try:
        return container[key]
    except (KeyError, IndexError, TypeError):
        return None


def _flattened(path: Path, state_dict: Any, per_rank: bool) -> tuple[FlatState, StateError | None]:
    """Return the leaves of an optimizer's own state dict; none, and the error, if it holds what cannot be stored."""
    nested = PerRank(state_dict) if per_rank else state_dict
    for key in reversed(path):
        nested = {key: nested}
    try:
        return flatten(nested, expand=lambda path, owner, own, per_rank: own), None
    except StateError as error:
        return FlatState(), error


def _misfit_as_a_whole(stored: StoredOptimizer, owner: Any, state_dict: Any) -> str | None:
    """Return why nothing of a step can be loaded by an optimizer of PyTorch's form; None if it can."""
    container = stored.containers.get(())
    classes = container.fields if container is not None and container.kind == "optimizer" else ()
    kind = other_kind(classes, stored_options({**stored.values, **stored.tensors}), owner)
    if kind is not None:
        return f"is of another kind: {kind}; leave it out: restore(..., only=...)"
    problem = groups_problem(stored.groups(), group_members(state_dict))
    problem = problem or moved_parameter(stored.names(), _names(state_dict))
    if problem is None and not any(name[0] == "state" for name in (*stored.tensors, *stored.values)):
        problem = "has no state in the checkpoint, not even an empty one; leave it out: restore(..., only=...)"
    return problem


def _names(state_dict: Any) -> list[Any]:
    """Return the names of the parameters in a state dict of PyTorch's form, None for those without."""
    found: list[Any] = []
    for group in state_dict["param_groups"]:
        names, members = group.get("param_names"), group["params"]
        found += names if isinstance(names, list) and len(names) == len(members) else [None] * len(members)
    return found
