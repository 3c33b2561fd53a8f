"""The systems that are compared, what they have in common, and what is asked of them.

A system is imported only when it is measured. `ours` is this repository, `dcp` is torch.distributed.checkpoint, `peers`
are other libraries.
"""

import importlib
import importlib.metadata
import os
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch.distributed as dist

from tools.bench.workload import State

__all__ = [
    "SYSTEMS",
    "Background",
    "Entry",
    "Place",
    "System",
    "commit_directory",
    "hidden_path",
    "make_system",
    "sync_file",
    "sync_tree",
    "version_of",
]


# -- what is asked of a system -----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Place:
    """Where a system saves, and for which rank.

    `threads` may write at once. The state is on `device`, "cpu" or "cuda".
    """

    folder: Path
    rank: int
    world_size: int
    threads: int
    sharded: bool
    device: str = "cpu"

    def path(self, step: int) -> Path:
        """Return the folder of a step, for a system whose checkpoints are named by the user."""
        return self.folder / f"step_{step:08d}"


class System(Protocol):
    """One way to save and load. All ranks call the same methods in the same order; one save is in flight at most."""

    def prepare(self, state: State) -> None:
        """Do in advance whatever the documentation offers to be done in advance."""

    def save(self, state: State, step: int) -> None:
        """Begin to save `state`, which may change as soon as this returns."""

    def poll(self) -> bool:
        """Return whether the save is durable and committed for all ranks; called after each step of training."""

    def load(self, state: State, step: int) -> None:
        """Read a durable step from storage into the tensors of `state`."""

    def close(self) -> None:
        """Free everything, and end all processes."""


# -- parts of systems --------------------------------------------------------------------------------------------------


class Background:
    """A thread that waits for a save to end, and then does what is missing for it to be durable."""

    def __init__(self) -> None:
        self._pool = ThreadPoolExecutor(1, "bench-durable")
        self._done: Future[None] | None = None

    def begin(self, wait: Callable[[], object], then: Callable[[], None]) -> None:
        """Call `wait` and `then`, one after the other, in the thread."""

        def work() -> None:
            wait()
            then()

        self._done = self._pool.submit(work)

    def poll(self) -> bool:
        """Return whether both are done, once; raise what they raised."""
        if self._done is None or not self._done.done():
            return False
        done, self._done = self._done, None
        done.result()
        return True

    def close(self) -> None:
        """Wait for the thread, and end it."""
        self._pool.shutdown()


def sync_tree(root: Path, threads: int, files: bool = True) -> None:
    """Sync all directories below `root`, and its own name; with `files` first their files."""
    directories, names = [root.parent], []
    for folder, _, inside in os.walk(root):
        directories.append(Path(folder))
        names += [Path(folder, name) for name in inside]
    if files:
        with ThreadPoolExecutor(threads) as pool:
            list(pool.map(sync_file, names))
    for directory in directories:
        sync_file(directory)


def commit_directory(place: Place, step: int) -> None:
    """Rename the hidden directory of a step, durably, when all ranks have written to it. Collective."""
    dist.barrier()
    if place.rank == 0:
        hidden = hidden_path(place, step)
        sync_file(hidden)
        hidden.rename(place.path(step))
        sync_file(place.folder)
    dist.barrier()


def hidden_path(place: Place, step: int) -> Path:
    """Return the directory in which a step is written before `commit_directory`."""
    return place.folder / f".step_{step:08d}"


def sync_file(path: Path) -> None:
    """Make a file or directory durable."""
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


# -- registry ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Entry:
    """A system: its title, its class `factory` in `module`, and the distribution `package` that it needs.

    A system with `only_saves` differs from another in saves alone, and is measured in these alone. Which part of
    "durable" a system does not do by itself, and we do for it, is in docs/benchmarks/methods.md.
    """

    title: str
    module: str
    factory: str
    package: str
    one_rank_only: bool = False
    reshards: bool = False
    from_memory: bool = False
    slots: int = 1
    only_saves: bool = False


SYSTEMS = {
    "ckpt": Entry("ckpt", "ours", "Ours", "torch", reshards=True, from_memory=True, slots=2),
    "ckpt_reuse": Entry("ckpt, files reused", "ours", "Reused", "torch", from_memory=True, slots=2, only_saves=True),
    "torch_save": Entry("torch.save", "peers", "TorchSave", "torch", slots=0),
    "safetensors": Entry("safetensors", "peers", "Safetensors", "safetensors", slots=0),
    "dcp": Entry("DCP, sync", "dcp", "Dcp", "torch", reshards=True, slots=0),
    "dcp_thread": Entry("DCP, thread", "dcp", "DcpThread", "torch", reshards=True),
    "dcp_process": Entry("DCP, process", "dcp", "DcpProcess", "torch", reshards=True),
    "torchsnapshot": Entry("torchsnapshot", "peers", "Torchsnapshot", "torchsnapshot"),
    "torch_checkpointing": Entry("torch_checkpointing", "peers", "TorchCheckpointing", "torch_checkpointing"),
    "orbax": Entry("orbax", "peers", "Orbax", "orbax-checkpoint", one_rank_only=True),
}


def version_of(name: str) -> str | None:
    """Return the version of the package that a system needs; None if it is not installed."""
    try:
        return importlib.metadata.version(SYSTEMS[name].package)
    except importlib.metadata.PackageNotFoundError:
        return None


def make_system(name: str, place: Place) -> System:
    """Return a new system, which has started nothing yet."""
    entry = SYSTEMS[name]
    system: System = getattr(importlib.import_module(f"{__name__}.{entry.module}"), entry.factory)(place)
    return system
