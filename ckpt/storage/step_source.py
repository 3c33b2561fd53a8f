"""Where the files of one published step are read from: a directory, or the objects below a prefix of a bucket.

A step may come from an untrusted source, so a name never leads out of it. Any process, any thread; free of torch.
"""

from __future__ import annotations

import contextlib
import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from types import TracebackType
from typing import Any, Self

import numpy as np

from ckpt.errors import StorageError
from ckpt.native import read_checked
from ckpt.storage.files import exists, is_directory, storage_errors, write_durable
from ckpt.storage.links import refuse_link
from ckpt.storage.names import PUBLISHED_STEP
from ckpt.storage.regular_files import open_regular, read_regular

__all__ = ["HeldStep", "LocalStep", "OpenFile", "StepSource", "step_source"]

Array = np.ndarray[Any, np.dtype[Any]]

_GONE = (FileNotFoundError, NotADirectoryError)


_UNCHECKED_BYTES = 1 << 20


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

    @abstractmethod
    def read_checked(self, segments: Array) -> bool:
        """Read `segments` into memory and check them, as `ckpt.native.read_checked` does. Raises as `read`."""

    @abstractmethod
    def close(self) -> None:
        """Release the file."""


class StepSource(ABC):
    """The files of one published step, by their names relative to it. `path` says where it is, in messages."""

    path: str
    piece_bytes = 4 << 20
    """How many bytes one thread reads at once, so that several share the work."""

    @property
    @abstractmethod
    def looks_like_step(self) -> bool:
        """Whether there is a step, although perhaps damaged: then a missing document is damage."""

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


def step_source(step: str | StepSource) -> StepSource:
    """Return the source itself, or that of a directory."""
    return LocalStep(step) if isinstance(step, str) else step


class HeldStep(ABC):
    """Holds a published step while it is read. A context manager."""

    path: str
    source: StepSource

    @abstractmethod
    def check(self) -> None:
        """Raise CheckpointNotFoundError unless the step is still the one that was opened.

        If it returns, all data read before is of that step.
        """

    @abstractmethod
    def renew(self) -> None:
        """Renew the lease if that is due; does nothing most times."""

    @property
    @abstractmethod
    def still_there(self) -> bool:
        """Whether the step is still the one that was opened."""

    @abstractmethod
    def close(self) -> None:
        """Release the step. Idempotent."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
