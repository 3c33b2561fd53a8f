"""The index of a published step: its tensors and values, read from two metadata files and checked.

Does not import torch.
"""

from __future__ import annotations

import json
import math
import os
import re
from dataclasses import dataclass, field
from typing import Any

from ckpt.errors import CheckpointCorruptError, CheckpointNotFoundError, FormatVersionError, StateError, StorageError
from ckpt.native import crc32c
from ckpt.paths import Path, display
from ckpt.storage.array_metadata import MAX_DIMENSIONS, ArrayMeta
from ckpt.storage.documents import MAX_DOCUMENT_BYTES, decode_document, decode_root
from ckpt.storage.dtypes import stored
PACK_DIRECTORY = "packed"
from ckpt.storage.regular_files import DamagedFileError, MissingFileError, read_regular
from ckpt.storage.root import FORMAT_VERSION
from ckpt.values.codec import decode_value

__all__ = [
    "ILL_FORMED",
    "CheckpointIndex",
    "StoredBox",
    "StoredTensor",
    "checked_summary",
    "dtype_name",
    "items",
    "key_path",
    "parse_index",
    "rank_of",
    "sizes",
    "whole_number",
]

ILL_FORMED = (KeyError, TypeError, ValueError, AttributeError, IndexError, OverflowError, RecursionError)
"""The exceptions that code raises when a document does not have the expected structure."""

_MAX_INT = 1 << 63
_MAX_ELEMENTS = 1 << 58  # so that sizes in bytes are not too large for numpy and the file system

_INSIDE = re.compile(r"(?!(.*/)?\.{0,2}(/|$))[A-Za-z0-9_.~%/-]+")
"""A path below the step, made of the characters of names (see `ckpt.storage.names`)."""


@dataclass(frozen=True, slots=True)
class StoredBox:
    """A box of a tensor, and where it is stored: the array in `directory`, or `pack_offset` bytes into the pack."""

    box_offset: tuple[int, ...]
    shape: tuple[int, ...]
    directory: str
    meta: ArrayMeta
    pack_offset: int | None = None


@dataclass(slots=True)
class StoredTensor:
    """A tensor of a step. `dtype` is torch's name."""

    dtype: str
    shape: tuple[int, ...]
    boxes: list[StoredBox] = field(default_factory=list)


@dataclass
class CheckpointIndex:
    """The content of a published step by path. `per_rank_...` are keyed by path, then by rank."""

    path: str
    summary: dict[str, Any]
    arrays: dict[str, ArrayMeta]
    tensors: dict[Path, StoredTensor] = field(default_factory=dict)
    values: dict[Path, Any] = field(default_factory=dict)
    per_rank_tensors: dict[Path, dict[int, StoredTensor]] = field(default_factory=dict)
    per_rank_values: dict[Path, dict[int, Any]] = field(default_factory=dict)
    aliases: dict[Path, Path] = field(default_factory=dict)

    @property
    def step(self) -> int:
        """The training step."""
        return int(self.summary["step"])

    @property
    def world_size(self) -> int:
        """The number of ranks that wrote the step."""
        return int(self.summary["world_size"])

    def tensor(self, path: Path, rank: int | None = None) -> StoredTensor | None:
        """Return the tensor at `path`, or at the path it is an alias of; with a `rank`, that rank's own one."""
        path = self.aliases.get(path, path)
        return self.tensors.get(path) if rank is None else self.per_rank_tensors.get(path, {}).get(rank)


def parse_index(path: str) -> CheckpointIndex:
    """Read the metadata as `read_index` does, without the check of consistency: see `find_inconsistencies`."""
    root_path = os.path.join(path, "zarr.json")
    data = _read(path, "zarr.json", MAX_DOCUMENT_BYTES)
    try:
        document = decode_root(data, root_path)
    except CheckpointCorruptError:
        _check_version(_version(data), root_path)  # a newer version may compute checksums in another way
        raise
    where = root_path
    try:
        summary = checked_summary(document["attributes"]["ckpt"], root_path)
        nodes = document["consolidated_metadata"]["metadata"]
        arrays = {
            directory: ArrayMeta.from_document(node, f"{root_path}, array {directory}")
            for directory, node in nodes.items()
            if node["node_type"] == "array"
        }
        index = CheckpointIndex(path, summary, arrays)
        _add_arrays(index)
        where = os.path.join(path, "state.json")
        state_data = _read(path, "state.json", whole_number(summary["state"]["bytes"]))
        if summary["state"] != {"bytes": len(state_data), "crc32c": crc32c(state_data)}:
            raise CheckpointCorruptError(f"{where} is not the one that belongs to this step")
        _add_state(index, decode_document(state_data, where))
    except ILL_FORMED as error:
        why = str(error) if type(error) is ValueError else repr(error)
        raise CheckpointCorruptError(f"{where} does not describe a checkpoint: {why:.300}") from error
    return index


