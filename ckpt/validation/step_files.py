"""What a step's own documents say of its files, read without trust: each sealed, all in agreement, nothing outside the
step ever opened."""

from __future__ import annotations

import json
import math
import os
import stat
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from ckpt.errors import CheckpointCorruptError, CheckpointError, FormatVersionError, StorageError
from ckpt.loading.index import CheckpointIndex, StoredTensor, read_index
from ckpt.paths import display
from ckpt.storage.checksums import crc32c
from ckpt.storage.commit import FORMAT_VERSION, part_name
from ckpt.storage.documents import canonical, unseal, unseal_root
from ckpt.storage.files import under
from ckpt.storage.metadata import ArrayMeta, group_document, groups

__all__ = [
    "ILL_FORMED",
    "ChunkFile",
    "Problem",
    "StepFiles",
    "all_tensors",
    "inside",
    "read_document",
    "read_index_inside",
    "read_step_files",
    "tensor_name",
]

_MAX_DOCUMENT_BYTES = 1 << 30
ILL_FORMED = (KeyError, TypeError, ValueError, AttributeError, IndexError, OverflowError)
"""What code raises that takes a sealed document at its word, when that describes no checkpoint."""


@dataclass(frozen=True, slots=True)
class Problem:
    """One thing that is wrong. `file` is relative to the step; `rank` is who wrote it; what is not known is None.

    `fatal`: a restore of this step fails. Other problems leave every tensor and value readable.
    """

    message: str
    file: str | None = None
    tensor: str | None = None
    chunk: tuple[int, ...] | None = None
    rank: int | None = None
    fatal: bool = False


@dataclass(frozen=True, slots=True)
class ChunkFile:
    """A chunk file as its writer recorded it; nothing is recorded (None) where the writer's part is damaged."""

    file: str
    directory: str
    index: tuple[int, ...]
    file_bytes: int | None = None
    crc32c: int | None = None
    rank: int | None = None


@dataclass
class StepFiles:
    """Everything the metadata says about the files of a step: the parts by rank, the chunk files, the expected
    documents."""

    index: CheckpointIndex
    parts: dict[int, dict[str, Any]] = field(default_factory=dict)
    chunks: list[ChunkFile] = field(default_factory=list)
    documents: dict[str, bytes | None] = field(default_factory=dict)  # None: exists, content is checked otherwise


def inside(path: str, name: str) -> os.stat_result:
    """The status of the regular file `name` in the step at `path`.

    CheckpointCorruptError if it is missing, leads elsewhere (also by a symbolic link), or is no file; StorageError if
    it may not be looked at.
    """
    try:
        under(path, name)
    except StorageError as error:
        raise CheckpointCorruptError(f"{path}: {error}") from None
    parts = name.split("/")
    try:
        for count in range(1, len(parts) + 1):
            status = os.lstat(os.path.join(path, *parts[:count]))
            if stat.S_ISLNK(status.st_mode):
                where = os.path.join(path, *parts[:count])
                raise CheckpointCorruptError(f"{where} is a symbolic link; no file of a checkpoint is one")
    except (FileNotFoundError, NotADirectoryError):
        raise CheckpointCorruptError(f"{os.path.join(path, name)} is missing") from None
    except OSError as error:
        raise StorageError(f"cannot read {os.path.join(path, name)}: {error.strerror}") from error
    if not stat.S_ISREG(status.st_mode):
        raise CheckpointCorruptError(f"{os.path.join(path, name)} is not a regular file")
    return status


def read_index_inside(path: str) -> CheckpointIndex:
    """`read_index` for a step nobody vouches for: follows no symbolic link, and no name that leads out of the step.

    Raises what `read_index` raises.
    """
    for name in ("zarr.json", "state.json"):
        if os.path.lexists(os.path.join(path, name)) and inside(path, name).st_size > _MAX_DOCUMENT_BYTES:
            raise CheckpointCorruptError(f"{os.path.join(path, name)} is larger than any document of a checkpoint")
    index = read_index(path)
    chunks = sum(math.prod(meta.grid_shape) for meta in index.arrays.values())
    if chunks != index.summary.get("files"):
        raise CheckpointCorruptError(
            f"{os.path.join(path, 'zarr.json')} describes {chunks} chunks, but says that {index.summary.get('files')} "
            "were written"
        )
    return index


def read_step_files(path: str, problems: list[Problem]) -> StepFiles:
    """Read all metadata of a step. What is wrong with single documents is added to `problems`.

    Raises CheckpointCorruptError when the root or the state document is damaged, for nothing else can be judged then.
    """
    try:
        index = read_index_inside(path)
    except CheckpointCorruptError:
        _look_for_another_save(path, problems)
        raise
    except FormatVersionError:
        _check_that_only_the_version_differs(path)
        raise
    files = StepFiles(index)
    summary = index.summary
    files.documents |= {"zarr.json": None, "state.json": None, "intent.json": None}
    intent = _sealed(path, "intent.json", None, problems)
    if intent is not None and intent != {key: summary.get(key) for key in intent}:
        problems.append(Problem("the intent belongs to another save", "intent.json", rank=0))
    if len(summary["parts"]) != summary["world_size"]:
        problems.append(Problem("the root does not list a part for every rank", "zarr.json", rank=0))
    documents = {directory: meta.array_document() for directory, meta in index.arrays.items()}
    for rank, checksum in enumerate(summary["parts"]):
        files.documents[part_name(rank)] = None
        part = _sealed(path, part_name(rank), checksum, problems, rank)
        if part is not None:
            _add_part(files, rank, part, documents, problems)
    for directory in groups(index.arrays):
        files.documents[f"{directory}/zarr.json"] = canonical(group_document())
    for directory, document in documents.items():
        files.documents[f"{directory}/zarr.json"] = canonical(document)
    return files


