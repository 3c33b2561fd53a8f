"""What the harness asks of a system, and what systems need in common."""

import os
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch.distributed as dist

from tools.bench.state import State

__all__ = ["Background", "Place", "System", "commit_directory", "sync_tree"]


@dataclass(frozen=True)
class Place:
    """Where a system saves, and which rank of how many asks it to. `threads` may write at once. The state is on
    `device`, "cpu" or "cuda"."""

    folder: Path
    rank: int
    world_size: int
    threads: int
    sharded: bool
    device: str = "cpu"

    def path(self, step: int) -> Path:
        """For a system whose checkpoints are named by the user."""
        return self.folder / f"step_{step:08d}"


class System(Protocol):
    """One way to save and load. All ranks call the same methods in the same order; one save is in flight at most."""

    def prepare(self, state: State) -> None:
        """Do in advance whatever the documentation offers to be done in advance."""

    def save(self, state: State, step: int) -> None:
        """Begin to save `state`; it may change as soon as this returns."""

    def poll(self) -> bool:
        """Whether the save is durable and committed for all ranks; what a training loop asks after each step."""

    def load(self, state: State, step: int) -> None:
        """Read a durable step from storage into the tensors of `state`."""

    def close(self) -> None:
        """Give everything back, processes included."""


class Background:
    """Waits in a thread for a save to end, and then does what is missing for it to be durable."""

    def __init__(self) -> None:
        self._pool = ThreadPoolExecutor(1, "bench-durable")
        self._done: Future[None] | None = None

    def begin(self, wait: Callable[[], object], then: Callable[[], None]) -> None:
        def work() -> None:
            wait()
            then()

        self._done = self._pool.submit(work)

    def poll(self) -> bool:
        if self._done is None or not self._done.done():
            return False
        done, self._done = self._done, None
        done.result()
        return True

    def close(self) -> None:
        self._pool.shutdown()


def sync_tree(root: Path, threads: int, files: bool = True) -> None:
    """Make all directories below `root` durable, and its own name; with `files` their files before that."""
    directories, names = [root.parent], []
    for folder, _, inside in os.walk(root):
        directories.append(Path(folder))
        names += [Path(folder, name) for name in inside]
    if files:
        with ThreadPoolExecutor(threads) as pool:
            list(pool.map(_sync, names))
    for directory in directories:
        _sync(directory)


def commit_directory(place: Place, step: int) -> None:
    """When all ranks have written to the hidden directory of a step: give it its name, durably. Collective."""
    dist.barrier()
    if place.rank == 0:
        hidden = hidden_path(place, step)
        _sync(hidden)
        hidden.rename(place.path(step))
        _sync(place.folder)
    dist.barrier()


def hidden_path(place: Place, step: int) -> Path:
    """Where a step is written before `commit_directory`."""
    return place.folder / f".step_{step:08d}"


def _sync(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
