"""Prepare the optimizers of a state for a restore: create missing state, find what does not fit.

An optimizer creates its state in its first step, so a restore into one that has not stepped must create it before. The
tensors are made as the checkpoint describes them, and like the parameter they belong to where the shapes are equal. No
step is run.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping
from typing import Any, TypeVar

import torch

from ckpt.loading.index import CheckpointIndex, StoredTensor
from ckpt.loading.match import Problem
from ckpt.paths import Path, display
from ckpt.planning.subclasses import part_like
from ckpt.storage.dtypes import torch_dtype
from ckpt.values.containers import Container

__all__ = ["Optimizers", "keep_dtypes"]

_SHOWN = 8
_T = TypeVar("_T")


class Optimizers:
    """The optimizers of a state, collected while it is flattened.

    A state dict has PyTorch's form (`state` by parameter, `param_groups`), or that of an optimizer class with another
    one. `problems` are mismatches; nothing is restored below the paths in `ignored`.
    """

    def __init__(self, index: CheckpointIndex, rank: int, resize: bool = False) -> None:
        self._index = index
        self._rank = rank
        self._resize = resize
        self._usual: set[Path] = set()
        self._other: set[Path] = set()
        self.problems: list[Problem] = []
        self.ignored: set[Path] = set()
        self.not_loaded: set[Path] = set()

    def expand(self, path: Path, owner: Any, state_dict: Any, per_rank: bool) -> Any:
        """Return a state dict with uninitialized tensors for the state that the checkpoint has and the optimizer lacks.

        With `per_rank`, for state of this rank alone. Any other `state_dict` is returned unchanged.
        """
        if not isinstance(owner, torch.optim.Optimizer) or not isinstance(state_dict, dict):
            return state_dict
        tensors, values = self._stored(path, per_rank)
        if not _is_usual(state_dict):
            self._other.add(path)
            return _filled(state_dict, owner, tensors, values)
        self._usual.add(path)
        if not self._groups_fit(path, state_dict, values):
            return state_dict
        if state_dict["state"]:
            return state_dict
        state = self._state(path, owner, tensors, values)
        if state:
            return {**state_dict, "state": state}
        return _filled(state_dict, owner, _by_name(tensors), _by_name(values))

    def unit(self, path: Path) -> Hashable | None:
        """Return a key that the leaves of one parameter's state share: they are restored together or not at all."""
        for length in range(len(path) - 1, -1, -1):
            if path[:length] in self._usual and path[length] == "state" and len(path) > length + 1:
                return path[: length + 2]
            if path[:length] in self._other:  # names like "state.layer.weight.exp_avg"
                return path[:length], str(path[length]).rpartition(".")[0] or path
        return None

    def _stored(self, path: Path, per_rank: bool) -> tuple[dict[Path, StoredTensor], dict[Path, Any]]:
        """Return the tensors and values of the checkpoint below `path`, by the rest of their paths."""
        index, at = self._index, len(path)
        names = (*(index.per_rank_tensors if per_rank else index.tensors), *index.aliases)
        found = {name[at:]: index.tensor(name, self._rank if per_rank else None) for name in names if name[:at] == path}
        values: Mapping[Path, Any] = index.values
        if per_rank:
            values = {name: own[self._rank] for name, own in index.per_rank_values.items() if self._rank in own}
        return (
            {name: tensor for name, tensor in found.items() if tensor is not None and name},
            {name[at:]: value for name, value in values.items() if name[:at] == path and len(name) > at},
        )

    def _groups_fit(self, path: Path, state_dict: Any, values: Mapping[Path, Any]) -> bool:
        """Return whether the checkpoint has the same parameters in the same groups, as `load_state_dict` needs."""
        stored = _stored_groups(values)
        own = [group["params"] for group in state_dict["param_groups"]]
        other_kind = _other_kind(values, state_dict["param_groups"])
        if other_kind is None and (stored is None or stored == own):
            return True
        if other_kind is not None or stored is None:
            text = f"is of another kind: {other_kind}; leave it out: restore(..., only=...)"
        elif list(map(len, stored)) == list(map(len, own)):
            text = f"numbers its parameters {_shortened(stored)} in the checkpoint, {_shortened(own)} in the state"
        else:
            text = (
                f"has {_group_sizes(stored)} in the checkpoint, {_group_sizes(own)} in the state; make it of the same "
            )
            text += "parameters, the frozen ones too, or leave it out: restore(..., only=...)"
        self.problems.append(Problem(path, f"parameter groups: {display(path)} {text}"))
        self.ignored.add(path)
        self.not_loaded.add(path)
        return False

    def _state(
        self, path: Path, owner: Any, tensors: Mapping[Path, StoredTensor], values: Mapping[Path, Any]
    ) -> dict[int, Any]:
        """Create state for the parameters that the checkpoint has state of, where the shapes fit."""
        parameters = _parameters(owner)
        state: dict[int, Any] = {}
        entries: dict[int, dict[Path, StoredTensor]] = {}
        subclasses: dict[Path, tuple[Container, dict[str, StoredTensor]]] = {}
        for name, tensor in tensors.items():
            if _is_state(name, len(parameters)):
                container = self._index.containers.get((*path, *name[:-1]))
                if container is not None and container.kind == "tensor":
                    subclasses.setdefault(name[:-1], (container, {}))[1][str(name[-1])] = tensor
                    name, tensor = name[:-1], StoredTensor(tensor.dtype, container.shape)
                entries.setdefault(int(name[1]), {})[name] = tensor
        for number, entry in entries.items():
            shapes = _shapes(owner, parameters, number)
            misfits = _misfits(entry, shapes)
            if self._resize and all(len(entry[name].shape) == len(shapes[0]) for name in misfits):
                misfits = []
            if misfits:
                self.ignored.add((*path, "state", number))
                self.problems += [
                    Problem(
                        (*path, *name),
                        f"shape: {display((*path, *name))} is {list(entry[name].shape)} in the checkpoint, its "
                        f"parameter is {list(shapes[0])} in the state",
                    )
                    for name in misfits
                ]
                continue
            for name, tensor in entry.items():
                if name in subclasses:
                    _put(state, name[1:], _subclass_like(parameters[number], *subclasses[name]))
                    continue
                resized = self._resize and len(tensor.shape) == len(shapes[0]) and tensor.shape not in shapes
                _put(state, name[1:], _like(parameters[number], tensor, resized))
        for name, value in values.items():
            if _is_state(name, len(parameters)) and (*path, *name[:2]) not in self.ignored:
                _put(state, name[1:], value)
        return {number: {key: _with_lists(item) for key, item in own.items()} for number, own in state.items()}


