"""Steps of a checkpoint root as storage for torch.distributed.checkpoint (DCP).

    dcp.save(state_dict, checkpoint_id="runs/lm/step_100", storage_writer=writer)     # Writer("runs/lm")
    dcp.load(state_dict, checkpoint_id="runs/lm/step_100", storage_reader=Reader())

A planner of DCP divides a state dict into items: boxes of tensors, and objects. They become the leaves of a state,
which a `Checkpointer` saves; so a step is published by all ranks or by none, and `Checkpointer.restore`, `ckpt.open`
and inspect_ckpt read it like any other:

    items of this rank --> leaves by path --> all ranks: errors, leaves in lists --> FlatState --> Checkpointer.save

DCP joins the keys of nested dicts by dots, and divides lists that hold dicts or tensors. The keys are stored, not the
joined names. A list without tensors is one value, as in every state, so its items are gathered on one rank.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import io
import json
import logging
import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Self

import torch
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import (
    LoadItemType,
    LoadPlan,
    LoadPlanner,
    ReadItem,
    SavePlan,
    SavePlanner,
    WriteItem,
    WriteItemType,
)
from torch.distributed.checkpoint.storage import StorageReader, StorageWriter, WriteResult

from ckpt.checkpointer import Checkpointer
from ckpt.errors import CheckpointError, CheckpointNotFoundError, StateError, StateMismatchError
from ckpt.loading.bounce_buffer import BouncedRead, as_numpy, read_bounced
from ckpt.loading.fetch import BoxRead, Fetch
from ckpt.loading.index import CheckpointIndex, StoredTensor
from ckpt.loading.lazy import Checkpoint, open_checkpoint
from ckpt.paths import Path
from ckpt.planning.boxes import Box, OwnBoxes
from ckpt.planning.state_dict import FlatState, TensorLeaf, ValueLeaf
from ckpt.planning.tensors import check_storable, tensor_spec, without_graph
from ckpt.ranks import Ranks
from ckpt.storage.dtypes import torch_dtype
from ckpt.storage.names import step_name
from ckpt.storage.roots import absolute, is_object_url, open_root
from ckpt.values.codec import UnencodableError, decode_value, encode_value, unregistered_in
from ckpt.values.containers import Container, rebuild

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

__all__ = ["Reader", "Writer", "latest_step"]

_log = logging.getLogger("ckpt")
_STEP = re.compile(r"(?:(?:global_?)?step|checkpoint)?[-_]?(\d{1,18})", re.ASCII)
_NUMBER = re.compile(r"0|[1-9]\d{0,17}", re.ASCII)
_SEQUENCES = ("list", "tuple", "namedtuple", "deque")
_LIST = Container("list")
_STATE, _GROUPS = "state", "param_groups"  # of the state dict of an optimizer
_MIN_THREADS, _MAX_THREADS = 4, 16


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
        timeout: timedelta = timedelta(minutes=10),
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
        other ranks. `options` are those of `ckpt.Checkpointer`, such as `keep_last`.
        """
        super().__init__()
        self._root, self._step = (None, None) if path is None else _parsed(path)
        self._stays_open = self._step is None
        self._process_group = process_group
        self._string_keys = string_keys
        self._timeout = timeout
        self._options = options
        self._checkpointer: Checkpointer | None = None

    @property
    def checkpoint_id(self) -> str | None:
        """The directory of the step that is written, or the root if no step is known; None without both."""
        if self._root is None or self._step is None:
            return self._root
        return os.path.join(self._root, step_name(self._step))

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

        Raises StateError, on all ranks, for an item of one of them that cannot be stored, and what `Checkpointer.save`
        raises.
        """
        assert self._root is not None
        assert self._step is not None
        with contextlib.ExitStack() as stack:
            checkpointer = self._open(self._root)
            if not self._stays_open:
                self._checkpointer = None
                stack.push(checkpointer)
            checkpointer.save(self._state(plan, planner), self._step)
        written: torch.futures.Future[list[WriteResult]] = torch.futures.Future()
        written.set_result([WriteResult(item.index, _nbytes(item), None) for item in plan.items])
        return written

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Do nothing: the step is published, and is read without these metadata."""
        metadata.storage_meta = self.storage_meta()

    def storage_meta(self) -> StorageMeta:
        """Return where the step is."""
        return StorageMeta(checkpoint_id=self.checkpoint_id)

    # -- from items to a state -----------------------------------------------------------------------------------------

    @property
    def _ranks(self) -> Ranks:
        return Ranks(self._process_group, self._timeout.total_seconds())

    def _wrong_group(self, what: str) -> str:
        ranks = self._ranks
        return (
            f"{what}, and rank {ranks.rank} of {ranks.world_size} for ckpt.integrations.dcp.Writer: give both the same "
            "process_group; with no_dist=True, give the Writer a group of this rank alone"
        )

    def _open(self, root: str) -> Checkpointer:
        opened = self._checkpointer
        if opened is not None and opened.root != absolute(root):
            self.close()
        if self._checkpointer is None:
            self._checkpointer = Checkpointer(
                root, process_group=self._process_group, timeout=self._timeout, **self._options
            )
        return self._checkpointer

    def _state(self, plan: SavePlan, planner: SavePlanner) -> FlatState:
        """Return the leaves that this rank saves. Collective; StateError on all ranks if any cannot store an item."""
        own, problem = _Leaves(), None
        try:
            with torch.no_grad():
                own = _leaves(plan, planner, self._string_keys)
        except Exception as error:
            problem = str(error) if isinstance(error, CheckpointError) else f"{type(error).__name__}: {error}"
        told = {"problem": problem, **own.to_document()}
        ranks = self._ranks
        ranks.doing = f"the save of step {self._step} through DCP"
        answers = [json.loads(answer) for answer in ranks(json.dumps(told).encode())]
        for rank, answer in enumerate(answers):
            if answer["problem"] is not None:
                raise StateError(
                    f"rank {rank} cannot store its part, nothing was written: {answer['problem']}", rank=rank
                )
        return _flat_state(own, answers, ranks.rank)


