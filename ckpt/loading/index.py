"""The index of a published step: its tensors and values, read from three documents and checked.

Does not import torch.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from ckpt.errors import CheckpointCorruptError, CheckpointNotFoundError, FormatVersionError, StorageError
from ckpt.native import crc32c
from ckpt.paths import Path, display
from ckpt.storage.documents import (
    FORMAT_VERSION,
    ILL_FORMED,
    MAX_DOCUMENT_BYTES,
    decode_document,
    decode_root,
    well_formed,
)
from ckpt.storage.memory_step import MemoryStep
from ckpt.storage.names import INDEX, part_name
from ckpt.storage.pack_index import PackIndex, StoredArray, Table
from ckpt.storage.regular_files import DamagedFileError, MissingFileError
from ckpt.storage.step_source import StepSource, step_source
from ckpt.values.codec import decode_value
from ckpt.values.containers import Container

_MAX_INT = 1 << 63
_READS_FORMAT_1 = "0.1"


@dataclass(slots=True)
class StoredTensor:
    """A tensor of a step, stored as one array or several, its boxes. `dtype` is torch's name."""

    dtype: str
    shape: tuple[int, ...]
    boxes: list[StoredArray] = field(default_factory=list)


@dataclass
class CheckpointIndex:
    """The content of a published step by path. `per_rank_...` are keyed by path, then by rank.

    If names have been changed for the state of one rank, `moved` has all names of the step that belong to no single
    rank, in its order, each with those that it has here instead.
    """

    source: StepSource
    summary: dict[str, Any]
    packs: PackIndex
    tensors: dict[Path, StoredTensor] = field(default_factory=dict)
    values: dict[Path, Any] = field(default_factory=dict)
    per_rank_tensors: dict[Path, dict[int, StoredTensor]] = field(default_factory=dict)
    per_rank_values: dict[Path, dict[int, Any]] = field(default_factory=dict)
    aliases: dict[Path, Path] = field(default_factory=dict)
    containers: dict[Path, Container] = field(default_factory=dict)
    per_rank_containers: dict[Path, dict[int, Container]] = field(default_factory=dict)
    moved: dict[Path, tuple[Path, ...]] = field(default_factory=dict)

    @property
    def path(self) -> str:
        """Where the step is."""
        return self.source.path

    @property
    def step(self) -> int:
        """The training step."""
        return int(self.summary["step"])

    @property
    def world_size(self) -> int:
        """The number of ranks that wrote the step."""
        return int(self.summary["world_size"])

    def stored_tensors(self) -> Iterator[tuple[Path, int | None, StoredTensor]]:
        """Yield every stored tensor with its path, and the rank that it belongs to or None. Without aliases."""
        for path, tensor in self.tensors.items():
            yield path, None, tensor
        for path, own in self.per_rank_tensors.items():
            for rank, tensor in own.items():
                yield path, rank, tensor

    def names(self) -> tuple[Path, ...]:
        """Return the names of the step that belong to no single rank: the same on all ranks."""
        return tuple(self.moved or dict.fromkeys((*self.tensors, *self.values, *self.aliases)))

    def tensor(self, path: Path, rank: int | None = None) -> StoredTensor | None:
        """Return the tensor at `path`, or at the path it is an alias of; with a `rank`, that rank's own one."""
        path = self.aliases.get(path, path)
        return self.tensors.get(path) if rank is None else self.per_rank_tensors.get(path, {}).get(rank)


def parse_index(step: str | StepSource) -> CheckpointIndex:
    """Read the metadata as `read_index` does, without the check of consistency: see `find_inconsistencies`."""
    source = step_source(step)
    path = source.path
    root_path = os.path.join(path, "zarr.json")
    data = _read(source, "zarr.json", MAX_DOCUMENT_BYTES)
    try:
        document = decode_root(data, root_path)
    except CheckpointCorruptError:
        _check_version(_version(data), root_path)  # a newer version may compute checksums in another way
        raise
    with well_formed(root_path):
        summary = checked_summary(document["attributes"]["ckpt"], root_path)
    with well_formed(os.path.join(path, INDEX)):
        packs = _read_packs(source, summary)
        index = CheckpointIndex(source, summary, packs)
        _add_tensors(index)
    with well_formed(os.path.join(path, "state.json")):
        _add_state(index, read_vouched(source, "state.json", summary["state"]))
    return index


