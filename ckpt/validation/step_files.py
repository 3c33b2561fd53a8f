"""Read the documents of an untrusted step, and list the files that they describe.

Every document must have a correct checksum and be consistent with the others. Nothing outside the step is opened.
"""

from __future__ import annotations

import json
import os
from dataclasses import dataclass, field
from typing import Any

from ckpt.errors import CheckpointCorruptError, CheckpointError, FormatVersionError, StorageError
from ckpt.loading.index import CheckpointIndex, chunk_table, items, parse_index, sizes
from ckpt.native import crc32c
from ckpt.storage.documents import (
    ILL_FORMED,
    MAX_DOCUMENT_BYTES,
    canonical_json,
    decode_document,
    decode_root,
    is_recorded,
)
from ckpt.storage.names import INDEX, MANIFEST, NODES, REFERENCES, pack_file, part_name
from ckpt.storage.regular_files import DamagedFileError
from ckpt.storage.root import FORMAT_VERSION
from ckpt.storage.step_source import StepSource, step_source

__all__ = ["PackFile", "Problem", "StepFiles", "read_document", "read_step_files"]


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
class PackFile:
    """A file of a pack: `nbytes` and `crc32c` are as its writer recorded them, None if the writer's part is damaged."""

    name: str
    rank: int
    number: int
    nbytes: int | None = None
    crc32c: int | None = None


@dataclass
class StepFiles:
    """The files of a step according to its metadata: the parts by rank, the files of packs, the names of documents.

    Those that are `optional` are there all together or not at all.
    """

    index: CheckpointIndex
    parts: dict[int, dict[str, Any]] = field(default_factory=dict)
    packs: list[PackFile] = field(default_factory=list)
    documents: set[str] = field(default_factory=set)
    optional: set[str] = field(default_factory=set)


def read_step_files(step: str | StepSource, problems: list[Problem]) -> StepFiles:
    """Read all metadata of a step, a source or a directory, and add the problems of single documents to `problems`.

    Raises CheckpointCorruptError if the root, the index or the state document is damaged: nothing else can be checked
    then.
    """
    source = step_source(step)
    try:
        index = parse_index(source)
    except CheckpointCorruptError:
        _find_mixed_saves(source, problems)
        raise
    except FormatVersionError:
        _check_that_only_the_version_differs(source)
        raise
    files = StepFiles(index)
    summary = index.summary
    files.documents |= {"zarr.json", INDEX, "state.json", "intent.json"}
    intent = _read_json(source, "intent.json", None, problems, 0, fatal=False)
    if intent is not None and intent != {key: summary.get(key) for key in intent}:
        problems.append(Problem("the intent belongs to another save", "intent.json", rank=0))
    for name, member in ((REFERENCES, "references"), (MANIFEST, MANIFEST), (NODES, NODES)):
        if member in summary:
            _check_for_readers(source, name, summary[member], files, problems)
    if MANIFEST not in summary:
        files.optional |= {MANIFEST, NODES}
    expected = index.packs.files()
    for rank, checksum in enumerate(summary["parts"]):
        files.documents.add(part_name(rank))
        part = _read_json(source, part_name(rank), checksum, problems, rank, fatal=index.packs.compressed)
        if part is not None:
            _add_part(files, rank, part, expected, problems)
    for rank, number in expected:
        if rank in files.parts:
            problems.append(Problem("no rank wrote this file", pack_file(rank, number), rank=rank, fatal=True))
        else:
            files.packs.append(PackFile(pack_file(rank, number), rank, number))
    return files


def _check_for_readers(source: StepSource, name: str, recorded: Any, files: StepFiles, problems: list[Problem]) -> None:
    files.documents.add(name)
    try:
        data = read_document(source, name)
        if not is_recorded(data, recorded):
            problems.append(Problem("differs from what the root says", name, rank=0))
    except CheckpointCorruptError as error:
        problems.append(Problem(str(error), name, rank=0))