@dataclass
class _Leaves:
    """What a rank has of a state, by path. `lists` are the positions in a path at which the key is that of a list."""

    tensors: dict[Path, TensorLeaf] = field(default_factory=dict)
    values: dict[Path, Any] = field(default_factory=dict)  # encoded
    lists: dict[Path, tuple[int, ...]] = field(default_factory=dict)

    def to_document(self) -> dict[str, Any]:
        """Return what the other ranks need to know, as JSON: no more than a digest of what is not in a list."""
        text = repr(([(path, leaf.spec) for path, leaf in self.tensors.items()], list(self.values), self.lists))
        paths = (*self.tensors, *self.values)
        return {
            "structure": hashlib.blake2b(text.encode(), digest_size=16).hexdigest(),
            "in_lists": [(path, at, self.values.get(path), path in self.tensors) for path, at in self.lists.items()],
            "states": sorted({path[:at] for path in paths for at, key in enumerate(path) if key == _STATE}, key=repr),
        }


@dataclass(frozen=True, slots=True)
class _InList:
    """A leaf in a list, of the rank `holder`; encoded unless it is a tensor."""

    holder: int
    path: Path
    positions: tuple[int, ...]
    encoded: Any
    is_tensor: bool


def _leaves(plan: SavePlan, planner: SavePlanner, string_keys: bool) -> _Leaves:
    """Resolve all items of a plan. StateError, naming the item, for one that cannot be stored."""
    leaves = _Leaves()
    parts: dict[Path, list[tuple[WriteItem, Any]]] = {}
    names: dict[Path, str] = {}
    for item in plan.items:
        name = item.index.fqn
        keys = _keys(name, plan.planner_data)
        path = tuple(int(key) if not string_keys and _NUMBER.fullmatch(str(key)) else key for key in keys)
        if names.setdefault(path, name) != name:
            raise StateError(f"{name} and {names[path]} have the same keys {list(path)}; rename one of them")
        positions = tuple(position for position, key in enumerate(keys) if type(key) is int)
        if positions:
            leaves.lists[path] = positions
        if item.type is WriteItemType.BYTE_IO:
            leaves.values[path] = _encoded(name, _object(item, planner))
        else:
            parts.setdefault(path, []).append((item, planner.resolve_data(item)))
    leaves.tensors = {path: _tensor_leaf(path, names[path], own) for path, own in parts.items()}
    return leaves


