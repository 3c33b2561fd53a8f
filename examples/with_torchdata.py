"""Training that continues with the next batch: the data loader is a part of the state.

    python examples/with_torchdata.py --root /tmp/numbers --die-at 8     # is killed after step 8; saved every 5 steps
    python examples/with_torchdata.py --root /tmp/numbers                # continues after step 5
    torchrun --nproc-per-node 2 examples/with_torchdata.py --root /tmp/two

Prints the weights and a digest of the batches of all steps from the first one of this process on. Both are the same,
bit by bit, as those of a run that was not killed. Needs torchdata.
"""

import argparse
import hashlib
import os
import signal

import torch
import torch.distributed as dist
from torch.utils.data import TensorDataset
from torchdata.stateful_dataloader import StatefulDataLoader

import ckpt

STEPS, SAVE_EVERY = 20, 5


def train(root: str, workers: int, die_at: int | None) -> str:
    rank = dist.get_rank()
    torch.manual_seed(1234 + rank)
    inputs = torch.randn(96, 8)
    dataset = TensorDataset(inputs, inputs.sum(dim=1, keepdim=True))
    loader = StatefulDataLoader(dataset, batch_size=8, shuffle=True, num_workers=workers)  # 12 batches
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Dropout(0.1), torch.nn.Linear(8, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    # Ranks train on their own here.
    own = {"model": ckpt.PerRank(model), "optimizer": ckpt.PerRank(optimizer)}
    state = {**own, "loader": loader, "rng": ckpt.RngState()}

    seen = hashlib.sha256()
    with ckpt.Checkpointer(root, keep=2) as checkpointer:
        step = first = checkpointer.restore(state) or 0
        while step < STEPS:
            for batch, target in loader:  # after a restore, the rest of the epoch
                step += 1
                seen.update(batch.numpy().tobytes())
                optimizer.zero_grad()
                (model(batch) - target).square().mean().backward()
                optimizer.step()
                if step % SAVE_EVERY == 0:
                    checkpointer.async_save(state, step)
                checkpointer.maybe_finalize(blocking=step + 1 == die_at)
                if step == die_at:
                    os.kill(os.getpid(), signal.SIGKILL)
                if step == STEPS:
                    break
    weights = hashlib.sha256(b"".join(tensor.numpy().tobytes() for tensor in model.state_dict().values()))
    return f"rank {rank} from step {first + 1}: weights {weights.hexdigest()[:12]}, data {seen.hexdigest()[:12]}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--root", required=True)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--die-at", type=int)
    options = parser.parse_args()
    if "MASTER_ADDR" in os.environ:
        dist.init_process_group("gloo")
    else:
        store = dist.TCPStore("127.0.0.1", 0, 1, is_master=True)  # type: ignore[attr-defined]
        dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    print(train(options.root, options.workers, options.die_at), flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