def _find_mixed_saves(source: StepSource, problems: list[Problem]) -> None:
    """Report whether root and intent are of different saves, after root and state were found not to match."""
    try:
        root = decode_root(read_document(source, "zarr.json"), "zarr.json")["attributes"]["ckpt"]
        intent = decode_document(read_document(source, "intent.json"), "intent.json")
        if intent["save"] != root["save"]:
            message = f"the root is of save {root['save']}, the intent of {intent['save']}: one is from another save"
            problems.append(Problem(message, "zarr.json", rank=0, fatal=True))
    except (CheckpointError, *ILL_FORMED):
        return


def _check_that_only_the_version_differs(source: StepSource) -> None:
    """Raise CheckpointCorruptError if only the version number is damaged: the checksum fits the current version."""
    where = os.path.join(source.path, "zarr.json")
    try:
        document = json.loads(read_document(source, "zarr.json"))
        summary = document["attributes"]["ckpt"]
        newer, summary["format"], checksum = summary["format"], FORMAT_VERSION, summary.pop("crc32c")
        if crc32c(canonical_json(document)) == checksum:
            raise CheckpointCorruptError(
                f"{where} is damaged: it says format {newer}, but its checksum fits {FORMAT_VERSION}"
            )
    except ILL_FORMED:
        return


def _read_json(
    source: StepSource, name: str, checksum: int | None, problems: list[Problem], rank: int, *, fatal: bool
) -> dict[str, Any] | None:
    try:
        data = read_document(source, name)
        if checksum is None:
            return decode_document(data, name)
        document = decode_document(data, name)
        if crc32c(data) == checksum:
            return document
        raise CheckpointCorruptError(f"{name} is not the one that belongs to this step: it is from another save")
    except CheckpointCorruptError as error:
        problems.append(Problem(str(error), name, rank=rank, fatal=fatal))
        return None


def read_document(step: str | StepSource, name: str) -> bytes:
    """Return the content of a document of a step, a source or a directory.

    CheckpointCorruptError if it is missing, too large or no regular file, or if there is a symbolic link in its path;
    StorageError if it cannot be read.
    """
    source = step_source(step)
    full = os.path.join(source.path, name)
    try:
        return source.read(name, MAX_DOCUMENT_BYTES)
    except DamagedFileError as damage:
        raise CheckpointCorruptError(f"{full} {damage}") from None
    except OSError as error:
        raise StorageError(f"cannot read {full}: {error.strerror}") from error


def _add_part(
    files: StepFiles,
    rank: int,
    part: dict[str, Any],
    missing: dict[tuple[int, int], int],
    problems: list[Problem],
) -> None:
    """Add the files that a part lists, and remove them from those that are `missing`."""
    name, summary = part_name(rank), files.index.summary
    expected = {key: summary[key] for key in ("save", "plan", "world_size")} | {"rank": rank}
    wrong = [key for key, value in expected.items() if part.get(key) != value]
    if wrong:
        fatal = files.index.packs.compressed  # then it says where the chunks are
        problems.append(Problem(f"the part differs from the root in {', '.join(wrong)}", name, rank=rank, fatal=fatal))
        return
    try:
        listed = [sizes(entry) for entry in items(part["files"])]
        packs = [PackFile(pack_file(rank, number), rank, number, nbytes, crc) for number, nbytes, crc in listed]
        chunk_table(part)
    except ILL_FORMED as error:
        message, fatal = f"the part is invalid: {error!r:.200}", files.index.packs.compressed
        problems.append(Problem(message, name, rank=rank, fatal=fatal))
        return
    files.parts[rank] = part
    for pack in packs:
        if missing.pop((rank, pack.number), None) is None:
            problems.append(
                Problem(f"the part lists {pack.name}, which has no chunks or is listed twice", name, rank=rank)
            )
        else:
            files.packs.append(pack)
