"""States in every layout that ranks can have, filled with values that depend on the name alone.

So the same state can be made on any number of ranks, and what a restore must bring is known without the run that saved.
"""

from __future__ import annotations

import hashlib
from typing import Any

import torch
from torch import nn

_SHAPES = ((7, 5), (10, 3), (1, 4), (0, 4), (33, 17), (64, 48), (3, 5, 7), (2,), (19,))


def full_tensor(name: str, shape: tuple[int, ...], dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """The whole tensor of this name."""
    seed = int.from_bytes(hashlib.blake2b(name.encode(), digest_size=6).digest(), "little")
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def build(world_size: int) -> dict[str, Any]:
    """A state over all ranks: plain, sharded by hand in one and two dimensions, and by FSDP2 and tensor parallelism."""
    from torch.distributed.device_mesh import init_device_mesh

    first = 2 if world_size % 2 == 0 else 1
    flat = init_device_mesh("cpu", (world_size,), mesh_dim_names=("x",))
    grid = init_device_mesh("cpu", (first, world_size // first), mesh_dim_names=("dp", "tp"))
    return {
        "plain": {f"{shape}": full_tensor(f"plain{shape}", shape) for shape in _SHAPES},
        "sharded": {name: _distributed(name, *how) for name, how in _shardings(flat, grid).items()},
        "ddp": _ddp(),
        "fsdp": _fsdp(flat),
        "fsdp_tp": _fsdp_and_tensor_parallel(grid),
        "hsdp": _fsdp(grid),
        "numbers": [1, 2.5, "three", None],
    }


def _shardings(flat: Any, grid: Any) -> dict[str, tuple[Any, list[Any], tuple[int, ...]]]:
    from torch.distributed.tensor import Replicate, Shard

    both: dict[str, tuple[Any, list[Any]]] = {
        "rows": (flat, [Shard(0)]),
        "replicated": (flat, [Replicate()]),
        "blocks": (grid, [Shard(0), Shard(1)]),
        "columns_of_replicas": (grid, [Replicate(), Shard(1)]),
        "rows_twice": (grid, [Shard(0), Shard(0)]),
        "transposed_blocks": (grid, [Shard(1), Shard(0)]),
        "one_dimension_of_the_mesh": (grid["tp"], [Shard(0)]),
    }
    result: dict[str, tuple[Any, list[Any], tuple[int, ...]]] = {}
    for name, (mesh, placements) in both.items():
        for shape in _SHAPES:
            if len(shape) > 1 or not any(p.is_shard(1) for p in placements):
                result[f"{name}{shape}"] = (mesh, placements, shape)
    return result


def _distributed(name: str, mesh: Any, placements: list[Any], shape: tuple[int, ...]) -> torch.Tensor:
    from torch.distributed.tensor import distribute_tensor

    return distribute_tensor(full_tensor(name, shape), mesh, placements)


class _Block(nn.Module):
    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.up = nn.Linear(width, hidden)
        self.down = nn.Linear(hidden, width)
        self.register_buffer("seen", torch.zeros(3, dtype=torch.int64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.down(torch.relu(self.up(x)))
        return result


def _model(name: str, width: int = 12, hidden: int = 22, dtype: torch.dtype = torch.float32) -> nn.Sequential:
    model = nn.Sequential(_Block(width, hidden), _Block(width, hidden))
    with torch.no_grad():
        for key, tensor in model.state_dict().items():
            tensor.copy_(full_tensor(name + key, tuple(tensor.shape)) * 10)
    return model.to(dtype)


def _ddp() -> nn.Module:
    return nn.parallel.DistributedDataParallel(_model("ddp"))


def _fsdp(mesh: Any) -> nn.Module:
    from torch.distributed.fsdp import fully_shard

    model = _model("fsdp", dtype=torch.bfloat16)
    for block in model:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model


def _fsdp_and_tensor_parallel(grid: Any) -> nn.Module:
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    model = _model("both")
    for block in model:
        parallelize_module(block, grid["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
        fully_shard(block, mesh=grid["dp"])
    return model


def _tensors(state: Any, prefix: str = "") -> dict[str, torch.Tensor]:
    if isinstance(state, nn.Module):
        state = state.state_dict()
    if isinstance(state, dict):
        found: dict[str, torch.Tensor] = {}
        for key, item in state.items():
            found |= _tensors(item, f"{prefix}/{key}")
        return found
    return {prefix: state} if isinstance(state, torch.Tensor) else {}


def _local(tensor: torch.Tensor) -> torch.Tensor:
    from torch.distributed.tensor import DTensor

    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def clear(state: Any) -> None:
    """Overwrite all tensors."""
    with torch.no_grad():
        for tensor in _tensors(state).values():
            _local(tensor.detach()).fill_(77)
    state["numbers"][:] = [0, 0, 0, 0]


def differences(state: Any, expected: Any) -> list[str]:
    """The names of the tensors whose bytes on this rank differ."""
    actual, wanted = _tensors(state), _tensors(expected)
    assert actual.keys() == wanted.keys()
    wrong = [name for name in wanted if not torch.equal(_local(actual[name]), _local(wanted[name]))]
    return wrong + (["numbers"] if state["numbers"] != expected["numbers"] else [])
