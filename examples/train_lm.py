"""Train a small byte-level language model with asynchronous checkpoints.

    torchrun --standalone --nproc-per-node 2 examples/train_lm.py --root /tmp/lm

The text is the source code of Python's standard library. Stop the run at any moment, in any way, and start the same
command again: it continues from the newest published step and ends with the same weights, bit by bit, as a run that
was never stopped.

With --restart the processes stay alive when a rank fails or hangs: all of them call `train` again, from the newest
step, which most of them still have in memory. Ranks beyond --active are spares and replace ranks that die. (Not under
torchrun, which ends all ranks of a node when one dies: use ckpt_launcher --ft-restart-policy in-process.)
"""

import argparse
import contextlib
import hashlib
import json
import random
import sys
import sysconfig
import time
from collections.abc import Callable
from dataclasses import asdict
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import ckpt
import inprocess
from ckpt.restart import CheckpointAbort, CheckpointFinalize
from ckpt.sinks import JsonLines
from inprocess.abort import AbortTorchDistributed
from inprocess.rank_assignment import MaxActiveWorldSize, ShiftRanks

Observer = Callable[[dict[str, Any]], None]


class ByteLM(nn.Module):
    def __init__(self, d_model: int, layers: int, context: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(256, d_model)
        self.position = nn.Parameter(torch.zeros(context, d_model))
        heads, wide = d_model // 64, 4 * d_model
        block = nn.TransformerEncoderLayer(d_model, heads, wide, dropout=0.1, batch_first=True, norm_first=True)
        self.blocks = nn.TransformerEncoder(block, layers, nn.LayerNorm(d_model), enable_nested_tensor=False)
        nn.init.normal_(self.embed.weight, std=0.02)
        self.register_buffer("mask", nn.Transformer.generate_square_subsequent_mask(context), persistent=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.blocks(self.embed(tokens) + self.position, mask=self.mask, is_causal=True)
        return F.linear(x, self.embed.weight)


def read_text(max_bytes: int = 4_000_000) -> torch.Tensor:
    files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    text = b"".join(file.read_bytes() for file in files)[:max_bytes]
    return torch.frombuffer(bytearray(text), dtype=torch.uint8)


def batch_at(text: torch.Tensor, batch: int, context: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return inputs and targets, which depend on the seed only."""
    starts = torch.randint(len(text) - context, (batch,), generator=torch.Generator().manual_seed(seed))
    rows = torch.stack([text[start : start + context + 1] for start in starts]).long()
    return rows[:, :-1], rows[:, 1:]


def train(
    args: argparse.Namespace,
    text: torch.Tensor,
    checkpointer: ckpt.Checkpointer,
    observe: Observer,
    watcher: ckpt.PreemptionWatcher | None = None,
    call: inprocess.CallWrapper | None = None,
) -> None:
    """Run the whole training. Depends on earlier calls in this process only through the checkpoints."""
    dist.init_process_group("gloo")  # after a restart it may consist of other ranks
    rank, world_size = dist.get_rank(), dist.get_world_size()

    def log(**record: Any) -> None:
        record["time"] = time.time()
        if args.log_file and rank == 0:
            with args.log_file.open("a") as log_file:
                log_file.write(json.dumps(record) + "\n")
        observe(record)

    torch.manual_seed(args.seed)  # the same initial weights on every rank
    model = ByteLM(args.d_model, args.layers, args.context)
    ddp = DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 10))
    for seed in (torch.manual_seed, np.random.seed, random.seed):  # the generators that RngState saves
        seed(args.seed + 1 + rank)  # different dropout on every rank

    # Everything that a run needs to continue, for saving and for restoring.
    per_rank = {"batches_read": 0}
    state = {"model": model, "optimizer": optimizer, "scheduler": scheduler}
    state |= {"rng": ckpt.RngState(), "rank": ckpt.PerRank(per_rank)}

    # All ranks call this, new ones included; ranks of the previous iteration find the data in memory.
    start = checkpointer.restore(state) or 0
    report = checkpointer.last_restore
    log(event="start", step=start, world_size=world_size, restored=asdict(report) if report else None)

    step = start
    for step in range(start + 1, args.steps + 1):
        began = time.perf_counter()
        in_flight = checkpointer.queue.get_num_unfinalized_calls()
        seed = (args.seed * 1_000_003 + per_rank["batches_read"]) * world_size + rank
        inputs, targets = batch_at(text, args.batch, args.context, seed)
        per_rank["batches_read"] += 1
        loss = F.cross_entropy(ddp(inputs).flatten(0, 1), targets.flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        scheduler.step()
        stepped = time.perf_counter()
        log(event="step", step=step, loss=loss.item(), step_s=stepped - began, in_flight=in_flight)

        if step % args.save_every == 0:
            begin = time.perf_counter()
            # The same as checkpointer.async_save(state, step): returns when the data is copied to shared memory.
            checkpointer.queue.schedule_async_request(checkpointer.save_request(state, step))
            log(event="save", step=step, stall_s=time.perf_counter() - begin)
        elif args.snapshot_every is not None and step % args.snapshot_every == 0:
            begin = time.perf_counter()
            checkpointer.snapshot(state, step)  # the same copy, which stays in memory
            log(event="snapshot", step=step, stall_s=time.perf_counter() - begin)
        for saved in checkpointer.maybe_finalize():
            log(event="finalized", step=saved)
        if call is not None:
            call.ping()  # a rank that does not get here for --soft-timeout seconds is treated as hanging
        if watcher is not None and watcher.should_stop(step):
            watcher.save(state, step)
            log(event="preempted", step=step)
            break

    for saved in checkpointer.maybe_finalize(blocking=True):
        log(event="finalized", step=saved)
    if rank == 0:
        digest = hashlib.sha256(b"".join(t.numpy().tobytes() for t in model.state_dict().values())).hexdigest()
        log(event="end", step=step, digest=digest)
        print(f"step {step}: weights sha256 {digest}")
    del ddp  # freed after its group it could block indefinitely
    dist.destroy_process_group()


def restart_wrapper(args: argparse.Namespace, checkpointer: ckpt.Checkpointer) -> inprocess.Wrapper:
    """Return the wrapper that restarts `train` after a fault, when groups are aborted and saves in flight decided."""
    return inprocess.Wrapper(
        abort=inprocess.Compose(CheckpointAbort(checkpointer), AbortTorchDistributed()),
        finalize=CheckpointFinalize(checkpointer, on_fault=args.on_fault),
        rank_assignment=inprocess.Compose(MaxActiveWorldSize(args.active), ShiftRanks()),
        soft_timeout=timedelta(seconds=args.soft_timeout),
        monitor_process_logfile=args.monitor_log,
    )


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="byte-level language model on Python's standard library")
    parser.add_argument("--root", required=True, help="where the checkpoints go")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--save-every", type=int, default=5)
    parser.add_argument("--snapshot-every", type=int, help="steps from one snapshot in memory to the next")
    parser.add_argument("--keep-last", type=int, default=3)
    parser.add_argument("--d-model", type=int, default=256)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--context", type=int, default=128)
    parser.add_argument("--batch", type=int, default=8, help="sequences per rank and step")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--events", help="append what is done with checkpoints to this file, as JSON lines (all ranks)")
    parser.add_argument("--log-file", type=Path, help="append one JSON line per step to this file (rank 0)")
    parser.add_argument("--preemptible", action="store_true", help="save and end when a signal says so")
    restart = parser.add_argument_group("restart in the same processes")
    restart.add_argument("--restart", action="store_true", help="continue after ranks fail, hang or die")
    restart.add_argument("--active", type=int, help="number of ranks that train at most; the others are spares")
    restart.add_argument("--on-fault", choices=("drain", "abort"), default="drain", help="how saves end")
    restart.add_argument("--soft-timeout", type=float, default=60.0, help="seconds without a step until a hang")
    restart.add_argument("--monitor-log", help="absolute path that contains {rank}; events.jsonl is beside it")
    return parser.parse_args()


def main(observe: Observer = lambda record: None) -> int:
    """Run the command, and return the exit code. `observe` receives every log record, on every rank."""
    args = parse_args()
    torch.use_deterministic_algorithms(True)
    torch.set_num_threads(1)
    text = read_text()
    with contextlib.ExitStack() as stack:
        if args.events:
            stack.enter_context(ckpt.observe(JsonLines(args.events)))
        checkpointer = ckpt.Checkpointer(args.root, keep=args.keep_last, snapshots=args.snapshot_every)
        stack.enter_context(checkpointer)
        watcher = stack.enter_context(ckpt.PreemptionWatcher(checkpointer)) if args.preemptible else None
        run = restart_wrapper(args, checkpointer)(train) if args.restart else train
        run(args, text, checkpointer, observe, watcher)
    return 0 if watcher is None else watcher.exit_code


if __name__ == "__main__":
    sys.exit(main())
