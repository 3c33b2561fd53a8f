"""Steps of a checkpoint root as storage for torch.distributed.checkpoint (DCP).

    dcp.save(state_dict, checkpoint_id="runs/lm/step_100", storage_writer=writer)     # Writer("runs/lm")
    dcp.load(state_dict, checkpoint_id="runs/lm/step_100", storage_reader=Reader())

A planner of DCP divides a state dict into items: boxes of tensors, and objects. They become the leaves of a state,
which a `Checkpointer` saves; so a step is published by all ranks or by none, and `Checkpointer.restore`, `ckpt.open`
and inspect_ckpt read it like any other:

    items of this rank --> ckpt.Leaves --> all ranks: errors, items of lists --> Checkpointer.save
"""

from __future__ import annotations

import contextlib
import dataclasses
import io
import json
import os
import re
import time
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Self

import torch
from torch.distributed.checkpoint.filesystem import CURRENT_DCP_VERSION
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta
from torch.distributed.checkpoint.planner import (
    LoadItemType,
    LoadPlan,
    LoadPlanner,
    ReadItem,
    SavePlan,
    SavePlanner,
)
from torch.distributed.checkpoint.storage import StorageReader, StorageWriter, WriteResult

import ckpt
from ckpt import (
    Checkpoint,
    Checkpointer,
    CheckpointError,
    CheckpointExistsError,
    CheckpointNotFoundError,
    LazyTensor,
    Leaves,
    SaveAbandonedError,
    StateMismatchError,
    Unregistered,
)
from ckpt.integrations.dcp_leaves import ARRAYS, DcpLeaves, DcpObject, add_leaves, leaves_of, nbytes_of

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

__all__ = ["Reader", "Writer", "latest_step"]

_MAX_LISTED_BYTES = 48 << 10  # of the names of numpy arrays, which are metrics of the step: see MAX_METRICS_BYTES
_STEP = re.compile(r"(?:(?:global_?)?step|checkpoint)?[-_]?(\d{1,18})", re.ASCII)


# -- writing -----------------------------------------------------------------------------------------------------------


