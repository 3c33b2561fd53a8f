"""Hold a published step while it is read: a lease against its removal, and a check that it was not replaced.

    <root>/.readers/<save>/<host>-<pid>-<start>-<random>    a process reads this step; renewed like writers' leases

Before any file of a removed step is overwritten, its directory is renamed, and then its documents are deleted. So a
reader that finds the same documents in the same place *after* it has read, has read that step and nothing else. That
holds on any file system; a lease only saves reading again.
"""

from __future__ import annotations

import contextlib
import functools
import os

from ckpt.errors import CheckpointCorruptError, CheckpointNotFoundError, StorageError
from ckpt.storage import directories, files
from ckpt.storage.directories import DirectoryLock, lock_shared
from ckpt.storage.documents import decode_document
from ckpt.storage.leases import RENEW_S, ReadLease, is_fresh, is_reader_alive, reader_name
from ckpt.storage.links import refuse_link
from ckpt.storage.regular_files import DamagedFileError, open_regular, read_document_at
from ckpt.storage.step_source import HeldStep, LocalStep

_READERS = ".readers"
_MAX_INTENT_BYTES = 1 << 20


def hold_directory(path: str, root: str | None = None, *, renewing: bool = False) -> HeldStep:
    """Hold the step in directory `path`; with `root`, its checkpoint root, make a lease there, where that is possible.

    With `renewing` a thread renews the lease; otherwise each `check` does. CheckpointNotFoundError if the step is being
    removed, or is none.
    """
    with contextlib.ExitStack() as ends:
        if (lock := _locked(path)) is not None:
            ends.enter_context(lock)
        identity = _identity(path)
        if identity is None:
            raise CheckpointNotFoundError(f"{path} is not a published checkpoint: it has no zarr.json")
        lease = None
        if root is not None and (save := _save_of(path)) is not None:
            lease = _make_lease(root, save, renewing)
        return HeldStep(LocalStep(path), lambda: _identity(path) == identity, lease, ends.pop_all())


def _locked(path: str) -> DirectoryLock | None:
    try:
        lock = lock_shared(path)
    except StorageError:
        if not files.is_directory(path):
            raise CheckpointNotFoundError(f"{path} does not exist (any more)") from None
        return None  # no permission to open the directory itself; reads show whether the files can be opened
    if lock is None:
        raise CheckpointNotFoundError(f"{path} is being removed; open another step")
    return lock


def why_no_step(path: str) -> str | None:
    """Return why what is at `path` is no step, whole or damaged; None if it may be one, or nothing is there.

    StorageError if that cannot be told.
    """
    if not files.exists(path) or _identity(path) is not None:
        return None
    if not files.is_directory(path):
        return "it is a link to nothing" if os.path.islink(path) else "it is not a directory"
    return "it has no zarr.json and no intent.json"


def remove_stale_readers(root: str) -> None:
    """Remove the leases of readers that have ended. For the owner."""
    folder = _readers(root)
    for save in directories.names_in(folder):
        directory = os.path.join(folder, save)
        with contextlib.suppress(StorageError):
            if os.path.islink(directory) or not _has_reader(directory, directories.names_in(directory)):
                directories.remove_tree(directory)


def has_readers(root: str, path: str) -> bool:
    """Return whether the published step in directory `path` has a reader with a lease, as the server has it."""
    save = _save_of(path)
    if save is None or os.path.islink(os.path.join(_readers(root), save)):  # no reader makes a lease there
        return False
    names = directories.fresh_names_below(root, f"{_READERS}/{save}")
    return _has_reader(os.path.join(_readers(root), save), names)


def _readers(root: str) -> str:
    """Return the directory of the leases. StorageError if it is a symbolic link."""
    return refuse_link(os.path.join(root, _READERS))


def _has_reader(directory: str, names: list[str]) -> bool:
    now = directories.server_time(directory) if names else 0.0
    return any(is_reader_alive(name, functools.partial(is_fresh, os.path.join(directory, name), now)) for name in names)


def _make_lease(root: str, save: str, renewing: bool) -> ReadLease | None:
    """Make a lease, a file; None if it cannot be made."""
    try:
        directory = directories.make_directories(root, f"{_READERS}/{save}")[-1]
        path = os.path.join(directory, reader_name())
        files.append(path, b"")
    except (OSError, StorageError):
        return None

    def release() -> None:
        files.remove(path)
        os.rmdir(directory)  # fails if another reader has a lease

    return ReadLease(functools.partial(files.touch, path), release, RENEW_S, renewing=renewing)


def _identity(path: str) -> tuple[bytes, int, int] | None:
    """Return what distinguishes the step at `path` from another one there; None if it has neither intent nor root.

    The files are opened each time: that makes the client of a network file system ask the server.
    """
    try:
        intent = read_document_at(os.path.join(path, "intent.json"), _MAX_INTENT_BYTES)
    except CheckpointCorruptError as damage:
        intent = str(damage).encode()
    try:
        root = open_regular(path, "zarr.json")
    except DamagedFileError:
        return None if intent is None else (intent, -1, -1)
    except OSError as error:
        raise StorageError(f"cannot read {path}/zarr.json: {error.strerror}") from error
    about = os.fstat(root)
    os.close(root)
    return intent or b"", about.st_size, about.st_mtime_ns


def _save_of(path: str) -> str | None:
    """Return the name of the save that was published as the step at `path`; None if its intent does not say.

    StorageError if it cannot be read: then the step may have readers.
    """
    where = os.path.join(path, "intent.json")
    try:
        data = read_document_at(where, _MAX_INTENT_BYTES)
        save = None if data is None else decode_document(data, where).get("save")
    except CheckpointCorruptError:
        return None
    return save if isinstance(save, str) and "/" not in save and save not in ("", ".", "..") else None
