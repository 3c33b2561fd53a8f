"""The tensors of an optimizer's state: which parameter they belong to, and new ones like it. Imports torch."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping
from typing import Any

import torch

from ckpt.loading.index import StoredTensor
from ckpt.paths import Path
from ckpt.planning.subclasses import part_like
from ckpt.storage.dtypes import torch_dtype
from ckpt.values.containers import Container


def is_usual(state_dict: Any) -> bool:
    """Return whether a state dict has PyTorch's form."""
    if not isinstance(state_dict, dict) or not isinstance(state_dict.get("state"), dict):
        return False
    groups = state_dict.get("param_groups")
    return isinstance(groups, list) and all(
        isinstance(group, dict) and isinstance(group.get("params"), list) for group in groups
    )


def group_members(state_dict: Any) -> list[list[Any]]:
    return [group["params"] for group in state_dict["param_groups"]]


def parameters_of(owner: Any) -> list[torch.Tensor]:
    groups = getattr(owner, "param_groups", ())  # some wrappers have none
    return [parameter for group in groups for parameter in group["params"]]


def parameters_by_number(owner: Any, groups: list[list[Any]]) -> dict[Any, torch.Tensor]:
    """Return the parameters by their numbers in a state dict, paired as `Optimizer.load_state_dict` does."""
    return dict(zip(itertools.chain(*groups), parameters_of(owner), strict=False))


def shapes_of_state(owner: Any, parameters: list[torch.Tensor], parameter: torch.Tensor) -> list[tuple[int, ...]]:
    """Return the shapes that state of this parameter may have: of the whole DTensor, or of this rank's part."""
    if isinstance(owner, torch.optim.LBFGS):  # keeps the concatenated state of all parameters at the first one
        return [(sum(shard_of(parameter).numel() for parameter in parameters),)]
    return [tuple(parameter.shape), tuple(shard_of(parameter).shape)]


def of_other_shape(
    entry: Mapping[Path, StoredTensor], shapes: list[tuple[int, ...]], as_many: bool = False
) -> list[Path]:
    """Return the tensors that may be of a parameter of another shape; none if one of them has the parameter's shape.

    A tensor with another number of dimensions tells nothing: optimizers keep statistics of rows, blocks and more. With
    `as_many`, those of more than one element have as many dimensions as the parameter.
    """
    if any(tensor.shape in shapes for tensor in entry.values() if tensor.shape):
        return []

    def may_be(tensor: StoredTensor) -> bool:
        return any(
            all(n in (1, m) for n, m in zip(tensor.shape, shape, strict=True))
            if len(tensor.shape) == len(shape)
            else not as_many or math.prod(tensor.shape) == 1
            for shape in shapes
        )

    return [name for name, tensor in entry.items() if not may_be(tensor)]


def shard_of(parameter: torch.Tensor) -> torch.Tensor:
    """Return this rank's part of a DTensor."""
    return parameter.to_local() if hasattr(parameter, "to_local") else parameter


def subclass_like(parameter: torch.Tensor, container: Container, parts: Mapping[str, StoredTensor]) -> Any:
    """Return an uninitialized tensor subclass for the state of a parameter, sharded like it.

    The tensors of its parts if their class is not known.
    """
    local = shard_of(parameter)
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


def tensor_like(parameter: torch.Tensor, stored: StoredTensor, resized: bool = False) -> torch.Tensor:
    """Return an uninitialized tensor for the state of a parameter; one of zeros in its shape, if that has changed."""
    dtype = torch_dtype(stored.dtype)
    if resized:
        return torch.zeros_like(parameter, dtype=dtype, requires_grad=False)
    if stored.shape in (tuple(parameter.shape), tuple(shard_of(parameter).shape)):
        return torch.empty_like(parameter, dtype=dtype, requires_grad=False)
    device = torch.device("cpu") if not stored.shape else parameter.device
    return torch.empty(stored.shape, dtype=dtype, device=device)
