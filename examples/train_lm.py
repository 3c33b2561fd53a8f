"""Train a small byte-level language model and checkpoint it while it trains.

    torchrun --standalone --nproc-per-node 2 examples/train_lm.py --root /tmp/lm

The text is the source code of Python's own standard library. Stop it at any moment, in any way, and start the same
command again: it goes on from the last finalized step and ends with the same weights, bit by bit, as a run that was
never stopped.
"""

import argparse
import hashlib
import json
import sysconfig
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import ckpt


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
    """The same batch for the same seed, whatever was drawn before."""
    starts = torch.randint(len(text) - context, (batch,), generator=torch.Generator().manual_seed(seed))
    rows = torch.stack([text[start : start + context + 1] for start in starts]).long()
    return rows[:, :-1], rows[:, 1:]


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="byte-level language model on Python's standard library")
    parser.add_argument("--root", required=True, help="where the checkpoints go")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--save-every", type=int, default=5)
    parser.add_argument("--keep-last", type=int, default=3)
    parser.add_argument("--d-model", type=int, default=256)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--context", type=int, default=128)
    parser.add_argument("--batch", type=int, default=8, help="sequences per rank and step")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--log-file", type=Path, help="append one JSON line per step to this file (rank 0)")
    return parser.parse_args()


def main() -> None:
    args = parse_args()
    torch.use_deterministic_algorithms(True)
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    log_file = args.log_file.open("a", buffering=1) if args.log_file and rank == 0 else None

    def log(**record: Any) -> None:
        if log_file:
            log_file.write(json.dumps(record) + "\n")

    text = read_text()
    torch.manual_seed(args.seed)  # the same initial weights on every rank
    model = ByteLM(args.d_model, args.layers, args.context)
    ddp = DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 10))
    torch.manual_seed(args.seed + 1 + rank)  # different dropout on every rank

    # Everything a run needs to go on, described once, for saving and for restoring.
    per_rank: dict[str, Any] = {"torch_rng": torch.get_rng_state(), "batches_read": 0}
    state = {"model": model, "optimizer": optimizer, "scheduler": scheduler, "rank": ckpt.PerRank(per_rank)}

    with ckpt.Checkpointer(args.root, keep_last=args.keep_last) as checkpointer:
        start = checkpointer.restore(state) or 0
        torch.set_rng_state(per_rank["torch_rng"])
        log(event="start", step=start, world_size=world_size)

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

            if step % args.save_every == 0:
                per_rank["torch_rng"] = torch.get_rng_state()
                # Returns once the bytes are copied to shared memory. In short: checkpointer.async_save(state, step)
                checkpointer.queue.schedule_async_request(checkpointer.save_request(state, step))
                log(event="save", step=step, stall_s=time.perf_counter() - stepped, time=time.time())
            for saved in checkpointer.maybe_finalize():
                log(event="finalized", step=saved)
            log(event="step", step=step, loss=loss.item(), step_s=stepped - began, in_flight=in_flight)

    if rank == 0:  # leaving the `with` block has waited for the last save
        digest = hashlib.sha256(b"".join(t.numpy().tobytes() for t in model.state_dict().values())).hexdigest()
        log(event="end", step=args.steps, digest=digest)
        print(f"step {args.steps}: weights sha256 {digest}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
