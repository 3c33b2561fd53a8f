"""The figures of one tree of this code in one turn. A program: prints JSON, seconds and MiB by name.

    python tree_turn.py FOLDER WORLD_SIZE     with the tree first in PYTHONPATH

It imports nothing of its folder, and calls only what older trees have, too. Each figure is that of the slowest rank.
"""

from __future__ import annotations

import gc
import json
import multiprocessing
import os
import socket
import sys
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import psutil

_SAVES, _SNAPSHOTS, _RESTORES = 7, 8, 5  # that count
_WARM = 3  # before them
_TIMEOUT_S = 120.0
_STATES = {"48 of 4 MB": (48, 1 << 20), "1,500 of 256 B": (1500, 64)}


class _Rank:
    def __init__(self, rank: int, world_size: int, folder: str) -> None:
        self._rank, self._world_size, self._folder = rank, world_size, folder

    def run(self) -> dict[str, float]:
        import torch
        import torch.distributed as dist

        torch.set_num_threads(1)
        torch.manual_seed(0)
        if self._world_size > 1:
            dist.init_process_group("gloo")
        figures: dict[str, float] = {}
        for kind, (count, numel) in _STATES.items():
            state = {"model": {f"p{number}": torch.randn(numel) for number in range(count)}}
            root = f"{self._folder}/{count}"
            found = self._trained(root, state) | self._loaded(root, state)
            figures |= {f"{kind}: {name}": value for name, value in found.items()}
        if self._world_size > 1:
            dist.destroy_process_group()
        return figures

    def _trained(self, root: str, state: Any) -> dict[str, float]:
        """Save, make snapshots, restore the last."""
        import ckpt

        held: dict[str, Any] = {}

        def first() -> None:
            held["checkpointer"] = ckpt.Checkpointer(root)
            held["checkpointer"].save(state, 1)

        figures = {"first save": self._slowest(first)}
        checkpointer = held["checkpointer"]
        stalls, durable, snapshots = [], [], []
        gc.collect()
        gc.disable()
        last = 1 + _WARM + _SAVES
        for step in range(2, last + 1):
            stalls.append(self._slowest(checkpointer.async_save, state, step))
            durable.append(stalls[-1] + self._slowest(checkpointer.maybe_finalize, True))
        for step in range(last + 1, last + 1 + _WARM + _SNAPSHOTS):
            snapshots.append(self._slowest(checkpointer.snapshot, state, step))
            time.sleep(0.03)  # its checksums are made beside training
            checkpointer.maybe_finalize()
        checkpointer.maybe_finalize(blocking=True)
        restores = [self._slowest(checkpointer.restore, state) for _ in range(_RESTORES)]
        figures |= {"memory of helpers": _private_mb()}
        gc.enable()
        checkpointer.close()
        figures |= {"stall of a save": median(stalls[_WARM:]), "durable": median(durable[_WARM:])}
        return figures | {"snapshot": median(snapshots[_WARM:]), "restore from memory": median(restores)}

    def _loaded(self, root: str, state: Any) -> dict[str, float]:
        import ckpt

        cold: list[float] = []
        warm: list[float] = []
        for times in (cold, warm, cold, warm):
            with ckpt.Checkpointer(root, read_only=True) as reader:
                if times is cold and self._rank == 0:
                    _drop_cache(root)
                times.append(self._slowest(reader.restore, state))
        return {"restore, page cache cold": median(cold), "restore, page cache warm": median(warm)}

    def _slowest(self, call: Callable[..., Any], *arguments: Any) -> float:
        """Return the seconds of a call that all ranks begin together."""
        import torch
        import torch.distributed as dist

        if self._world_size > 1:
            dist.barrier()
        begin = time.perf_counter()
        call(*arguments)
        seconds = torch.tensor([time.perf_counter() - begin], dtype=torch.float64)
        if self._world_size > 1:
            dist.all_reduce(seconds, dist.ReduceOp.MAX)
        return float(seconds)


def _private_mb() -> float:
    total = 0
    for child in psutil.Process().children(recursive=True):
        lines = Path(f"/proc/{child.pid}/smaps_rollup").read_text().splitlines()
        total += sum(int(line.split()[1]) for line in lines if line.startswith("Private_"))
    return total / 1024


def _drop_cache(root: str) -> None:
    for file in (path for path in Path(root).rglob("*") if path.is_file()):
        with file.open("rb") as opened:
            os.fsync(opened.fileno())
            os.posix_fadvise(opened.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def _rank(rank: int, world_size: int, folder: str, port: int, results: Any) -> None:
    os.environ.update(
        RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world_size), LOCAL_WORLD_SIZE=str(world_size),
        MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), OMP_NUM_THREADS="1",
    )  # fmt: skip
    figures = _Rank(rank, world_size, folder).run()
    if rank == 0:
        results.put(figures)


def main() -> None:
    """Fork the ranks before torch is imported, and print what rank 0 has found."""
    folder, world_size = sys.argv[1], int(sys.argv[2])
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    fork = multiprocessing.get_context("fork")
    results = fork.Queue()
    ranks = [fork.Process(target=_rank, args=(rank, world_size, folder, port, results)) for rank in range(world_size)]
    for process in ranks:
        process.start()
    print(json.dumps(results.get(timeout=_TIMEOUT_S)))
    for process in ranks:
        process.join(_TIMEOUT_S)


if __name__ == "__main__":
    main()
