"""Workers, as their trainer sees them: what is left of one in the trainer."""

from __future__ import annotations

import contextlib
import os

import psutil

from ckpt.async_calls.writer_main import CODEC
from ckpt.keeper.trainer_side import Keeper, Worker
from inprocess.ipc.deadline import Deadline
from tests.inprocess.coordination.helpers import eventually
from tests.support import LeakCheck


def pidfds() -> int:
    """Return how many pidfds this process has."""
    found = 0
    for fd in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            found += "pidfd" in os.readlink(f"/proc/self/fd/{fd}")
    return found


def test_nothing_is_left_of_a_worker_that_is_released_before_its_fork_is_reported(leak_check: LeakCheck) -> None:
    keeper = Keeper()
    before = pidfds()
    try:
        keeper.start()
        assert keeper.pid is not None
        process = psutil.Process(keeper.pid)
        process.suspend()
        early = Worker(keeper, "writer", CODEC)
        early.release()
        late = Worker(keeper, "writer", CODEC)
        process.resume()
        eventually(lambda: keeper.pump() or late.refresh() or late.pid is not None)  # told after the early one
        assert pidfds() == before + 1
        late.release()
        assert pidfds() == before
        eventually(lambda: process.children() == [])
        keeper.pump()
        assert (keeper._started, keeper._exits) == ({}, {})
    finally:
        keeper.close(Deadline(20.0))
