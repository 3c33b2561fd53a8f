"""Check every file of a step against its documents."""

from __future__ import annotations

import math
import mmap
import os
import re
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass, field
from itertools import islice

from ckpt.errors import CheckpointCorruptError, CheckpointError, StorageError
from ckpt.loading.consistency import find_inconsistencies
from ckpt.loading.index import CheckpointIndex
from ckpt.storage.array_metadata import ArrayMeta
from ckpt.storage.chunk_codec import READ_BYTES, verify_chunk
from ckpt.validation.step_files import (
    ChunkFile,
    Problem,
    StepFiles,
    read_document,
    read_step_files,
    tensor_name,
)

__all__ = ["Report", "validate"]

_MAX_MISSING_LISTED = 1000


@dataclass
class Report:
    """The result of a validation. `bytes_read` counts bytes of chunk files."""

    path: str
    step: int | None = None
    files: int = 0
    bytes_read: int = 0
    problems: list[Problem] = field(default_factory=list)

    @property
    def whole(self) -> bool:
        """No problem was found."""
        return not self.problems

    @property
    def restorable(self) -> bool:
        """No problem was found that makes a restore of this step fail."""
        return not any(problem.fatal for problem in self.problems)


Progress = Callable[[int, int], None]
"""Called with the bytes checked so far and in total."""


def validate(path: str, *, quick: bool = False, jobs: int = 8, progress: Progress | None = None) -> Report:
    """Check the published step in directory `path`, reading `jobs` files at once. Damage is in the report.

    Raises CheckpointNotFoundError, FormatVersionError, or StorageError (also without permission to read a file) if the
    step cannot be checked.
    """
    report = Report(path)
    try:
        files = read_step_files(path, report.problems)
        report.step = files.index.step
        _check_name(path, files.index, report.problems)
        report.problems += [
            Problem(problem.message, problem.file, problem.tensor, rank=0, fatal=True)
            for problem in find_inconsistencies(files.index)
        ]
        found = _scan(path)
        _check_cover(files, len(found.sizes), report.problems)
        report.files = len(found.sizes)
        _check_files(path, files, found, quick, report.problems)
    except CheckpointCorruptError as error:
        report.problems.append(Problem(str(error), _file_named_in(str(error), path), rank=0, fatal=True))
        return report
    if not quick:
        _check_bytes(path, files, found.sizes, report, jobs, progress)
    return report


def _file_named_in(message: str, path: str) -> str | None:
    return next((name for name in ("zarr.json", "state.json") if message.startswith(os.path.join(path, name))), None)


def _check_name(path: str, index: CheckpointIndex, problems: list[Problem]) -> None:
    match = re.fullmatch(r"step_(\d+)", os.path.basename(os.path.abspath(path)))
    if match and int(match[1]) != index.step:
        message = f"the directory is named {match[0]}, but holds step {index.step}: another save"
        problems.append(Problem(message, "zarr.json", rank=0))


def _check_cover(files: StepFiles, files_found: int, problems: list[Problem]) -> None:
    """Check that exactly one rank has recorded each chunk of each array.

    Chunks that no part lists are added to `files`: ranks whose parts are damaged have written them.
    """
    owners: dict[str, ChunkFile] = {}
    for chunk in files.chunks:
        other = owners.setdefault(chunk.file, chunk)
        if other is not chunk:
            message = f"ranks {other.rank} and {chunk.rank} both wrote this chunk"
            tensor = tensor_name(files.index, chunk.directory)
            problems.append(Problem(message, chunk.file, tensor, chunk.index, chunk.rank, fatal=True))
    expected = sum(math.prod(meta.grid_shape) for meta in files.index.arrays.values())
    if expected == len(owners):
        return
    missing = islice(_chunks_not_in(owners, files.index), expected - len(owners))
    if len(files.parts) < len(files.index.summary["parts"]):
        files.chunks += islice(missing, files_found + _MAX_MISSING_LISTED)
        return
    for chunk in islice(missing, _MAX_MISSING_LISTED):
        tensor = tensor_name(files.index, chunk.directory)
        problems.append(Problem("no rank wrote this chunk", chunk.file, tensor, chunk.index, fatal=True))


def _chunks_not_in(owners: dict[str, ChunkFile], index: CheckpointIndex) -> Iterator[ChunkFile]:
    for directory, meta in index.arrays.items():
        for number in meta.chunk_indices():
            file = f"{directory}/{meta.chunk_key(number)}"
            if file not in owners:
                yield ChunkFile(file, directory, number)


@dataclass(frozen=True, slots=True)
class _Found:
    """The files of a step with their sizes (-1 if not regular), and its directories. Links are not followed."""

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
    """Check that exactly the expected files exist, with the right sizes and, unless `quick`, the right documents."""
    _check_nothing_else(files, found, problems)
    for chunk in files.chunks:
        message = _wrong_size(chunk, files.index.arrays[chunk.directory], found.sizes.get(chunk.file))
        if message is not None:
            tensor = tensor_name(files.index, chunk.directory)
            problems.append(Problem(message, chunk.file, tensor, chunk.index, chunk.rank, fatal=True))
    for name, expected in files.documents.items():
        size = found.sizes.get(name)
        if size is None:
            if name != "intent.json" and not name.startswith("parts/"):  # reported when they were read
                problems.append(Problem("is missing", name))
        elif expected is not None and (size != len(expected) or (not quick and _differs(path, name, expected))):
            problems.append(Problem("differs from what the root says", name))


def _check_nothing_else(files: StepFiles, found: _Found, problems: list[Problem]) -> None:
    known = files.documents.keys() | {chunk.file for chunk in files.chunks}
    for name in sorted(found.sizes.keys() - known):
        kind = "file" if found.sizes[name] >= 0 else "symbolic link or device"
        problems.append(Problem(f"this {kind} does not belong to the checkpoint", name))
    parents = {"parts", *(name.rpartition("/")[0] for name in files.documents)}  # every directory has a zarr.json
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
    return meta.size_problem(chunk.index, size)


def _differs(path: str, name: str, expected: bytes) -> bool:
    try:
        return read_document(path, name) != expected
    except CheckpointCorruptError:
        return True


def _check_bytes(
    path: str, files: StepFiles, sizes: dict[str, int], report: Report, jobs: int, progress: Progress | None
) -> None:
    """Read every chunk file of the right size, and compare its checksum with the recorded one."""
    arrays = files.index.arrays
    chunks = [
        chunk for chunk in files.chunks if _wrong_size(chunk, arrays[chunk.directory], sizes.get(chunk.file)) is None
    ]
    total = sum(sizes[chunk.file] for chunk in chunks)
    own = threading.local()

    def check(chunk: ChunkFile) -> tuple[ChunkFile, Problem | None]:
        tensor, meta = tensor_name(files.index, chunk.directory), arrays[chunk.directory]
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
