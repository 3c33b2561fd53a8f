"""Is a published step whole? What `inspect_ckpt` tells people, and what they may trust `restore` to find. Free of
torch.

Quick validation reads the step's own documents only: each is sealed, all agree, every element of every tensor is stored
exactly once, every file is there in its exact size, and no other. Full validation reads every byte and compares every
checksum with the one its writer recorded, so a chunk that is valid in itself but belongs elsewhere is found, too.

Nothing outside the step is ever opened: symbolic links are damage, and so is a document that names a place elsewhere.
"""

from __future__ import annotations

import json
import math
import mmap
import os
import re
import stat
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

from ckpt.errors import CheckpointCorruptError, CheckpointError, FormatVersionError, StorageError
from ckpt.loading.index import CheckpointIndex, StoredBox, StoredTensor, read_index
from ckpt.paths import display
from ckpt.planning.boxes import Box
from ckpt.storage.checksums import CHECKSUM_BYTES, crc32c
from ckpt.storage.commit import FORMAT_VERSION, part_name
from ckpt.storage.documents import canonical, unseal, unseal_root
from ckpt.storage.dtypes import stored
from ckpt.storage.files import under
from ckpt.storage.metadata import ArrayMeta, group_document, groups
from ckpt.storage.verification import READ_BYTES, verify_chunk

__all__ = [
    "ChunkFile",
    "Problem",
    "Report",
    "StepFiles",
    "all_tensors",
    "inside",
    "read_index_inside",
    "read_step_files",
    "validate",
]

_MAX_DOCUMENT_BYTES = 1 << 30
_MAX_MISSING_LISTED = 1000
_ILL_FORMED = (KeyError, TypeError, ValueError, AttributeError, IndexError, OverflowError)


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


@dataclass
class Report:
    """What a validation found. `bytes_read` counts chunk bytes."""

    path: str
    step: int | None = None
    files: int = 0
    bytes_read: int = 0
    problems: list[Problem] = field(default_factory=list)

    @property
    def whole(self) -> bool:
        """Nothing is wrong."""
        return not self.problems

    @property
    def restorable(self) -> bool:
        """Nothing was found that makes a restore of this step fail."""
        return not any(problem.fatal for problem in self.problems)


Progress = Callable[[int, int], None]
"""Called with (bytes checked so far, bytes in all)."""


def validate(path: str, *, quick: bool = False, jobs: int = 8, progress: Progress | None = None) -> Report:
    """Check the published step in directory `path`. `jobs` files are read at once.

    Raises CheckpointNotFoundError, FormatVersionError or StorageError (also for a file that may not be read) when it
    cannot be judged; damage is in the report.
    """
    report = Report(path)
    try:
        files = read_step_files(path, report.problems)
        report.step = files.index.step
        _check_name(path, files.index, report.problems)
        _check_cover(files, report.problems)
        _check_tensors(files.index, report.problems)
        found = _scan(path)
        report.files = len(found.sizes)
        _check_files(path, files, found, quick, report.problems)
    except CheckpointCorruptError as error:
        report.problems.append(Problem(str(error), _file_named_in(str(error), path), rank=0, fatal=True))
        return report
    except _ILL_FORMED as error:
        message = f"the documents are sealed, but do not describe a checkpoint: {error!r}"
        report.problems.append(Problem(message, "zarr.json", rank=0, fatal=True))
        return report
    if not quick:
        _check_bytes(path, files, found.sizes, report, jobs, progress)
    return report


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
        root = unseal_root(_read(path, "zarr.json"), "zarr.json")["attributes"]["ckpt"]
        intent = unseal(_read(path, "intent.json"), "intent.json")
        if intent["save"] != root["save"]:
            message = f"the root is of save {root['save']}, the intent of {intent['save']}: one is from another save"
            problems.append(Problem(message, "zarr.json", rank=0, fatal=True))
    except (CheckpointError, *_ILL_FORMED):
        return


def _check_that_only_the_version_differs(path: str) -> None:
    """A damaged version number looks like a newer version. CheckpointCorruptError if the seal fits another number."""
    where = os.path.join(path, "zarr.json")
    try:
        document = json.loads(_read(path, "zarr.json"))
        summary = document["attributes"]["ckpt"]
        newer, summary["format"], seal = summary["format"], FORMAT_VERSION, summary.pop("crc32c")
        if crc32c(canonical(document)) == seal:
            raise CheckpointCorruptError(
                f"{where} is damaged: it says format {newer}, but its seal fits {FORMAT_VERSION}"
            )
    except _ILL_FORMED:
        return


def _file_named_in(message: str, path: str) -> str | None:
    return next((name for name in ("zarr.json", "state.json") if message.startswith(os.path.join(path, name))), None)


def _sealed(
    path: str, name: str, checksum: int | None, problems: list[Problem], rank: int = 0
) -> dict[str, Any] | None:
    try:
        data = _read(path, name)
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


def _read(path: str, name: str) -> bytes:
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


