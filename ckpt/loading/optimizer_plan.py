"""Make the state dict that one optimizer is to load, of its own and of what the step has. Imports torch."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Hashable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from ckpt.loading.index import CheckpointIndex, StoredTensor
from ckpt.loading.match import Mismatch
from ckpt.loading.optimizer_tensors import (
    is_usual,
    of_other_shape,
    parameters_by_number,
    parameters_of,
    shapes_of_state,
    shard_of,
    subclass_like,
    tensor_like,
)
from ckpt.loading.options import RestoreOptions
from ckpt.paths import Path, display
from ckpt.planning.optimizer_classes import is_optimizer
from ckpt.planning.state_dict import FlatState, TensorLeaf, flatten
from ckpt.storage.dtypes import torch_dtype
from ckpt.values.codec import resolve, unregistered_in
from ckpt.values.containers import Container, rebuild
from ckpt.values.tensor_subclasses import class_named


@dataclass(frozen=True, slots=True)
class StoredOptimizer:
    """The items of one optimizer in the step, by the rest of the path."""

    tensors: dict[Path, StoredTensor]
    values: dict[Path, Any]
    containers: dict[Path, Container]

    @classmethod
    def below(cls, index: CheckpointIndex, path: Path, rank: int | None) -> StoredOptimizer:
        """Return the items below a path; with a `rank`, of that rank alone."""
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

    def names(self) -> list[Any]:
        """Return the names of the parameters in the groups' `param_names`, in their order; None for those without."""
        groups = self.values.get(("param_groups",))
        found: list[Any] = []
        for number, members in enumerate(self.groups() or []):
            names = self.values.get(("param_groups", number, "param_names"))
            if isinstance(groups, list):
                names = groups[number].get("param_names")
            found += names if isinstance(names, list) and len(names) == len(members) else [None] * len(members)
        return found


class Models:
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
        path = self._at.get(shard_of(parameter).data_ptr())
        tensor = None if path is None else self._index.tensor(path)
        return None if tensor is None else tensor.shape


def _without_optimizers(path: Path, owner: Any, state_dict: Any, per_rank: bool) -> Any:
    return {} if is_optimizer(owner) else state_dict


class StateDictPlan:
    """How the state dict for one optimizer is made of its own and of the step.

    The leaves of one parameter's state are a unit: they are restored together or not at all.
    """

    def __init__(
        self,
        path: Path,
        owner: Any,
        state_dict: Any,
        own: FlatState,
        stored: StoredOptimizer,
        options: RestoreOptions,
    ) -> None:
        self._path = path
        self._owner = owner
        self._state_dict = state_dict
        self._own = own
        self._stored = stored
        self._options = options
        self._is_usual = is_usual(state_dict)
        self._parameters = parameters_of(owner)
        self._numbers = parameters_by_number(owner, stored.groups() or []) if self._is_usual else {}
        self._used = {shard_of(parameter).data_ptr() for parameter in self._parameters}
        self._spoiled: set[Hashable] = set()
        self.mismatches: list[Mismatch] = []

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

    def find_problems(self, models: Models) -> None:
        """Find the units that do not fit, with the tensors and values that are in the way."""
        for unit, entry in self._entries().items():
            for name in self._misfits(unit, entry, models):
                now, of = self._shape_now(unit, name)
                shown = f"{display((*self._path, *name))} is {list(entry[name].shape)} in the checkpoint, {of}"
                remedy = "resize" if self._can_resize(unit, name, entry) else "shape"
                self._spoil(name, f"shape: {shown}{list(now)} in the state", remedy)
        for name, tensor in self._stored.tensors.items():
            leaf = self._own_leaf(name)
            if leaf is not None and self._selects(name) and self._is_in_other_dtype(leaf, tensor):
                shown = display((*self._path, *name))
                text = f"dtype: {shown} is {tensor.dtype} in the checkpoint, {leaf.spec.dtype} in the state"
                self._spoil(name, text, "cast")
        outer = {_outermost(name, self._stored.containers) for name in self._stored.tensors}
        for name in [each for each in outer if each is not None and self._selects(each) and self._is_unknown(each)]:
            self._spoil(
                name,
                f"class: {display((*self._path, *name))} is a {self._stored.containers[name].type}, which this program "
                "does not know; import its package (see ckpt.register_tensor_subclass)",
            )
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

    def _spoil(self, name: Path, text: str, remedy: str = "") -> None:
        self._spoiled.add(self._unit(name))
        self.mismatches.append(Mismatch((*self._path, *name), text, remedy))

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

    def _misfits(self, unit: Hashable, entry: Mapping[Path, StoredTensor], models: Models) -> list[Path]:
        """Return the tensors that were made for a parameter of another shape."""
        if not self._is_usual:
            found = [name for name, tensor in entry.items() if self._was_of_other_shape(name, tensor, models)]
        else:
            parameter = self._parameter(next(iter(entry)))
            if parameter is None:
                return []
            shapes = shapes_of_state(self._owner, self._parameters, parameter)
            # Only of PyTorch's own optimizers it is known how the shapes are related.
            is_known = type(self._owner).__module__.startswith("torch.optim")
            found = of_other_shape(entry, shapes, as_many=is_known)
            if found and not is_known and models.stored_shape(parameter) in (None, *shapes):
                found = []  # statistics of rows and blocks, projections to fewer rows
        return [] if self._options.resize and all(self._can_resize(unit, name, entry) for name in found) else found

    def _can_resize(self, unit: Hashable, name: Path, entry: Mapping[Path, StoredTensor]) -> bool:
        # LBFGS concatenates all parameters: if one has another size, elements no longer belong to the same parameter.
        is_concatenated = isinstance(self._owner, torch.optim.LBFGS)
        return not is_concatenated and len(entry[name].shape) == len(self._shape_now(unit, name)[0])

    def _was_of_other_shape(self, name: Path, tensor: StoredTensor, models: Models) -> bool:
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
            return shapes_of_state(self._owner, self._parameters, parameter)[0], "its parameter is "
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

    def _is_unknown(self, name: Path) -> bool:
        """Return whether a tensor subclass cannot be made, and the optimizer has none there."""
        container = self._stored.containers[name]
        is_made = class_named(container.type) is not None and bool(container.context)
        return not is_made and (*self._path, *name) not in self._own.containers

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
        return tensor_like(parameter, stored, is_resized)

    def _is_resized(self, shape: tuple[int, ...], stored: StoredTensor, parameter: torch.Tensor | None) -> bool:
        if not self._options.resize or shape == stored.shape or len(shape) != len(stored.shape):
            return False
        return parameter is None or (
            shape in (own := shapes_of_state(self._owner, self._parameters, parameter)) and stored.shape not in own
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
        return subclass_like(parameter, container, {str(part[-1]): tensor for part, tensor in parts.items()})

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
