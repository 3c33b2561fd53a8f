"""Save two steps with dcp.async_save, while the state goes on changing: ROOT, "thread" or "process", the first step.

A job that does not begin with step 1 loads the step before.
"""

import sys
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from ckpt.integrations.dcp import Reader, Writer


def main(root: str, kind: str, first: str) -> None:
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    state: dict[str, Any] = {"w": distribute_tensor(torch.zeros(6), mesh, [Shard(0)]), "n": 0}
    if int(first) > 1:
        dcp.load(state, checkpoint_id=f"{root}/step_{int(first) - 1}", storage_reader=Reader())
    with Writer(root) as writer:
        for step in (int(first), int(first) + 1):
            state["w"].add_(1)
            state["n"] = step
            saving = dcp.async_save(
                state,
                checkpoint_id=f"{root}/step_{step}",
                storage_writer=writer,
                async_checkpointer_type=AsyncCheckpointerType(kind),
            )
            state["w"].add_(10)
            saving.result(timeout=100)
            state["w"].sub_(10)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