def _keys(name: str, planner_data: Any) -> Path:
    """Return the nested keys of a name; the name itself if its planner does not say. Only those of lists are int."""
    if not name.isascii() and any("\ud800" <= character <= "\udfff" for character in name):
        raise StateError(f"{name!r} is not valid Unicode and cannot be a name in a file")
    keys = planner_data.get(name) if isinstance(planner_data, Mapping) else None
    is_path = isinstance(keys, tuple) and keys and all(type(key) in (str, int) for key in keys)
    return keys if is_path and keys is not None else (name,)


def _object(item: WriteItem, planner: SavePlanner) -> Any:
    """Return the object of an item, which a planner makes bytes."""
    if isinstance(planner, DefaultSavePlanner):
        own: type[DefaultSavePlanner] = type(planner)
        default = DefaultSavePlanner
        if (own.resolve_data, own.transform_object) == (default.resolve_data, default.transform_object):
            return planner.lookup_object(item.index)
    data = planner.resolve_data(item)
    try:
        assert isinstance(data, io.BytesIO)
        data.seek(0)
        return torch.load(data, weights_only=False)  # what this process has just made of its own object
    except Exception as error:
        raise StateError(
            f"{item.index.fqn}: {type(planner).__name__}.resolve_data did not make what torch.load reads "
            f"({error!r:.200}); ckpt stores values, not bytes in a format of the planner"
        ) from error


def _encoded(name: str, value: Any) -> Any:
    try:
        return encode_value(value)
    except UnencodableError as error:
        where = ".".join(map(str, (name, *error.path)))
        raise StateError(
            f"{where}: {error}. Of tensors, DCP hands over those in dicts and lists; it hands over no numpy arrays: "
            "make tensors of them"
        ) from None


def _tensor_leaf(path: Path, name: str, parts: list[tuple[WriteItem, Any]]) -> TensorLeaf:
    """Return the leaf of a tensor of which this rank writes some boxes."""
    tensors: list[torch.Tensor] = []
    boxes: list[Box] = []
    size: tuple[int, ...] = ()
    for item, tensor in parts:
        about = item.tensor_data
        if about is None or not isinstance(tensor, torch.Tensor):
            raise StateError(f"{name}: its planner resolves it to a {type(tensor).__name__}, not to a tensor")
        check_storable(path, without_graph(tensor))
        box, size = Box(tuple(about.chunk.offsets), tuple(about.chunk.sizes)), tuple(about.size)
        if tuple(tensor.shape) != box.shape:
            raise StateError(
                f"{name}: its planner resolves the box of shape {list(box.shape)} to a tensor of shape "
                f"{list(tensor.shape)}"
            )
        if box.elements or not tensors:
            tensors.append(without_graph(tensor))
            boxes.append(box)
    local, offsets = (tensors[0], [(0,) * len(size)]) if len(tensors) == 1 else _joined(tensors)
    held = [(box, at) for box, at in zip(boxes, offsets, strict=True) if box.elements]
    spec = tensor_spec(local.dtype, size, OwnBoxes(tuple(sorted(box for box, _ in held))), False)
    return TensorLeaf(local, spec, held)


def _joined(tensors: list[torch.Tensor]) -> tuple[torch.Tensor, list[tuple[int, ...]]]:
    """Return one tensor that holds all of these, one behind the other in its first dimension; and the offsets."""
    rows = [tensor.shape[0] for tensor in tensors]
    rest = [max(sizes) for sizes in zip(*(tensor.shape[1:] for tensor in tensors), strict=True)]
    joined = tensors[0].new_zeros((sum(rows), *rest))
    offsets = [(sum(rows[:number]), *(0 for _ in rest)) for number in range(len(rows))]
    for tensor, offset in zip(tensors, offsets, strict=True):
        joined[Box(offset, tuple(tensor.shape)).slices((0,) * len(offset))] = tensor
    return joined, offsets


