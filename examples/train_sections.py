"""DDP training with named sections: a hang in a section is detected, and the job continues from the last checkpoint.

    ckpt_launcher --standalone --nproc-per-node 2 --max-restarts 3 \\
        --ft-rank-section-timeouts setup:60,step:10,checkpoint:30,ckpt.write:60 \\
        examples/train_sections.py --root /tmp/sections --hang step:7

The launcher ends the rank that hangs, and starts all ranks again. With --in-process the processes stay alive instead,
and the limits come from --limits. Limits are learned when there is enough data, and saved with the checkpoints. After a
SIGTERM to the launcher the job saves a last checkpoint and ends with exit code 0; the same command continues from
there. The final weights are always the same, bit by bit.
"""

import argparse
import hashlib
import json
import signal
import sysconfig
import threading
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import ckpt
import inprocess
from ckpt.restart import CheckpointAbort, CheckpointFinalize, report_sections
from inprocess.abort import AbortTorchDistributed
from inprocess.fault_tolerance import FaultToleranceConfig, RankMonitorClient

CONTEXT, BATCH = 16, 32


def next_byte_model() -> nn.Module:
    return nn.Sequential(
        nn.Embedding(256, 16), nn.Flatten(), nn.Linear(16 * CONTEXT, 128), nn.GELU(), nn.Linear(128, 256)
    )


def read_text() -> torch.Tensor:
    files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))[:20]
    return torch.frombuffer(bytearray(b"".join(file.read_bytes() for file in files)), dtype=torch.uint8)


def batch_at(text: torch.Tensor, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    starts = torch.randint(len(text) - CONTEXT, (BATCH,), generator=torch.Generator().manual_seed(seed))
    rows = torch.stack([text[start : start + CONTEXT + 1] for start in starts]).long()
    return rows[:, :-1], rows[:, -1]


def hang_if_asked(args: argparse.Namespace, section: str, step: int, rank: int) -> None:
    """Hang the last rank indefinitely, once per checkpoint root."""
    marker = args.root / f"hung_in_{section}_{step}"
    if f"{section}:{step}" in args.hang and rank == dist.get_world_size() - 1 and not marker.exists():
        marker.touch()
        print(f"rank {rank} hangs in section {section}, step {step}", flush=True)
        threading.Event().wait()


def on_any_rank(flag: bool) -> bool:
    """Collective. Return whether the flag is true on any rank."""
    shared = torch.tensor(int(flag))
    dist.all_reduce(shared, op=dist.ReduceOp.MAX)
    return bool(shared)


def train(
    args: argparse.Namespace,
    checkpointer: ckpt.Checkpointer,
    stopping: threading.Event,
) -> None:
    """Run the whole training. Ends early with a last checkpoint if `stopping` is set on any rank."""
    dist.init_process_group("gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    client = RankMonitorClient()
    client.init_workload_monitoring()  # the rank is watched from here on
    report_sections(checkpointer, client)  # the sections ckpt.* that have a limit

    with client.section("setup"):
        text = read_text()
        torch.manual_seed(0)
        model = next_byte_model()
        ddp = DistributedDataParallel(model)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        learned = {"limits": json.dumps(client.state_dict())}
        state = {"model": model, "optimizer": optimizer, "learned": learned}
        start = checkpointer.restore(state) or 0
        client.load_state_dict(json.loads(learned["limits"]))
        if rank == 0:
            print(f"begins after step {start}, limits {client.section_timeouts}", flush=True)

    for step in range(start + 1, args.steps + 1):
        client.set_iteration(step)
        with client.section("step"):
            inputs, targets = batch_at(text, step * world_size + rank)
            loss = F.cross_entropy(ddp(inputs), targets)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            hang_if_asked(args, "step", step, rank)
            is_last = on_any_rank(stopping.is_set()) or step == args.steps
        if is_last or step % args.save_every == 0:
            with client.section("checkpoint"):
                learned["limits"] = json.dumps(client.state_dict())
                checkpointer.async_save(state, step)  # the section covers staging only
                hang_if_asked(args, "checkpoint", step, rank)
            if step >= args.learn_after:  # on all ranks: learning is a collective
                client.calculate_and_set_section_timeouts(["step", "checkpoint"], False, skip_if_not_ready=True)
        checkpointer.maybe_finalize()
        if is_last:
            break

    client.shutdown_workload_monitoring()  # no limits for the rest
    checkpointer.maybe_finalize(blocking=True)
    if rank == 0:
        digest = hashlib.sha256(b"".join(t.numpy().tobytes() for t in model.state_dict().values())).hexdigest()
        print(f"step {step}: weights sha256 {digest}", flush=True)
    del ddp  # freed after its group it could block indefinitely
    dist.destroy_process_group()


def wrapper(args: argparse.Namespace, checkpointer: ckpt.Checkpointer) -> inprocess.Wrapper:
    """Return the wrapper: a late section restarts `train` in its processes; 30 s later its process is ended."""
    return inprocess.Wrapper(
        abort=inprocess.Compose(CheckpointAbort(checkpointer), AbortTorchDistributed()),
        finalize=CheckpointFinalize(checkpointer),
        sections=FaultToleranceConfig.from_kwargs(rank_section_timeouts=args.limits, safety_factor=args.safety_factor),
        soft_timeout=timedelta(seconds=60),
        hard_timeout=timedelta(seconds=90),
    )


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="a training with sections")
    parser.add_argument("--root", type=Path, required=True, help="where the checkpoints go")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--save-every", type=int, default=5)
    parser.add_argument("--learn-after", type=int, default=20, help="learn limits at checkpoints from this step on")
    parser.add_argument("--hang", action="append", default=[], metavar="SECTION:STEP", help="hang once in this section")
    parser.add_argument("--in-process", action="store_true", help="restart in the same processes")
    parser.add_argument("--limits", default="setup:60,step:10,checkpoint:30,ckpt.write:60", help="with --in-process")
    parser.add_argument("--safety-factor", type=float, default=5.0, help="with --in-process")
    return parser.parse_args()


def main() -> None:
    args = parse_args()
    args.root.mkdir(parents=True, exist_ok=True)
    torch.use_deterministic_algorithms(True)
    torch.set_num_threads(1)
    stopping = threading.Event()
    signal.signal(signal.SIGTERM, lambda _number, _frame: stopping.set())
    with ckpt.Checkpointer(args.root, keep=3) as checkpointer:
        run = wrapper(args, checkpointer)(train) if args.in_process else train
        run(args, checkpointer, stopping)


if __name__ == "__main__":
    main()