def _look_for_another_save(path: str, problems: list[Problem]) -> None:
    """When root and state do not fit each other, the intent tells which of them came from another save."""
    try:
        root = unseal_root(read_document(path, "zarr.json"), "zarr.json")["attributes"]["ckpt"]
        intent = unseal(read_document(path, "intent.json"), "intent.json")
        if intent["save"] != root["save"]:
            message = f"the root is of save {root['save']}, the intent of {intent['save']}: one is from another save"
            problems.append(Problem(message, "zarr.json", rank=0, fatal=True))
    except (CheckpointError, *ILL_FORMED):
        return


def _check_that_only_the_version_differs(path: str) -> None:
    """A damaged version number looks like a newer version. CheckpointCorruptError if the seal fits another number."""
    where = os.path.join(path, "zarr.json")
    try:
        document = json.loads(read_document(path, "zarr.json"))
        summary = document["attributes"]["ckpt"]
        newer, summary["format"], seal = summary["format"], FORMAT_VERSION, summary.pop("crc32c")
        if crc32c(canonical(document)) == seal:
            raise CheckpointCorruptError(
                f"{where} is damaged: it says format {newer}, but its seal fits {FORMAT_VERSION}"
            )
    except ILL_FORMED:
        return


def _sealed(
    path: str, name: str, checksum: int | None, problems: list[Problem], rank: int = 0
) -> dict[str, Any] | None:
    try:
        data = read_document(path, name)
        if checksum is None:
            return unseal(data, name)
        if crc32c(data) == checksum:  # the root vouches for every byte, the seal included
            document: dict[str, Any] = json.loads(data)
            return document
        unseal(data, name)  # says more, unless it is a whole document
        raise CheckpointCorruptError(f"{name} is not the one that belongs to this step: it is from another save")
    except CheckpointCorruptError as error:
        problems.append(Problem(str(error), name, rank=rank))
        return None


def read_document(path: str, name: str) -> bytes:
    """The bytes of a document of the step; CheckpointCorruptError if it cannot be one, StorageError if it may not be
    read."""
    if inside(path, name).st_size > _MAX_DOCUMENT_BYTES:
        raise CheckpointCorruptError(f"{name} is larger than any document of a checkpoint")
    full = os.path.join(path, name)
    try:
        with open(full, "rb", buffering=0) as stream:
            return stream.read()
    except PermissionError as error:
        raise StorageError(f"cannot read {full}: {error.strerror}") from error
    except OSError as error:
        raise CheckpointCorruptError(f"{name} cannot be read: {error.strerror}") from error


def _add_part(
    files: StepFiles, rank: int, part: dict[str, Any], documents: dict[str, dict[str, Any]], problems: list[Problem]
) -> None:
    name, summary = part_name(rank), files.index.summary
    expected = {key: summary[key] for key in ("save", "plan", "world_size")} | {"rank": rank}
    wrong = [key for key, value in expected.items() if part.get(key) != value]
    if wrong:
        problems.append(Problem(f"the part differs from the root in {', '.join(wrong)}", name, rank=rank))
        return
    files.parts[rank] = part
    for directory, document in part["arrays"].items():
        if documents.get(directory) != document:
            problems.append(Problem(f"the part describes {directory} in another way than the root", name, rank=rank))
    for directory, written in part["chunks"].items():
        meta = files.index.arrays.get(directory)
        for key, file_bytes, checksum in written:
            index = None if meta is None else _chunk_index(meta, key)
            if index is None:
                problems.append(Problem(f"the part lists {directory}/{key}, which is no chunk", name, rank=rank))
                continue
            files.chunks.append(ChunkFile(f"{directory}/{key}", directory, index, file_bytes, checksum, rank))


def _chunk_index(meta: ArrayMeta, key: str) -> tuple[int, ...] | None:
    first, *numbers = key.split(".")
    if first != "c" or not all(number.isdecimal() for number in numbers):
        return None
    index = tuple(map(int, numbers[: len(meta.shape)]))
    inside = len(index) == len(meta.shape) and all(i < n for i, n in zip(index, meta.grid_shape, strict=True))
    return index if inside and meta.chunk_key(index) == key else None


def all_tensors(index: CheckpointIndex) -> Iterator[tuple[str, StoredTensor]]:
    """Every stored tensor under its name; those of single ranks as ``<name>@rank<r>``. Aliases are not among them."""
    for path, tensor in index.tensors.items():
        yield display(path), tensor
    for path, own in index.per_rank_tensors.items():
        for rank, tensor in own.items():
            yield f"{display(path)}@rank{rank}", tensor


def tensor_name(index: CheckpointIndex, directory: str) -> str:
    """How people call what an array holds."""
    about = index.arrays[directory].attributes["ckpt"]
    if about.get("pack"):
        return "(packed tensors)"
    name = display(tuple(about["name"]))
    return f"{name}@rank{about['rank']}" if "rank" in about else name
