"""A DDP training that goes on after a fault, in the same processes: one rank raises, all ranks begin `train` again.

    torchrun --standalone --nproc-per-node 2 examples/restart_basic.py

What makes a function restartable: everything it needs it makes itself, process group, model and optimizer included, and
nothing catches `BaseException`. What is to outlive a restart is kept outside of it; here the weights, every ten steps,
in memory (examples/train_lm.py does that properly, with checkpoints).
"""

from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import inprocess

STEPS, KEEP_EVERY, FAULTY_STEP = 40, 10, 25


def train(kept: dict[str, Any], call: inprocess.CallWrapper | None = None) -> float:
    """`call` is passed by the wrapper, because of its annotation."""
    assert call is not None
    dist.init_process_group("gloo")
    loss = fit(dist.get_rank(), dist.get_world_size(), kept, call)
    dist.destroy_process_group()  # after the DDP module is gone: as last owner of a group it can block for ever
    return loss


def fit(rank: int, world_size: int, kept: dict[str, Any], call: inprocess.CallWrapper) -> float:
    torch.manual_seed(0)
    model = torch.nn.Linear(8, 1)
    model.load_state_dict(kept["model"] if kept else model.state_dict())
    ddp = DistributedDataParallel(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    start = torch.tensor(kept.get("step", 0))
    dist.broadcast(start, src=0)  # a rank may have kept more than another; as DDP does, take what rank 0 has
    first = int(start) + 1
    print(f"iteration {call.iteration}: rank {rank} of {world_size} begins with step {first}", flush=True)

    loss = torch.zeros(())
    for step in range(first, STEPS + 1):
        inputs = torch.randn(16, 8, generator=torch.Generator().manual_seed(step * world_size + rank))
        loss = (ddp(inputs) - inputs.sum(dim=1, keepdim=True)).square().mean()
        optimizer.zero_grad()
        loss.backward()  # the ranks meet here: when one fails, the others are in the middle of this
        if step == FAULTY_STEP and call.iteration == 0 and rank == 1:
            raise RuntimeError("a fault on one rank")
        optimizer.step()
        if step % KEEP_EVERY == 0:
            weights = {name: tensor.clone() for name, tensor in model.state_dict().items()}
            with call.atomic():  # both or neither: no restart comes in between
                kept.update(model=weights, step=step)
    return loss.item()


def main() -> None:
    wrapper = inprocess.Wrapper(
        initialize=inprocess.initialize.RetryController(max_iterations=3),
        soft_timeout=timedelta(seconds=30),
    )
    print(f"done, loss {wrapper(train)({}):.4f}", flush=True)


if __name__ == "__main__":
    main()
