"""Training that is asked to stop, saves on all ranks, and continues where it stopped when it is started again.

    torchrun --standalone --nproc-per-node 2 examples/preemption.py --root /tmp/preempted

Send SIGTERM to torchrun or SIGUSR1 to one of the workers, or create the file given by --stop-file; then run it again.
examples/preemption.sbatch does so in a job of Slurm.
"""

import argparse
import sys
import time
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import ckpt


def train(args: argparse.Namespace) -> int:
    """Train until the last step, or until asked to stop; return the exit code."""
    torch.manual_seed(0)
    model = torch.nn.Linear(256, 256)
    parallel = DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(model.parameters())
    state = {"model": model, "optimizer": optimizer, "rng": ckpt.RngState()}
    with (
        ckpt.Checkpointer(args.root, keep=3) as checkpointer,
        ckpt.PreemptionWatcher(
            checkpointer,
            stop_file=args.stop_file,
            notice=timedelta(seconds=args.notice),
            exit_code=args.exit_code,
        ) as watcher,
    ):
        start = checkpointer.restore(state) or 0
        tell(f"begins after step {start}")
        for step in range(start + 1, args.steps + 1):
            optimizer.zero_grad()
            parallel(torch.randn(16, 256)).square().mean().backward()
            optimizer.step()
            time.sleep(args.step_seconds)
            if step % 100 == 0:
                checkpointer.async_save(state, step)
            checkpointer.maybe_finalize()
            if watcher.should_stop(step):
                published = watcher.save(state, step)
                tell(f"stops after step {step}, published: {published}")
                break
        else:
            tell(f"done after step {args.steps}")
    return watcher.exit_code


def tell(line: str) -> None:
    """Print a line in one write, so that lines of several ranks do not mix."""
    print(f"rank {dist.get_rank()} {line}\n", end="", flush=True)


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--root", required=True)
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--step-seconds", type=float, default=0.05, help="what a larger model would take")
    parser.add_argument("--stop-file")
    parser.add_argument("--notice", type=float, default=25.0, help="seconds from the stop file to the end")
    parser.add_argument("--exit-code", type=int, default=75, help="of a process that was asked to stop")
    args = parser.parse_args()
    dist.init_process_group("gloo")
    code = train(args)
    dist.destroy_process_group()
    return code


if __name__ == "__main__":
    sys.exit(main())
