"""Is a published step whole? What `inspect_ckpt` tells people, and what they may trust `restore` to find. Free of
torch.

Quick validation reads metadata only: every document is sealed, all agree, every element of every tensor is stored
exactly once, every file is there in its exact size, and no other. Full validation reads every byte and compares every
checksum with the one its writer recorded, so a chunk that is valid in itself but belongs elsewhere is found, too.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass, field
from typing import Any

from ckpt.errors import CheckpointCorruptError, CheckpointError
from ckpt.loading.index import CheckpointIndex, StoredBox, StoredTensor, read_index
from ckpt.paths import display
from ckpt.planning.boxes import Box
from ckpt.storage.checksums import crc32c
from ckpt.storage.commit import part_name
from ckpt.storage.documents import canonical, unseal
from ckpt.storage.dtypes import stored
from ckpt.storage.metadata import ArrayMeta, group_document, groups
from ckpt.storage.verification import verify_chunk

__all__ = ["ChunkFile", "Problem", "Report", "StepFiles", "read_step_files", "validate"]

_MAX_DOCUMENT_BYTES = 1 << 30


@dataclass(frozen=True, slots=True)
class Problem:
    """One thing that is wrong. `file` is relative to the step; `rank` is who wrote it; what is not known is None."""

    message: str
    file: str | None = None
    tensor: str | None = None
    chunk: tuple[int, ...] | None = None
    rank: int | None = None


@dataclass(frozen=True, slots=True)
class ChunkFile:
    """A chunk file as its writer recorded it."""

    file: str
    directory: str
    index: tuple[int, ...]
    file_bytes: int
    crc32c: int
    rank: int


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


Progress = Callable[[int, int], None]
"""Called with (bytes checked so far, bytes in all)."""


def validate(path: str, *, quick: bool = False, jobs: int = 4, progress: Progress | None = None) -> Report:
    """Check the published step in directory `path`. `jobs` files are read at once.

    Raises CheckpointNotFoundError, FormatVersionError or StorageError when it cannot be judged; damage is in the
    report.
    """
    report = Report(path)
    try:
        files = read_step_files(path, report.problems)
    except CheckpointCorruptError as error:
        report.problems.append(Problem(str(error)))
        return report
    report.step = files.index.step
    _check_name(path, files.index, report.problems)
    _check_cover(files, report.problems)
    _check_tensors(files.index, report.problems)
    sizes = _sizes(path)
    report.files = len(sizes)
    _check_files(path, files, sizes, report.problems)
    if not quick:
        _check_bytes(path, files, sizes, report, jobs, progress)
    return report


def read_step_files(path: str, problems: list[Problem]) -> StepFiles:
    """Read all metadata of a step. What is wrong with single documents is added to `problems`.

    Raises CheckpointCorruptError when the root or the state document is damaged, for nothing else can be judged then.
    """
    index = read_index(path)
    files = StepFiles(index)
    summary = index.summary
    files.documents |= {"zarr.json": None, "state.json": None, "intent.json": None}
    intent = _sealed(path, "intent.json", None, problems)
    if intent is not None and intent != {key: summary[key] for key in intent}:
        problems.append(Problem("the intent belongs to another save", "intent.json", rank=0))
    if len(summary["parts"]) != summary["world_size"]:
        problems.append(Problem("the root does not list a part for every rank", "zarr.json", rank=0))
    for rank, checksum in enumerate(summary["parts"]):
        files.documents[part_name(rank)] = None
        part = _sealed(path, part_name(rank), checksum, problems, rank)
        if part is not None:
            _add_part(files, rank, part, problems)
    for directory in groups(index.arrays):
        files.documents[f"{directory}/zarr.json"] = canonical(group_document())
    for directory, meta in index.arrays.items():
        files.documents[f"{directory}/zarr.json"] = meta.document_bytes()
    return files


def _sealed(
    path: str, name: str, checksum: int | None, problems: list[Problem], rank: int = 0
) -> dict[str, Any] | None:
    try:
        data = _read(path, name)
        if checksum is not None and crc32c(data) != checksum:
            raise CheckpointCorruptError(f"{name} is not the one that belongs to this step")
        return unseal(data, name)
    except CheckpointCorruptError as error:
        problems.append(Problem(str(error), name, rank=rank))
        return None


def _read(path: str, name: str) -> bytes:
    full = os.path.join(path, name)
    try:
        with open(full, "rb") as stream:
            data = stream.read(_MAX_DOCUMENT_BYTES + 1)
    except OSError as error:
        raise CheckpointCorruptError(f"{name} cannot be read: {error.strerror}") from error
    if len(data) > _MAX_DOCUMENT_BYTES:
        raise CheckpointCorruptError(f"{name} is larger than any document of a checkpoint")
    return data


def _add_part(files: StepFiles, rank: int, part: dict[str, Any], problems: list[Problem]) -> None:
    name, summary = part_name(rank), files.index.summary
    expected = {key: summary[key] for key in ("save", "plan", "world_size")} | {"rank": rank}
    wrong = [key for key, value in expected.items() if part.get(key) != value]
    if wrong:
        problems.append(Problem(f"the part differs from the root in {', '.join(wrong)}", name, rank=rank))
        return
    files.parts[rank] = part
    for directory, document in part["arrays"].items():
        meta = files.index.arrays.get(directory)
        if meta is None or meta.array_document() != document:
            problems.append(Problem(f"the part describes {directory} in another way than the root", name, rank=rank))
    for directory, written in part["chunks"].items():
        for key, file_bytes, checksum in written:
            index = _chunk_index(files.index.arrays.get(directory), key)
            if index is None:
                problems.append(Problem(f"the part lists {directory}/{key}, which is no chunk", name, rank=rank))
                continue
            files.chunks.append(ChunkFile(f"{directory}/{key}", directory, index, file_bytes, checksum, rank))


def _chunk_index(meta: ArrayMeta | None, key: str) -> tuple[int, ...] | None:
    if meta is None or not re.fullmatch(r"c(\.\d+)*", key):
        return None
    numbers = tuple(int(part) for part in key.split(".")[1:])
    index = numbers[: len(meta.shape)]
    inside = len(index) == len(meta.shape) and all(i < n for i, n in zip(index, meta.grid_shape, strict=True))
    return index if inside and meta.chunk_key(index) == key else None


def _check_name(path: str, index: CheckpointIndex, problems: list[Problem]) -> None:
    match = re.fullmatch(r"step_(\d+)", os.path.basename(os.path.abspath(path)))
    if match and int(match[1]) != index.step:
        problems.append(Problem(f"the directory is named {match[0]}, but holds step {index.step}", "zarr.json", rank=0))


def _check_cover(files: StepFiles, problems: list[Problem]) -> None:
    """Every chunk of every array is recorded by exactly one rank."""
    owners: dict[tuple[str, tuple[int, ...]], int] = {}
    for chunk in files.chunks:
        other = owners.setdefault((chunk.directory, chunk.index), chunk.rank)
        if other != chunk.rank:
            message = f"ranks {other} and {chunk.rank} both wrote this chunk"
            problems.append(
                Problem(message, chunk.file, _tensor_name(files.index, chunk.directory), chunk.index, chunk.rank)
            )
    for directory, meta in files.index.arrays.items():
        for index in meta.chunk_indices():
            if (directory, index) not in owners:
                file = f"{directory}/{meta.chunk_key(index)}"
                problems.append(Problem("no rank wrote this chunk", file, _tensor_name(files.index, directory), index))


def _tensor_name(index: CheckpointIndex, directory: str) -> str:
    about = index.arrays[directory].attributes["ckpt"]
    if about.get("pack"):
        return "(small tensors)"
    name = display(tuple(about["name"]))
    return f"{name}@rank{about['rank']}" if "rank" in about else name


def _check_tensors(index: CheckpointIndex, problems: list[Problem]) -> None:
    """Every element of every tensor is stored exactly once, and the pack has room for what is said to be in it."""
    for name, tensor in _all_tensors(index):
        boxes = [Box(box.box_offset, box.shape) for box in tensor.boxes]
        whole = Box.whole(tensor.shape)
        inside = all(box.elements == 0 or box.intersection(whole) == box for box in boxes)
        apart = all(a.intersection(b) is None for i, a in enumerate(boxes) for b in boxes[:i])
        if not inside or not apart or sum(box.elements for box in boxes) != whole.elements:
            problems.append(Problem("the stored boxes do not make up the tensor exactly", "zarr.json", name, rank=0))
        problems += [
            Problem("lies outside the pack", "state.json", name, rank=0)
            for box in tensor.boxes
            if box.pack_offset is not None and not _fits(box, tensor.dtype)
        ]
    for alias, target in index.aliases.items():
        if target not in index.tensors and target not in index.per_rank_tensors:
            problems.append(
                Problem(f"is an alias of {display(target)}, which is not there", "state.json", display(alias))
            )


def _fits(box: StoredBox, dtype: str) -> bool:
    assert box.pack_offset is not None
    size = Box.whole(box.shape).elements * stored(dtype).itemsize
    return size == 0 or 0 <= box.pack_offset <= box.pack_offset + size <= box.meta.shape[0]


def _all_tensors(index: CheckpointIndex) -> Iterator[tuple[str, StoredTensor]]:
    for path, tensor in index.tensors.items():
        yield display(path), tensor
    for path, own in index.per_rank_tensors.items():
        for rank, tensor in own.items():
            yield f"{display(path)}@rank{rank}", tensor


def _sizes(path: str) -> dict[str, int]:
    """Every file below `path`, links not followed, with its size; what is neither file nor directory has size -1."""
    sizes: dict[str, int] = {}
    stack = [""]
    while stack:
        directory = stack.pop()
        with os.scandir(os.path.join(path, directory)) as entries:
            for entry in entries:
                name = f"{directory}{entry.name}"
                if entry.is_dir(follow_symlinks=False):
                    stack.append(f"{name}/")
                else:
                    is_file = entry.is_file(follow_symlinks=False)
                    sizes[name] = entry.stat(follow_symlinks=False).st_size if is_file else -1
    return sizes


def _check_files(path: str, files: StepFiles, sizes: dict[str, int], problems: list[Problem]) -> None:
    """Every file that must be there is there with the right size (documents: with the right bytes), and no other."""
    chunks = {chunk.file: chunk for chunk in files.chunks}
    known = files.documents.keys() | chunks.keys()
    for name in sorted(sizes.keys() - known):
        problems.append(Problem("this file does not belong to the checkpoint", name))
    for chunk in files.chunks:
        where = (chunk.file, _tensor_name(files.index, chunk.directory), chunk.index, chunk.rank)
        meta = files.index.arrays[chunk.directory]
        size = sizes.get(chunk.file)
        if size is None:
            problems.append(Problem("is missing", *where))
        elif size != chunk.file_bytes:
            problems.append(Problem(f"has {size} bytes instead of {chunk.file_bytes}", *where))
        elif meta.compression is None and size != meta.layout(chunk.index).file_bytes:
            problems.append(Problem(f"has {size} bytes, which does not fit its array", *where))
    for name, expected in files.documents.items():
        if name not in sizes:
            if name != "intent.json" and not name.startswith("parts/"):  # these were reported when they were read
                problems.append(Problem("is missing", name))
        elif expected is not None and _differs(path, name, sizes[name], expected):
            problems.append(Problem("differs from what the root says", name))


def _differs(path: str, name: str, size: int, expected: bytes) -> bool:
    try:
        return size != len(expected) or _read(path, name) != expected
    except CheckpointError:
        return True


def _check_bytes(
    path: str, files: StepFiles, sizes: dict[str, int], report: Report, jobs: int, progress: Progress | None
) -> None:
    """Read every chunk file that is there and compare its checksum with the recorded one."""
    chunks = [chunk for chunk in files.chunks if sizes.get(chunk.file) == chunk.file_bytes]
    total = sum(chunk.file_bytes for chunk in chunks)

    def check(chunk: ChunkFile) -> tuple[ChunkFile, Problem | None]:
        tensor = _tensor_name(files.index, chunk.directory)
        try:
            found = verify_chunk(path, chunk.directory, files.index.arrays[chunk.directory], chunk.index, tensor)
        except CheckpointError as error:
            return chunk, Problem(str(error), chunk.file, tensor, chunk.index, chunk.rank)
        if found.crc32c != chunk.crc32c:
            message = "holds other data than its writer recorded: a chunk of another place, step or save"
            return chunk, Problem(message, chunk.file, tensor, chunk.index, chunk.rank)
        return chunk, None

    with ThreadPoolExecutor(max(1, jobs), "ckpt-validate") as pool:
        for future in as_completed([pool.submit(check, chunk) for chunk in chunks]):
            chunk, problem = future.result()
            report.bytes_read += chunk.file_bytes
            if problem is not None:
                report.problems.append(problem)
            if progress is not None:
                progress(report.bytes_read, total)