def _read(step: str, name: str, most_bytes: int) -> bytes:
    path = os.path.join(step, name)
    try:
        return read_regular(step, name, most_bytes)
    except MissingFileError:
        is_step = re.fullmatch(r"step_\d{8,18}", os.path.basename(os.path.abspath(step)))
        if os.path.isdir(step) and (is_step or os.path.lexists(os.path.join(step, "intent.json"))):
            raise CheckpointCorruptError(f"{path} is missing; restore from another step") from None
        raise CheckpointNotFoundError(f"{step} is not a published checkpoint: it has no {name}") from None
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
    if type(version) is int and version > FORMAT_VERSION:
        raise FormatVersionError(
            f"{where} is in format {version}; this version of ckpt reads formats up to {FORMAT_VERSION}. Install a "
            f"newer version of ckpt-inprocess to read it"
        )


def checked_summary(summary: dict[str, Any], where: str) -> dict[str, Any]:
    """Return the summary of a step, which is the attribute ``ckpt`` of its root, after checking it.

    FormatVersionError if it has a newer format; one of `ILL_FORMED` if a member is missing or invalid. `where` names
    the file for messages.
    """
    _check_version(summary["format"], where)
    if type(summary["format"]) is not int or summary["format"] != FORMAT_VERSION:
        raise ValueError(f"unknown format {summary['format']!r:.80}")
    for name in ("step", "world_size", "owner", "bytes", "files", "tensors"):
        whole_number(summary[name])
    for name in ("save", "plan"):
        if type(summary[name]) is not str:
            raise ValueError(f"{name} is {summary[name]!r:.80}, not a string")
    before = summary["continues"]
    if before is not None:
        whole_number(before["step"])
        if not isinstance(before["save"], str | None):
            raise ValueError(f"continues is invalid: {before!r:.80}")
    if len(sizes(summary["parts"])) != summary["world_size"] or not summary["parts"]:
        raise ValueError(f"there are {len(summary['parts'])} parts of {summary['world_size']} ranks")
    return summary


def _add_arrays(index: CheckpointIndex) -> None:
    world_size = index.world_size
    for directory, meta in index.arrays.items():
        if not _INSIDE.fullmatch(directory):
            raise ValueError(f"{directory!r:.80} is not inside the step")
        about = meta.attributes["ckpt"]
        if directory == PACK_DIRECTORY or "pack" in about:
            if directory != PACK_DIRECTORY or about != {"pack": True} or (meta.dtype, len(meta.shape)) != ("uint8", 1):
                raise ValueError(f"{directory!r:.80} is not the array of packed tensors")
            continue
        offset, shape = _box_in_tensor(about, meta.shape)
        rank = rank_of(about.get("rank"), world_size)
        _tensor(index, key_path(about["name"]), rank, meta.dtype, shape).boxes.append(
            StoredBox(offset, meta.shape, directory, meta)
        )


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
    pack = index.arrays.get(PACK_DIRECTORY) or ArrayMeta((0,), "uint8", (1,))
    for entry in items(state["packed"]):
        shape = sizes(entry["shape"])
        offset, whole = _box_in_tensor(entry, shape)
        stored = StoredBox(offset, shape, PACK_DIRECTORY, pack, whole_number(entry["offset"]))
        rank = rank_of(entry.get("rank"), world_size)
        _tensor(index, key_path(entry["path"]), rank, dtype_name(entry["dtype"]), whole).boxes.append(stored)
    for name, target in items(state["aliases"]):
        if index.aliases.setdefault(key_path(name), key_path(target)) != tuple(target):
            raise ValueError(f"{display(key_path(name))} is an alias of two names")


def _box_in_tensor(about: dict[str, Any], shape: tuple[int, ...]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the offset of a box in its tensor, and the shape of the tensor."""
    if "box_offset" not in about and "tensor_shape" not in about:
        return (0,) * len(shape), shape
    offset, whole = sizes(about["box_offset"]), sizes(about["tensor_shape"])
    if not len(offset) == len(whole) == len(shape):
        raise ValueError(f"a box of shape {shape} at {offset} does not fit a tensor of shape {whole}")
    return offset, whole


def _tensor(index: CheckpointIndex, path: Path, rank: int | None, dtype: str, shape: tuple[int, ...]) -> StoredTensor:
    by_key: dict[Any, StoredTensor] = index.tensors if rank is None else index.per_rank_tensors.setdefault(path, {})
    key: Any = path if rank is None else rank
    tensor = by_key.get(key)
    if tensor is None:
        if len(shape) > MAX_DIMENSIONS or math.prod(filter(None, shape)) > _MAX_ELEMENTS:
            raise ValueError(f"{display(path)} has an impossible shape: {list(shape)!r:.80}")
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


def dtype_name(value: Any) -> str:
    """Check and return the name of a dtype that can be stored."""
    try:
        stored(value)
    except (StateError, TypeError):
        raise ValueError(f"{value!r:.80} is not a dtype that can be stored") from None
    name: str = value
    return name
