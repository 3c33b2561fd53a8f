"""Lightning: `Trainer` saves and loads its checkpoints as steps, with `ModelCheckpoint` and `ckpt_path` as ever.

    Trainer(plugins=[CkptIO()], callbacks=[ModelCheckpoint(dirpath="checkpoints", ...)])

    checkpoints/                     the directory of ModelCheckpoint is a checkpoint root; or s3://bucket/checkpoints
        epoch=0-step=100.ckpt        a name: a small JSON file that lists the numbers of steps, newest first
        last.ckpt                    the same; more than one while a later save of the name is not published
        step_00000100/               a step for each save
        step_00000101/

    save_checkpoint      write the name, stage, return; the writer process publishes the step
    the next save        finalize: remove what the published step replaces, and what ModelCheckpoint has removed
    teardown             wait for all saves, finalize, end the writer

A name is there before its step is published. If that never happens, the name stands for the step before, if it had one:
a checkpoint is whole or absent, and what ModelCheckpoint removes stays until a later one is published.
"""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

import ckpt
from ckpt import Checkpointer
from ckpt.integrations.lightning_directory import Directory
from ckpt.integrations.lightning_names import (
    exists,
    is_link,
    located,
    remove_name,
    resolved,
    root_of,
)

try:
    from lightning.pytorch.plugins.io import CheckpointIO
    from lightning.pytorch.strategies import DDPStrategy, ModelParallelStrategy, Strategy
except ImportError as error:
    raise ImportError(
        "ckpt.integrations.lightning needs Lightning 2.6 or newer: pip install 'ckpt-inprocess[lightning]'"
    ) from error

from ckpt.integrations.lightning_reading import (
    Nothing,
    load_from_checkpoint,
    newest,
    read,
    read_checkpoint,
    refuse_objects,
    wait_for_newest,
)

__all__ = [
    "CkptDDPStrategy",
    "CkptIO",
    "CkptModelParallelStrategy",
    "load_from_checkpoint",
    "read_checkpoint",
]

_log = logging.getLogger("ckpt")
_StrPath = str | os.PathLike[str]
_OPTIONS = ("staging", "timeout", "on_failed_save")
_BEFORE_THE_END = "hpc_ckpt_"  # how those begin that Lightning saves when SLURM is about to end the job
_MODEL, _OPTIMIZERS = "state_dict", "optimizer_states"


# -- the plugin --------------------------------------------------------------------------------------------------------


