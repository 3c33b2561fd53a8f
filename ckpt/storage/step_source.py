"""Where the files of one published step are read from: a directory, or the objects below a prefix of a bucket.

A step may come from an untrusted source, so a name never leads out of it. Any process, any thread; free of torch.
"""

from __future__ import annotations

import contextlib
import itertools
import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from types import TracebackType
from typing import Any, Self

import numpy as np

from ckpt.errors import CheckpointCorruptError, CheckpointNotFoundError, StorageError
from ckpt.native import CHECKSUM_BYTES, check_pieces, read_checked
from ckpt.storage.documents import MAX_DOCUMENT_BYTES
from ckpt.storage.files import exists, is_directory, storage_errors, write_durable
from ckpt.storage.leases import ReadLease
from ckpt.storage.links import refuse_link
from ckpt.storage.names import PUBLISHED_STEP
from ckpt.storage.regular_files import DamagedFileError, MissingFileError, open_regular, read_regular
from inprocess.ipc.uncopied import Uncopied

Array = np.ndarray[Any, np.dtype[Any]]

_GONE = (FileNotFoundError, NotADirectoryError)

_UNCHECKED_BYTES = 1 << 20
_NEAR_BYTES = 1 << 20  # what lies between two ranges that are fetched as one: a request costs as much time


class OpenFile(ABC):
    """A file of a step that is open for reading. Any thread, several at once."""

    @property
    @abstractmethod
    def size(self) -> int:
        """The number of bytes."""

    @abstractmethod
    def read(self, offset: int, nbytes: int) -> bytes | memoryview:
        """Return bytes of the file; fewer at its end. OSError or StorageError if it cannot be read."""

    def read_into(self, memory: memoryview, offset: int) -> int:
        """Read bytes into memory, and return how many: at the end of the file, or at any time, fewer than fit."""
        data = self.read(offset, len(memory))
        memory[: len(data)] = data
        return len(data)

    def read_checked(self, segments: Array) -> bool:
        """Read `segments` into memory and check them, as `ckpt.native.read_checked` does. Raises as `read`.

        Blocks near each other are fetched with one `read`, which may be a request to another machine.
        """
        return all(check_pieces(self.read(start, end - start), start, part) for part, start, end in _ranges(segments))

    def close(self) -> None:  # noqa: B027 - a file that is fetched with requests has nothing to release
        """Release the file."""


def _ranges(segments: Array) -> list[tuple[Array, int, int]]:
    """Return groups of segments, each with the first and the last byte (excluded) of its blocks."""
    segments = segments[(segments["bytes"] > 0) & (segments["rows"] > 0)]
    if not len(segments):
        return []
    block, at = segments["block_bytes"], segments["at"]
    last = at + (segments["rows"] - 1) * segments["at_step"] + segments["bytes"] - 1
    pitch = block + CHECKSUM_BYTES
    first_byte, end_byte = segments["base"] + at // block * pitch, segments["base"] + (last // block + 1) * pitch
    ends = np.maximum.accumulate(end_byte)
    cuts = [0, *(np.flatnonzero(first_byte[1:] > ends[:-1] + _NEAR_BYTES) + 1).tolist(), len(segments)]
    return [
        (np.ascontiguousarray(segments[low:high]), int(first_byte[low:high].min()), int(end_byte[low:high].max()))
        for low, high in itertools.pairwise(cuts)
    ]


class StepSource(ABC):
    """The files of one published step, by their names relative to it. `path` says where it is, in messages."""

    path: str
    piece_bytes = 4 << 20
    """How many bytes one thread reads at once, so that several share the work."""

    @property
    def looks_like_step(self) -> bool:
        """Whether there is a step, although perhaps damaged: then a missing document is damage."""
        return True

    @abstractmethod
    def read(self, name: str, max_bytes: int) -> bytes:
        """Return the content of a document.

        MissingFileError if it does not exist; DamagedFileError if it is larger than `max_bytes`, or not what a file of
        a step is; StorageError or OSError if it cannot be read.
        """

    @abstractmethod
    def open(self, name: str) -> OpenFile:
        """Open a file. Raises as `read`."""

    def require(self, names: Callable[[], Iterable[str]]) -> None:
        """Raise CheckpointUnreachableError if files that are needed are known to be out of reach from this node.

        `names` returns them; it is called only where that can be.
        """
        del names

    @abstractmethod
    def scan(self) -> tuple[dict[str, int], set[str]]:
        """Return all files with their sizes, -1 for what is no regular file, and all directories, if there are any.

        StorageError if they cannot be listed.
        """

    def changed_s(self, name: str) -> float:
        """Return when a file was written last, in seconds since 1970; 0 if it does not exist, or if that is not known.

        StorageError if it cannot be told.
        """
        del name
        return 0.0

    def usage(self) -> tuple[int, float]:
        """Return the bytes of all files, and when any of them changed last, in seconds since 1970.

        Zeros if there are none, or if the time is not known. StorageError if they cannot be listed.
        """
        sizes, _ = self.scan()
        return sum(sizes.values()), 0.0


