"""Prepare the optimizers of a state for a restore: make the state dicts that they are to load.

An optimizer gets what its `load_state_dict` would make of the state dict that was saved: state that it has and the step
has not is removed, and what the step has is made. So the structure is that of the step. Tensors of the optimizer that
are like those of the step are in their places, to be filled where they are; the others are made as the step describes
them, and like the parameter they belong to where the shapes are equal. No step is run.
"""

from __future__ import annotations

import itertools
from argparse import Namespace
from collections.abc import Hashable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from ckpt.loading.index import CheckpointIndex, StoredTensor
from ckpt.loading.match import Problem
from ckpt.loading.optimizer_kinds import groups_problem, other_kind, stored_options
from ckpt.loading.options import RestoreOptions
from ckpt.paths import Path, display
from ckpt.planning.state_dict import FlatState, PerRank, TensorLeaf, flatten
from ckpt.planning.subclasses import part_like
from ckpt.storage.dtypes import torch_dtype
from ckpt.values.codec import resolve, unregistered_in
from ckpt.values.containers import Container, rebuild

__all__ = ["Optimizers", "keep_dtypes"]


class Optimizers:
    """The optimizers of a state, collected while it is flattened.

    A state dict has PyTorch's form (`state` by parameter, `param_groups`), or that of an optimizer class with another
    one. `problems` are mismatches, and `left_out` names that would fit but belong to what does not; nothing is restored
    at or below the paths in `ignored`, and the objects at those in `not_loaded` do not load.
    """

    def __init__(self, index: CheckpointIndex, rank: int, state: Any, options: RestoreOptions) -> None:
        self._index = index
        self._rank = rank
        self._options = options
        self._models = _Models(index, state, options)
        self.problems: list[Problem] = []
        self.left_out: list[Path] = []
        self.ignored: set[Path] = set()
        self.not_loaded: set[Path] = set()

    def expand(self, path: Path, owner: Any, state_dict: Any, per_rank: bool) -> Any:
        """Return the state dict that an optimizer is to load, with tensors to be filled.

        With `per_rank`, of this rank alone. What is not to be restored is as it is in `state_dict`, and so is all of a
        state dict that is not an optimizer's, or that the step does not have.
        """
        if not isinstance(owner, torch.optim.Optimizer) or not isinstance(state_dict, dict):
            return state_dict
        stored = _Stored.below(self._index, path, self._rank if per_rank else None)
        if not stored.tensors and not stored.values:
            return state_dict
        is_usual = _is_usual(state_dict)
        problem = _misfit_as_a_whole(stored, owner, state_dict) if is_usual else None
        if problem is not None:
            return self._refused(path, state_dict, f"parameter groups: {display(path)} {problem}")
        own = _flattened(path, state_dict, per_rank)
        if own.owners or any(leaf.spec.per_rank is not per_rank for leaf in own.tensors.values()):
            return state_dict
        plan = _Plan(path, owner, state_dict, own, stored, self._options, is_usual)
        if plan.is_equal():
            return state_dict
        plan.find_problems(self._models)
        try:
            made = plan.made()
        except ValueError as error:
            return self._refused(path, state_dict, f"structure: {display(path)} cannot be made of both: {error}")
        self.problems += plan.problems
        names = {problem.path for problem in plan.problems}
        self.left_out += [name for name in plan.spoiled_names() if name not in names]
        self.ignored.update(plan.spoiled_names())
        return made

    def _refused(self, path: Path, state_dict: Any, text: str) -> Any:
        self.problems.append(Problem(path, text))
        self.ignored.add(path)
        self.not_loaded.add(path)
        return state_dict


def keep_dtypes(owner: Any, state_dict: Any) -> None:
    """Undo the casts of `Optimizer.load_state_dict`, which casts state to the dtype of its parameter."""
    if not isinstance(owner, torch.optim.Optimizer) or not _is_usual(state_dict):
        return
    numbers = _by_number(owner, _group_members(state_dict))
    for number, restored in state_dict["state"].items():
        own = owner.state[numbers[number]] if number in numbers else {}
        for key, value in restored.items() if isinstance(restored, dict) else ():
            if (
                isinstance(value, torch.Tensor)
                and isinstance(own.get(key), torch.Tensor)
                and own[key].dtype != value.dtype
            ):
                own[key] = value.to(own[key].device)