class Writer(StorageWriter):
    """Writes what a planner of DCP hands over as a step of a checkpoint root: whole on all ranks, or absent.

    Every rank makes one. The data are copied to shared memory, and written by a process beside this one; `write_data`
    returns when the step is published. Failures are a `CheckpointError` in the failures of DCP's CheckpointException.
    As with DCP itself, one save at a time.
    """

    def __init__(
        self,
        path: str | os.PathLike[str] | None = None,
        *,
        process_group: ProcessGroup | None = None,
        string_keys: bool = False,
        timeout: timedelta | float = timedelta(minutes=10),
        **options: Any,
    ) -> None:
        """Start and write nothing yet.

        `path` is a checkpoint root, or the directory of a step in one, such as ``runs/lm/step_100`` or
        ``s3://models/lm/step_100``: its last part is the number of the step, alone or behind ``step``, ``global_step``
        or ``checkpoint``. (The directory on disk is ``step_00000100``.) A `checkpoint_id` that is given to DCP names a
        step in the same way, and replaces it. The memory and the process that writes stay for the next save until
        `close`; only if `path` is that of a step, and in the background process of ``dcp.async_save``, they are there
        for one save.

        `process_group` is the one that DCP is given. DCP makes strings of all keys; a key that is a whole number is
        stored as a number, as in the state of an optimizer, unless `string_keys`. `timeout` bounds every wait for
        other ranks. `options` are those of `ckpt.Checkpointer`, such as `keep`.
        """
        super().__init__()
        self._root, self._step = (None, None) if path is None else _parsed(path)
        self._stays_open = self._step is None
        self._process_group = process_group
        self._string_keys = string_keys
        self._timeout_s = timeout.total_seconds() if isinstance(timeout, timedelta) else timeout
        self._options = options
        self._checkpointer: Checkpointer | None = None
        self._opened_root: str | None = None

    @property
    def checkpoint_id(self) -> str | None:
        """The directory of the step that is written, or the root if no step is known; None without both."""
        if self._root is None or self._step is None:
            return self._root
        return os.path.join(self._root, f"step_{self._step:08d}")

    def close(self) -> None:
        """Release the root, end the process that writes, and free the memory. Idempotent."""
        checkpointer, self._checkpointer = self._checkpointer, None
        if checkpointer is not None:
            checkpointer.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def __getstate__(self) -> dict[str, Any]:
        """Return what another process needs to write: ``async_save`` may send a writer to its background process."""
        return self.__dict__ | {"_checkpointer": None, "_process_group": None, "_stays_open": False}

    # -- the interface of DCP, in the order of its calls ---------------------------------------------------------------

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Return whether `checkpoint_id` names a step."""
        return _parsed(checkpoint_id)[1] is not None

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Begin another save, of the step that `checkpoint_id` names if it is given. ValueError if it names none."""
        if checkpoint_id is None:
            return
        root, step = _parsed(checkpoint_id)
        if step is None:
            raise ValueError(_no_step(checkpoint_id))
        self._root, self._step = root or self._root or ".", step

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Check that this writer can do what DCP was asked to."""
        if self._step is None:
            raise ValueError(_no_step(self._root))
        if not kwargs.get("use_collectives", True):
            raise ValueError("ckpt.integrations.dcp.Writer needs dcp.save(use_collectives=True): ranks commit together")
        if kwargs.get("rank", self._ranks.rank) != self._ranks.rank:
            raise ValueError(self._wrong_group(f"this process is rank {kwargs['rank']} for DCP"))

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """Return the plan as it is."""
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """Return the plans as they are. ValueError if they are not those of the ranks of `process_group`."""
        if len(plans) != self._ranks.world_size:
            raise ValueError(self._wrong_group(f"DCP saves on {len(plans)} ranks"))
        return plans

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> torch.futures.Future[list[WriteResult]]:
        """Save the items of all ranks as one step, and return when it is published. Collective.

        Raises StateError, on all ranks, for an item of one of them that cannot be stored; CheckpointExistsError for the
        first save to a root unless it is behind the newest step; and what `Checkpointer.recover` and `save` raise.
        """
        assert self._root is not None
        assert self._step is not None
        with contextlib.ExitStack() as stack:
            checkpointer = self._open(self._root)
            if not self._stays_open:
                self._checkpointer = None
                stack.push(checkpointer)
            state, metrics = self._state(plan, planner)
            try:
                is_published = checkpointer.save(state, self._step, metrics=metrics)
            except CheckpointExistsError:  # its text advises methods of a Checkpointer
                steps = checkpointer.all_steps()
                raise CheckpointExistsError(_why_not(self._root, self._step, steps), step=self._step) from None
            if not is_published:
                raise SaveAbandonedError(f"step {self._step} is not published: the log has the error", step=self._step)
        written: torch.futures.Future[list[WriteResult]] = torch.futures.Future()
        written.set_result([WriteResult(item.index, nbytes_of(item), None) for item in plan.items])
        return written

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Do nothing: the step is published, and is read without these metadata."""
        metadata.storage_meta = self.storage_meta()
        metadata.version = CURRENT_DCP_VERSION

    def storage_meta(self) -> StorageMeta:
        """Return where the step is."""
        return StorageMeta(checkpoint_id=self.checkpoint_id)

    # -- from items to a state -----------------------------------------------------------------------------------------

    @property
    def _ranks(self) -> ckpt.Ranks:
        return ckpt.Ranks(self._process_group, self._timeout_s)

    def _wrong_group(self, what: str) -> str:
        ranks = self._ranks
        return (
            f"{what}, and rank {ranks.rank} of {ranks.world_size} for ckpt.integrations.dcp.Writer: give both the same "
            "process_group; with no_dist=True, give the Writer a group of this rank alone"
        )

    def _open(self, root: str) -> Checkpointer:
        if self._opened_root != root:
            self.close()
        if self._checkpointer is None:
            self._opened_root = root
            self._checkpointer = Checkpointer(
                root, process_group=self._process_group, timeout=self._timeout_s, **self._options
            )
            # Otherwise steps behind the newest one would be refused, unless this process has loaded one. That the
            # trainer has done so is not known in the background process of `dcp.async_save`.
            self._checkpointer.recover()
        return self._checkpointer

    def _state(self, plan: SavePlan, planner: SavePlanner) -> tuple[Any, dict[str, Any]]:
        """Return the leaves that this rank saves, and the metrics of the step.

        Collective; StateError on all ranks if any cannot store an item.
        """
        leaves, problem = Leaves(), None
        arrays: list[Any] = []
        try:
            with torch.no_grad():
                arrays = add_leaves(leaves, plan, planner, self._string_keys)
        except Exception as error:
            problem = str(error) if isinstance(error, CheckpointError) else f"{type(error).__name__}: {error}"
        ranks = self._ranks
        ranks.doing = f"the save of step {self._step} through DCP"
        everywhere = [answer for answer in ranks.outcomes(json.dumps(arrays).encode()) if isinstance(answer, bytes)]
        listed = [
            list(each) for each in sorted({tuple(k) for answer in everywhere for k in json.loads(answer)}, key=repr)
        ]
        if problem is None and len(json.dumps(listed)) > _MAX_LISTED_BYTES:
            problem = f"{len(listed)} numpy arrays are more than a step of DCP can name; make tensors of them"
        return leaves.state(ranks, problem), {ARRAYS: listed} if listed else {}