def read_vouched(step: str | StepSource, name: str, expected: dict[str, Any]) -> dict[str, Any]:
    """Return a document of a step, a source or a directory, of which the root records `bytes` and `crc32c`.

    CheckpointCorruptError if it is another one, or damaged; StorageError if it cannot be read.
    """
    source = step_source(step)
    where = os.path.join(source.path, name)
    data = _read(source, name, whole_number(expected["bytes"]))
    if expected != {"bytes": len(data), "crc32c": crc32c(data)}:
        raise CheckpointCorruptError(f"{where} is not the one that belongs to this step")
    return decode_document(data, where)


def _read_packs(source: StepSource, summary: dict[str, Any]) -> PackIndex:
    if isinstance(source, MemoryStep):
        return source.index
    document = read_vouched(source, INDEX, summary["index"])
    tables = _Tables(source, summary["parts"])
    return PackIndex.from_document(document, summary["world_size"], tables.of_rank, lambda: _pack_bytes(source))


def _pack_bytes(source: StepSource) -> int:
    sizes, _ = source.scan()
    return sum(nbytes for nbytes in sizes.values() if nbytes > 0)


class _Tables:
    """Where the compressed chunks are, read from the part manifest of a rank when it is needed. Any thread."""

    def __init__(self, source: StepSource, checksums: list[int]) -> None:
        self._source = source
        self._checksums = checksums
        self._known: dict[int, Table] = {}

    def of_rank(self, rank: int) -> Table:
        """Return the places of the compressed chunks of a rank. CheckpointCorruptError if its part is damaged."""
        if rank not in self._known:
            name = part_name(rank)
            data = _read(self._source, name, MAX_DOCUMENT_BYTES)
            where = os.path.join(self._source.path, name)
            if crc32c(data) != self._checksums[rank]:
                raise CheckpointCorruptError(f"{where} is not the one that belongs to this step")
            with well_formed(where):
                self._known[rank] = chunk_table(decode_document(data, where))
        return self._known[rank]


def chunk_table(part: dict[str, Any]) -> Table:
    """Return where the compressed chunks are that a part manifest lists. One of `ILL_FORMED` if that is invalid."""
    table: dict[tuple[int, int], tuple[int, int, int]] = {}
    for entry in items(part.get("chunks", [])):
        array, copy, file, offset, nbytes = sizes(entry)
        if table.setdefault((array, copy), (file, offset, nbytes)) != (file, offset, nbytes):
            raise ValueError(f"chunk {copy} of array {array} is in two places")
    return table


def _read(source: StepSource, name: str, most_bytes: int) -> bytes:
    path = os.path.join(source.path, name)
    try:
        return source.read(name, most_bytes)
    except MissingFileError:
        if source.looks_like_step:
            raise CheckpointCorruptError(f"{path} is missing; restore from another step") from None
        raise CheckpointNotFoundError(f"{source.path} is not a published checkpoint: it has no {name}") from None
    except DamagedFileError as damage:
        raise CheckpointCorruptError(f"{path} {damage}; restore from another step") from None
    except OSError as error:
        raise StorageError(f"cannot read {path}: {error.strerror}") from error


def _version(data: bytes) -> Any:
    """Return the format version of a root whose checksum is wrong; None if it has none."""
    try:
        return json.loads(data)["attributes"]["ckpt"]["format"]
    except ILL_FORMED:
        return None


def _check_version(version: Any, where: str) -> None:
    if type(version) is not int:
        return
    if version > FORMAT_VERSION:
        raise FormatVersionError(
            f"{where} is in format {version}; this version of ckpt reads format {FORMAT_VERSION}. Install a newer "
            f"version of ckpt-inprocess to read it"
        )
    if 0 < version < FORMAT_VERSION:
        raise FormatVersionError(
            f"{where} is in format {version}; this version of ckpt reads format {FORMAT_VERSION}. Install version "
            f"{_READS_FORMAT_1} of ckpt-inprocess to read it"
        )


