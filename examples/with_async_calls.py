"""A save of your own in the background: each rank writes a file, and when all have, rank 0 writes the list of them.

    torchrun --standalone --nproc-per-node 2 examples/with_async_calls.py --root /tmp/shards

The calls are those of Megatron-LM: a request with a function for the background, one that copies the tensors first, and
functions that finalize it on all ranks together. (`ckpt.Checkpointer` does all of this by itself.)
"""

import argparse
import json
import os
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist

from ckpt import AsyncCallsQueue, AsyncRequest

STEPS, SAVE_EVERY = 30, 10


def write_shard(file: Path, tensors: dict[str, torch.Tensor]) -> None:
    """Runs in a writer process, while training goes on."""
    torch.save(tensors, file)
    with file.open("rb") as written:
        os.fsync(written.fileno())


def copied(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Runs in the trainer before `schedule_async_request` returns; afterwards the tensors may change."""
    return {name: tensor.detach().to("cpu", copy=True) for name, tensor in tensors.items()}


def commit(folder: Path) -> None:
    """Runs in the trainer, when the files of all ranks are written."""
    dist.barrier()  # all ranks finalize the same calls in the same order, so collectives are allowed here
    if dist.get_rank() == 0:
        (folder / "complete.json").write_text(json.dumps(sorted(file.name for file in folder.glob("*.pt"))))


def train(root: Path) -> None:
    queue = AsyncCallsQueue()
    model = torch.nn.Linear(64, 64)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for step in range(1, STEPS + 1):
        optimizer.zero_grad()
        model(torch.randn(16, 64)).square().mean().backward()
        optimizer.step()
        if step % SAVE_EVERY == 0:
            folder = root / str(step)
            folder.mkdir(parents=True, exist_ok=True)
            tensors = model.state_dict()
            file = folder / f"{dist.get_rank()}.pt"
            request = AsyncRequest(write_shard, (file, tensors), [], preload_fn=partial(copied, tensors))
            request.add_finalize_fn(partial(commit, folder))
            queue.schedule_async_request(request)
        queue.maybe_finalize_async_calls(blocking=False)
    queue.close()  # waits for the last calls, and finalizes them


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--root", required=True, type=Path)
    root = parser.parse_args().root
    dist.init_process_group("gloo")
    train(root)
    print(f"rank {dist.get_rank()} is done, {len(list(root.glob('*/complete.json')))} complete", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
