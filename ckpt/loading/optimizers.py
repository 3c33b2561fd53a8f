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


def fill_fresh_optimizer(
    index: CheckpointIndex, rank: int, path: Path, owner: Any, state_dict: Any, per_rank: bool
) -> Any:
    """The state dict of an optimizer without state, with uninitialized tensors where the checkpoint at `path` has some.

    `per_rank`: where it has some of this `rank` alone. Anything else comes back as it is.
    """
    if not isinstance(owner, torch.optim.Optimizer) or state_dict.get("state"):
        return state_dict
    parameters = [parameter for group in owner.param_groups for parameter in group["params"]]
    prefix = (*path, "state")
    state: dict[Any, Any] = {}
    for name in (*(index.per_rank_tensors if per_rank else index.tensors), *index.aliases):
        tensor = index.tensor(name, rank if per_rank else None)
        if tensor is not None and _is_below(prefix, name, len(parameters)):
            _put(state, name[len(prefix) :], _like(parameters[int(name[len(prefix)])], tensor))
    own_values = ((name, own[rank]) for name, own in index.per_rank_values.items() if rank in own)
    for name, value in own_values if per_rank else index.values.items():
        if _is_below(prefix, name, len(parameters)):
            _put(state, name[len(prefix) :], value)
    filled = {number: {key: _with_lists(item) for key, item in own.items()} for number, own in state.items()}
    return {**state_dict, "state": filled} if filled else state_dict


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


def _is_below(prefix: Path, name: Path, parameters: int) -> bool:
    """Whether it is a name like ``<prefix>/3/exp_avg``, of one of so many parameters."""
    if len(name) < len(prefix) + 2 or name[: len(prefix)] != prefix:
        return False
    number = name[len(prefix)]
    return isinstance(number, int) and 0 <= number < parameters


def _put(tree: dict[Any, Any], path: Path, leaf: Any) -> None:
    for key in path[:-1]:
        tree = tree.setdefault(key, {})
    tree[path[-1]] = leaf


def _with_lists(node: Any) -> Any:
    """Names do not tell a list from a dict: what has the keys 0, 1, ... is taken for a list."""
    if not isinstance(node, dict):
        return node
    items = {key: _with_lists(item) for key, item in node.items()}
    return (
        [items[number] for number in range(len(items))] if items and items.keys() == set(range(len(items))) else items
    )


def _like(parameter: torch.Tensor, stored: StoredTensor) -> torch.Tensor:
    dtype = torch_dtype(stored.dtype)
    shard = parameter.to_local() if hasattr(parameter, "to_local") else parameter  # of a DTensor
    if stored.shape in (tuple(parameter.shape), tuple(shard.shape)):
        return torch.empty_like(parameter, dtype=dtype, requires_grad=False)
    device = torch.device("cpu") if not stored.shape else parameter.device
    return torch.empty(stored.shape, dtype=dtype, device=device)
