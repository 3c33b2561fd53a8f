"""Optimizers create their state in their first step; a restore into one that has not stepped must create it before.

The tensors are made from what the checkpoint says, like the parameter they belong to where the shapes are the same. No
step is run.
"""

from __future__ import annotations

from typing import Any

import torch

from ckpt.loading.index import CheckpointIndex, StoredTensor
from ckpt.paths import Path
from ckpt.storage.dtypes import torch_dtype

__all__ = ["fill_fresh_optimizer", "keep_dtypes"]


def fill_fresh_optimizer(index: CheckpointIndex, path: Path, owner: Any, state_dict: Any) -> Any:
    """The state dict of an optimizer without state, with uninitialized tensors where the checkpoint at `path` has some.

    Anything else comes back as it is.
    """
    if not isinstance(owner, torch.optim.Optimizer) or state_dict.get("state"):
        return state_dict
    parameters = [parameter for group in owner.param_groups for parameter in group["params"]]
    prefix = (*path, "state")
    state: dict[Any, dict[Any, Any]] = {}
    for name in (*index.tensors, *index.aliases):
        number, key = _place(name, prefix)
        tensor = index.tensor(name)
        if key is not None and tensor is not None and 0 <= number < len(parameters):
            state.setdefault(number, {})[key] = _like(parameters[number], tensor)
    for name, value in index.values.items():
        number, key = _place(name, prefix)
        if key is not None and 0 <= number < len(parameters):
            state.setdefault(number, {})[key] = value
    return {**state_dict, "state": state} if state else state_dict


def keep_dtypes(owner: Any, state_dict: Any) -> None:
    """`Optimizer.load_state_dict` casts state to the dtype of its parameter; put back what was restored in another
    dtype."""
    if not isinstance(owner, torch.optim.Optimizer):
        return
    parameters = [parameter for group in owner.param_groups for parameter in group["params"]]
    for number, restored in state_dict["state"].items():
        own = owner.state[parameters[number]] if isinstance(number, int) and number < len(parameters) else {}
        for key, value in restored.items():
            if (
                isinstance(value, torch.Tensor)
                and isinstance(own.get(key), torch.Tensor)
                and own[key].dtype != value.dtype
            ):
                own[key] = value


def _place(name: Path, prefix: Path) -> tuple[int, Any]:
    """(parameter number, key) of a name like ``<prefix>/3/exp_avg``; the key is None for other names."""
    if len(name) == len(prefix) + 2 and name[: len(prefix)] == prefix and isinstance(name[-2], int):
        return name[-2], name[-1]
    return -1, None


def _like(parameter: torch.Tensor, stored: StoredTensor) -> torch.Tensor:
    dtype = torch_dtype(stored.dtype)
    if tuple(parameter.shape) == stored.shape:
        return torch.empty_like(parameter, dtype=dtype, requires_grad=False)
    device = torch.device("cpu") if not stored.shape else parameter.device
    return torch.empty(stored.shape, dtype=dtype, device=device)