@dataclass(frozen=True, slots=True)
class _Stored:
    """What the step has of one optimizer, by the rest of the path."""

    tensors: dict[Path, StoredTensor]
    values: dict[Path, Any]
    containers: dict[Path, Container]

    @classmethod
    def below(cls, index: CheckpointIndex, path: Path, rank: int | None) -> _Stored:
        """Return what is below a path; with a `rank`, of that rank alone."""
        at = len(path)
        values: Mapping[Path, Any] = index.values
        containers: Mapping[Path, Container] = index.containers
        names = (*(index.tensors if rank is None else index.per_rank_tensors), *index.aliases)
        if rank is not None:
            values = {name: own[rank] for name, own in index.per_rank_values.items() if rank in own}
            containers = {name: own[rank] for name, own in index.per_rank_containers.items() if rank in own}
        found = {name[at:]: index.tensor(name, rank) for name in names if name[:at] == path and len(name) > at}
        return cls(
            {name: tensor for name, tensor in found.items() if tensor is not None},
            {name[at:]: value for name, value in values.items() if name[:at] == path and len(name) > at},
            {name[at:]: container for name, container in containers.items() if name[:at] == path},
        )

    def groups(self) -> list[list[Any]] | None:
        """Return the numbers of the parameters of each group; None if there are no groups.

        The groups are one value, unless there is a tensor in them.
        """
        groups = self.values.get(("param_groups",))
        if isinstance(groups, list):
            found = {number: group.get("params") for number, group in enumerate(groups) if isinstance(group, dict)}
        else:
            found = {
                int(name[1]): value
                for name, value in self.values.items()
                if len(name) == 3 and name[0] == "param_groups" and name[2] == "params" and isinstance(name[1], int)
            }
        members = [params for _, params in sorted(found.items()) if isinstance(params, list)]
        return members if members and len(members) == len(found) else None


def _misfit_as_a_whole(stored: _Stored, owner: torch.optim.Optimizer, state_dict: Any) -> str | None:
    """Return why nothing of a step can be loaded by an optimizer of PyTorch's form; None if it can."""
    container = stored.containers.get(())
    classes = container.fields if container is not None and container.kind == "optimizer" else ()
    kind = other_kind(classes, stored_options({**stored.values, **stored.tensors}), owner)
    if kind is not None:
        return f"is of another kind: {kind}; leave it out: restore(..., only=...)"
    problem = groups_problem(stored.groups(), _group_members(state_dict))
    if problem is None and not any(name[0] == "state" for name in (*stored.tensors, *stored.values)):
        problem = "has no state in the checkpoint, not even an empty one; leave it out: restore(..., only=...)"
    return problem


class _Models:
    """The parameters of the modules in a state, and their shapes in the step."""

    def __init__(self, index: CheckpointIndex, state: Any, options: RestoreOptions) -> None:
        self._index = index
        self._state = state
        self._options = options
        self._at: dict[int, Path] | None = None

    def stored_shape(self, parameter: torch.Tensor) -> tuple[int, ...] | None:
        """Return the shape that a parameter had; None if it is not in the state, or not in the step."""
        if self._at is None:
            flat = flatten(self._state, expand=_without_optimizers, reaches=self._options.reaches)
            self._at = {leaf.local.data_ptr(): path for path, leaf in flat.tensors.items() if leaf.local.numel()}
        path = self._at.get(_shard(parameter).data_ptr())
        tensor = None if path is None else self._index.tensor(path)
        return None if tensor is None else tensor.shape


def _without_optimizers(path: Path, owner: Any, state_dict: Any, per_rank: bool) -> Any:
    return {} if isinstance(owner, torch.optim.Optimizer) else state_dict