class CkptIO(CheckpointIO):
    """A checkpoint plugin that saves in the background: ``Trainer(plugins=[CkptIO()])``.

    For one device and for DDP, where rank 0 writes, as with every plugin; with `CkptDDPStrategy` and
    `CkptModelParallelStrategy` all ranks write their share. Each directory that is saved to becomes a checkpoint root,
    with a writer process of its own. It may be the URL of an object store, whose credentials are taken from the
    environment. `options` are those of `ckpt.Checkpointer` that do not say which steps are kept: staging, timeout,
    on_failed_save.

    The error of a save is raised by the next one, or at the end of `Trainer.fit`, unless `on_failed_save` lets training
    go on. What Lightning saves when SLURM is about to end the job, and a whole checkpoint after the end of `fit`, is
    published when the save returns. After an exception in `fit`, saves that are staged are waited for at most five
    seconds: their writer finishes them, even if this process ends.

    One object serves any number of calls of `fit`, `test` and so on, and any number of Trainers, one after the other.
    The hooks of `ckpt.restart` take it in place of a Checkpointer; the next `fit` restores, with ``ckpt_path="last"``.
    All methods are for the thread that trains.
    """

    def __init__(self, **options: Any) -> None:
        super().__init__()
        unknown = sorted(options.keys() - set(_OPTIONS))
        if unknown:
            raise TypeError(
                f"CkptIO takes no {', '.join(unknown)}; it takes {', '.join(_OPTIONS)}. Which checkpoints are kept is "
                "said to ModelCheckpoint: save_top_k, save_last"
            )
        self._options = options
        timeout = options.get("timeout", timedelta(minutes=10))
        self._timeout_s = timeout.total_seconds() if isinstance(timeout, timedelta) else float(timeout)
        self._directories: dict[str, Directory] = {}
        self._restarts = False
        self._has_ended = False  # a Trainer, and none has loaded since: only then loops tell whether it trains
        self._alone: dist.ProcessGroup | None = None  # of this rank only

    def save_checkpoint(self, checkpoint: dict[str, Any], path: _StrPath, storage_options: Any | None = None) -> None:
        """Stage a checkpoint of Lightning and return; called on rank 0 alone.

        Raises StateError, naming the key, for what cannot be stored, and the error of an earlier save.
        """
        self._save(checkpoint, path, storage_options, None)

    def save_checkpoint_on_all_ranks(
        self, checkpoint: dict[str, Any], path: _StrPath, storage_options: Any | None = None
    ) -> None:
        """Stage this rank's share of a checkpoint and return. Collective; the path of rank 0 counts."""
        self._save(checkpoint, path, storage_options, self._all_ranks())

    def load_checkpoint(
        self, path: _StrPath, map_location: Any | None = None, weights_only: bool | None = None
    ) -> dict[str, Any]:
        """Return the newest complete checkpoint of this name, with all tensors on the CPU. Collective.

        While the newest save of the name is being written, by this program or another, it is waited for, at most half
        of `timeout`. Saves that an ended job left are decided first. The last two arguments have no effect: nothing is
        executed.

        If no save of a name that begins with "last" was completed, the result counts as false, and Lightning starts
        from the beginning. Otherwise raises CheckpointNotFoundError; also CheckpointCorruptError, and StateError for a
        value of a type that is not registered.
        """
        found = self._find(path)
        return Nothing() if found is None else read(*found, restores=True)

    def load_into(
        self, path: _StrPath, model: torch.nn.Module, optimizers: list[torch.optim.Optimizer], strict: bool
    ) -> dict[str, Any]:
        """Restore model and optimizers in place, in any sharding, and return the rest of the checkpoint. Collective.

        Without `optimizers` their state is not read. Raises as `load_checkpoint` does; StateMismatchError, if `strict`,
        when a name of the model is missing or unexpected.
        """
        found = self._find(path)
        if found is None:
            return Nothing()
        root, step = found
        state: dict[str, Any] = {_MODEL: model}
        if optimizers:
            state[_OPTIMIZERS] = list(optimizers)
        rest = read(root, step, exclude=(_MODEL, _OPTIMIZERS))
        with Checkpointer(root, read_only=True, timeout=self._timeout_s) as reader:
            reader.restore(state, step, strict, only=tuple(state))
        return rest

    def remove_checkpoint(self, path: _StrPath) -> None:
        """Remove a checkpoint once the saves that are scheduled now are published; rank 0 alone."""
        path = located(path)
        root = root_of(path)
        if is_link(path):
            remove_name(path)
        elif root in self._directories:
            self._directories[root].remove_later(path)
        elif exists(path):
            with Checkpointer(root, process_group=self._group_of_one()) as checkpointer:
                Directory(root, checkpointer, shared=False).remove_later(path)

    def teardown(self) -> None:
        """Wait for all saves and end the writers, then raise the first failure.

        After an exception, wait for at most five seconds: a writer with a save that takes longer stays, and finishes by
        itself. All stay, without a wait, with the hooks of `ckpt.restart`: for the next call of the function.
        """
        self._has_ended = not self._restarts
        if sys.exc_info()[1] is not None:
            if not self._restarts:
                ended = [root for root, directory in self._directories.items() if directory.end_after_exception()]
                for root in ended:
                    del self._directories[root]
            return
        self._close(list(self._directories))

    @property
    def bridge(self) -> _Bridge:
        """The side for the hooks of `ckpt.restart`."""
        self._restarts = True
        return _Bridge(self._directories, self._forget_group)

    def _forget_group(self) -> None:
        self._alone = None

    def _all_ranks(self) -> ckpt.Ranks:
        ranks = ckpt.Ranks(None, self._timeout_s)
        ranks.doing = "a checkpoint of Lightning"
        return ranks

    def _save(self, checkpoint: dict[str, Any], path: _StrPath, storage_options: Any, ranks: ckpt.Ranks | None) -> None:
        if storage_options is not None:
            raise TypeError("CkptIO takes no storage_options: Trainer.save_checkpoint(path)")
        refuse_objects(checkpoint, ())
        global_step = int(checkpoint.get("global_step", 0))

        def prepare() -> tuple[str, int, bool]:
            for directory in self._directories.values():
                directory.finalize()
            if ranks is not None and ranks.rank != 0:
                return "", 0, False
            own = located(path)
            directory = self._directory(root_of(own), ranks)
            return own, directory.prepare(own, global_step), not directory.is_recovered

        where, step, recovers = prepare() if ranks is None else ranks.result_of_first("begin a save", prepare)
        name = os.path.basename(where)
        about = {"name": name, "epoch": checkpoint.get("epoch"), "global_step": global_step}
        directory = self._directory(root_of(where), ranks)
        directory.save(checkpoint, where, step, {"lightning": about}, recovers=recovers)
        if name.startswith(_BEFORE_THE_END):
            directory.finalize(blocking=True)
        elif self._has_ended and _is_between_epochs(checkpoint):  # by Trainer.save_checkpoint: no teardown follows
            self._close([root_of(where)])

    def _close(self, roots: list[str]) -> None:
        """Wait for the saves of directories and end their writers, then raise the first failure."""
        errors = []
        for root in roots:
            errors += self._directories.pop(root).close()
        if errors:
            raise errors[0]

    def _find(self, path: _StrPath) -> tuple[str, int] | None:
        """Return root and number of the newest complete step of a name, the same on all ranks; see `newest`.

        While its newest step is being written, this waits, at most half of `timeout`: other ranks wait meanwhile.
        """
        self._has_ended = False
        ranks = self._all_ranks()

        def find() -> tuple[str, int] | None:
            if ranks.rank != 0:
                return None
            root = root_of(resolved(located(path)))
            wait_for_newest(path, self._timeout_s / 2)
            if root in self._directories:
                for failure in self._directories[root].settle(blocking=False):
                    _log.warning("%s", failure)
            else:
                with Checkpointer(root, process_group=self._group_of_one(), timeout=self._timeout_s) as reader:
                    reader.recover()
            return newest(path)

        found = ranks.result_of_first("find a checkpoint", find)
        return None if found is None else (found[0], found[1])

    def _directory(self, root: str, ranks: ckpt.Ranks | None) -> Directory:
        if root not in self._directories:
            group = self._group_of_one() if ranks is None else None
            checkpointer = Checkpointer(root, process_group=group, **self._options)
            self._directories[root] = Directory(root, checkpointer, shared=ranks is not None)
        return self._directories[root]

    def _group_of_one(self) -> dist.ProcessGroup | None:
        if dist.is_initialized() and dist.get_world_size() > 1 and self._alone is None:
            self._alone = dist.new_group([dist.get_rank()], backend="gloo", use_local_synchronization=True)
        return self._alone