def _check_name(path: str, index: CheckpointIndex, problems: list[Problem]) -> None:
    match = re.fullmatch(r"step_(\d+)", os.path.basename(os.path.abspath(path)))
    if match and int(match[1]) != index.step:
        message = f"the directory is named {match[0]}, but holds step {index.step}: another save"
        problems.append(Problem(message, "zarr.json", rank=0))


def _check_cover(files: StepFiles, problems: list[Problem]) -> None:
    """Every chunk of every array is recorded by exactly one rank.

    What the root does not know of a rank whose part is damaged is expected to be there, too, and added to the chunks.
    """
    owners: dict[str, ChunkFile] = {}
    for chunk in files.chunks:
        other = owners.setdefault(chunk.file, chunk)
        if other is not chunk:
            message = f"ranks {other.rank} and {chunk.rank} both wrote this chunk"
            tensor = _tensor_name(files.index, chunk.directory)
            problems.append(Problem(message, chunk.file, tensor, chunk.index, chunk.rank, fatal=True))
    expected = sum(math.prod(meta.grid_shape) for meta in files.index.arrays.values())
    if expected == len(owners):
        return
    missing = islice(_chunks_not_in(owners, files.index), expected - len(owners))
    if len(files.parts) < len(files.index.summary["parts"]):
        files.chunks += missing
        return
    for chunk in islice(missing, _MAX_MISSING_LISTED):
        tensor = _tensor_name(files.index, chunk.directory)
        problems.append(Problem("no rank wrote this chunk", chunk.file, tensor, chunk.index, fatal=True))


def _chunks_not_in(owners: dict[str, ChunkFile], index: CheckpointIndex) -> Iterator[ChunkFile]:
    for directory, meta in index.arrays.items():
        for number in meta.chunk_indices():
            file = f"{directory}/{meta.chunk_key(number)}"
            if file not in owners:
                yield ChunkFile(file, directory, number)


def _tensor_name(index: CheckpointIndex, directory: str) -> str:
    about = index.arrays[directory].attributes["ckpt"]
    if about.get("pack"):
        return "(packed tensors)"
    name = display(tuple(about["name"]))
    return f"{name}@rank{about['rank']}" if "rank" in about else name


def _check_tensors(index: CheckpointIndex, problems: list[Problem]) -> None:
    """Every element of every tensor is stored exactly once, and the pack has room for what is said to be in it."""
    for name, tensor in all_tensors(index):
        if not _made_up_of(tensor.shape, tensor.boxes):
            message = "the stored boxes do not make up the tensor exactly"
            problems.append(Problem(message, "zarr.json", name, rank=0, fatal=True))
        problems += [
            Problem("lies outside the pack", "state.json", name, rank=0, fatal=True)
            for box in tensor.boxes
            if box.pack_offset is not None and not _fits(box, tensor.dtype)
        ]
    for alias, target in index.aliases.items():
        if target not in index.tensors and target not in index.per_rank_tensors:
            message = f"is an alias of {display(target)}, which is not there"
            problems.append(Problem(message, "state.json", display(alias), rank=0, fatal=True))


def _made_up_of(shape: tuple[int, ...], stored_boxes: list[StoredBox]) -> bool:
    if len(stored_boxes) == 1:
        return stored_boxes[0].shape == shape and not any(stored_boxes[0].box_offset)
    boxes = [Box(box.box_offset, box.shape) for box in stored_boxes]
    whole = Box.whole(shape)
    inside = all(box.elements == 0 or box.intersection(whole) == box for box in boxes)
    apart = all(a.intersection(b) is None for i, a in enumerate(boxes) for b in boxes[:i])
    return inside and apart and sum(box.elements for box in boxes) == whole.elements


def _fits(box: StoredBox, dtype: str) -> bool:
    assert box.pack_offset is not None
    size = math.prod(box.shape) * stored(dtype).itemsize
    return size == 0 or 0 <= box.pack_offset <= box.pack_offset + size <= box.meta.shape[0]


def all_tensors(index: CheckpointIndex) -> Iterator[tuple[str, StoredTensor]]:
    """Every stored tensor under its name; those of single ranks as ``<name>@rank<r>``. Aliases are not among them."""
    for path, tensor in index.tensors.items():
        yield display(path), tensor
    for path, own in index.per_rank_tensors.items():
        for rank, tensor in own.items():
            yield f"{display(path)}@rank{rank}", tensor


@dataclass(frozen=True, slots=True)
class _Found:
    """What is below a step, links not followed: the size of every file (-1: neither file nor directory), and all
    directories."""

    sizes: dict[str, int] = field(default_factory=dict)
    directories: set[str] = field(default_factory=set)