class _Plan:
    """How the state dict for one optimizer is made of its own and of the step.

    The leaves of one parameter's state are a unit: they are restored together or not at all.
    """

    def __init__(
        self,
        path: Path,
        owner: torch.optim.Optimizer,
        state_dict: Any,
        own: FlatState,
        stored: _Stored,
        options: RestoreOptions,
        is_usual: bool,
    ) -> None:
        self._path = path
        self._owner = owner
        self._state_dict = state_dict
        self._own = own
        self._stored = stored
        self._options = options
        self._is_usual = is_usual
        self._parameters = _parameters(owner)
        self._numbers = _by_number(owner, stored.groups() or []) if is_usual else {}
        self._used = {_shard(parameter).data_ptr() for parameter in self._parameters}
        self._spoiled: set[Hashable] = set()
        self.problems: list[Problem] = []

    def is_equal(self) -> bool:
        """Return whether both have the same structure, so that all tensors and values can be replaced in place."""
        own, stored, at = self._own, self._stored, len(self._path)
        names = {path[at:] for path in (*own.tensors, *own.aliases)}
        containers = {path[at:]: container for path, (container, _) in own.containers.items()}
        recorded = {path: each for path, each in stored.containers.items() if each.kind != "optimizer"}
        return (
            names == stored.tensors.keys()
            and {path[at:] for path in own.values} == stored.values.keys()
            and containers == recorded
            and all(
                leaf.writeable
                and leaf.spec.shape == stored.tensors[path[at:]].shape
                and leaf.spec.dtype == stored.tensors[path[at:]].dtype
                and leaf.local.data_ptr() not in self._used
                for path, leaf in own.tensors.items()
            )
            and all(stored.tensors[path[at:]] is stored.tensors[target[at:]] for path, target in own.aliases.items())
            and len(own.tensors) == len({id(tensor) for tensor in stored.tensors.values()})
            and all(leaf.assign is not None for leaf in own.values.values())
            and not any(next(unregistered_in(value), None) for value in stored.values.values())
        )

    # -- what does not fit --

    def find_problems(self, models: _Models) -> None:
        """Find the units that do not fit, with the tensors and values that are in the way."""
        for unit, entry in self._entries().items():
            for name in self._misfits(unit, entry, models):
                now, of = self._shape_now(unit, name)
                shown = f"{display((*self._path, *name))} is {list(entry[name].shape)} in the checkpoint, {of}"
                self._spoil(name, f"shape: {shown}{list(now)} in the state")
        for name, tensor in self._stored.tensors.items():
            leaf = self._own_leaf(name)
            if leaf is not None and self._selects(name) and self._is_in_other_dtype(leaf, tensor):
                shown = display((*self._path, *name))
                self._spoil(name, f"dtype: {shown} is {tensor.dtype} in the checkpoint, {leaf.spec.dtype} in the state")
        for name, value in self._stored.values.items():
            unknown = next(unregistered_in(self._resolved(name, value)), None) if self._selects(name) else None
            if unknown is not None:
                self._spoil(
                    name,
                    f"type: {display((*self._path, *name))} holds a {unknown.name}, which this program has not "
                    "registered (see ckpt.register_encoder)",
                )

    def spoiled_names(self) -> list[Path]:
        """Return the paths of all leaves that are not restored because their unit does not fit."""
        names = (*self._stored.tensors, *self._stored.values, *self._own_names())
        return [(*self._path, *name) for name in dict.fromkeys(names) if self._is_spoiled(name)]

    def _spoil(self, name: Path, text: str) -> None:
        self._spoiled.add(self._unit(name))
        self.problems.append(Problem((*self._path, *name), text))

    def _is_spoiled(self, name: Path) -> bool:
        return bool(self._spoiled) and self._unit(name) in self._spoiled

    def _unit(self, name: Path) -> Hashable:
        """Return a key that the leaves of one parameter's state share. A leaf that is no such state has its own."""
        if not self._is_usual:  # names like "state.layer.weight.exp_avg"
            return str(name[0]).rpartition(".")[0] or name
        return name[:2] if name[0] == "state" and len(name) > 1 else name

    def _selects(self, name: Path) -> bool:
        return self._options.selects((*self._path, *name))

    def _entries(self) -> dict[Hashable, dict[Path, StoredTensor]]:
        """Return the tensors of each unit; a tensor subclass is one."""
        entries: dict[Hashable, dict[Path, StoredTensor]] = {}
        for name, tensor in self._stored.tensors.items():
            if not self._selects(name):
                continue
            outer = _outermost(name, self._stored.containers)
            if outer is not None:
                name, tensor = outer, StoredTensor(tensor.dtype, self._stored.containers[outer].shape)
            entries.setdefault(self._unit(name), {})[name] = tensor
        return entries

    def _misfits(self, unit: Hashable, entry: Mapping[Path, StoredTensor], models: _Models) -> list[Path]:
        """Return the tensors that were made for a parameter of another shape."""
        if not self._is_usual:
            found = [name for name, tensor in entry.items() if self._was_of_other_shape(name, tensor, models)]
        else:
            parameter = self._parameter(next(iter(entry)))
            if parameter is None:
                return []
            shapes = _shapes(self._owner, self._parameters, parameter)
            found = _of_other_shape(entry, shapes)
            if found and not isinstance(self._owner, torch.optim.LBFGS):
                before = models.stored_shape(parameter)
                if before is None:  # only of PyTorch's own optimizers it is known how the shapes are related
                    found = found if type(self._owner).__module__.startswith("torch.optim") else []
                elif before in shapes:  # statistics of rows and blocks, projections to fewer rows
                    found = []
        if self._options.resize and all(
            len(entry[name].shape) == len(self._shape_now(unit, name)[0]) for name in found
        ):
            return []
        return found

    def _was_of_other_shape(self, name: Path, tensor: StoredTensor, models: _Models) -> bool:
        """Return whether state with a name of its own was like a parameter of another shape."""
        leaf = self._own_leaf(name)
        if leaf is None or leaf.spec.shape == tensor.shape:
            return False
        like = [parameter for parameter in self._parameters if tuple(parameter.shape) == leaf.spec.shape]
        return bool(like) and not any(models.stored_shape(parameter) == leaf.spec.shape for parameter in like)

    def _shape_now(self, unit: Hashable, name: Path) -> tuple[tuple[int, ...], str]:
        """Return the shape that a tensor would have, and words for what has that shape."""
        parameter = self._parameter(name)
        if parameter is not None:
            return _shapes(self._owner, self._parameters, parameter)[0], "its parameter is "
        leaf = self._own_leaf(name)
        return (() if leaf is None else leaf.spec.shape), ""

    def _is_in_other_dtype(self, leaf: TensorLeaf, tensor: StoredTensor) -> bool:
        """Return whether state has the dtype of its parameter, and had another one."""
        return (
            not self._options.cast
            and leaf.spec.dtype != tensor.dtype
            and leaf.spec.shape == tensor.shape
            and torch_dtype(tensor.dtype).is_floating_point
            and leaf.local.is_floating_point()
            and any(leaf.local.dtype == parameter.dtype for parameter in self._parameters)
        )

    # -- the state dict --

    def made(self) -> Any:
        """Return the state dict. ValueError if what is kept cannot be in it."""
        leaves: dict[Path, Any] = {}
        containers: dict[Path, Container] = {}
        known = {path[len(self._path) :]: container for path, (container, _) in self._own.containers.items()}
        for name in self._own_names():
            if not self._selects(name) or self._is_spoiled(name):
                name = _outermost(name, known) or name
                leaves[name] = _item(self._state_dict, name)
                containers |= _around(name, known)
        for name, leaf in self._taken():
            leaves[name] = leaf
            containers |= _around(name, self._stored.containers)
        made = rebuild(leaves, containers)
        return {"state": {}, **made} if self._is_usual else made

    def _taken(self) -> Iterator[tuple[Path, Any]]:
        """Yield the leaves of the step, with tensors to be filled: the optimizer's own, or new ones."""
        made: dict[Hashable, Any] = {}
        for name, tensor in self._stored.tensors.items():
            if not self._selects(name) or self._is_spoiled(name):
                continue
            outer = _outermost(name, self._stored.containers)
            key: Hashable = id(tensor) if outer is None else outer  # other names of a tensor are that tensor
            if key not in made:
                made[key] = self._tensor(name, tensor) if outer is None else self._subclass(outer)
            yield outer or name, made[key]
        for name, value in self._stored.values.items():
            if self._selects(name) and not self._is_spoiled(name):
                yield name, self._resolved(name, value)

    def _tensor(self, name: Path, stored: StoredTensor) -> Any:
        leaf = self._own_leaf(name)
        parameter = self._parameter(name)
        is_resized = False
        if leaf is not None and leaf.writeable and leaf.local.data_ptr() not in self._used:
            is_resized = self._is_resized(leaf.spec.shape, stored, parameter)
            same = leaf.spec.dtype == stored.dtype or self._options.cast
            if same and (leaf.spec.shape == stored.shape or is_resized):
                if leaf.local.numel():
                    self._used.add(leaf.local.data_ptr())  # two tensors of the step cannot be in the same memory
                return _item(self._state_dict, name)
        if parameter is None:
            alike = (one for one in self._parameters if tuple(one.shape) == stored.shape)
            parameter = next(alike, self._parameters[0] if self._parameters else torch.empty(0))
        else:
            is_resized = self._is_resized(tuple(parameter.shape), stored, parameter)
        return _like(parameter, stored, is_resized)

    def _is_resized(self, shape: tuple[int, ...], stored: StoredTensor, parameter: torch.Tensor | None) -> bool:
        if not self._options.resize or shape == stored.shape or len(shape) != len(stored.shape):
            return False
        return parameter is None or (
            shape in (own := _shapes(self._owner, self._parameters, parameter)) and stored.shape not in own
        )

    def _subclass(self, name: Path) -> Any:
        """Return a tensor subclass to be filled: the optimizer's own, or a new one like its parameter."""
        stored, own = self._stored, self._own.containers.get((*self._path, *name), (None, False))[0]
        container = stored.containers[name]
        parts = {part: tensor for part, tensor in stored.tensors.items() if part[: len(name)] == name}
        leaves = {part: self._own_leaf(part) for part in parts}
        if own is not None and (own.kind, own.type, own.fields) == ("tensor", container.type, container.fields):
            found = [(leaf, parts[part]) for part, leaf in leaves.items() if leaf is not None]
            if len(found) == len(parts) and all(
                leaf.writeable and (leaf.spec.shape, leaf.spec.dtype) == (part.shape, part.dtype)
                for leaf, part in found
            ):
                return _item(self._state_dict, name)
        parameter = self._parameter(name)
        if parameter is None:
            alike = (one for one in self._parameters if tuple(one.shape) == container.shape)
            parameter = next(alike, self._parameters[0])
        return _subclass_like(parameter, container, {str(part[-1]): tensor for part, tensor in parts.items()})

    def _parameter(self, name: Path) -> torch.Tensor | None:
        """Return the parameter that state belongs to, by its number."""
        if not self._is_usual or name[0] != "state" or len(name) < 2:
            return None
        return self._numbers.get(name[1])

    def _own_leaf(self, name: Path) -> TensorLeaf | None:
        path = (*self._path, *name)
        return self._own.tensors.get(self._own.aliases.get(path, path))

    def _own_names(self) -> list[Path]:
        return [path[len(self._path) :] for path in self._own.names()]

    def _resolved(self, name: Path, value: Any) -> Any:
        own = self._own.values.get((*self._path, *name))
        return value if own is None else resolve(value, own.value)


