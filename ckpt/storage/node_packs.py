"""Pack files on the disks of each node, for a root that has everything else.

    <root>                            shared by all nodes: what decides about saves, documents, and the pack files with
                                      what several ranks hold
    <node_local>/root.json            the root that the files here belong to
    <node_local>/<save>/packs/...     the other pack files of the ranks that run on this node
    <node_local>/<save>/decided       a process of this node knows that the save is decided

A rank writes its part to the root when its pack files are durable. So a published step has all of them somewhere, but
that says nothing about a disk that was lost since: whoever reads a step takes the files that this node has from here,
others from the root or from the copy in the mirror, and has to do without the step if they are not there either.

Processes of one node share the directory. Any process; free of torch.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy as np

from ckpt.errors import (
    CheckpointCorruptError,
    CheckpointError,
    CheckpointNotFoundError,
    CheckpointUnreachableError,
    StorageError,
)
from ckpt.storage import directories, files
from ckpt.storage.documents import encode_document, read_json
from ckpt.storage.files import storage_errors
from ckpt.storage.interface import Root
from ckpt.storage.links import refuse_link
from ckpt.storage.names import SaveId, pack_rank, parse_save_name
from ckpt.storage.node_lock import NodeLock
from ckpt.storage.pack_writers import PackWriter
from ckpt.storage.regular_files import DamagedFileError, MissingFileError
from ckpt.storage.step_source import HeldStep, LocalStep, OpenFile, StepSource

Array = np.ndarray[Any, np.dtype[Any]]

_log = logging.getLogger("ckpt")
_OF_ROOT = "root.json"
_DECIDED = "decided"
_PACKS = "packs"
_SHOWN = 4


class NodePacks:
    """The directory of this node with pack files of the saves of `root`, copies of which are in `mirror`."""

    def __init__(self, path: str, root: Root, mirror: Root | None = None) -> None:
        self.path = os.path.realpath(path)  # it may be a link, but nothing in it
        self._root = root
        self._mirror = mirror

    def claim(self) -> None:
        """Make the directory, durably, unless it is there. StorageError if it belongs to another root."""
        directories.make_with_parents(self.path)
        files.create_exclusive(os.path.join(self.path, _OF_ROOT), encode_document({"root": self._root.path}))
        try:
            owner = self._owner()
        except CheckpointCorruptError as error:
            raise StorageError(f"it is not known which root {self.path} belongs to: {error}") from error
        if owner != self._root.path:
            raise StorageError(
                f"{self.path} has pack files of the root {owner}, not of {self._root.path}: give each root a directory "
                "of its own, or remove this one"
            )
        directories.check_writable(self.path)

    def _owner(self) -> str | None:
        document = read_json(os.path.join(self.path, _OF_ROOT))
        return None if document is None else str(document.get("root"))

    def writer(self, save: SaveId, rank: int, *, threads: int) -> PackWriter:
        """Return what writes the pack of a rank. StorageError if that is not possible here."""
        path = directories.make_directories(self.path, save.name)[-1]
        directories.fsync_directory(self.path)
        return PackWriter(path, rank, threads=threads)

    def note_decided(self, save: SaveId) -> None:
        """Record that a save, of which there are files here, is decided."""
        with contextlib.suppress(StorageError):  # then a later owner of the root removes the files
            files.append(os.path.join(refuse_link(self._path(save)), _DECIDED), b"")

    def _path(self, save: SaveId) -> str:
        return os.path.join(self.path, save.name)

    def _saves(self) -> list[SaveId]:
        found = ((parse_save_name(name), os.path.join(self.path, name)) for name in directories.names_in(self.path))
        return [save for save, path in found if save is not None and files.is_directory(path, follow=False)]

    # -- removal -------------------------------------------------------------------------------------------------------

    def clean_before(self, owner: int) -> None:
        """Do what `clean` does if the owner with this token has no files here yet: a dead run may have filled the disk.

        Never raises.
        """
        with contextlib.suppress(CheckpointError, OSError):
            if all(save.owner != owner for save in self._saves()):
                self.clean(lambda: None)

    def clean(self, before_each: Callable[[], None]) -> None:
        """Delete the files of saves and steps that are gone. Of several processes of a node, one does it.

        They are gone if the save was abandoned, or the step removed, or superseded before training passed its number.
        Nothing is deleted because the root does not know it: it may be unmounted, or the save may be about to begin.
        Calls `before_each` before it deletes a save. What the root cannot be read for stays. StorageError if nothing of
        it can be read.
        """
        lock = NodeLock(f"clean {self.path}")
        if not lock.take():
            return
        try:
            saves = self._saves()
            if not saves or self._owner() != self._root.path:
                return
            owner = self._root.ownership.owner()
            for save in saves:
                with contextlib.suppress(StorageError):  # it is not known whether this one is gone: it stays
                    if self._is_gone(save, owner):
                        before_each()
                        directories.remove_tree(self._path(save))
        finally:
            lock.release()

    def _is_gone(self, save: SaveId, owner: int) -> bool:
        """Return whether nothing of a save will be read or published any more. `owner` was read before.

        StorageError if that cannot be told.
        """
        is_over = save.owner < owner or files.exists(os.path.join(self._path(save), _DECIDED))
        gone = self._root.is_gone(save)
        if gone is None and is_over:  # and the root is still the one that this save was for
            gone = self._root.ownership.newest() >= save.owner
        if gone is False and save.owner < owner and max(self._root.steps(), default=-1) > save.step:
            gone = any(name.startswith(save.name) for name in self._root.superseded())
        return bool(gone)

    # -- reading -------------------------------------------------------------------------------------------------------

    def source(self, step: int, shared: StepSource, *, lease: bool = False) -> NodeLocalStep:
        """Return all files of a published step, whose documents are in `shared`.

        With `lease` its copy in the mirror is held, for all ranks. CheckpointNotFoundError if the step is gone.
        """
        save = parse_save_name(self._root.save_of(step) or "")
        if save is None:
            raise CheckpointNotFoundError(f"{self._root.path} has no published step {step}", step=step)
        return NodeLocalStep(shared, LocalStep(self._path(save)), save, self._mirror, lease=lease)


class NodeLocalStep(StepSource):
    """A step with pack files on the disks of nodes: reads those of this node there, others from the root or the mirror.

    What is damaged here is read from the mirror, too. `from_mirror` are the names of the files that were.
    """

    def __init__(
        self, shared: StepSource, local: LocalStep, save: SaveId, mirror: Root | None, *, lease: bool = False
    ) -> None:
        self.path = shared.path
        self.from_mirror: set[str] = set()
        self._shared = shared
        self._local = local
        self._save = save
        self._mirror = mirror
        self._known: dict[str, bool] = {}  # whether a file is in the root
        self._lock = threading.Lock()
        self._copy: HeldStep | None = None
        self._copied: set[int] = set()  # ranks whose files are in a copy that is not published
        self._lease = lease
        if lease:
            with contextlib.suppress(StorageError):  # it may not be needed
                self._hold_copy()

    @property
    def looks_like_step(self) -> bool:
        """See `StepSource.looks_like_step`."""
        return self._shared.looks_like_step

    def read(self, name: str, max_bytes: int) -> bytes:
        """See `StepSource.read`. Documents are in the root."""
        return self._shared.read(name, max_bytes)

    def open(self, name: str) -> OpenFile:
        """See `StepSource.open`. StorageError also if it is not known whether the mirror has a copy."""
        if not name.startswith(f"{_PACKS}/"):
            return self._shared.open(name)
        try:
            return _NodeFile(self, name, self._local.open(name))
        except (DamagedFileError, OSError) as error:
            if isinstance(error, MissingFileError) and self._is_shared(name):
                return self._shared.open(name)
            copy = self.open_copy(name, error)
            if copy is None:
                raise MissingFileError(f"is not in {self._local.path}, nor in the root or the mirror") from error
            return copy

    def _is_shared(self, name: str) -> bool:
        """Return whether a pack file is in the root. One look for each file."""
        if name not in self._known:
            with storage_errors("read", os.path.join(self.path, name)):
                try:
                    file = self._shared.open(name)
                    try:
                        self._known[name] = file.size >= 0
                    finally:
                        file.close()
                except DamagedFileError:
                    self._known[name] = False
        return self._known[name]

    def open_copy(self, name: str, why: Exception | None = None) -> OpenFile | None:
        """Open a file of the copy in the mirror; None if it is not there. Raises as `open`."""
        source = self._copy_with(name)
        if source is None:
            return None
        if name not in self.from_mirror:
            self.from_mirror.add(name)
            level = logging.DEBUG if isinstance(why, MissingFileError) else logging.WARNING
            what = why or "does not match its checksums"
            _log.log(level, "%s/%s %s: reading it from %s", self._local.path, name, what, source.path)
        self.piece_bytes = source.piece_bytes
        try:
            return source.open(name)
        except MissingFileError:
            moved = self._copy_with(name)  # the copy was published just now
            if moved is None or moved.path == source.path:
                raise
            return moved.open(name)

    def _copy_with(self, name: str) -> StepSource | None:
        """Return the copy in the mirror that has a file; None if none has it.

        A copy that is not published, and perhaps never will be, has the files of the ranks whose parts it has.
        """
        if (held := self._hold_copy()) is not None:
            return held.source
        rank = pack_rank(os.path.basename(name))
        if self._mirror is None or rank is None:
            return None
        with self._lock:
            pending = self._mirror.pending_save(self._save)
            if rank not in self._copied and pending.has_part(rank):
                self._copied.add(rank)
            return pending.source if rank in self._copied else None

    def _hold_copy(self) -> HeldStep | None:
        """Hold the published copy in the mirror, if there is one of this save, until `close`."""
        with self._lock:
            mirror, step = self._mirror, self._save.step
            if self._copy is None and mirror is not None and step in mirror.steps():
                with contextlib.suppress(CheckpointNotFoundError):
                    if mirror.save_of(step) == self._save.name:
                        self._copy = mirror.hold_step(step, lease=self._lease, renewing=True)
            return self._copy

    def scan(self) -> tuple[dict[str, int], set[str]]:
        """See `StepSource.scan`: the documents, and the files that this node has."""
        sizes, folders = self._shared.scan()
        for name, size in self._local.scan()[0].items():
            if name.startswith(f"{_PACKS}/"):
                sizes[name] = size
        return sizes, folders

    @property
    def node_path(self) -> str:
        """The directory of this node with the pack files of the step."""
        return self._local.path

    @property
    def ranks_here(self) -> set[int]:
        """The ranks that have pack files on this node."""
        packs = os.path.join(self._local.path, _PACKS)
        names = (name for folder in directories.names_in(packs) for name in directories.names_in(f"{packs}/{folder}"))
        return {rank for name in names if (rank := pack_rank(name)) is not None}

    def can_read(self, name: str) -> bool:
        """Return whether a pack file is on this node, as far as that can be told, or in the root."""
        with contextlib.suppress(StorageError):  # the disk of the node failed: there may be a copy in the mirror
            if files.exists(os.path.join(self._local.path, name)):
                return True
        return self._is_shared(name)

    def require(self, names: Callable[[], Iterable[str]]) -> None:
        """See `StepSource.require`."""
        missing = [name for name in sorted(names()) if not self.can_read(name) and self._copy_with(name) is None]
        if missing:
            shown = ", ".join(missing[:_SHOWN]) + (", ..." if len(missing) > _SHOWN else "")
            raise CheckpointUnreachableError(
                f"{len(missing)} pack files of step {self._save.step} that this rank needs are neither in "
                f"{self._local.path} nor in the mirror: {shown}. They may be on the disks of other nodes",
                step=self._save.step,
            )

    def check(self) -> None:
        """Raise CheckpointNotFoundError unless what was read from the mirror is of this step."""
        if self._copy is not None and self.from_mirror:
            self._copy.check()

    def close(self) -> None:
        """Release the copy in the mirror. Idempotent."""
        copy, self._copy = self._copy, None
        if copy is not None:
            copy.close()


class _NodeFile(OpenFile):
    """A file on this node. Blocks that are damaged are read from the copy in the mirror, if there is one."""

    def __init__(self, step: NodeLocalStep, name: str, local: OpenFile) -> None:
        self._step = step
        self._name = name
        self._local = local

    @property
    def size(self) -> int:
        return self._local.size

    def read(self, offset: int, nbytes: int) -> bytes | memoryview:
        with _damage():
            return self._local.read(offset, nbytes)

    def read_into(self, memory: memoryview, offset: int) -> int:
        with _damage():
            return self._local.read_into(memory, offset)

    def read_checked(self, segments: Array) -> bool:
        failed: Exception | None = None
        try:
            if self._local.read_checked(segments):
                return True
        except (DamagedFileError, OSError) as error:
            failed = error
        copy = self._step.open_copy(self._name, failed)
        if copy is None:
            if failed is not None:
                raise DamagedFileError(f"cannot be read: {failed}") from failed
            return False
        try:
            return copy.read_checked(segments)
        finally:
            copy.close()

    def close(self) -> None:
        self._local.close()


@contextlib.contextmanager
def _damage() -> Iterator[None]:
    """Take a disk that fails for a damaged file: there may be a copy."""
    try:
        yield
    except OSError as error:
        raise DamagedFileError(f"cannot be read: {error.strerror}") from error