class LocalStep(StepSource):
    """A step in a directory: regular files below it, no links."""

    def __init__(self, path: str) -> None:
        self.path = path

    @property
    def looks_like_step(self) -> bool:
        is_named = PUBLISHED_STEP.fullmatch(os.path.basename(os.path.abspath(self.path)))
        has_intent = exists(os.path.join(self.path, "intent.json"))
        return is_directory(self.path) and (is_named is not None or has_intent)

    def read(self, name: str, max_bytes: int) -> bytes:
        """See `StepSource.read`."""
        return read_regular(self.path, name, max_bytes)

    def open(self, name: str) -> OpenFile:
        """See `StepSource.open`."""
        return _LocalFile(open_regular(self.path, name))

    def write(self, name: str, data: bytes) -> None:
        """Write or replace a document of the step, durably. StorageError if that fails."""
        write_durable(os.path.join(refuse_link(self.path), name), data)

    def scan(self) -> tuple[dict[str, int], set[str]]:
        """See `StepSource.scan`. Links are not followed."""
        sizes: dict[str, int] = {}
        folders: set[str] = set()
        stack = [""]
        while stack:
            folder = stack.pop()
            try:
                with os.scandir(f"{self.path}/{folder}") as entries:
                    for entry in entries:
                        name = folder + entry.name
                        if entry.is_dir(follow_symlinks=False):
                            folders.add(name)
                            stack.append(f"{name}/")
                        else:
                            is_file = entry.is_file(follow_symlinks=False)
                            sizes[name] = entry.stat(follow_symlinks=False).st_size if is_file else -1
            except OSError as error:
                raise StorageError(f"cannot list {os.path.join(self.path, folder)}: {error.strerror}") from error
        return sizes, folders

    def changed_s(self, name: str) -> float:
        """See `StepSource.changed_s`."""
        path = os.path.join(self.path, name)
        with storage_errors("find", path), contextlib.suppress(*_GONE):
            return os.stat(path).st_mtime
        return 0.0

    def usage(self) -> tuple[int, float]:
        """See `StepSource.usage`. Links are not followed; what is removed meanwhile is left out."""
        total, newest, stack = 0, 0.0, [self.path]
        while stack:
            folder = stack.pop()
            with storage_errors("list", folder), contextlib.suppress(*_GONE), os.scandir(folder) as entries:
                for entry in entries:
                    status = entry.stat(follow_symlinks=False)
                    newest = max(newest, status.st_mtime)
                    if entry.is_dir(follow_symlinks=False):
                        stack.append(entry.path)
                    else:
                        total += status.st_size
        with storage_errors("find", self.path), contextlib.suppress(*_GONE):
            newest = max(newest, os.lstat(self.path).st_mtime)
        return total, newest


class _LocalFile(OpenFile):
    def __init__(self, fd: int) -> None:
        self._fd = fd

    @property
    def size(self) -> int:
        return os.fstat(self._fd).st_size

    def read(self, offset: int, nbytes: int) -> bytes:
        if nbytes > _UNCHECKED_BYTES:  # the memory for it is allocated first
            nbytes = max(0, min(nbytes, self.size - offset))
        return os.pread(self._fd, nbytes, offset)

    def read_into(self, memory: memoryview, offset: int) -> int:
        return os.preadv(self._fd, [memory], offset)

    def read_checked(self, segments: Array) -> bool:
        return read_checked(self._fd, segments)

    def close(self) -> None:
        os.close(self._fd)


def read_document(source: StepSource, name: str) -> bytes | None:
    """Return the content of a document of a step; None if it does not exist.

    CheckpointCorruptError if it is not what a file of a step is; StorageError if it cannot be read.
    """
    where = os.path.join(source.path, name)
    with storage_errors("read", where):
        try:
            return source.read(name, MAX_DOCUMENT_BYTES)
        except MissingFileError:
            return None
        except DamagedFileError as damage:
            raise CheckpointCorruptError(f"{where} {damage}; restore from another step or copy") from None


def step_source(step: str | StepSource) -> StepSource:
    """Return the source itself, or that of a directory."""
    return LocalStep(step) if isinstance(step, str) else step


class HeldStep(Uncopied):
    """Holds a published step while it is read: its files, and a lease where one could be made. A context manager.

    The lease only saves reading again: `check` tells whether what was read is of this step.
    """

    def __init__(
        self,
        source: StepSource,
        is_same: Callable[[], bool],
        lease: ReadLease | None = None,
        ends: contextlib.ExitStack | None = None,
    ) -> None:
        """`is_same` looks whether the step is still the one that was opened. `ends` is closed with this.

        CheckpointNotFoundError if the step was removed meanwhile: looks after the lease was made, which the owner looks
        for before it removes the step.
        """
        self.path = source.path
        self.source = source
        self._is_same = is_same
        self._lease = lease
        self._ends = contextlib.ExitStack() if ends is None else ends
        try:
            self.check()
        except BaseException:
            self.close()
            raise

    def check(self) -> None:
        """Raise CheckpointNotFoundError unless the step is still the one that was opened; renew the lease if it is due.

        If it returns, all data read before is of that step.
        """
        if not self._is_same():
            raise CheckpointNotFoundError(
                f"{self.path} was removed or replaced while it was read; open the checkpoint again, and the newest step"
            )
        if self._lease is not None:
            self._lease.renew_if_due()

    @property
    def still_there(self) -> bool:
        """Whether the step is still the one that was opened. True if that cannot be told."""
        try:
            return self._is_same()
        except StorageError:
            return True  # nothing is known of a removal

    def close(self) -> None:
        """Release the step. Idempotent."""
        lease, self._lease = self._lease, None
        if lease is not None:
            lease.release()
        self._ends.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
