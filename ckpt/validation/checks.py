"""Check every file of a step against its documents, and its database against its index.

The database must be the one that the index gives, byte by byte. Only compressed nodes may be other frames, of another
version of zstd, with the same content.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import re
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass, field

import numpy as np

from ckpt.errors import CheckpointCorruptError, StorageError
from ckpt.loading.consistency import find_inconsistencies
from ckpt.loading.index import CheckpointIndex
from ckpt.storage.chunk_codec import READ_BYTES
from ckpt.storage.documents import ILL_FORMED
from ckpt.storage.names import INDEX, MANIFEST, NODES, pack_file
from ckpt.storage.ocdbt import FRAME_HEAD_BYTES, FRAME_TAIL_BYTES, database, decompressed, head_of
from ckpt.storage.regions import Numbers
from ckpt.storage.regular_files import DamagedFileError
from ckpt.storage.step_source import StepSource, step_source
from ckpt.storage.zarr_entries import Hierarchy
from ckpt.validation.step_files import PackChecks, PackFile, Problem, StepFiles, read_document, read_step_files


@dataclass
class Report:
    """The result of a validation. `bytes_read` counts bytes of packs."""

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


# What a client of NFS, or of FUSE, makes of a file that is removed while a process reads it, until that has closed it.
_STILL_OPEN = re.compile(r"(^|/)\.(nfs[0-9a-f]{8,}|fuse_hidden[0-9a-f]{8,})$")

Progress = Callable[[int, int], None]
"""Called with the bytes checked so far and in total."""


def validate(step: str | StepSource, *, quick: bool = False, jobs: int = 8, progress: Progress | None = None) -> Report:
    """Check a published step, a source or a directory, reading `jobs` files at once. Damage is in the report.

    Raises CheckpointNotFoundError, FormatVersionError, or StorageError (also without permission to read a file) if the
    step cannot be checked.
    """
    source = step_source(step)
    path = source.path
    report = Report(path)
    try:
        files = read_step_files(source, report.problems)
        report.step = files.index.step
        _check_name(path, files.index, report.problems)
        report.problems += [
            Problem(problem.message, problem.file, problem.tensor, rank=0, fatal=True)
            for problem in find_inconsistencies(files.index)
        ]
        found = _Found(*source.scan())
        report.files = len(found.sizes)
        if not files.optional.isdisjoint(found.sizes):
            files.documents |= files.optional
            missing = sorted(files.optional - found.sizes.keys())
            report.problems += [Problem("is missing", name, rank=0) for name in missing]
        _check_files(files, found, report.problems)
        checks = PackChecks(files.index)
        for rank in files.parts:
            report.problems += checks.table_problems(rank)
    except CheckpointCorruptError as error:
        report.problems.append(Problem(str(error), _file_named_in(str(error), path), rank=0, fatal=True))
        return report
    if not quick:
        _check_database(files, source, report.problems)
        _check_bytes(checks, files, found, report, jobs, progress)
    return report


def _check_database(files: StepFiles, source: StepSource, problems: list[Problem]) -> None:
    """Compare the database with the index, if there is one, and no problem of it or of the parts is known.

    Nor a fatal one: the memory for this is in proportion to the number of chunks, so all of them have to be there.
    """
    sound = files.documents - {problem.file for problem in problems}
    known = len(files.parts) == files.index.world_size and not any(problem.fatal for problem in problems)
    if not known or not {MANIFEST, NODES} <= sound:
        return
    try:
        manifest, nodes = read_document(source, MANIFEST), read_document(source, NODES)
    except CheckpointCorruptError as error:
        problems.append(Problem(str(error), rank=0))
        return
    with contextlib.suppress(CheckpointCorruptError, *ILL_FORMED):  # of compressed chunks that no part has: reported
        wrong = database_problem(files.index, manifest, nodes)
        if wrong is not None:
            problems.append(Problem(wrong[1], wrong[0], rank=0))


def _file_named_in(message: str, path: str) -> str | None:
    documents = ("zarr.json", INDEX, "state.json")
    return next((name for name in documents if message.startswith(os.path.join(path, name))), None)


def _check_name(path: str, index: CheckpointIndex, problems: list[Problem]) -> None:
    match = re.fullmatch(r"step_(\d+)", os.path.basename(os.path.abspath(path)))
    if match and int(match[1]) != index.step:
        message = f"the directory is named {match[0]}, but holds step {index.step}: another save"
        problems.append(Problem(message, "zarr.json", rank=0))


@dataclass(frozen=True, slots=True)
class _Found:
    """The files of a step with their sizes (-1 if not regular), and its directories. Links are not followed."""

    sizes: dict[str, int] = field(default_factory=dict)
    directories: set[str] = field(default_factory=set)


def _check_files(files: StepFiles, found: _Found, problems: list[Problem]) -> None:
    """Check that exactly the expected files exist, with the right sizes."""
    expected = files.index.packs.files()
    known = files.documents | {pack_file(*place) for place in expected}
    for name in sorted(name for name in found.sizes.keys() - known if not _STILL_OPEN.search(name)):
        kind = "file" if found.sizes[name] >= 0 else "symbolic link or device"
        problems.append(Problem(f"this {kind} does not belong to the checkpoint", name))
    parents = {parent for name in known for parent in _parents(name)}
    for name in sorted(found.directories - parents):
        if not any(file.startswith(f"{name}/") for file in found.sizes):
            problems.append(Problem("this directory does not belong to the checkpoint", name))
    for pack in files.packs:
        wanted = pack.nbytes if files.index.packs.compressed else expected[pack.rank, pack.number]
        message = _wrong_size(pack, wanted, found.sizes.get(pack.name))
        if message is not None:
            problems.append(Problem(message, pack.name, rank=pack.rank, fatal=True))


def _parents(name: str) -> Iterator[str]:
    while name := name.rpartition("/")[0]:
        yield name


def _wrong_size(pack: PackFile, wanted: int | None, size: int | None) -> str | None:
    if size is None:
        return "is missing"
    if size < 0:
        return "is a symbolic link or a device; no file of a checkpoint is one"
    if wanted is not None and size != wanted:
        return f"has {size} bytes instead of {wanted}"
    if pack.nbytes is not None and size != pack.nbytes:
        return f"has {size} bytes, but its writer recorded {pack.nbytes}"
    return None


def _check_bytes(
    checks: PackChecks, files: StepFiles, found: _Found, report: Report, jobs: int, progress: Progress | None
) -> None:
    """Read every file of a pack, and compare its checksum with the recorded one.

    Left out are files with compressed chunks of which no part says where they are: that is reported already.
    """
    packs = [pack for pack in files.packs if found.sizes.get(pack.name, -1) >= 0]
    if files.index.packs.compressed:
        packs = [pack for pack in packs if pack.rank in files.parts]
    total = sum(found.sizes[pack.name] for pack in packs)
    own = threading.local()

    def check(pack: PackFile) -> tuple[PackFile, list[Problem]]:
        if not hasattr(own, "buffer"):
            own.buffer = memoryview(mmap.mmap(-1, READ_BYTES))
        try:
            return pack, checks.check(pack, found.sizes[pack.name], own.buffer)
        except StorageError as error:
            if isinstance(error.__cause__, PermissionError):
                raise
            return pack, [Problem(str(error), pack.name, rank=pack.rank, fatal=True)]

    known = {problem.file for problem in report.problems if problem.fatal}
    pool = ThreadPoolExecutor(max(1, jobs), "ckpt-validate")
    try:
        for future in as_completed([pool.submit(check, pack) for pack in packs]):
            pack, problems = future.result()
            report.bytes_read += found.sizes[pack.name]
            report.problems += [problem for problem in problems if problem.tensor or problem.file not in known]
            if progress is not None:
                progress(report.bytes_read, total)
    finally:
        pool.shutdown(cancel_futures=True)


# -- the database ------------------------------------------------------------------------------------------------------


def database_problem(index: CheckpointIndex, manifest: bytes, nodes: bytes) -> tuple[str, str] | None:
    """Return a file, and what is wrong with it; None if both are right.

    CheckpointCorruptError or ValueError if it cannot be told, as the parts do not say where compressed chunks are.
    """
    entries = Hierarchy.of(index.packs).entries(compressed_places(index))
    recorded = _Recorded(nodes)
    try:
        expected = database(entries, compress=recorded.compressed)
    except DamagedFileError as damage:
        return NODES, f"differs from the index: the node at byte {recorded.at} {damage}"
    if nodes != expected[1]:
        return NODES, "differs from the index"
    return None if manifest == expected[0] else (MANIFEST, "differs from the index")


def compressed_places(index: CheckpointIndex) -> Numbers:
    """Return the places of compressed chunks as `Hierarchy.entries` takes them. CheckpointCorruptError."""
    rows = list[tuple[int, ...]]()
    if index.packs.compressed and index.packs.table is not None:
        for rank in range(index.world_size):
            rows += [(*key, *place) for key, place in index.packs.table(rank).items()]
    return np.array(rows, np.int64).reshape(-1, 5)


class _Recorded:
    """Takes the frames of compressed nodes from a file, in order; `at` is where the next one begins."""

    def __init__(self, nodes: bytes) -> None:
        self.at = 0
        self._nodes = nodes

    def compressed(self, body: bytes) -> bytes | None:
        """Return the frame of the next node, None if that is not compressed. DamagedFileError for another content."""
        nbytes, is_compressed = head_of(self._nodes, self.at)
        frame = self._nodes[self.at + FRAME_HEAD_BYTES : self.at + nbytes - FRAME_TAIL_BYTES]
        if is_compressed and decompressed(frame, len(body)).tobytes() != body:
            raise DamagedFileError("has another content")
        self.at += nbytes
        return frame if is_compressed else None
