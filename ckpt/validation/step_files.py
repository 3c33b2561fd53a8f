"""Read the documents of an untrusted step, and list the files that they describe.

Every document must have a correct checksum and be consistent with the others. Nothing outside the step is opened.
"""

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
from ckpt.storage.documents import MAX_DOCUMENT_BYTES, canonical_json, decode_document, decode_root
from ckpt.storage.names import part_name
from ckpt.storage.regular_files import DamagedFileError, read_regular
from ckpt.storage.root import FORMAT_VERSION

__all__ = ["ChunkFile", "Problem", "StepFiles", "read_document", "read_step_files", "tensor_name"]


@dataclass(frozen=True, slots=True)
class Problem:
    """A problem of a step. `file` is relative to the step, `rank` wrote it; unknown members are None.

    If it is `fatal`, a restore of this step fails. Other problems leave every tensor and value readable.
    """

    message: str
    file: str | None = None
    tensor: str | None = None
    chunk: tuple[int, ...] | None = None
    rank: int | None = None
    fatal: bool = False


@dataclass(frozen=True, slots=True)
class ChunkFile:
    """A chunk file as its writer recorded it; members are None if the writer's part is damaged."""

    file: str
    directory: str
    index: tuple[int, ...]
    file_bytes: int | None = None
    crc32c: int | None = None
    rank: int | None = None


@dataclass
class StepFiles:
    """The files of a step according to its metadata: the parts by rank, the chunk files, the expected documents."""

    index: CheckpointIndex
    parts: dict[int, dict[str, Any]] = field(default_factory=dict)
    chunks: list[ChunkFile] = field(default_factory=list)
    documents: dict[str, bytes | None] = field(
        default_factory=dict
    )  # None: must exist; the content is checked separately


def read_step_files(path: str, problems: list[Problem]) -> StepFiles:
    """Read all metadata of a step, and add the problems of single documents to `problems`.

    Raises CheckpointCorruptError if the root or the state document is damaged: nothing else can be checked then.
    """
    try:
        index = parse_index(path)
    except CheckpointCorruptError:
        _find_mixed_saves(path, problems)
        raise
    except FormatVersionError:
        _check_that_only_the_version_differs(path)
        raise
    files = StepFiles(index)
    summary = index.summary
    files.documents |= {"zarr.json": None, "state.json": None, "intent.json": None}
    intent = _read_json(path, "intent.json", None, problems)
    if intent is not None and intent != {key: summary.get(key) for key in intent}:
        problems.append(Problem("the intent belongs to another save", "intent.json", rank=0))
    documents = {directory: meta.array_document() for directory, meta in index.arrays.items()}
    for rank, checksum in enumerate(summary["parts"]):
        files.documents[part_name(rank)] = None
        part = _read_json(path, part_name(rank), checksum, problems, rank)
        if part is not None:
            _add_part(files, rank, part, documents, problems)
    for directory in groups(index.arrays):
        files.documents[f"{directory}/zarr.json"] = canonical_json(group_document())
    for directory, document in documents.items():
        files.documents[f"{directory}/zarr.json"] = canonical_json(document)
    return files


def _find_mixed_saves(path: str, problems: list[Problem]) -> None:
    """Report whether root and intent are of different saves, after root and state were found not to match."""
    try:
        root = decode_root(read_document(path, "zarr.json"), "zarr.json")["attributes"]["ckpt"]
        intent = decode_document(read_document(path, "intent.json"), "intent.json")
        if intent["save"] != root["save"]:
            message = f"the root is of save {root['save']}, the intent of {intent['save']}: one is from another save"
            problems.append(Problem(message, "zarr.json", rank=0, fatal=True))
    except (CheckpointError, *ILL_FORMED):
        return


def _check_that_only_the_version_differs(path: str) -> None:
    """Raise CheckpointCorruptError if only the version number is damaged: the checksum fits the current version."""
    where = os.path.join(path, "zarr.json")
    try:
        document = json.loads(read_document(path, "zarr.json"))
        summary = document["attributes"]["ckpt"]
        newer, summary["format"], checksum = summary["format"], FORMAT_VERSION, summary.pop("crc32c")
        if crc32c(canonical_json(document)) == checksum:
            raise CheckpointCorruptError(
                f"{where} is damaged: it says format {newer}, but its checksum fits {FORMAT_VERSION}"
            )
    except ILL_FORMED:
        return


def _read_json(
    path: str, name: str, checksum: int | None, problems: list[Problem], rank: int = 0
) -> dict[str, Any] | None:
    try:
        data = read_document(path, name)
        if checksum is None:
            return decode_document(data, name)
        document = decode_document(data, name)
        if crc32c(data) == checksum:
            return document
        raise CheckpointCorruptError(f"{name} is not the one that belongs to this step: it is from another save")
    except CheckpointCorruptError as error:
        problems.append(Problem(str(error), name, rank=rank))
        return None


def read_document(path: str, name: str) -> bytes:
    """Return the content of a document of the step at `path`.

    CheckpointCorruptError if it is missing, too large or no regular file, or if there is a symbolic link in its path;
    StorageError if it cannot be read.
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
        problems.append(Problem(f"the part is invalid: {error!r:.200}", name, rank=rank))
        return
    files.parts[rank] = part
    for directory in differ:
        problems.append(Problem(f"the part describes {directory} differently from the root", name, rank=rank))
    for chunk in chunks:
        if isinstance(chunk, str):
            problems.append(Problem(f"the part lists {chunk}, which is not a chunk", name, rank=rank))
        else:
            files.chunks.append(chunk)


def _listed_chunks(index: CheckpointIndex, rank: int, part: dict[str, Any]) -> list[ChunkFile | str]:
    """Return the chunks that a part lists; only the name for one that no array has."""
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
    """Return the name, for messages, of the tensor that an array holds."""
    about = index.arrays[directory].attributes["ckpt"]
    if about.get("pack"):
        return "(packed tensors)"
    name = display(tuple(about["name"]))
    return f"{name}@rank{about['rank']}" if "rank" in about else name
