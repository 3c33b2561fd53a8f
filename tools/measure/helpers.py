"""The processes beside each trainer with everything on, and their private memory. A program: prints JSON.

    python helpers.py TREE

It is the program of a process of its own, and imports nothing of its folder, so that it can measure older trees, too.
Two ranks run in the wrapper, with snapshots before each step, replicas, lingering memory and a mirror, until all of
that has begun; then each looks at the processes that it and its helpers have started.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import socket
import tempfile
import time
from pathlib import Path
from typing import Any

import psutil

_RANKS = 2
_SETTLED_S = 30.0


def _private_mb(process: psutil.Process) -> float:
    lines = Path(f"/proc/{process.pid}/smaps_rollup").read_text().splitlines()
    return sum(int(line.split()[1]) for line in lines if line.startswith("Private_")) / 1024


def _helpers() -> list[tuple[str, bool, float]]:
    """Return name, whether it was started by exec, and private memory in MiB of each helper of this process."""
    trainer = psutil.Process()
    own = trainer.cmdline()
    found = []
    for process in trainer.children(recursive=True):
        parent = process.parent()
        command = process.cmdline()
        is_exec = command != (own if parent is None else parent.cmdline())
        found.append((_name(process.name(), command), is_exec, _private_mb(process)))
    return found


def _name(comm: str, command: list[str]) -> str:
    """Return the name of a process: its own, or that of the module which it runs."""
    if not comm.startswith("python"):
        return comm
    return next((word for word in command if word.startswith(("ckpt.", "inprocess."))), comm)


def _rank(rank: int, folder: str, port: int, results: Any) -> None:
    os.environ.update(
        RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(_RANKS), LOCAL_WORLD_SIZE=str(_RANKS),
        MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), TMPDIR=folder,
    )  # fmt: skip
    import torch
    import torch.distributed as dist

    import ckpt
    import inprocess

    def train(call: inprocess.CallWrapper | None = None) -> None:
        assert call is not None
        dist.init_process_group("gloo", store=call.store, rank=rank, world_size=_RANKS)
        snapshots = ckpt.Snapshots(every=1, replicas=1, place=f"place {rank}", linger=60, linger_id="measure")
        mirror = ckpt.Mirror(f"{folder}/mirror")
        state = {"model": {f"parameter_{number}": torch.ones(1 << 16) for number in range(8)}}
        with ckpt.Checkpointer(f"{folder}/root", snapshots=snapshots, mirror=mirror) as checkpointer:
            checkpointer.restore(state)
            checkpointer.save(state, 1)
            step, deadline = 2, time.monotonic() + _SETTLED_S
            done = torch.zeros(1)
            while not done.item() and time.monotonic() < deadline:
                checkpointer.step(state, step)
                checkpointer.maybe_finalize()
                step += 1
                time.sleep(0.1)
                replicated = checkpointer.replicated_step is not None
                copied = Path(folder, "mirror", "step_00000001").exists()
                done = torch.tensor(float(replicated and copied))
                dist.all_reduce(done, dist.ReduceOp.MIN)
            results.put((rank, bool(done.item()), _helpers()))
            dist.barrier()
        dist.destroy_process_group()

    inprocess.Wrapper()(train)()


def main() -> None:
    """Measure, and print the helpers of the rank that has most."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        port = taken.getsockname()[1]
    context = multiprocessing.get_context("spawn")
    results: Any = context.Queue()
    with tempfile.TemporaryDirectory(prefix="hm") as folder:
        ranks = [context.Process(target=_rank, args=(rank, folder, port, results)) for rank in range(_RANKS)]
        for each in ranks:
            each.start()
        found = [results.get(timeout=3 * _SETTLED_S) for _ in ranks]
        for each in ranks:
            each.join()
    if not all(settled for _, settled, _ in found):
        raise RuntimeError("replicas and the mirror had not begun in time")
    print(json.dumps(max((helpers for _, _, helpers in found), key=len)))


if __name__ == "__main__":
    main()