def keep_dtypes(owner: Any, state_dict: Any) -> None:
    """Undo the casts of `Optimizer.load_state_dict`, which casts state to the dtype of its parameter."""
    if not isinstance(owner, torch.optim.Optimizer) or not _is_usual(state_dict):
        return
    parameters = _parameters(owner)
    for number, restored in state_dict["state"].items():
        own = owner.state[parameters[number]] if isinstance(number, int) and number < len(parameters) else {}
        for key, value in restored.items() if isinstance(restored, dict) else ():
            if (
                isinstance(value, torch.Tensor)
                and isinstance(own.get(key), torch.Tensor)
                and own[key].dtype != value.dtype
            ):
                own[key] = value


def _is_usual(state_dict: Any) -> bool:
    """Return whether a state dict has PyTorch's form."""
    if not isinstance(state_dict, dict) or not isinstance(state_dict.get("state"), dict):
        return False
    groups = state_dict.get("param_groups")
    return isinstance(groups, list) and all(
        isinstance(group, dict) and isinstance(group.get("params"), list) for group in groups
    )


def _parameters(owner: torch.optim.Optimizer) -> list[torch.Tensor]:
    return [parameter for group in owner.param_groups for parameter in group["params"]]


def _stored_groups(values: Mapping[Path, Any]) -> list[list[Any]] | None:
    """Return the numbers of the parameters of each group; None if the checkpoint has none.

    The groups are one value, unless there is a tensor in them.
    """
    groups = values.get(("param_groups",))
    if isinstance(groups, list):
        found = {number: group.get("params") for number, group in enumerate(groups) if isinstance(group, dict)}
    else:
        found = {
            int(name[1]): value
            for name, value in values.items()
            if len(name) == 3 and name[0] == "param_groups" and name[2] == "params" and isinstance(name[1], int)
        }
    groups = [found[number] for number in sorted(found)]
    return groups if groups and all(isinstance(params, list) for params in groups) else None


