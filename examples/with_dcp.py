"""Train a sharded model with torch.distributed.checkpoint (DCP), which writes to a checkpoint root.

    torchrun --standalone --nproc-per-node 2 examples/with_dcp.py --root /tmp/dcp --steps 6

Stop the run at any moment and start the same command again, also on another number of ranks: it continues from the
newest step.
"""

import argparse
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import async_save
from torch.distributed.checkpoint.stateful import Stateful
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from ckpt.integrations.dcp import Reader, Writer, latest_step


class App(Stateful):
    """Model and optimizer, with parameters by name, so that any number of ranks can load them."""

    def __init__(self, model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
        self.model = model
        self.optimizer = optimizer

    def state_dict(self) -> dict[str, Any]:
        model, optimizer = get_state_dict(self.model, self.optimizer)
        return {"model": model, "optimizer": optimizer}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        set_state_dict(
            self.model,
            self.optimizer,
            model_state_dict=state_dict["model"],
            optim_state_dict=state_dict["optimizer"],
        )


def train(root: str, steps: int) -> None:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 1))
    fully_shard(model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    optimizer = torch.optim.AdamW(model.parameters())
    state: dict[str, Any] = {"app": App(model, optimizer), "step": 0}
    newest = latest_step(root)
    if newest is not None:
        load(state, checkpoint_id=f"{root}/step_{newest}", storage_reader=Reader())

    saving: Any = None
    saves = dist.new_group(backend="gloo")  # for the thread that saves, while this one trains
    with Writer(root, process_group=saves, keep=2) as writer:
        for step in range(state["step"] + 1, steps + 1):
            torch.manual_seed(step)
            loss = model(torch.randn(16, 64)).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            if step % 2 == 0:
                state["step"] = step
                if saving is not None:
                    saving.result()  # one save at a time; raises what made it fail
                checkpoint_id = f"{root}/step_{step}"
                saving = async_save(state, checkpoint_id=checkpoint_id, storage_writer=writer, process_group=saves)
        if saving is not None:
            saving.result()
    if dist.get_rank() == 0:
        print(f"from step {newest} to {steps}, loss {loss.item():.6f}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="A sharded model, saved with torch.distributed.checkpoint")
    parser.add_argument("--root", required=True)
    parser.add_argument("--steps", type=int, default=6)
    arguments = parser.parse_args()
    dist.init_process_group("gloo")
    train(arguments.root, arguments.steps)
    dist.destroy_process_group()