def _is_usual(state_dict: Any) -> bool:
    """Return whether a state dict has PyTorch's form."""
    if not isinstance(state_dict, dict) or not isinstance(state_dict.get("state"), dict):
        return False
    groups = state_dict.get("param_groups")
    return isinstance(groups, list) and all(
        isinstance(group, dict) and isinstance(group.get("params"), list) for group in groups
    )


def _group_members(state_dict: Any) -> list[list[Any]]:
    return [group["params"] for group in state_dict["param_groups"]]


def _parameters(owner: torch.optim.Optimizer) -> list[torch.Tensor]:
    return [parameter for group in owner.param_groups for parameter in group["params"]]


def _by_number(owner: torch.optim.Optimizer, groups: list[list[Any]]) -> dict[Any, torch.Tensor]:
    """Return the parameters by their numbers in the groups of a state dict, paired as by `Optimizer.load_state_dict`."""
    return dict(zip(itertools.chain(*groups), _parameters(owner), strict=False))


def _flattened(path: Path, state_dict: Any, per_rank: bool) -> FlatState:
    nested = PerRank(state_dict) if per_rank else state_dict
    for key in reversed(path):
        nested = {key: nested}
    return flatten(nested, expand=lambda path, owner, own, per_rank: own)


def _outermost(name: Path, containers: Mapping[Path, Container]) -> Path | None:
    """Return the path of the tensor subclass that a tensor is a part of."""
    for length in range(1, len(name)):
        container = containers.get(name[:length])
        if container is not None and container.kind == "tensor":
            return name[:length]
    return None