def _other_kind(values: Mapping[Path, Any], own: list[dict[str, Any]]) -> str | None:
    """Return how the options of an optimizer differ from those of the one that was saved; None if they may be the same.

    A newer version of an optimizer has options more; two kinds of optimizers have some each that the other has not.
    """
    groups = values.get(("param_groups",))
    if not isinstance(groups, list) or not groups or not own or not isinstance(groups[0], dict):
        return None
    stored, ours = set(groups[0]), set(own[0])
    if not stored - ours or not ours - stored:
        return None
    only_stored, only_ours = (", ".join(sorted(map(str, names))) for names in (stored - ours, ours - stored))
    return f"that of the checkpoint has {only_stored}, that of the state {only_ours}"


def _group_sizes(groups: list[list[Any]]) -> str:
    counts = [str(len(group)) for group in groups]
    more = ", ..." if len(counts) > _SHOWN else ""
    plural = "" if len(counts) == 1 else "s"
    return f"{len(counts)} parameter group{plural} with {', '.join(counts[:_SHOWN])}{more} parameter(s)"


def _shortened(groups: list[list[Any]]) -> str:
    text = str(groups)
    return text if len(text) <= 80 else f"{text[:80]}..."


def _is_state(name: Path, parameters: int) -> bool:
    """Return whether a path is like ``state/3/exp_avg``, for one of `parameters` parameters."""
    return len(name) > 2 and name[0] == "state" and isinstance(name[1], int) and 0 <= name[1] < parameters


def _by_name(stored: Mapping[Path, _T]) -> dict[Path, _T]:
    """Return the state of parameters with names instead of numbers."""
    return {
        name: item for name, item in stored.items() if len(name) > 2 and name[0] == "state" and type(name[1]) is str
    }


def _shapes(owner: Any, parameters: list[torch.Tensor], number: int) -> list[tuple[int, ...]]:
    """Return the shapes that state of this parameter may have: of the whole DTensor, or of this rank's part."""
    if isinstance(owner, torch.optim.LBFGS):  # keeps the concatenated state of all parameters at the first one
        return [(sum(_shard(parameter).numel() for parameter in parameters),)]
    return [tuple(parameters[number].shape), tuple(_shard(parameters[number]).shape)]


def _misfits(entry: Mapping[Path, StoredTensor], shapes: list[tuple[int, ...]]) -> list[Path]:
    """Return the tensors made for a parameter of another shape; none if one of them has the parameter's shape.

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


def _filled(
    state_dict: dict[Any, Any], owner: Any, tensors: Mapping[Path, StoredTensor], values: Mapping[Path, Any]
) -> Any:
    """Return a state dict of another form, completed from the checkpoint if it has no state yet."""
    leaves = dict(_leaves((), state_dict))
    if any(isinstance(leaf, torch.Tensor) and leaf.numel() > 1 for leaf in leaves.values()):
        return state_dict
    filled = _copied(state_dict)
    for name, tensor in tensors.items():
        if name not in leaves:
            _put(filled, name, _like_any(_parameters(owner), tensor))
    for name, value in values.items():
        if name not in leaves:
            _put(filled, name, value)
    return filled


def _leaves(path: Path, node: Any) -> Iterator[tuple[Path, Any]]:
    if isinstance(node, dict):
        for key, item in node.items():
            yield from _leaves((*path, key), item)
    yield path, node


def _copied(node: Any) -> Any:
    return {key: _copied(item) for key, item in node.items()} if isinstance(node, dict) else node


def _put(tree: Any, path: Path, leaf: Any) -> None:
    for key in path[:-1]:
        tree = tree.setdefault(key, {})
        if not isinstance(tree, dict):
            return
    tree[path[-1]] = leaf


def _with_lists(node: Any) -> Any:
    """Turn dicts with the keys 0, 1, ... into lists: paths do not tell them apart."""
    if not isinstance(node, dict):
        return node
    items = {key: _with_lists(item) for key, item in node.items()}
    return (
        [items[number] for number in range(len(items))] if items and items.keys() == set(range(len(items))) else items
    )


def _shard(parameter: torch.Tensor) -> torch.Tensor:
    """Return this rank's part of a DTensor."""
    return parameter.to_local() if hasattr(parameter, "to_local") else parameter


def _subclass_like(
    parameter: torch.Tensor, container: Container, parts: Mapping[str, StoredTensor]
) -> torch.Tensor | dict[str, torch.Tensor]:
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
        return tensor  # type: ignore[no-any-return]
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


def _like_any(parameters: list[torch.Tensor], stored: StoredTensor) -> torch.Tensor:
    """Return a tensor sharded like a parameter of the same shape, if there is one."""
    same = (parameter for parameter in parameters if tuple(parameter.shape) == stored.shape)
    return _like(next(same, parameters[0]), stored)
