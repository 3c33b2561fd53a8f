"""A rank with everything on that is forked in every way between its saves: no child may have any effect on it."""

from __future__ import annotations

import atexit
import contextlib
import gc
import logging
import multiprocessing
import os
import sys
import threading
import traceback
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, Dataset

import ckpt
from ckpt.errors import CheckpointError
from tests.ckpt.crash.killers import wait_until

HELPERS = ("ckpt-keeper", "ckpt-replicas", "ckpt-mirror")
TO_THE_END = ("child_exits", "child_leaves_the_block_by_exit")  # most of a second each


class _Warnings(logging.Handler):
    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        if "the export before has not ended" not in (line := record.getMessage()):  # on a busy machine
            self.lines.append(line)


class Rank:
    """One rank. A child runs one of the methods whose names begin with `child`."""

    def __init__(self, folder: Path, rank: int) -> None:
        self.folder, self.rank, self.step = folder, rank, 0
        self.state: dict[str, Any] = {"w": torch.arange(10_000.0)}
        self.warnings = _Warnings()
        logging.getLogger("ckpt").addHandler(self.warnings)
        self.events: list[Any] = []
        self.observation = ckpt.observe(self.events.append)
        self.checkpointer: Any = ckpt.Checkpointer(
            folder / "root",
            save_every=2,
            snapshots=ckpt.Snapshots(
                every=1,
                replicas=1,
                host="127.0.0.1",
                place=f"place {rank}",
                linger=timedelta(minutes=5),
                linger_id=f"forks {folder}",
            ),
            keep=ckpt.Latest(100),
            timeout=timedelta(seconds=40),
            mirror=ckpt.Mirror(folder / "mirror"),
            export=ckpt.ExportOptions(folder / "exports", every=2),
        )
        self.checkpointer.restore(self.state)
        self.train()
        wait_until(lambda: len(self.helpers()) == len(HELPERS), "the processes of this rank")

    def train(self) -> None:
        """Do two steps: a snapshot, and a save."""
        for _ in range(2):
            self.step += 1
            self.state["w"] += 1
            self.checkpointer.step(self.state, self.step)
        assert self.checkpointer.maybe_finalize(blocking=True) == [self.step]

    def helpers(self) -> dict[str, int]:
        """The processes of this rank that last, by name: the keeper, and workers."""
        found = {}
        for process in psutil.Process().children(recursive=True):
            with contextlib.suppress(psutil.NoSuchProcess):
                name, is_child = process.name(), process.ppid() == os.getpid()
                if name in HELPERS and (is_child or name != "ckpt-keeper"):  # a fork of it has its name at first
                    found[name] = process.pid
        return found

    def everything(self) -> dict[str, Any]:
        children = psutil.Process().children(recursive=True)
        workers = sorted(p.pid for p in children if p.name() in ("ckpt-writer", "ckpt-replicas"))
        found = (self.folder / "root" / ".owner").rglob("*")
        owner = sorted(str(path) for path in found if not path.name.startswith("."))  # but files of a moment
        return {**self.helpers(), "workers": workers, "owner": owner}

    # -- ways to leave -------------------------------------------------------------------------------------------------

    def child_closes(self) -> None:
        self.checkpointer.close()
        self.checkpointer.close()

    def child_leaves_the_block(self) -> None:
        with self.checkpointer:
            pass

    def child_leaves_the_block_by_exit(self) -> None:
        with self.checkpointer, self.checkpointer.queue:
            sys.exit(0)

    def child_leaves_the_block_by_error(self) -> None:
        try:
            with self.checkpointer:
                raise ZeroDivisionError
        except ZeroDivisionError:
            pass

    def child_drops_it(self) -> None:
        self.checkpointer = None
        gc.collect()

    def child_exits(self) -> None:
        pass

    def child_uses_it(self) -> None:
        uses: list[Callable[[], Any]] = [
            lambda: self.checkpointer.save(self.state, 1000),
            lambda: self.checkpointer.snapshot(self.state, 1001),
            lambda: self.checkpointer.step(self.state, 1002),
            lambda: self.checkpointer.warmup(self.state),
            lambda: self.checkpointer.restore(self.state),
            lambda: self.checkpointer.recover(),
            lambda: self.checkpointer.bridge.recover_from_fault(None),
            lambda: self.checkpointer.maybe_finalize(),
            lambda: self.checkpointer.delete(self.step),
            lambda: self.checkpointer.pin(self.step),
        ]
        for use in uses:
            with pytest.raises(CheckpointError, match=f"process {os.getppid()}; .* is a fork of it"):
                use()
        assert self.checkpointer.latest_step() == self.step

    def child_closes_each_part(self) -> None:
        """What no user can reach has no effect, either."""
        saver, parts = self.checkpointer._parts.saver, self.checkpointer._parts
        saver._lingering.leave()
        saver.replicator._worker.leave()
        parts.mirror.abort()
        parts.exports.abort()
        parts.queue._release()

    def check(self, before: dict[str, Any], way: str) -> None:
        self.train()
        after = self.everything()
        assert after == before, (way, before, after)
        assert not self.warnings.lines, (way, self.warnings.lines)


def fork(rank: Rank, way: Callable[[], None]) -> None:
    """Run it in a child that ends as a program does: with exit handlers; some take all modules apart, too."""
    sys.stdout.flush()
    pid = os.fork()
    if pid == 0:
        rank.warnings.lines.clear()
        try:
            way()
        except Exception:
            traceback.print_exc()
            os._exit(1)
        if way.__name__ not in TO_THE_END:
            threading._shutdown()  # type: ignore[attr-defined]
            atexit._run_exitfuncs()
            os._exit(0)
        sys.exit(0)
    status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    assert status == 0, (way.__name__, status)


class _Items(Dataset[int]):
    def __init__(self, rank: Rank) -> None:
        self.rank = rank

    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> int:
        self.rank.checkpointer.close()
        return index


def main(folder: Path) -> None:
    dist.init_process_group("gloo")
    rank = Rank(folder, dist.get_rank())
    before = rank.everything()
    for name in [name for name in dir(rank) if name.startswith("child_")]:
        fork(rank, getattr(rank, name))
    rank.check(before, "forks")
    context = multiprocessing.get_context("fork")
    for target in (rank.child_closes, rank.child_leaves_the_block_by_exit, rank.child_exits):
        process = context.Process(target=target)
        process.start()
        process.join()
        assert process.exitcode == 0
    rank.check(before, "multiprocessing")
    loader = DataLoader(_Items(rank), num_workers=2, multiprocessing_context=context)
    assert sorted(int(item) for item in loader) == [0, 1, 2, 3]
    rank.check(before, "data loader")
    rank.checkpointer.close()
    rank.observation.close()
    assert not rank.warnings.lines, rank.warnings.lines
    assert not rank.helpers()
    steps = list(range(2, rank.step + 1, 2))
    dist.barrier()
    assert rank.checkpointer.all_steps() == steps
    with ckpt.Checkpointer(folder / "mirror", read_only=True) as mirror:
        assert mirror.all_steps() == steps
    print("done", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
