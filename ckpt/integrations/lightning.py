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

import contextlib
import io
import json
import logging
import os
import sys
import time
from collections.abc import Callable, Mapping
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from ckpt.checkpointer import Checkpointer
from ckpt.distributed import own_rank
from ckpt.errors import CheckpointError, CheckpointNotFoundError, CheckpointTimeoutError, StateError, StorageError
from ckpt.integrations.lightning_names import (
    exists,
    is_link,
    located,
    names_in,
    read_name,
    remove_name,
    resolved,
    root_of,
    write_name,
)
from ckpt.loading.all_or_none import error_class
from ckpt.loading.bounce_buffer import as_numpy
from ckpt.loading.fetch import BoxRead, Fetch
from ckpt.loading.lazy import open_checkpoint
from ckpt.loading.options import RestoreOptions
from ckpt.loading.restore import Tiers, restore
from ckpt.paths import Path, display
from ckpt.planning.boxes import Box
from ckpt.planning.state_dict import PerRank, RngState
from ckpt.ranks import Ranks
from ckpt.saving.recover import recover_for_restore
from ckpt.saving.scheduled import wait_for_program, wait_for_step
from ckpt.storage.roots import open_root
from ckpt.values.codec import unregistered_in
from ckpt.values.containers import rebuild

try:
    from lightning.pytorch import __version__ as lightning_version
    from lightning.pytorch.plugins.io import CheckpointIO
    from lightning.pytorch.strategies import DDPStrategy, ModelParallelStrategy, Strategy
except ImportError as error:
    raise ImportError(
        "ckpt.integrations.lightning needs Lightning 2.6 or newer: pip install 'ckpt-inprocess[lightning]'"
    ) from error

__all__ = [
    "CkptDDPStrategy",
    "CkptIO",
    "CkptModelParallelStrategy",
    "load_from_checkpoint",
    "read_checkpoint",
]

_log = logging.getLogger("ckpt")
_T = TypeVar("_T")
_StrPath = str | os.PathLike[str]
_OPTIONS = ("slots", "max_host_bytes", "overlap", "compression", "threads", "timeout", "on_divergence")
_LAST = "last"  # how the names begin that `ckpt_path="last"` looks for
_BEFORE_THE_END = "hpc_ckpt_"  # how those begin that Lightning saves when SLURM is about to end the job
_MODEL, _OPTIMIZERS = "state_dict", "optimizer_states"


# -- the plugin --------------------------------------------------------------------------------------------------------


