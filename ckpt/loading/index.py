"""What is in a published step: read once from its two metadata files, verified, and free of torch."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass, field
from typing import Any

from ckpt.errors import CheckpointCorruptError, CheckpointNotFoundError, FormatVersionError, StorageError
from ckpt.paths import Path, display
from ckpt.storage.checksums import crc32c
from ckpt.storage.commit import FORMAT_VERSION
from ckpt.storage.documents import unseal, unseal_root
from ckpt.storage.files import under
from ckpt.storage.metadata import ArrayMeta
from ckpt.storage.names import PACK_DIRECTORY
from ckpt.values.codec import decode_value

__all__ = ["CheckpointIndex", "StoredBox", "StoredTensor", "read_index"]


@dataclass(frozen=True, slots=True)
class StoredBox:
    """A box of a tensor and where it is stored: all of the array in `directory`, or `offset` bytes into the pack."""

    box_offset: tuple[int, ...]
    shape: tuple[int, ...]
    directory: str
    meta: ArrayMeta
    pack_offset: int | None = None


@dataclass(slots=True)
class StoredTensor:
    """A tensor of the checkpoint. `dtype` is torch's name."""

    dtype: str
    shape: tuple[int, ...]
    boxes: list[StoredBox] = field(default_factory=list)


@dataclass
class CheckpointIndex:
    """A published step by names. `per_rank_...` are keyed by path, then by the rank they belong to."""

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
        """How many ranks wrote it."""
        return int(self.summary["world_size"])

    def tensor(self, path: Path, rank: int | None = None) -> StoredTensor | None:
        """The tensor of this name, or of the name it is an alias of; with a `rank`, the one that is that rank's own."""
        path = self.aliases.get(path, path)
        return self.tensors.get(path) if rank is None else self.per_rank_tensors.get(path, {}).get(rank)


def read_index(path: str) -> CheckpointIndex:
    """Read the metadata of the published step in directory `path`.

    Raises CheckpointNotFoundError, FormatVersionError (before anything else is believed), CheckpointCorruptError,
    StorageError.
    """
    root_path = os.path.join(path, "zarr.json")
    data = _read(root_path, path)
    try:
        document = unseal_root(data, root_path)
    except CheckpointCorruptError:
        _check_version(data, root_path)  # a newer version may seal its documents in another way
        raise
    _check_version(data, root_path, document)
    try:
        summary = document["attributes"]["ckpt"]
        nodes = document["consolidated_metadata"]["metadata"]
        arrays = {
            directory: ArrayMeta.from_document(node, f"{root_path}, array {directory}")
            for directory, node in nodes.items()
            if node["node_type"] == "array"
        }
        state_path = os.path.join(path, "state.json")
        state_data = _read(state_path, path)
        if summary["state"] != {"bytes": len(state_data), "crc32c": crc32c(state_data)}:
            raise CheckpointCorruptError(f"{state_path} is not the one that belongs to this step")
        index = CheckpointIndex(path, summary, arrays)
        _add_arrays(index)
        _add_state(index, unseal(state_data, state_path))
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        raise CheckpointCorruptError(f"{root_path} does not describe a checkpoint: {error!r}") from error
    return index


def _read(path: str, step_path: str) -> bytes:
    try:
        with open(path, "rb") as stream:
            return stream.read()
    except (FileNotFoundError, NotADirectoryError):
        if os.path.isfile(os.path.join(step_path, "intent.json")):
            raise CheckpointCorruptError(f"{path} is missing; restore from another step") from None
        raise CheckpointNotFoundError(
            f"{step_path} is not a published checkpoint: it has no {os.path.basename(path)}"
        ) from None
    except OSError as error:
        raise StorageError(f"cannot read {path}: {error.strerror}") from error


def _check_version(data: bytes, where: str, document: dict[str, Any] | None = None) -> None:
    try:
        version = (document or json.loads(data))["attributes"]["ckpt"]["format"]
    except (ValueError, KeyError, TypeError, RecursionError):
        return
    if isinstance(version, int) and version > FORMAT_VERSION:
        raise FormatVersionError(
            f"{where} is in format {version}; this version of ckpt reads formats up to {FORMAT_VERSION}. Install a "
            f"newer version "
            "of ckpt-inprocess to read it"
        )


def _add_arrays(index: CheckpointIndex) -> None:
    for directory, meta in index.arrays.items():
        try:
            under(index.path, directory)
        except StorageError:
            raise CheckpointCorruptError(
                f"{os.path.join(index.path, 'zarr.json')} describes {directory!r}, which is not inside the step"
            ) from None
        about = meta.attributes["ckpt"]
        if about.get("pack"):
            continue
        path = _path(about["name"])
        offset = tuple(about.get("box_offset") or (0,) * len(meta.shape))
        shape = tuple(about.get("tensor_shape") or meta.shape)
        _tensor(index, path, about.get("rank"), meta.dtype, shape).boxes.append(
            StoredBox(offset, meta.shape, directory, meta)
        )


def _add_state(index: CheckpointIndex, state: dict[str, Any]) -> None:
    for name, rank, value in state["values"]:
        if rank is None:
            index.values[_path(name)] = decode_value(value)
        else:
            index.per_rank_values.setdefault(_path(name), {})[rank] = decode_value(value)
    for entry in state["packed"]:
        shape = tuple(entry["shape"])
        whole = tuple(entry.get("tensor_shape", shape))
        offset = tuple(entry.get("box_offset", (0,) * len(shape)))
        meta = index.arrays.get(PACK_DIRECTORY)
        if meta is None:
            if 0 not in shape:
                raise CheckpointCorruptError(
                    f"{index.path}: {display(_path(entry['path']))} is packed, but there is no pack"
                )
            meta = ArrayMeta((0,), "uint8", (1,))
        stored = StoredBox(offset, shape, PACK_DIRECTORY, meta, entry["offset"])
        _tensor(index, _path(entry["path"]), entry.get("rank"), entry["dtype"], whole).boxes.append(stored)
    index.aliases.update((_path(name), _path(target)) for name, target in state["aliases"])


def _tensor(index: CheckpointIndex, path: Path, rank: int | None, dtype: str, shape: tuple[int, ...]) -> StoredTensor:
    if rank is None:
        tensor = index.tensors.setdefault(path, StoredTensor(dtype, shape))
    else:
        tensor = index.per_rank_tensors.setdefault(path, {}).setdefault(rank, StoredTensor(dtype, shape))
    if (tensor.dtype, tensor.shape) != (dtype, shape):
        raise CheckpointCorruptError(f"{index.path}: {display(path)} is stored in two different shapes or dtypes")
    return tensor


def _path(name: list[str | int]) -> Path:
    return tuple(name)
