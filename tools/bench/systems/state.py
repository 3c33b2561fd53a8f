"""The state of a transformer in a job: whole on each rank, or sharded by FSDP2; and the memory of one rank of it."""

import math
from typing import cast

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from tools.bench.workload import PARTS, State, make_shapes, make_state, tensors

_PRIME = 65521


def replicated_state(total_bytes: float, device: str = "cpu") -> State:
    """Return the whole state, the same on every rank: that of data-parallel training."""
    state = make_state(total_bytes)
    return {part: {name: tensor.to(device) for name, tensor in named.items()} for part, named in state.items()}


def sharded_state(total_bytes: float, device: str = "cpu") -> State:
    """Return DTensors over all ranks of the default process group: weights made by `fully_shard`, the rest like them.

    Their values do not depend on the number of ranks: another number must load the same.
    """
    mesh = init_device_mesh(device, (dist.get_world_size(),))
    with torch.device("meta"):
        model = _Model(make_shapes(total_bytes))
    for layer in model.children():
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    model.to_empty(device=device)
    weights = {name: cast(DTensor, parameter.detach()) for name, parameter in model.named_parameters()}

    def like(weight: DTensor, number: int, dtype: torch.dtype) -> DTensor:
        local = (
            weight.to_local()
            if dtype is torch.bfloat16
            else torch.empty(weight.to_local().shape, dtype=dtype, device=device)
        )
        _, offset = compute_local_shape_and_global_offset(weight.shape, mesh, weight.placements)
        first = number + offset[0] * math.prod(weight.shape[1:])
        values = torch.arange(first, first + local.numel(), dtype=torch.float64, device=device)
        local.view(-1).copy_(values.remainder_(_PRIME))
        if dtype is torch.bfloat16:
            return weight
        return DTensor.from_local(
            local, mesh, weight.placements, run_check=False, shape=weight.shape, stride=weight.stride()
        )

    numbered = list(enumerate(weights.items()))
    return {part: {name: like(weight, n, dtype) for n, (name, weight) in numbered} for part, dtype in PARTS.items()}


class _Model(nn.Module):
    """Parameters with the names and shapes of a transformer, grouped in its layers. It computes nothing."""

    def __init__(self, shapes: dict[str, tuple[int, ...]]) -> None:
        super().__init__()
        for name, shape in shapes.items():
            *parents, leaf = name.split(".")
            module: nn.Module = self
            for parent in ["_".join(parents[:2]), *parents[2:]]:
                if not hasattr(module, parent):
                    module.add_module(parent, nn.Module())
                module = cast(nn.Module, getattr(module, parent))
            module.register_parameter(leaf, nn.Parameter(torch.empty(shape, dtype=torch.bfloat16)))


def local_tensors(state: State) -> list[torch.Tensor]:
    """Return this rank's memory of every tensor, contiguous, in the order of the state."""
    return [tensor.to_local() if isinstance(tensor, DTensor) else tensor for tensor in tensors(state)]


def local_state(state: State) -> State:
    """Return the same dicts with this rank's memory instead of DTensors."""
    return {
        part: {name: tensor.to_local() if isinstance(tensor, DTensor) else tensor for name, tensor in named.items()}
        for part, named in state.items()
    }


def share_of(state: State, rank: int, world_size: int) -> list[torch.Tensor]:
    """Return what this rank has to stage: its shards, or an equal part of each tensor that all ranks have."""
    if any(isinstance(tensor, DTensor) for tensor in tensors(state)):
        return [tensor for tensor in local_tensors(state) if tensor.numel()]
    parts = []
    for tensor in tensors(state):
        count = tensor.numel()
        part = tensor.view(-1)[count * rank // world_size : count * (rank + 1) // world_size]
        if part.numel():
            parts.append(part)
    return parts