class CkptIO(CheckpointIO):
    """A checkpoint plugin that saves in the background: ``Trainer(plugins=[CkptIO()])``.

    For one device and for DDP, where rank 0 writes, as with every plugin; with `CkptDDPStrategy` and
    `CkptModelParallelStrategy` all ranks write their share. Each directory that is saved to becomes a checkpoint root,
    with a writer process of its own. It may be the URL of an object store, whose credentials are taken from the
    environment. `options` are those of `ckpt.Checkpointer` that do not say which steps are kept: slots,
    max_host_bytes, overlap, compression, threads, timeout, on_divergence.

    The error of a save is raised by the next one, or at the end of `Trainer.fit`. What Lightning saves when SLURM is
    about to end the job is published when the save returns. After an exception in `fit`, saves
    that are staged are not waited for: their writer finishes them, even if this process ends.

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
        self._timeout_s = options.get("timeout", timedelta(minutes=10)).total_seconds()
        self._directories: dict[str, _Directory] = {}
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
        return _Nothing() if found is None else _read(*found)

    def load_into(
        self, path: _StrPath, model: torch.nn.Module, optimizers: list[torch.optim.Optimizer], strict: bool
    ) -> dict[str, Any]:
        """Restore model and optimizers in place, in any sharding, and return the rest of the checkpoint. Collective.

        Without `optimizers` their state is not read. Raises as `load_checkpoint` does; StateMismatchError, if `strict`,
        when a name of the model is missing or unexpected.
        """
        found = self._find(path)
        if found is None:
            return _Nothing()
        root, step = found
        state: dict[str, Any] = {_MODEL: model}
        if optimizers:
            state[_OPTIMIZERS] = list(optimizers)
        rest = _read(root, step, lambda key: key not in (_MODEL, _OPTIMIZERS))
        options = RestoreOptions(strict, only=tuple(state))
        restore(Tiers(open_root(root)), state, step, options, self._all_ranks(), read_only=True)
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
                _Directory(root, checkpointer, shared=False).remove_later(path)

    def teardown(self) -> None:
        """Wait for all saves and end the writers, then raise the first failure; after an exception, do nothing."""
        if sys.exc_info()[1] is not None:
            return
        errors = []
        for directory in list(self._directories.values()):
            errors += directory.close()
        self._directories.clear()
        if errors:
            raise errors[0]

    @property
    def last_restore(self) -> None:
        """None: nothing is restored after a fault but by the next `fit`."""
        return None

    @property
    def resume_step(self) -> None:
        """None, for the same reason."""
        return None

    @property
    def interrupted_at(self) -> float | None:
        """When `interrupt` was first called since the last fault; None if it was not, or no directory is open."""
        times = (directory.checkpointer.interrupted_at for directory in self._directories.values())
        return min((at for at in times if at is not None), default=None)

    def interrupt(self) -> None:
        """Wake a thread that waits for a save. From any thread; for `ckpt.restart.CheckpointAbort`."""
        for directory in list(self._directories.values()):
            directory.checkpointer.interrupt()

    def recover_from_fault(self, drain_timeout: timedelta | None, rank: int | None = 0) -> None:
        """Decide every save in flight; for `ckpt.restart.CheckpointFinalize`. See `Checkpointer.recover_from_fault`.

        Each directory has its own `drain_timeout`.
        """
        for root, directory in list(self._directories.items()):
            directory.checkpointer.recover_from_fault(drain_timeout, rank)
            if not directory.shared:  # its process group was one of the last iteration
                for failure in directory.close():
                    _log.warning("%s: %s", root, failure)
                del self._directories[root]
        self._alone = None

    def _all_ranks(self) -> Ranks:
        ranks = Ranks(None, self._timeout_s)
        ranks.doing = "a checkpoint of Lightning"
        return ranks

    def _save(self, checkpoint: dict[str, Any], path: _StrPath, storage_options: Any, ranks: Ranks | None) -> None:
        if storage_options is not None:
            raise TypeError("CkptIO takes no storage_options: Trainer.save_checkpoint(path)")
        _refuse_objects(checkpoint, ())
        global_step = int(checkpoint.get("global_step", 0))

        def prepare() -> tuple[str, int]:
            for directory in self._directories.values():
                directory.finalize()
            if ranks is not None and ranks.rank != 0:
                return "", 0
            own = located(path)
            return own, self._directory(root_of(own), ranks).prepare(own, global_step)

        where, step = prepare() if ranks is None else _together(ranks, prepare)
        name = os.path.basename(where)
        about = {"name": name, "epoch": checkpoint.get("epoch"), "global_step": global_step}
        directory = self._directory(root_of(where), ranks)
        directory.save(checkpoint, where, step, {"lightning": about})
        if name.startswith(_BEFORE_THE_END):
            directory.finalize(blocking=True)

    def _find(self, path: _StrPath) -> tuple[str, int] | None:
        """Return root and number of the newest complete step of a name, the same on all ranks; see `_newest`.

        While its newest step is being written, this waits, at most half of `timeout`: other ranks wait meanwhile.
        """
        ranks = self._all_ranks()

        def find() -> tuple[str, int] | None:
            if ranks.rank != 0:
                return None
            root = root_of(resolved(located(path)))
            _wait_for_newest(path, self._timeout_s / 2)
            if root in self._directories:
                for failure in self._directories[root].settle(blocking=False):
                    _log.warning("%s", failure)
            else:
                recover_for_restore(open_root(root), 0, None, self._timeout_s / 2, _log.warning)
            return _newest(path)

        found = _together(ranks, find)
        return None if found is None else (found[0], found[1])

    def _directory(self, root: str, ranks: Ranks | None) -> _Directory:
        if root not in self._directories:
            group = self._group_of_one() if ranks is None else None
            checkpointer = Checkpointer(root, process_group=group, **self._options)
            self._directories[root] = _Directory(root, checkpointer, shared=ranks is not None)
        return self._directories[root]

    def _group_of_one(self) -> dist.ProcessGroup | None:
        if dist.is_initialized() and dist.get_world_size() > 1 and self._alone is None:
            self._alone = dist.new_group([dist.get_rank()], backend="gloo", use_local_synchronization=True)
        return self._alone


class _Directory:
    """A directory that is saved to: its checkpointer, and what is to be done when its saves are published."""

    def __init__(self, root: str, checkpointer: Checkpointer, *, shared: bool) -> None:
        self.checkpointer = checkpointer
        self.shared = shared  # by all ranks, which save together
        self._root = open_root(root)
        self._last: int | None = None  # the number of the newest save
        self._saves: dict[int, str] = {}  # the paths of saves that are not known to be published, by step
        self._removals: list[tuple[int, str]] = []  # each path with the step that must be published before

    @property
    def leads(self) -> bool:
        """Whether this rank writes and removes names."""
        return not self.shared or not dist.is_initialized() or dist.get_rank() == 0

    def prepare(self, path: str, global_step: int) -> int:
        """Write the name of a save, and return the number of its step: the global step, or the next free number."""
        if is_link(path):
            remove_name(path)
        self._removals = [removal for removal in self._removals if removal[1] != path]
        earlier = read_name(path) if exists(path) else []
        if self._last is None:
            known = [*self._root.steps(), *(save.step for save in self._root.pending())]
            self._last = max(known, default=-1)
        step = max(global_step, self._last + 1)
        self._root.make()
        write_name(path, [step, *earlier])
        return step

    def save(self, checkpoint: dict[str, Any], path: str, step: int, metrics: dict[str, Any]) -> None:
        """Stage and schedule a save."""
        self._last = step
        self._saves[step] = path
        self.checkpointer.async_save(checkpoint, step, metrics=metrics)

    def finalize(self, blocking: bool = False) -> None:
        """Finalize the saves that are decided. Raises the error of one that was abandoned."""
        for step in self.checkpointer.maybe_finalize(blocking):
            self._published(step)

    def remove_later(self, path: str) -> None:
        """Remove a name and its steps, once the newest save is published."""
        self._removals.append((max(self._saves, default=-1), path))
        if not self._saves:
            self._remove(-1)

    def settle(self, blocking: bool = True) -> list[CheckpointError]:
        """Finalize the saves that are decided, or with `blocking` all; return the failures."""
        errors: list[CheckpointError] = []
        while True:
            try:
                self.finalize(blocking)
                return errors
            except CheckpointError as error:  # of one save, which is no longer in the queue
                errors.append(error)
                if isinstance(error, CheckpointTimeoutError):
                    return errors

    def close(self) -> list[CheckpointError]:
        """Wait for all saves, finalize them and end the writer; return the failures."""
        try:
            return self.settle()
        finally:
            self.checkpointer.close()

    def _published(self, step: int) -> None:
        path = self._saves.get(step)
        self._saves = {other: name for other, name in self._saves.items() if other > step}
        if not self.leads:
            return
        if path is not None and exists(path):
            steps = read_name(path)
            kept = [other for other in steps if other >= step or not self._delete(other)]
            if kept != steps:
                write_name(path, kept)
        self._remove(step)

    def _remove(self, published: int) -> None:
        """Remove the names that waited for this step."""
        due = [removal for removal in self._removals if removal[0] <= published]
        for removal in due:
            path = removal[1]
            if exists(path):
                kept = [step for step in read_name(path) if not self._delete(step)]
                if kept:
                    continue  # again, after the next save
                remove_name(path)
            self._removals.remove(removal)

    def _delete(self, step: int) -> bool:
        """Remove a step; False, and a warning, if that is not possible now."""
        try:
            self.checkpointer.delete(step)
        except CheckpointNotFoundError:
            pass  # it was never published
        except StorageError as error:
            _log.warning("step %d of %s is not removed yet: %s", step, self._root.path, error)
            return False
        return True


# -- names -------------------------------------------------------------------------------------------------------------


def _wait_for_newest(path: _StrPath, timeout_s: float) -> None:
    """Wait while the newest step of a name is being written, and what this program saves beside it; at most so long."""
    path = located(path)
    root, deadline = open_root(root_of(resolved(path))), time.monotonic() + timeout_s
    wait_for_step(root, read_name(path)[0], deadline)
    wait_for_program(root, deadline)  # a link may stand for the step before


def _newest(path: _StrPath) -> tuple[str, int] | None:
    """Return root and number of the newest complete step of a name; None if a name for "last" has none.

    A symbolic link (``save_last="link"``) to a checkpoint that was never completed stands for the step before it.
    """
    path = located(path)
    root = root_of(resolved(path))
    steps = read_name(path)
    published = open_root(root).steps()
    complete = [step for step in published if step <= steps[0] and (step in steps or is_link(path))]
    if complete:
        if complete[-1] != steps[0]:
            _log.warning("%s: the save of step %d is not complete; loading step %d", path, steps[0], complete[-1])
        return root, complete[-1]
    if os.path.basename(path).startswith(_LAST):
        _log.warning("%s: its save was not completed, and there was none before; nothing is loaded", path)
        return None
    names = [place for place in names_in(root) if _is_complete(place, published)]
    raise CheckpointNotFoundError(
        f"{path}: its save is not complete. It takes longer than the timeout (CkptIO.teardown() waits for it, as does "
        "the end of `fit`), or was never completed, because a job ended meanwhile or the save failed. Complete "
        f"checkpoints there: {', '.join(names) or 'none'}"
    )


def _is_complete(place: str, published: list[int]) -> bool:
    with contextlib.suppress(CheckpointError):
        return not set(read_name(place)).isdisjoint(published)
    return False


# -- reading -----------------------------------------------------------------------------------------------------------


class _Nothing(dict[str, Any]):
    """A checkpoint of which Lightning restores nothing: it counts as false, and has the one member that is read."""

    def __init__(self) -> None:
        super().__init__({"pytorch-lightning_version": lightning_version})

    def __bool__(self) -> bool:
        return False


def read_checkpoint(path: _StrPath, *, timeout: timedelta = timedelta(minutes=10)) -> dict[str, Any]:
    """Return a checkpoint of Lightning: ``state_dict``, ``hyper_parameters``, ``callbacks`` and so on, on the CPU.

    In any process, and by any rank alone. Waits while the newest save of the name is being written, at most `timeout`.
    Raises as `CkptIO.load_checkpoint` does, and CheckpointNotFoundError if no save of the name was completed.
    """
    _wait_for_newest(path, timeout.total_seconds())
    found = _newest(path)
    if found is None:
        raise CheckpointNotFoundError(f"{os.fspath(path)}: no save of this name was completed")
    return _read(*found)


def load_from_checkpoint(kind: type[_T], path: _StrPath, **arguments: Any) -> _T:
    """Return what ``kind.load_from_checkpoint(path, **arguments)`` returns for a file of torch.save.

    `kind` is a LightningModule or LightningDataModule. By any rank alone. In memory, the checkpoint is put into the
    form of such a file, so for a moment it needs its size three times. Raises as `read_checkpoint` does.
    """
    file = io.BytesIO()
    torch.save(read_checkpoint(path), file)
    file.seek(0)
    arguments.setdefault("weights_only", False)  # these are the bytes written above
    model: _T = kind.load_from_checkpoint(file, **arguments)  # type: ignore[attr-defined]
    return model


def _read(root: str, step: int, select: Callable[[str | int], bool] = lambda key: True) -> dict[str, Any]:
    """Return the parts of a step whose topmost keys are selected. What belongs to single ranks is that of this rank."""
    rank = own_rank() or 0
    with open_checkpoint(root, step) as checkpoint:
        index = checkpoint.index
        stored = {path: tensor for path, tensor in index.tensors.items() if select(path[0])}
        stored |= {path: own[rank] for path, own in index.per_rank_tensors.items() if rank in own and select(path[0])}
        leaves: dict[Path, Any] = {
            path: torch.empty(tensor.shape, dtype=getattr(torch, tensor.dtype)) for path, tensor in stored.items()
        }
        threads = min(max(4, torch.get_num_threads()), 16)
        Fetch(index, threads=threads).read(
            [
                BoxRead(display(path), tensor, Box.whole(tensor.shape), as_numpy(leaves[path]))
                for path, tensor in stored.items()
            ]
        )
        checkpoint.check()
    leaves |= {path: leaves[target] for path, target in index.aliases.items() if target in leaves}
    values = {path: value for path, value in index.values.items() if select(path[0])}
    values |= {path: own[rank] for path, own in index.per_rank_values.items() if rank in own and select(path[0])}
    for path, value in values.items():
        for unknown in unregistered_in(value):
            functions = ", to_json, from_json" if unknown.form == "registered" else ""
            raise StateError(
                f"{display(path)} of step {step} of {root} is a {unknown.name}, which this program has not registered: "
                f"call ckpt.register_encoder({unknown.name.rpartition('.')[2]}{functions}) before"
            )
    containers = dict(index.containers)
    containers |= {path: own[rank] for path, own in index.per_rank_containers.items() if rank in own}
    state: dict[str, Any] = rebuild(leaves | values, containers)
    return state


def _refuse_objects(node: Any, path: Path) -> None:
    """Raise StateError for an object with a state dict: a load would return the state dict in its place."""
    if isinstance(node, Mapping):
        for key, item in node.items():
            _refuse_objects(item, (*path, key))
    elif isinstance(node, list | tuple):
        for number, item in enumerate(node):
            _refuse_objects(item, (*path, number))
    elif isinstance(node, torch.nn.Module) or (
        callable(getattr(node, "load_state_dict", None)) and not isinstance(node, RngState | PerRank | torch.Tensor)
    ):
        raise StateError(
            f"{display(path)} is a {type(node).__name__}, an object that cannot be stored. If it is an argument of the "
            f"LightningModule, leave it out: self.save_hyperparameters(ignore=[{str(path[-1])!r}]); otherwise put its "
            "state_dict() there"
        )


def _together(ranks: Ranks, action: Callable[[], Any]) -> Any:
    """Run `action` on all ranks and return what that of rank 0 returned; raise on all if one raised. Collective.

    Results are JSON.
    """
    failure: CheckpointError | None = None
    try:
        own = {"result": action()}
    except CheckpointError as error:
        failure = error
        own = {"kind": type(error).__name__, "text": str(error)}
    answers = [json.loads(answer) for answer in ranks(json.dumps(own).encode())]
    if failure is not None:
        raise failure
    for rank, answer in enumerate(answers):
        if "kind" in answer:
            raise error_class(answer["kind"])(f"rank {rank}: {answer['text']}", rank=rank)
    return answers[0]["result"]


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
