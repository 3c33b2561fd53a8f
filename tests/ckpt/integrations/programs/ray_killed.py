"""Ray Train, whose workers are killed when a step is staged on both, with writers that are stopped until then.

    python ray_killed.py STORAGE

Prints a JSON object.
"""

import json
import os
import signal
import sys
import threading
import time
from pathlib import Path
from typing import Any

import psutil
import ray.train
import torch
import torch.distributed as dist
from ray.train.torch import TorchConfig, TorchTrainer

import ckpt
import inprocess
from ckpt.integrations.ray import report, run_root

_DEADLINE_S = 120.0


def train(config: dict[str, str]) -> None:
    rank = ray.train.get_context().get_world_rank()
    with ckpt.Checkpointer(run_root()) as checkpointer:
        state = {"weight": torch.zeros(1000)}
        start = checkpointer.restore(state) or 0
        if start:
            report(checkpointer, {"start": start, "wrapper": refusal()})
            return
        checkpointer.save(state, 10)
        own = {process.pid: process.name() for process in psutil.Process().children(recursive=True)}
        for pid, name in own.items():
            if name == "ckpt-writer":
                os.kill(pid, signal.SIGSTOP)
        checkpointer.async_save(state, 20)
        dist.barrier()
        told = Path(config["storage"]) / f"rank{rank}"
        told.with_suffix(".tmp").write_text(json.dumps({"worker": os.getpid(), "own": own}))
        told.with_suffix(".tmp").rename(told)
        dist.barrier()
        if rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        dist.barrier()  # until Ray kills this worker, too


def refusal() -> str:
    """Return what the restart wrapper says in the thread of Ray's worker."""
    try:
        inprocess.Wrapper(abort=None)(lambda: None)()
    except ValueError as error:
        return str(error)
    return "works"


def watch(storage: Path, found: dict[str, Any]) -> None:
    """Let the writers go on when both workers are dead; note what is left of the workers' processes in the end."""
    files = [storage / f"rank{rank}" for rank in range(2)]
    wait_until(lambda: all(file.exists() for file in files))
    told = [json.loads(file.read_text()) for file in files]
    wait_until(lambda: not any(is_running(each["worker"]) for each in told))
    own = {int(pid): name for each in told for pid, name in each["own"].items()}
    found["names"] = sorted(own.values())
    for pid, name in own.items():
        if name == "ckpt-writer":
            os.kill(pid, signal.SIGCONT)
    wait_until(lambda: not any(map(is_running, own)))
    found["all ended"] = True


def is_running(pid: int) -> bool:
    try:
        return bool(psutil.Process(pid).status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


def wait_until(condition: Any) -> None:
    deadline = time.monotonic() + _DEADLINE_S
    while not condition():
        if time.monotonic() > deadline:
            raise TimeoutError("see the stack")
        time.sleep(0.02)


def main() -> None:
    storage, found = Path(sys.argv[1]), dict[str, Any]()
    watching = threading.Thread(target=watch, args=(storage, found), daemon=True)
    watching.start()
    trainer = TorchTrainer(
        train,
        train_loop_config={"storage": str(storage)},
        torch_config=TorchConfig(backend="gloo"),
        scaling_config=ray.train.ScalingConfig(num_workers=2),
        run_config=ray.train.RunConfig(
            name="killed", storage_path=str(storage), failure_config=ray.train.FailureConfig(max_failures=1)
        ),
    )
    result: Any = trainer.fit()
    watching.join(_DEADLINE_S)
    print(json.dumps({**found, **result.metrics, "path": result.checkpoint.path}))


if __name__ == "__main__":
    main()
