"""DDP, FSDP2, a device mesh and a group of its own, all met through a plain `init_process_group`."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from tests.inprocess.unchanged.programs.journal import begin, digest, note, run, strike

STEPS = 4


def train() -> str:
    begin()
    dist.init_process_group("gloo")
    weights = digest(fit_ddp() | fit_fsdp())
    dist.destroy_process_group()
    return weights


def fit_ddp() -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 1))
    ddp = DistributedDataParallel(model)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.05)
    for step in range(1, STEPS + 1):
        _step(ddp, optimizer, step)
        if step == 1:
            note("first step", weights=digest(model.state_dict()))
    everybody = dist.new_group(list(range(dist.get_world_size())))
    total = torch.ones(())
    dist.all_reduce(total, group=everybody)
    assert int(total) == dist.get_world_size()
    return {f"ddp.{name}": tensor for name, tensor in model.state_dict().items()}


def fit_fsdp() -> dict[str, torch.Tensor]:
    torch.manual_seed(1)
    mesh = init_device_mesh("cpu", (1, dist.get_world_size()), mesh_dim_names=("replicate", "shard"))
    model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 1))
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    for step in range(STEPS + 1, 2 * STEPS + 1):
        _step(model, optimizer, step)
    return {f"fsdp.{name}": tensor.full_tensor() for name, tensor in model.state_dict().items()}


def _step(model: torch.nn.Module, optimizer: torch.optim.Optimizer, step: int) -> None:
    inputs = torch.randn(4, 8, generator=torch.Generator().manual_seed(100 * step + dist.get_rank()))
    loss = (model(inputs) - inputs.sum(dim=1, keepdim=True)).square().mean()
    optimizer.zero_grad()
    strike(step)
    loss.backward()
    optimizer.step()


if __name__ == "__main__":
    run(train)