def checked_summary(summary: dict[str, Any], where: str) -> dict[str, Any]:
    """Return the summary of a step, which is the attribute ``ckpt`` of its root, after checking it.

    FormatVersionError if it has another format; one of `ILL_FORMED` if a member is missing or invalid. `where` names
    the file for messages.
    """
    _check_version(summary["format"], where)
    if type(summary["format"]) is not int or summary["format"] != FORMAT_VERSION:
        raise ValueError(f"unknown format {summary['format']!r:.80}")
    for name in ("step", "world_size", "owner", "bytes", "files", "tensors"):
        whole_number(summary[name])
    for name in ("save", "plan", *(("run",) if "run" in summary else ())):
        if type(summary[name]) is not str:
            raise ValueError(f"{name} is {summary[name]!r:.80}, not a string")
    if not isinstance(summary.get("pace", {}), dict):
        raise ValueError(f"pace is {summary['pace']!r:.80}, not an object")
    before = summary["continues"]
    if before is not None:
        whole_number(before["step"])
        if not isinstance(before["save"], str | None):
            raise ValueError(f"continues is invalid: {before!r:.80}")
    if summary["restart"] is not None:
        whole_number(summary["restart"])
    versions = summary["versions"]
    if type(versions) is not dict or not all(type(version) is str for version in versions.values()):
        raise ValueError(f"versions is {versions!r:.80}, not the versions of packages")
    if type(summary["metrics"]) is not dict:
        raise ValueError(f"metrics is {summary['metrics']!r:.80}, not a JSON object")
    if len(sizes(summary["parts"])) != summary["world_size"] or not summary["parts"]:
        raise ValueError(f"there are {len(summary['parts'])} parts of {summary['world_size']} ranks")
    return summary


def _add_state(index: CheckpointIndex, state: dict[str, Any]) -> None:
    world_size = index.world_size
    for name, rank, value in items(state["values"]):
        path, owner = key_path(name), rank_of(rank, world_size)
        known = index.values if owner is None else index.per_rank_values.setdefault(path, {})
        key: Any = path if owner is None else owner
        if key in known:
            raise ValueError(f"the value {display(path)} is stored twice")
        try:
            known[key] = decode_value(value)
        except CheckpointCorruptError as error:
            raise ValueError(f"the value {display(path)}: {error}") from None
    for name, target in items(state["aliases"]):
        if index.aliases.setdefault(key_path(name), key_path(target)) != tuple(target):
            raise ValueError(f"{display(key_path(name))} is an alias of two names")
    for name, rank, document in items(state["containers"]):
        path, owner = key_path(name), rank_of(rank, world_size)
        container = Container.from_document(document)
        if owner is None:
            before = index.containers.setdefault(path, container)
        else:
            before = index.per_rank_containers.setdefault(path, {}).setdefault(owner, container)
        if before is not container:
            raise ValueError(f"the container {display(path)} is recorded twice")


def _add_tensors(index: CheckpointIndex) -> None:
    tensors = index.tensors
    for array in index.packs.arrays:
        _, path, meta, _, _, _, shape, rank = array  # one access instead of five
        if rank is None and path not in tensors:
            tensors[path] = StoredTensor(meta.dtype, shape, [array])
        else:
            _tensor(index, array).boxes.append(array)


def _tensor(index: CheckpointIndex, array: StoredArray) -> StoredTensor:
    """Return the tensor that an array belongs to."""
    path, rank, dtype, shape = array.path, array.rank, array.meta.dtype, array.tensor_shape
    by_key: dict[Any, StoredTensor] = index.tensors if rank is None else index.per_rank_tensors.setdefault(path, {})
    key: Any = path if rank is None else rank
    tensor = by_key.get(key)
    if tensor is None:
        tensor = by_key[key] = StoredTensor(dtype, shape)
    elif (tensor.dtype, tensor.shape) != (dtype, shape):
        raise ValueError(f"{display(path)} is stored in two different shapes or dtypes")
    return tensor


def whole_number(value: Any) -> int:
    """Check and return an integer that is not negative. Unlike JSON, Python takes True for 1 and 1.0 for 1."""
    if type(value) is not int or not 0 <= value < _MAX_INT:
        raise ValueError(f"{value!r:.80} is not a non-negative integer")
    return value


def sizes(value: Any) -> tuple[int, ...]:
    """Check and return a shape or an offset: a list of non-negative integers."""
    for number in items(value):
        if type(number) is not int or not 0 <= number < _MAX_INT:
            raise ValueError(f"{value!r:.80} is not a list of non-negative integers")
    return tuple(value)


def items(value: Any) -> list[Any]:
    """Check and return a list."""
    if type(value) is not list:
        raise ValueError(f"{value!r:.80} is not a list")
    return value


def key_path(value: Any) -> Path:
    """Check and return the path of a leaf: a list of strings and integers."""
    for key in items(value):
        if type(key) is not str and type(key) is not int:
            raise ValueError(f"{value!r:.80} is not a path of strings and integers")
    return tuple(value)


def rank_of(value: Any, world_size: int) -> int | None:
    """Check and return a rank, or None."""
    if value is not None and whole_number(value) >= world_size:
        raise ValueError(f"rank {value!r} is not one of the {world_size} ranks that wrote the step")
    rank: int | None = value
    return rank
