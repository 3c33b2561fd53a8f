"""Jobs on a store that fails at random, whose processes are killed at random requests: what is published stays whole.

`make test` plays one seed, `make test-faults` 500, or OBJECT_FAULTS of them; OBJECT_FAULTS_SEED is the first. By a
seed: how often requests fail, which and how, what is killed at which request.
"""

import contextlib
import os
import random
import threading
from datetime import timedelta
from typing import Any

import psutil
import pytest
import torch

import ckpt
from ckpt.errors import CheckpointError
from ckpt.storage.names import parse_save_name
from ckpt.storage.roots import open_root
from ckpt.storage.stores import open_store
from ckpt.storage.stores.interface import StorageOptions
from ckpt.validation.checks import validate
from tests.support import RankGroup, launch_ranks
from tests.support.object_server import Bucket, Request, slow_down
from tests.support.selection import FULL

pytestmark = pytest.mark.timeout(180)

_FIRST = int(os.environ.get("OBJECT_FAULTS_SEED", 1 if FULL else 11))  # 11: requests fail, and processes are killed
_SEEDS = range(_FIRST, _FIRST + int(os.environ.get("OBJECT_FAULTS", 500 if FULL else 1)))
_STEPS, _RANKS, _REQUESTS = 5, 2, 220
_KILLED = ("nothing", "writer", "trainers", "everything")
_FAULTS = (slow_down(), (500, b""), "reset", "lost", "late")


def _state(step: int, world_size: int, rank: int) -> dict[str, Any]:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    full = torch.arange(40_000, dtype=torch.float32).reshape(-1, 100) * step
    if world_size == 1:
        return {"sharded": full, "step": step}
    return {"sharded": distribute_tensor(full, init_device_mesh("cpu", (world_size,)), [Shard(0)]), "step": step}


def _train(rank: int, world_size: int, url: str) -> None:
    with ckpt.Checkpointer(
        url, staging=ckpt.Staging(file_bytes=20_000), keep=2, timeout=timedelta(seconds=20)
    ) as checkpointer:
        for step in range(1, _STEPS + 1):
            try:
                checkpointer.save(_state(step, world_size, rank), step)
            except CheckpointError as error:
                print(f"failed {step}: {error}", flush=True)
            else:
                print(f"published {step}", flush=True)


class _Chaos:
    """The rule of the proxy for one seed."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)
        self._share = self._random.choice([0.0, 0.05, 0.2])
        self.killed = self._random.choice(_KILLED)
        self._kill_at = self._random.randrange(_REQUESTS)
        self._rank = self._random.randrange(_RANKS)
        self._lock = threading.Lock()
        self._over = threading.Event()
        self.group: RankGroup | None = None

    def end(self) -> None:
        """Let the store work from now on."""
        self._over.set()

    def __call__(self, request: Request) -> Any:
        if self._over.is_set():
            return None
        with self._lock:
            fault = self._random.choice(_FAULTS) if self._random.random() < self._share else None
        if request.number == self._kill_at and self.group is not None:
            self._kill(self.group)
        if fault == "late":
            self._over.wait(0.3)
            return None
        return fault

    def _kill(self, group: RankGroup) -> None:
        ranks = [self._rank] if self.killed == "writer" else range(_RANKS)
        for rank in ranks:
            with contextlib.suppress(psutil.Error):
                trainer = psutil.Process(group.pid(rank))
                children = trainer.children(recursive=True) if self.killed in ("writer", "everything") else []
                if self.killed in ("trainers", "everything"):
                    trainer.kill()
                for child in children:
                    with contextlib.suppress(psutil.Error):
                        child.kill()


@pytest.mark.parametrize("seed", _SEEDS)
def test_what_is_published_stays_whole_and_nothing_else_is_seen(seed: int, bucket: Bucket) -> None:
    chaos = _Chaos(seed)
    bucket.proxy.rule = chaos
    with launch_ranks(_train, _RANKS, bucket.url, env=bucket.env) as group:
        chaos.group = group
        group.wait(timeout=55, returncodes=dict.fromkeys(range(_RANKS)))
        group.wait_for_no_survivors(50)
        told = [int(line.split()[1]) for line in group.stdout(0).splitlines() if line.startswith("published")]
        output = "\n".join(group.stdout(rank) + group.stderr(rank) for rank in range(_RANKS))
    chaos.end()
    root = open_root(bucket.url)
    state = _state(0, 1, 0)
    with ckpt.Checkpointer(bucket.url, keep=2, timeout=timedelta(seconds=20)) as checkpointer:
        newest = checkpointer.restore(state)
        assert (newest or 0) >= max(told, default=0), output
        if newest is not None:
            assert state["step"] == newest
            assert torch.equal(state["sharded"], _state(newest, 1, 0)["sharded"])
        for step in checkpointer.all_steps():
            assert validate(root.source_of(step)).problems == [], step
        checkpointer.save(_state(10, 1, 0), 10)
        assert root.pending() == [], "a save is undecided"
        published = {root.save_of(step) for step in checkpointer.all_steps()}
        assert len(published) <= 2
    keys = [about.key for about in open_store(bucket.url, StorageOptions.of(bucket.options, 20.0)).below("saves/")]
    left = {key.split("/")[1] for key in keys}
    assert all(parse_save_name(name) is not None for name in left)
    assert left == published, "objects of dead saves are left"