def _flat_state(own: _Leaves, answers: list[Any], rank: int) -> FlatState:
    """Return the state of this rank. `answers` are the documents of all ranks.

    A list without tensors becomes a value of the lowest rank that has any of its items.
    """
    in_lists = [
        _InList(holder, tuple(path), tuple(positions), encoded, is_tensor)
        for holder, answer in enumerate(answers)
        for path, positions, encoded, is_tensor in answer["in_lists"]
    ]
    containers = {item.path[:at] for item in in_lists if item.is_tensor for at in item.positions}
    values = {path: encoded for path, encoded in own.values.items() if path not in own.lists}
    lists: dict[Path, list[tuple[int, _InList]]] = {}  # where each item begins in its path
    for item in in_lists:
        inner = [at for at in item.positions if item.path[:at] not in containers]
        if inner:
            lists.setdefault(item.path[: inner[0]], []).append((inner[0], item))
        elif item.holder == rank and not item.is_tensor:
            values[item.path] = item.encoded
    states = {tuple(path) for answer in answers for path in answer["states"]}
    for path, items in lists.items():
        value = encode_value(_list_of(items))
        if items[0][1].holder == rank:
            values[path] = value
            if path[-1] == _GROUPS and path[:-1] not in states:  # of an optimizer, whose state is an empty dict
                values[*path[:-1], _STATE] = {}
    structure = hashlib.blake2b("".join(answer["structure"] for answer in answers).encode(), digest_size=16)
    return FlatState(
        tensors=own.tensors,
        values={path: ValueLeaf(None, False, None, encoded) for path, encoded in values.items()},
        containers=dict.fromkeys(sorted(containers, key=repr), (_LIST, False)),
        structure=structure.hexdigest(),
    )


def _list_of(items: list[tuple[int, _InList]]) -> Any:
    """Return a list made of its items. One without leaves is an empty dict: DCP hands nothing over for it."""
    leaves = {item.path[begin:]: decode_value(item.encoded) for begin, item in items}
    lists = {item.path[begin:at] for begin, item in items for at in item.positions if at >= begin}
    for path in lists:
        numbers = {int(leaf[len(path)]) for leaf in leaves if leaf[: len(path)] == path}
        leaves |= {(*path, number): {} for number in range(max(numbers)) if number not in numbers}
    return rebuild(leaves, dict.fromkeys(lists, _LIST))


def _nbytes(item: WriteItem) -> int:
    about = item.tensor_data
    return 0 if about is None else about.chunk.sizes.numel() * about.properties.dtype.itemsize


# -- reading -----------------------------------------------------------------------------------------------------------


class Reader(StorageReader):
    """Reads a step for a planner of DCP, whatever has written it: `Writer`, a `Checkpointer`, inspect_ckpt.

    Each rank reads the boxes that it needs, and verifies their checksums. No file is unpickled; the bytes that a
    planner is given for a value are made in memory. A leaf of a single rank is named ``<name>@rank<r>``.
    """

    def __init__(self, path: str | os.PathLike[str] | None = None) -> None:
        """Read nothing yet. `path` is that of a step, as for `Writer`, or a checkpoint root: then its newest step.

        A `checkpoint_id` that is given to DCP replaces it.
        """
        super().__init__()
        self._path = None if path is None else os.fspath(path)
        self._checkpoint: Checkpoint | None = None
        self._contents = _Contents()

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
        self._checkpoint = _opened(self._path)
        self._contents = _contents(self._checkpoint.index)
        return self._contents.metadata(self._checkpoint.path, str(self._checkpoint.summary["save"]))

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
        checkpoint = self._opened_checkpoint
        try:
            self._read_tensors([item for item in plan.items if item.type is LoadItemType.TENSOR], planner)
        except CheckpointError:
            checkpoint.check()  # raises if the step was removed: then nothing is damaged
            raise
        checkpoint.check()
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
        threads = min(max(_MIN_THREADS, torch.get_num_threads()), _MAX_THREADS)
        fetch = Fetch(self._opened_checkpoint.index, threads=threads)
        direct: list[BoxRead] = []
        bounced: list[BouncedRead] = []
        resolved: list[tuple[ReadItem, torch.Tensor, torch.Tensor]] = []
        for item in items:
            name, stored = item.storage_index.fqn, self._contents.tensors[item.storage_index.fqn]
            corner = item.storage_index.offset or (0,) * len(stored.shape)
            offset = tuple(a + b for a, b in zip(corner, item.storage_offsets, strict=True))
            box = Box(offset, tuple(item.lengths))
            tensor = planner.resolve_tensor(item).detach()
            if tuple(tensor.shape) != box.shape:
                raise StateMismatchError(f"{name}: {list(box.shape)} elements are read into {list(tensor.shape)}")
            dtype = torch_dtype(stored.dtype)
            target = tensor if tensor.dtype == dtype else torch.empty(box.shape, dtype=dtype)
            resolved.append((item, tensor, target))
            if target.is_cpu and not target.is_conj() and not target.is_neg():
                direct.append(BoxRead(name, stored, box, as_numpy(target)))
            else:
                bounced.append(BouncedRead(name, stored, box, target))
        fetch.read(direct)
        read_bounced(fetch, bounced)
        for item, tensor, target in resolved:
            if target is not tensor:
                tensor.copy_(target)
            planner.commit_tensor(item, tensor)

    def _bytes_of(self, item: ReadItem) -> io.BytesIO:
        """Return the bytes that `LoadPlanner.load_bytes` takes for a value."""
        name = item.storage_index.fqn
        value = self._contents.values[name]
        unknown = next(unregistered_in(value), None)
        if unknown is not None:
            raise StateMismatchError(
                f"{name} holds a value of the type {unknown.name}, which this program has not registered; call "
                "ckpt.register_encoder before the load"
            )
        data = io.BytesIO()
        torch.save(value, data)
        data.seek(0)
        return data