class _Bridge:
    """The recovery of all directories of a `CkptIO` from a fault; see `ckpt.restart`."""

    last_restore: None = None  # nothing is restored after a fault but by the next `fit`
    resume_step: None = None

    def __init__(self, directories: dict[str, Directory], forget_group: Callable[[], None]) -> None:
        self._directories = directories
        self._forget_group = forget_group

    @property
    def interrupted_at(self) -> float | None:
        """When `interrupt` was first called since the last fault; None if it was not, or no directory is open."""
        times = (directory.checkpointer.bridge.interrupted_at for directory in self._directories.values())
        return min((at for at in times if at is not None), default=None)

    def interrupt(self) -> None:
        """Wake a thread that waits for a save. From any thread."""
        for directory in list(self._directories.values()):
            directory.checkpointer.bridge.interrupt()

    def recover_from_fault(self, drain_timeout: timedelta | None, rank: int | None = 0) -> None:
        """Decide every save in flight. Each directory has its own `drain_timeout`."""
        for root, directory in list(self._directories.items()):
            directory.checkpointer.bridge.recover_from_fault(drain_timeout, rank)
            if not directory.shared:  # its process group was one of the last iteration
                for failure in directory.close():
                    _log.warning("%s: %s", root, failure)
                del self._directories[root]
        self._forget_group()


def _is_between_epochs(checkpoint: dict[str, Any]) -> bool:
    """Return whether each epoch that `Trainer.fit` began has ended; False if a checkpoint does not say it."""
    loops = checkpoint.get("loops") or {}
    progress = loops.get("fit_loop", {}).get("epoch_progress", {}).get("current", {})
    return bool(progress) and progress["ready"] == progress["completed"]


# -- strategies in which all ranks save --------------------------------------------------------------------------------


class _SavesOnAllRanks:
    """A strategy whose checkpoints all ranks write."""

    checkpoint_io: Any

    def setup_environment(self) -> None:
        _io_of(self)
        super().setup_environment()  # type: ignore[misc]

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: _StrPath, storage_options: Any = None) -> None:
        """Save on all ranks, each its share. Collective."""
        _io_of(self).save_checkpoint_on_all_ranks(checkpoint, filepath, storage_options)


class CkptDDPStrategy(_SavesOnAllRanks, DDPStrategy):
    """DDP in which each rank writes a part of every checkpoint, instead of rank 0 everything.

    ``Trainer(strategy=CkptDDPStrategy(), plugins=[CkptIO()])``. Takes the arguments of `DDPStrategy`.
    """


class CkptModelParallelStrategy(_SavesOnAllRanks, ModelParallelStrategy):
    """FSDP2 and tensor parallelism, with checkpoints to which each rank writes its shards.

    ``Trainer(strategy=CkptModelParallelStrategy(), plugins=[CkptIO()])``. Takes the arguments of
    `ModelParallelStrategy`; `save_distributed_checkpoint` has no effect. A checkpoint can be loaded by any number of
    ranks in any sharding, and by `read_checkpoint` as a whole.
    """

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """Return the state dict of the module, with the shards of this rank."""
        state: dict[str, Any] = Strategy.lightning_module_state_dict(self)
        return state

    def optimizer_state(self, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
        """Return the state dict of an optimizer, with the shards of this rank."""
        state: dict[str, Any] = Strategy.optimizer_state(self, optimizer)
        return state

    def load_checkpoint(self, checkpoint_path: _StrPath, weights_only: bool | None = None) -> dict[str, Any]:
        """Restore module and optimizers in place, and return the rest of the checkpoint. Collective."""
        module = self.lightning_module
        return _io_of(self).load_into(checkpoint_path, module, self.optimizers, module.strict_loading)

    def teardown(self) -> None:
        """End the training process, as every strategy does, and wait for the saves."""
        super().teardown()
        _io_of(self).teardown()


def _io_of(strategy: Any) -> CkptIO:
    plugin = strategy.checkpoint_io
    if not isinstance(plugin, CkptIO):
        kind = type(strategy).__name__
        raise TypeError(f"{kind} saves with CkptIO: Trainer(strategy={kind}(...), plugins=[CkptIO()])")
    return plugin