def _scan(path: str) -> _Found:
    found = _Found()
    stack = [""]
    while stack:
        directory = stack.pop()
        try:
            with os.scandir(f"{path}/{directory}") as entries:
                for entry in entries:
                    name = directory + entry.name
                    if entry.is_dir(follow_symlinks=False):
                        found.directories.add(name)
                        stack.append(f"{name}/")
                    else:
                        is_file = entry.is_file(follow_symlinks=False)
                        found.sizes[name] = entry.stat(follow_symlinks=False).st_size if is_file else -1
        except OSError as error:
            raise StorageError(f"cannot list {os.path.join(path, directory)}: {error.strerror}") from error
    return found


def _check_files(path: str, files: StepFiles, found: _Found, quick: bool, problems: list[Problem]) -> None:
    """Every file that must be there is there with the right size (documents, unless `quick`: with the right bytes), and
    no other."""
    _check_nothing_else(files, found, problems)
    for chunk in files.chunks:
        message = _wrong_size(chunk, files.index.arrays[chunk.directory], found.sizes.get(chunk.file))
        if message is not None:
            tensor = _tensor_name(files.index, chunk.directory)
            problems.append(Problem(message, chunk.file, tensor, chunk.index, chunk.rank, fatal=True))
    for name, expected in files.documents.items():
        size = found.sizes.get(name)
        if size is None:
            if name != "intent.json" and not name.startswith("parts/"):  # these were reported when they were read
                problems.append(Problem("is missing", name))
        elif expected is not None and (size != len(expected) or (not quick and _differs(path, name, expected))):
            problems.append(Problem("differs from what the root says", name))


def _check_nothing_else(files: StepFiles, found: _Found, problems: list[Problem]) -> None:
    known = files.documents.keys() | {chunk.file for chunk in files.chunks}
    for name in sorted(found.sizes.keys() - known):
        kind = "file" if found.sizes[name] >= 0 else "symbolic link or device"
        problems.append(Problem(f"this {kind} does not belong to the checkpoint", name))
    parents = {"parts", *(name.rpartition("/")[0] for name in files.documents)}  # every directory has a document
    for name in sorted(found.directories - parents):
        if not any(file.startswith(f"{name}/") for file in found.sizes):
            problems.append(Problem("this directory does not belong to the checkpoint", name))


def _wrong_size(chunk: ChunkFile, meta: ArrayMeta, size: int | None) -> str | None:
    if size is None:
        return "is missing"
    if size < 0:
        return "is a symbolic link or a device; no file of a checkpoint is one"
    if chunk.file_bytes is not None and size != chunk.file_bytes:
        return f"has {size} bytes instead of {chunk.file_bytes}"
    if meta.compression is None and size != _file_bytes(meta, chunk.index):
        return f"has {size} bytes, which does not fit its array"
    return None


def _file_bytes(meta: ArrayMeta, index: tuple[int, ...]) -> int:
    if meta.sharded:
        return meta.layout(index).file_bytes
    return math.prod(meta.chunk_shape) * meta.stored.itemsize + CHECKSUM_BYTES


def _differs(path: str, name: str, expected: bytes) -> bool:
    try:
        return _read(path, name) != expected
    except CheckpointCorruptError:
        return True


def _check_bytes(
    path: str, files: StepFiles, sizes: dict[str, int], report: Report, jobs: int, progress: Progress | None
) -> None:
    """Read every chunk file that is there in the right size, and compare its checksum with the recorded one."""
    arrays = files.index.arrays
    chunks = [
        chunk for chunk in files.chunks if _wrong_size(chunk, arrays[chunk.directory], sizes.get(chunk.file)) is None
    ]
    total = sum(sizes[chunk.file] for chunk in chunks)
    own = threading.local()

    def check(chunk: ChunkFile) -> tuple[ChunkFile, Problem | None]:
        tensor, meta = _tensor_name(files.index, chunk.directory), arrays[chunk.directory]
        if not hasattr(own, "buffer"):
            own.buffer = memoryview(mmap.mmap(-1, READ_BYTES))
        try:
            found = verify_chunk(path, chunk.directory, meta, chunk.index, tensor, own.buffer)
        except CheckpointError as error:
            if isinstance(error.__cause__, PermissionError):
                raise
            message = str(error).removeprefix(
                f"tensor {tensor}, chunk {chunk.index}: {os.path.join(path, chunk.file)} "
            )
            message = message.removesuffix("; restore from another step or copy")
            return chunk, Problem(message, chunk.file, tensor, chunk.index, chunk.rank, fatal=True)
        if chunk.crc32c is not None and found.crc32c != chunk.crc32c:
            message = "holds other data than its writer recorded: a chunk of another place, step or save"
            return chunk, Problem(message, chunk.file, tensor, chunk.index, chunk.rank, fatal=True)
        return chunk, None

    pool = ThreadPoolExecutor(max(1, jobs), "ckpt-validate")
    try:
        for future in as_completed([pool.submit(check, chunk) for chunk in chunks]):
            chunk, problem = future.result()
            report.bytes_read += sizes[chunk.file]
            if problem is not None:
                report.problems.append(problem)
            if progress is not None:
                progress(report.bytes_read, total)
    finally:
        pool.shutdown(cancel_futures=True)
