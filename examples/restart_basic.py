"""DDP training that continues in the same processes after one rank raises an exception.

    torchrun --standalone --nproc-per-node 2 examples/restart_basic.py

After the fault, all ranks call `train` again. A function can be restarted if it creates everything it needs itself,
including process group, model and optimizer, and nothing in it catches `BaseException`. Data that must survive a
restart is kept outside of it: here the weights, in memory, every ten steps. (examples/train_lm.py uses checkpoints.)
"""

from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import inprocess

STEPS, KEEP_EVERY, FAULTY_STEP = 40, 10, 25


def train(kept: dict[str, Any], call: inprocess.CallWrapper) -> float:
    """Train until the last step; return the loss. The wrapper passes `call` because of its annotation."""
    dist.init_process_group("gloo")
    loss = fit(dist.get_rank(), dist.get_world_size(), kept, call)
    dist.destroy_process_group()  # after `fit` has freed the DDP module, which could block indefinitely otherwise
    return loss


def fit(rank: int, world_size: int, kept: dict[str, Any], call: inprocess.CallWrapper) -> float:
    torch.manual_seed(0)
    model = torch.nn.Linear(8, 1)
    model.load_state_dict(kept["model"] if kept else model.state_dict())
    ddp = DistributedDataParallel(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    start = torch.tensor(kept.get("step", 0))
    dist.broadcast(start, src=0)  # ranks may have kept different steps; DDP, too, uses the weights of rank 0
    first = int(start) + 1
    tell(f"iteration {call.iteration}: rank {rank} of {world_size} begins with step {first}")

    loss = torch.zeros(())
    for step in range(first, STEPS + 1):
        inputs = torch.randn(16, 8, generator=torch.Generator().manual_seed(step * world_size + rank))
        loss = (ddp(inputs) - inputs.sum(dim=1, keepdim=True)).square().mean()
        optimizer.zero_grad()
        loss.backward()  # a collective: when one rank fails, the others are blocked here
        if step == FAULTY_STEP and call.iteration == 0 and rank == 1:
            raise RuntimeError("a fault on one rank")
        optimizer.step()
        if step % KEEP_EVERY == 0:
            weights = {name: tensor.clone() for name, tensor in model.state_dict().items()}
            with call.atomic():  # no restart between the two updates
                kept.update(model=weights, step=step)
    return loss.item()


def main() -> None:
    wrapper = inprocess.Wrapper(
        initialize=inprocess.initialize.RetryController(max_iterations=3),
        soft_timeout=timedelta(seconds=30),
    )
    tell(f"done, loss {wrapper(train)({}):.4f}")


def tell(line: str) -> None:
    """Print a line in one write, so that lines of several ranks do not mix."""
    print(f"{line}\n", end="", flush=True)


if __name__ == "__main__":
    main()
