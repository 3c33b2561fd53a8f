"""Files that appear together in a directory, or not at all.

Each is written under a temporary name; in the end all are made durable, then get their names, the one that others look
for first last. A crash before that leaves files with names that nobody reads.
"""

from __future__ import annotations

import contextlib
import os
import secrets
from types import TracebackType
from typing import BinaryIO, Self

from ckpt.storage.directories import fsync_directory
from ckpt.storage.files import storage_errors, sync_files

from ..opening import CannotReadError

__all__ = ["NewDirectory"]


class NewDirectory:
    """A directory that does not exist yet, or is empty. Use as a context manager; an error removes what was written."""

    def __init__(self, path: str) -> None:
        """CannotReadError if there is something at `path` that must not be touched. StorageError."""
        self.path = path
        self._made = False
        self._files: list[tuple[str, str]] = []
        if os.path.lexists(path) and not os.path.isdir(path):
            raise CannotReadError(f"{path} is there already and is no directory")
        if os.path.isdir(path) and os.listdir(path):
            raise CannotReadError(f"{path} is not empty; give a new or an empty directory")
        if not os.path.isdir(path):
            with storage_errors("make directory", path):
                os.mkdir(path)
            self._made = True

    def create(self, name: str) -> BinaryIO:
        """A new file, that will be called `name`. The last one that is created gets its name last."""
        temporary = os.path.join(self.path, f".{name[:100]}.{secrets.token_hex(8)}.tmp")
        with storage_errors("write", temporary):
            stream = open(temporary, "xb")  # noqa: SIM115
        self._files.append((temporary, name))
        return stream

    def rename(self, old: str, new: str) -> None:
        """Let the file that was to be called `old` be called `new`."""
        self._files = [(path, new if name == old else name) for path, name in self._files]

    def commit(self) -> None:
        """Make everything durable, then give the files their names. All of them are closed by now. StorageError."""
        sync_files([path for path, _ in self._files], [self.path])
        for path, name in self._files:
            with storage_errors("rename", path):
                os.rename(path, os.path.join(self.path, name))
        self._files.clear()
        fsync_directory(self.path)
        fsync_directory(os.path.dirname(os.path.abspath(self.path)))

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None:
            self.commit()
            return
        for path, _ in self._files:
            with contextlib.suppress(OSError):
                os.unlink(path)
        if self._made:
            with contextlib.suppress(OSError):
                os.rmdir(self.path)
