"""What a step's own documents say of its files, read without trust: each sealed, all in agreement, nothing outside the
step ever opened."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass, field
from typing import Any

from ckpt.errors import CheckpointCorruptError, CheckpointError, FormatVersionError, StorageError
from ckpt.loading.index import ILL_FORMED, CheckpointIndex, items, key_path, parse_index, whole_number
from ckpt.native import crc32c
from ckpt.paths import display
from ckpt.storage.array_metadata import ArrayMeta, group_document, groups
from ckpt.storage.documents import MAX_DOCUMENT_BYTES, canonical, unseal, unseal_root
from ckpt.storage.names import part_name
from ckpt.storage.regular_files import DamagedFileError, read_regular
from ckpt.storage.root import FORMAT_VERSION

__all__ = ["ChunkFile", "Problem", "StepFiles", "read_document", "read_step_files", "tensor_name"]


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


def read_step_files(path: str, problems: list[Problem]) -> StepFiles:
    """Read all metadata of a step. What is wrong with single documents is added to `problems`.

    Raises CheckpointCorruptError when the root or the state document is damaged, for nothing else can be judged then.
    """
    try:
        index = parse_index(path)
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
        document = unseal(data, name)
        if crc32c(data) == checksum:
            return document
        raise CheckpointCorruptError(f"{name} is not the one that belongs to this step: it is from another save")
    except CheckpointCorruptError as error:
        problems.append(Problem(str(error), name, rank=rank))
        return None


def read_document(path: str, name: str) -> bytes:
    """The bytes of a document of the step at `path`.

    CheckpointCorruptError if it is missing, is no regular file or too large for one, or is or lies below a symbolic
    link; StorageError if it may not be read.
    """
    full = os.path.join(path, name)
    try:
        return read_regular(path, name, MAX_DOCUMENT_BYTES)
    except DamagedFileError as damage:
        raise CheckpointCorruptError(f"{full} {damage}") from None
    except OSError as error:
        raise StorageError(f"cannot read {full}: {error.strerror}") from error


def _add_part(
    files: StepFiles, rank: int, part: dict[str, Any], documents: dict[str, dict[str, Any]], problems: list[Problem]
) -> None:
    name, summary = part_name(rank), files.index.summary
    expected = {key: summary[key] for key in ("save", "plan", "world_size")} | {"rank": rank}
    wrong = [key for key, value in expected.items() if part.get(key) != value]
    if wrong:
        problems.append(Problem(f"the part differs from the root in {', '.join(wrong)}", name, rank=rank))
        return
    try:
        chunks = _listed_chunks(files.index, rank, part)
        for entry in items(part["packed"]):
            key_path(entry["path"])
        differ = [directory for directory, document in part["arrays"].items() if documents.get(directory) != document]
    except ILL_FORMED as error:
        problems.append(Problem(f"the part is not one of a checkpoint: {error!r:.200}", name, rank=rank))
        return
    files.parts[rank] = part
    for directory in differ:
        problems.append(Problem(f"the part describes {directory} in another way than the root", name, rank=rank))
    for chunk in chunks:
        if isinstance(chunk, str):
            problems.append(Problem(f"the part lists {chunk}, which is no chunk", name, rank=rank))
        else:
            files.chunks.append(chunk)


def _listed_chunks(index: CheckpointIndex, rank: int, part: dict[str, Any]) -> list[ChunkFile | str]:
    """The chunks that a part lists; the name only where there is no such chunk."""
    found: list[ChunkFile | str] = []
    for directory, written in part["chunks"].items():
        meta = index.arrays.get(directory)
        for key, file_bytes, checksum in items(written):
            number = None if meta is None else _chunk_index(meta, key)
            file = f"{directory}/{key}"
            size, crc = whole_number(file_bytes), whole_number(checksum)
            found.append(file if number is None else ChunkFile(file, directory, number, size, crc, rank))
    return found


def _chunk_index(meta: ArrayMeta, key: str) -> tuple[int, ...] | None:
    first, *numbers = key.split(".")
    if first != "c" or not all(number.isdecimal() for number in numbers):
        return None
    index = tuple(map(int, numbers[: len(meta.shape)]))
    inside = len(index) == len(meta.shape) and all(i < n for i, n in zip(index, meta.grid_shape, strict=True))
    return index if inside and meta.chunk_key(index) == key else None


def tensor_name(index: CheckpointIndex, directory: str) -> str:
    """How people call what an array holds."""
    about = index.arrays[directory].attributes["ckpt"]
    if about.get("pack"):
        return "(packed tensors)"
    name = display(tuple(about["name"]))
    return f"{name}@rank{about['rank']}" if "rank" in about else name
