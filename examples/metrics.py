"""Training whose saves can be watched: metrics for Prometheus, and a file of events for each rank.

    torchrun --standalone --nproc-per-node 2 examples/metrics.py --root /tmp/measured --hold 60
    curl http://127.0.0.1:9464/metrics                                  # both ranks, in the meantime
    inspect_ckpt report /tmp/measured/root --events /tmp/measured/events_*.jsonl -o /tmp/measured/report.html

Needs prometheus_client. Without torchrun it is one rank.
"""

import argparse
import os
import time

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import ckpt
from ckpt.sinks import JsonLines, Prometheus

SAVE_EVERY = 10


def train(root: str, steps: int) -> None:
    """Train until the last step, from the newest one that was saved."""
    torch.manual_seed(0)
    model = torch.nn.Linear(256, 256)
    parallel = DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(model.parameters())
    state = {"model": model, "optimizer": optimizer, "rng": ckpt.RngState()}
    with ckpt.Checkpointer(root, keep=ckpt.Latest(2) | ckpt.Best("loss")) as checkpointer:
        for step in range((checkpointer.restore(state) or 0) + 1, steps + 1):
            optimizer.zero_grad()
            loss = parallel(torch.randn(16, 256)).square().mean()
            loss.backward()
            optimizer.step()
            if step % SAVE_EVERY == 0:
                checkpointer.async_save(state, step, metrics={"loss": loss.item()})
            checkpointer.maybe_finalize()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--root", required=True, help="a directory for the steps and the events")
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--port", type=int, default=9464)
    parser.add_argument("--hold", type=float, default=0.0, help="seconds to go on serving metrics after training")
    options = parser.parse_args()
    if "MASTER_ADDR" in os.environ:
        dist.init_process_group("gloo")
    else:
        store = dist.TCPStore("127.0.0.1", 0, 1, is_master=True)  # type: ignore[attr-defined]
        dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    # Both sinks on every rank: one process of each node serves the metrics of all of them.
    with (
        ckpt.observe(JsonLines(f"{options.root}/events_{{rank}}.jsonl")) as events,
        ckpt.observe(Prometheus("example", port=options.port)) as metrics,
    ):
        train(f"{options.root}/root", options.steps)
        print(f"rank {dist.get_rank()} is done", flush=True)
        time.sleep(options.hold)
        dist.barrier()  # the process that serves ends last, when all ranks have counted their saves
    print(f"rank {dist.get_rank()} has lost {events.dropped + metrics.dropped} events", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
