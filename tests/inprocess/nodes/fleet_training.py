"""The program of the workers of a fleet, `fleet_training.py FOLDER LIMIT_S`: a small training with checkpoints.

Into FOLDER/events goes a line for each thing that a rank does, with its node. While there is a file hold.<step>, the
nodes that it names wait before that step; before, all ranks wait until their saves are published.
"""

import ctypes
import hashlib
import os
import sys
import time
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.elastic.multiprocessing.errors import record

import ckpt
import ckpt.sinks
from tests.inprocess.nodes import cgroups

STEPS, SAVE_EVERY = 24, 5
_OWN_FLOATS = 1 << 16  # of each rank
_POLL_S = 0.02


class Training:
    """The training of this rank, with what it shares with the test in a folder."""

    def __init__(self, folder: Path, limit_s: float) -> None:
        self._folder = folder
        self._deadline = time.monotonic() + limit_s
        self._rank, self._world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        self._log = os.open(folder / "events", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        disk = os.environ.get("FLEET_DISK")
        # What only this rank has goes to its node, and a copy of it to the mirror, for a node in its place.
        options = {"node_local": f"{disk}/steps", "mirror": str(folder / "mirror")} if disk else {}
        failed = os.environ.get("FLEET_FAILED_SAVES", "raise")
        self._checkpointer = ckpt.Checkpointer(
            folder / "root", on_failed_save=failed, timeout=timedelta(seconds=limit_s), **options
        )
        torch.manual_seed(0)
        self._model = torch.nn.Linear(16, 16)
        self._optimizer = torch.optim.AdamW(self._model.parameters())
        self._own = torch.zeros(_OWN_FLOATS)

    def run(self) -> None:
        """Train to the last step, from the newest that is published."""
        state = {"model": self._model, "optimizer": self._optimizer, "own": ckpt.PerRank(self._own)}
        start = self._checkpointer.restore(state) or 0
        self._say("from", start)
        for step in range(start + 1, STEPS + 1):
            self._hold(step)
            loss = self._train(step)
            self._say("step", step, "loss", loss)
            if step % SAVE_EVERY == 0:
                self._checkpointer.async_save(state, step)
            self._checkpointer.maybe_finalize()
        self._checkpointer.close()
        digest = hashlib.sha256()
        for tensor in (self._model.weight, self._model.bias, self._own):
            digest.update(tensor.detach().numpy().tobytes())
        self._say("weights", digest.hexdigest())

    def _train(self, step: int) -> str:
        """Make a step; return the loss over all ranks, to the bit."""
        data = torch.randn(4, 16, generator=torch.Generator().manual_seed(step * self._world_size + self._rank))
        self._optimizer.zero_grad()
        loss = self._model(data).square().mean()
        loss.backward()
        total = loss.detach().clone()
        dist.all_reduce(total)
        for parameter in self._model.parameters():
            dist.all_reduce(parameter.grad)
        self._optimizer.step()
        self._own += total * (self._rank + 1)
        return float(total).hex()

    def _hold(self, step: int) -> None:
        file = self._folder / f"hold.{step}"
        if not file.exists():
            return
        self._checkpointer.maybe_finalize(blocking=True)
        self._say("reaches", step)
        while file.exists() and os.uname().nodename in file.read_text().split():
            if time.monotonic() > self._deadline:
                sys.exit(f"{file} is not removed")
            time.sleep(_POLL_S)

    def _say(self, *words: object) -> None:
        cycle = os.environ["TORCHELASTIC_RESTART_COUNT"]
        line = " ".join(map(str, ("cycle", cycle, "rank", self._rank, os.uname().nodename, *words)))
        os.write(self._log, f"{line}\n".encode())


def enter_node(launcher: int) -> None:
    """Move this process, which has one thread, to the node of its launcher: another process may have forked it."""
    group = Path(f"/proc/{launcher}/cgroup").read_text().partition("::")[2].strip()
    Path(f"{cgroups.mount_point()}{group}", "cgroup.procs").write_text("0")
    folder = os.getcwd()
    for name in ("net", "uts", "mnt"):
        theirs = f"/proc/{launcher}/ns/{name}"
        if os.readlink(theirs) != os.readlink(f"/proc/self/ns/{name}"):
            fd = os.open(theirs, os.O_RDONLY | os.O_CLOEXEC)
            if ctypes.CDLL(None, use_errno=True).setns(fd, 0) != 0:
                raise OSError(ctypes.get_errno(), f"setns of {theirs}")
            os.close(fd)
    os.chdir(folder)


@record
def main() -> None:
    folder, limit_s = Path(sys.argv[1]), float(sys.argv[2])
    enter_node(int(os.environ["FLEET_LAUNCHER"]))
    dist.init_process_group("gloo", timeout=timedelta(seconds=limit_s))
    with ckpt.observe(ckpt.sinks.JsonLines(folder / "ckpt.jsonl")):
        Training(folder, limit_s).run()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