@dataclass
class _Contents:
    """The leaves of a step by their names in DCP, and their nested keys: those of lists are numbers, others strings."""

    tensors: dict[str, StoredTensor] = field(default_factory=dict)
    values: dict[str, Any] = field(default_factory=dict)
    keys: dict[str, Path] = field(default_factory=dict)

    def metadata(self, path: str, save: str) -> Metadata:
        """Return the description of all leaves for planners."""
        entries: dict[str, TensorStorageMetadata | BytesStorageMetadata] = {}
        for name, tensor in self.tensors.items():
            size = torch.Size(tensor.shape)
            whole = ChunkStorageMetadata(torch.Size([0] * len(size)), size)
            entries[name] = TensorStorageMetadata(TensorProperties(torch_dtype(tensor.dtype)), size, [whole])
        entries |= {name: BytesStorageMetadata() for name in self.values}
        return Metadata(entries, planner_data=self.keys, storage_data={}, storage_meta=StorageMeta(path, load_id=save))


def _contents(index: CheckpointIndex) -> _Contents:
    contents = _Contents()

    def name(path: Path, rank: int | None = None, inner: Path = ()) -> str:
        keys = tuple(key if _is_sequence(index, path[:at]) else str(key) for at, key in enumerate(path)) + inner
        dotted = ".".join(map(str, keys)) + ("" if rank is None else f"@rank{rank}")
        if dotted in contents.keys:
            raise StateError(
                f"{index.path}: the keys {list(contents.keys[dotted])} and {list(keys)} are the same for DCP, "
                f"{dotted}; use Checkpointer.restore or ckpt.open"
            )
        contents.keys[dotted] = keys if rank is None else (dotted,)
        return dotted

    for path, rank, tensor in index.stored_tensors():
        contents.tensors[name(path, rank)] = tensor
    for path, target in index.aliases.items():
        if target in index.tensors:
            contents.tensors[name(path)] = index.tensors[target]
    for path, value in index.values.items():
        for inner, part in _parts((), value):
            contents.values[name(path, None, inner)] = part
    for path, own in index.per_rank_values.items():
        for rank, value in own.items():
            contents.values[name(path, rank)] = value
    return contents


def _is_sequence(index: CheckpointIndex, path: Path) -> bool:
    container = index.containers.get(path)
    return container is not None and container.kind in _SEQUENCES


def _parts(path: Path, value: Any) -> Iterator[tuple[Path, Any]]:
    """Divide a value as DCP does: dicts, and lists that hold a dict at any depth."""
    if isinstance(value, Mapping):
        for key, item in value.items():
            yield from _parts((*path, str(key)), item)
    elif isinstance(value, list) and _holds_dict(value):
        for number, item in enumerate(value):
            yield from _parts((*path, number), item)
    else:
        yield path, value


def _holds_dict(value: Any) -> bool:
    return isinstance(value, Mapping) or (isinstance(value, list) and any(map(_holds_dict, value)))


def latest_step(
    root: str | os.PathLike[str],
    *,
    process_group: ProcessGroup | None = None,
    timeout: timedelta = timedelta(minutes=10),
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


def _opened(path: str) -> Checkpoint:
    """Open the step that a path names, or the newest one of a root."""
    root, step = _parsed(path)
    if step is not None:
        is_root = bool(open_root(path).steps()) if is_object_url(path) else os.path.isdir(path)
        if not is_root or step in open_root(root or ".").steps():
            return open_checkpoint(root or ".", step)
    return open_checkpoint(path)
