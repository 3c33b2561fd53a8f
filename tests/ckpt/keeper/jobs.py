"""One start of a job whose memory may outlive it, as a function of each rank."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal

import torch
import torch.distributed as dist

import ckpt
from ckpt.keeper.lingering import LingeringMemory
from ckpt.saving import memory_tier
from tests.ckpt.saving.snapshot_jobs import fresh, is_state_of, train_step

Deed = Callable[[ckpt.Checkpointer, int], None]
"""What a rank does with its Checkpointer before its end."""

LINGER = timedelta(minutes=2)


def began(checkpointer: ckpt.Checkpointer, state: dict[str, Any], rank: int) -> list[Any]:
    """Return what a rank has restored: step, tier, bytes from storage, and whether the state is that of the step."""
    report = checkpointer.last_restore
    if report is None:
        return [None, None, None, is_state_of(state, rank, 0)]
    return [report.step, report.tier, report.storage_bytes, is_state_of(state, rank, report.step)]


def start(
    rank: int,
    world_size: int,
    root: Path,
    steps: int = 0,
    end: Literal["kill", "close", "raise", "leave"] = "kill",
    before: Deed = lambda checkpointer, rank: None,
    saves: tuple[int, ...] = (),
    step: int | None = None,
    dies: str | None = None,
    linger: timedelta | float = LINGER,
    linger_id: str = "a job",
    **options: Any,
) -> None:
    """Restore, print what that was, make so many snapshots, and end like this.

    The steps in `saves` are saved. `step` is what is asked for. In the restore the process `dies` in a place of `DIE`.
    """
    if dies is not None:
        _die(*DIE[dies])
    snapshots = ckpt.Snapshots(1, linger=linger, linger_id=linger_id)
    options = {"timeout": timedelta(seconds=30), **options}
    with contextlib.ExitStack() as stack:
        checkpointer = ckpt.Checkpointer(root, snapshots=snapshots, **options)
        if end == "raise":
            stack.enter_context(contextlib.suppress(RuntimeError))
            stack.enter_context(checkpointer)
        state = fresh()
        first = checkpointer.restore(state, step) or 0
        os.write(1, f"began {began(checkpointer, state, rank)!r}\n".encode())
        for current in range(first + 1, first + steps + 1):
            train_step(state, rank, current)
            if current in saves:
                checkpointer.save(state, current)
            else:
                checkpointer.step(state, current)
            _together()
        before(checkpointer, rank)
        _together()
        if end == "raise":
            raise RuntimeError("a fault")
        if end == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        if end == "close":
            checkpointer.close()


DIE: MappingProxyType[str, tuple[Any, str, bool]] = MappingProxyType(
    {
        "before it takes": (memory_tier.MemoryTier, "_take_over", False),
        "when it has taken": (memory_tier.MemoryTier, "_take_over", True),
        "when all have restored": (memory_tier.MemoryTier, "settle", False),
        "before its keeper knows": (LingeringMemory, "settle", False),
        "when its keeper knows": (LingeringMemory, "settle", True),
    }
)
"""Where a process can die while it takes over memory: in which function, and whether after it."""


def _die(owner: Any, name: str, after: bool) -> None:
    function = getattr(owner, name)

    def fatal(*args: Any, **options: Any) -> None:
        if after:
            function(*args, **options)
        os.kill(os.getpid(), signal.SIGKILL)

    setattr(owner, name, fatal)


def resized(rank: int, world_size: int, root: Path, steps: int, end: str) -> None:
    """As `start`, of a state that does not depend on the number of ranks."""
    checkpointer = ckpt.Checkpointer(root, snapshots=ckpt.Snapshots(every=1, linger=LINGER, linger_id="a job"))
    state = {"weights": [torch.zeros(10_000) for _ in range(7)], "count": {"steps": 0}}
    first = checkpointer.restore(state) or 0
    right = all(tensor.eq(sum(range(first + 1))).all() for tensor in state["weights"])  # type: ignore[attr-defined]
    report = checkpointer.last_restore
    os.write(1, f"began {[first, report and report.tier, report and report.storage_bytes, bool(right)]!r}\n".encode())
    for current in range(first + 1, first + steps + 1):
        for tensor in state["weights"]:
            tensor.add_(current)  # type: ignore[attr-defined]
        checkpointer.snapshot(state, current)
        _together()
    if end == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    checkpointer.close()


def _together() -> None:
    if dist.is_initialized():
        dist.barrier()