def _around(name: Path, containers: Mapping[Path, Container]) -> dict[Path, Container]:
    """Return the containers that a leaf is in, or is, if it is an empty one."""
    prefixes = (name[:length] for length in range(len(name) + 1))
    found = {prefix: containers[prefix] for prefix in prefixes if prefix in containers}
    return {prefix: container for prefix, container in found.items() if container.kind not in ("tensor", "optimizer")}


def _item(tree: Any, path: Path) -> Any:
    for key in path:
        items: Any = vars(tree) if isinstance(tree, Namespace) else tree
        tree = items[key]
    return tree


def _shapes(
    owner: torch.optim.Optimizer, parameters: list[torch.Tensor], parameter: torch.Tensor
) -> list[tuple[int, ...]]:
    """Return the shapes that state of this parameter may have: of the whole DTensor, or of this rank's part."""
    if isinstance(owner, torch.optim.LBFGS):  # keeps the concatenated state of all parameters at the first one
        return [(sum(_shard(parameter).numel() for parameter in parameters),)]
    return [tuple(parameter.shape), tuple(_shard(parameter).shape)]


def _of_other_shape(entry: Mapping[Path, StoredTensor], shapes: list[tuple[int, ...]]) -> list[Path]:
    """Return the tensors that may be of a parameter of another shape; none if one of them has the parameter's shape.

    A tensor with another number of dimensions tells nothing: optimizers keep statistics of rows, blocks and more.
    """
    if any(tensor.shape in shapes for tensor in entry.values() if tensor.shape):
        return []

    def may_be(tensor: StoredTensor) -> bool:
        return any(
            len(tensor.shape) != len(shape) or all(n in (1, m) for n, m in zip(tensor.shape, shape, strict=True))
            for shape in shapes
        )

    return [name for name, tensor in entry.items() if not may_be(tensor)]