# -- reading -----------------------------------------------------------------------------------------------------------


class Reader(StorageReader):
    """Reads a step for a planner of DCP, whatever has written it: `Writer`, a `Checkpointer`, inspect_ckpt.

    Each rank reads the boxes that it needs, and verifies their checksums. No file is unpickled; the bytes that a
    planner is given for a value are made in memory. A leaf of a single rank is named ``<name>@rank<r>``.
    """

    def __init__(
        self, path: str | os.PathLike[str] | None = None, *, timeout: timedelta | float = timedelta(minutes=10)
    ) -> None:
        """Read nothing yet. `path` is that of a step, as for `Writer`, or a checkpoint root: then its newest step.

        A `checkpoint_id` that is given to DCP replaces it. A step that is just being written, and what this program
        writes to the root, is waited for, at most `timeout`.
        """
        super().__init__()
        self._timeout_s = timeout.total_seconds() if isinstance(timeout, timedelta) else timeout
        self._path = None if path is None else os.fspath(path)
        self._checkpoint: Checkpoint | None = None
        self._leaves = DcpLeaves()

    @property
    def checkpoint_id(self) -> str | None:
        """The directory of the step, once it is opened; else the path."""
        return self._path if self._checkpoint is None else self._checkpoint.path

    def close(self) -> None:
        """Release the step, which may be removed then. Idempotent; a load does it at its end."""
        checkpoint, self._checkpoint = self._checkpoint, None
        if checkpoint is not None:
            checkpoint.close()

    # -- the interface of DCP, in the order of its calls ---------------------------------------------------------------

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Return whether there is a published step."""
        try:
            _opened(os.fspath(checkpoint_id)).close()
        except CheckpointError:
            return False
        return True

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Begin another load, from `checkpoint_id` if it is given."""
        self.close()
        if checkpoint_id is not None:
            self._path = os.fspath(checkpoint_id)

    # Not named kwargs: DCP would take that for a reader of metadata of single ranks, and call it again after a failure.
    def read_metadata(self, *args: Any, **options: Any) -> Metadata:
        """Open the step and return what is in it; each tensor is one chunk.

        Raises what `ckpt.open` raises, and StateError if two leaves have the same name in DCP.
        """
        self.close()
        if self._path is None:
            raise ValueError("which step? Reader(path), or dcp.load(checkpoint_id=path)")
        _wait_until_written(self._path, self._timeout_s)
        self._checkpoint = _opened(self._path)
        self._leaves = leaves_of(self._checkpoint)
        return self._leaves.metadata(self._checkpoint.path, str(self._checkpoint.summary["save"]))

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Do nothing."""

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        """Return the plan with the name of the save that was opened."""
        return dataclasses.replace(plan, storage_data=str(self._opened_checkpoint.summary["save"]))

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        """Return the plans as they are. CheckpointNotFoundError if the ranks have opened different steps."""
        if len({plan.storage_data for plan in plans}) > 1:
            raise CheckpointNotFoundError(
                f"{self._path}: ranks have opened different steps, since one was published or replaced meanwhile; name "
                "the step: dcp.load(checkpoint_id='.../step_100')"
            )
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> torch.futures.Future[None]:
        """Fill the tensors and load the values of a plan; return when that is done.

        Raises CheckpointCorruptError, naming tensor, chunk and file; CheckpointNotFoundError if the step was removed
        meanwhile; StateMismatchError for a tensor of another shape.
        """
        with self._opened_checkpoint.restoring():
            self._read_tensors([item for item in plan.items if item.type is LoadItemType.TENSOR], planner)
            for item in plan.items:
                if item.type is LoadItemType.BYTE_IO:
                    planner.load_bytes(item, self._bytes_of(item))
        self.close()
        done: torch.futures.Future[None] = torch.futures.Future()
        done.set_result(None)
        return done

    # -- from a step to items ------------------------------------------------------------------------------------------

    @property
    def _opened_checkpoint(self) -> Checkpoint:
        if self._checkpoint is None:
            raise CheckpointError(f"{self._path} is not open: a Reader reads once for each read_metadata")
        return self._checkpoint

    def _read_tensors(self, items: list[ReadItem], planner: LoadPlanner) -> None:
        wanted: list[tuple[LazyTensor, tuple[int, ...], torch.Tensor]] = []
        for item in items:
            name, stored = item.storage_index.fqn, self._leaves.tensors[item.storage_index.fqn]
            corner = item.storage_index.offset or (0,) * len(stored.shape)
            offset = tuple(a + b for a, b in zip(corner, item.storage_offsets, strict=True))
            tensor = planner.resolve_tensor(item).detach()
            if tensor.shape != item.lengths:
                raise StateMismatchError(f"{name}: {list(item.lengths)} elements are read into {list(tensor.shape)}")
            wanted.append((stored, offset, tensor))
        self._opened_checkpoint.read_into(wanted)
        for item, (_, _, tensor) in zip(items, wanted, strict=True):
            planner.commit_tensor(item, tensor)

    def _bytes_of(self, item: ReadItem) -> io.BytesIO:
        """Return the bytes that `LoadPlanner.load_bytes` takes for a value."""
        name = item.storage_index.fqn
        value = self._leaves.values[name]
        if isinstance(value, DcpObject):
            value = value.load()
        unknown = next(Unregistered.within(value), None)
        if unknown is not None:
            raise StateMismatchError(
                f"{name} holds a value of the type {unknown.name}, which this program has not registered; call "
                "ckpt.register_encoder before the load"
            )
        data = io.BytesIO()
        torch.save(value, data)
        data.seek(0)
        return data


def latest_step(
    root: str | os.PathLike[str],
    *,
    process_group: ProcessGroup | None = None,
    timeout: timedelta | float = timedelta(minutes=10),
) -> int | None:
    """Return the newest published step of a root, the same on all ranks; None if there is none. Collective.

    Saves that an ended run left are decided first, as by `Checkpointer.restore`: complete ones are published, the
    others abandoned. So call it before the load with which a run begins. Raises what `Checkpointer.recover` raises.
    """
    with Checkpointer(root, process_group=process_group, timeout=timeout) as checkpointer:
        return max(checkpointer.recover(), default=None)


# -- paths -------------------------------------------------------------------------------------------------------------


def _parsed(path: str | os.PathLike[str]) -> tuple[str | None, int | None]:
    """Return the root and the step that a path names; the whole path and None if it is not that of a step."""
    text = os.fspath(path)
    root, name = os.path.split(text.rstrip("/"))
    match = _STEP.fullmatch(name)
    return (text, None) if match is None else (root or None, int(match[1]))


def _no_step(path: str | os.PathLike[str] | None) -> str:
    return (
        f"{path}: which step? The last part of checkpoint_id is its number, alone or behind 'step', 'global_step' or "
        "'checkpoint': dcp.save(state_dict, checkpoint_id='runs/lm/step_100', storage_writer=writer)"
    )


def _why_not(root: str, step: int, steps: list[int]) -> str:
    if step in steps:
        return (
            f"step {step} is already published in {root}, and nothing was written over; save it with another number, "
            f"or remove it: inspect_ckpt rm {root} {step}"
        )
    return (
        f"{root} has later steps, the newest is {max(steps, default=None)}, and step {step} would mix two trainings; "
        f"nothing was written. Give another root, or remove the later steps: inspect_ckpt rm {root} STEP"
    )


def _wait_until_written(path: str, timeout_s: float) -> None:
    """Wait while the step that a path names, or any that this program saves to a root, is being written."""
    root, step = _parsed(path)
    deadline = time.monotonic() + timeout_s
    if step is not None:
        ckpt.wait_until_written(root or ".", step, timeout=timeout_s)
    ckpt.wait_until_written(path, timeout=max(deadline - time.monotonic(), 0))


def _opened(path: str) -> Checkpoint:
    """Open the step that a path names, or the newest one of a root; one with the name of a step may be that, too."""
    root, step = _parsed(path)
    if step is None:
        return ckpt.open(path)
    try:
        return ckpt.open(root or ".", step)
    except CheckpointNotFoundError as missing:
        try:
            return ckpt.open(path)
        except CheckpointNotFoundError:
            raise missing from None
