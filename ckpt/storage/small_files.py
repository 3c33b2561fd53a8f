"""Small files of a program beside the steps of a root, in a directory or in an object store."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from ckpt.errors import StorageError
from ckpt.storage import directories, files
from ckpt.storage.files import storage_errors
from ckpt.storage.roots import absolute, is_object_url
from ckpt.storage.stores import open_store
from ckpt.storage.stores.interface import StorageOptions, Store

_TIMEOUT_S = 60.0  # for requests that an object store does not answer
_MAX_BYTES = 1 << 20


class SmallFiles:
    """The small files of a program in a directory or a prefix of an object store, such as a checkpoint root.

    Each is written as a whole or not at all, durably; there is no agreement with saves, nor among processes. Choose
    names that no step has: not ``step_...``, nor with a dot in front. For any thread. Every method raises StorageError
    if the storage fails, and ValueError for a name that leads out of the directory.
    """

    def __init__(self, path: str | os.PathLike[str], *, storage_options: Mapping[str, Any] | None = None) -> None:
        """Read and make nothing yet. `path` and `storage_options` are those of `Checkpointer`.

        StorageError for a URL that is not supported.
        """
        self.path = absolute(path)
        self._options = StorageOptions.of(storage_options, _TIMEOUT_S)

    def write(self, name: str, data: bytes) -> None:
        """Write a file, or replace it. Directories that are missing are made. ValueError for more than 1 MiB."""
        if len(data) > _MAX_BYTES:
            raise ValueError(f"{name} has {len(data)} bytes; small files have at most {_MAX_BYTES}")
        if (store := self._store()) is not None:
            store.put(_checked(name), data)
            return
        directories.make_with_parents(self.path)
        files.write_durable(self._file(name), data)

    def read(self, name: str) -> bytes | None:
        """Return the content of a file; None if there is none. ValueError for more than 1 MiB."""
        if (store := self._store()) is not None:
            return store.get(_checked(name), _MAX_BYTES)
        try:
            with open(self._file(name), "rb") as file:
                data = file.read(_MAX_BYTES + 1)
        except FileNotFoundError:
            return None
        except OSError as error:
            raise StorageError(f"cannot read {self._file(name)}: {error.strerror}") from error
        if len(data) > _MAX_BYTES:
            raise ValueError(f"{self._file(name)} has more than {_MAX_BYTES} bytes")
        return data

    def remove(self, name: str) -> None:
        """Remove a file, if it exists; a symbolic link, not what it leads to."""
        if (store := self._store()) is not None:
            store.delete([_checked(name)])
        else:
            files.remove(self._file(name))

    def exists(self, name: str) -> bool:
        """Return whether there is something of this name: a file, a directory, a symbolic link."""
        if (store := self._store()) is not None:
            return store.about(_checked(name)) is not None
        return files.exists(self._file(name))

    def names(self) -> list[str]:
        """Return the names of all files, sorted; in a directory also of what else is there."""
        if (store := self._store()) is not None:
            return sorted(each.key for each in store.names("")[1])
        with storage_errors("list", self.path):
            try:
                return sorted(os.listdir(self.path))
            except FileNotFoundError:
                return []

    def _file(self, name: str) -> str:
        return os.path.join(self.path, _checked(name))

    def _store(self) -> Store | None:
        """Return the object store; None for a directory."""
        return open_store(self.path, self._options) if is_object_url(self.path) else None


def _checked(name: str) -> str:
    if name.startswith("/") or any(part in ("", ".", "..") for part in name.split("/")):
        raise ValueError(f"{name!r} is no name of a small file: it must lead to a file in the directory")
    return name