def _shard(parameter: torch.Tensor) -> torch.Tensor:
    """Return this rank's part of a DTensor."""
    return parameter.to_local() if hasattr(parameter, "to_local") else parameter


def _subclass_like(parameter: torch.Tensor, container: Container, parts: Mapping[str, StoredTensor]) -> Any:
    """Return an uninitialized tensor subclass for the state of a parameter, sharded like it.

    The tensors of its parts if their class is not known.
    """
    local = _shard(parameter)
    sizes = {name: tensor.shape for name, tensor in parts.items()}
    made = {
        name: torch.empty(size, dtype=torch_dtype(parts[name].dtype), device=local.device)
        for name, size in part_like(container, sizes, local)
    }
    tensor = container.tensor_of(made, tuple(local.shape))
    if local is parameter or isinstance(tensor, dict):
        return tensor
    from torch.distributed.tensor import DTensor

    assert isinstance(parameter, DTensor)
    return DTensor.from_local(
        tensor, parameter.device_mesh, parameter.placements, shape=parameter.shape, stride=parameter.stride()
    )


def _like(parameter: torch.Tensor, stored: StoredTensor, resized: bool = False) -> torch.Tensor:
    """Return an uninitialized tensor for the state of a parameter; one of zeros in its shape, if that has changed."""
    dtype = torch_dtype(stored.dtype)
    if resized:
        return torch.zeros_like(parameter, dtype=dtype, requires_grad=False)
    if stored.shape in (tuple(parameter.shape), tuple(_shard(parameter).shape)):
        return torch.empty_like(parameter, dtype=dtype, requires_grad=False)
    device = torch.device("cpu") if not stored.shape else parameter.device
    return torch.empty(stored.shape, dtype=dtype, device=device)
