"""Where things are in a root in a directory, for `root.CheckpointRoot` and what it is made of; steps that are renamed.

Published steps are renamed when they are removed, moved aside or published again (`StepMoves`). A process may be
stopped between its look at the token and a rename, while a later owner claims the root and continues the very step that
is renamed then. So it is renamed to a name from which nothing deletes, and the token is looked at again, before the
second rename. Either that look finds the claim of the later owner; or that owner, who looks for such names after its
claim, finds this one, publishes the step again, and the second rename fails. Pins are looked at again, too, before the
second rename: whoever pins a step looks afterwards whether it has its name.

Files of a removed step can be recycled: the next save overwrites them. Making files and allocating their blocks takes a
file system longer than overwriting existing ones. Saves of one plan have the same files, so each rank of the next save
can take those that it wrote in a removed step, and make none:

    step_00000100/              published
    .retired/step_00000100-..   removed for all readers; the files that identify the step are being deleted
    .retired/<plan>/            only data and parts, for the next save of this plan
    .pending/<save>/            a save like any other: it can be published when it has an intent and all of its parts

Each transition is one atomic rename: of the directory by the coordinator, of a file by the rank that takes it. So a
process that deletes recycled files cannot interfere with a save that takes them, and of two saves only one has a file.
A crash leaves one of these states; a later save takes the files or deletes them.
"""

from __future__ import annotations

import contextlib
import os
import re
import secrets
from collections.abc import Iterable

from ckpt.errors import FencedError, StorageError
from ckpt.storage import directories, files
from ckpt.storage.copied_steps import CopiedObjects
from ckpt.storage.directories import DirectoryLock, Rename, try_lock_exclusive
from ckpt.storage.documents import intent_of_step, owner_of_step
from ckpt.storage.files import storage_errors
from ckpt.storage.interface import Pending, Root
from ckpt.storage.links import refuse_link, refuse_links
from ckpt.storage.names import parse_save_name, step_name, step_numbers
from ckpt.storage.ownership import Ownership
from ckpt.storage.step_reader import has_readers
from ckpt.storage.step_source import LocalStep, StepSource
from ckpt.storage.stores.directory import DirectoryStore


class DirectoryRoot(Root):
    """The directories of a root, and the steps in them."""

    store: DirectoryStore

    def __init__(self, path: str) -> None:
        if "://" in path:
            raise StorageError(f"{path}: only directories can be used here, not URLs")
        self.path = path
        self.ownership = Ownership(path)
        self.store = DirectoryStore(path)
        self.copied = CopiedObjects(path)
        """The steps that were copied here from a store."""

    @property
    def pending_path(self) -> str:
        """The directory of saves that are neither published nor abandoned."""
        return refuse_link(os.path.join(self.path, ".pending"))

    @property
    def abandoned_path(self) -> str:
        """The directory of abandoned saves and removed steps."""
        return refuse_link(os.path.join(self.path, ".abandoned"))

    @property
    def superseded_path(self) -> str:
        """The directory of steps of branches that were left."""
        return refuse_link(os.path.join(self.path, ".superseded"))

    @property
    def damaged_path(self) -> str:
        """The directory of steps that were found damaged."""
        return refuse_link(os.path.join(self.path, ".damaged"))

    def step_path(self, step: int) -> str:
        """Return the directory of `step` once it is published; or where it was copied to from an object store."""
        path = os.path.join(self.path, step_name(step))
        is_copied = self.copied.are_there() and not files.exists(path)
        return self.copied.steps(only=False).get(step, path) if is_copied else path

    def steps(self) -> list[int]:
        """See `Root.steps`."""
        names = self.names(self.path)
        steps = step_numbers(names)
        return sorted(steps | self.copied.steps(only=not steps).keys() if "saves" in names else steps)

    def source_of(self, step: int) -> StepSource:
        """See `Root.source_of`."""
        return LocalStep(self.step_path(step))

    def pinned_steps(self, *, fresh: bool = False) -> set[int]:
        """See `PublishedSteps.pinned_steps`. A look changes nothing, as a fresh list on a network file system does."""
        path = os.path.join(self.path, "pins")
        names = directories.fresh_names_below(self.path, "pins") if fresh else directories.names_in(path)
        return step_numbers(names)

    def _make_pin(self, step: int) -> bool:
        """See `PublishedSteps._make_pin`. The file is made in its folder, which may be of all users of the root."""
        for made in directories.make_directories(self.path, "pins")[:-1]:
            directories.fsync_directory(made)
        return files.create_exclusive(os.path.join(self.path, "pins", step_name(step)), b"")

    def names(self, path: str) -> list[str]:
        """Return the names in a directory of the root; none if it does not exist. StorageError if it cannot be read."""
        try:
            return os.listdir(path)
        except FileNotFoundError:
            return []
        except NotADirectoryError:
            raise StorageError(f"checkpoint root {self.path} is a file; choose a directory") from None
        except OSError as error:
            raise StorageError(f"cannot list {path}: {error.strerror} (check its permissions and owner)") from error

    def make(self) -> None:
        """Make the root and its directories for pending and abandoned saves, durably."""
        self.check_links()
        for path in (self.path, self.pending_path, self.abandoned_path):
            directories.make_with_parents(path)

    def check_links(self) -> None:
        """See `Root.check_links`."""
        refuse_links(self.path)

    def check_writable(self) -> None:
        """Raise StorageError when the root cannot be made or written to."""
        self.make()
        directories.check_writable(self.pending_path)


# -- steps that are renamed --------------------------------------------------------------------------------------------

_MOVING = re.compile(r"step_(\d{8,18})-moving-(\d+)-[0-9a-f]+")


def is_moving(name: str, before: int | None = None) -> bool:
    """Return whether a name is that of a step that is being moved, by an owner before that with this token."""
    found = _MOVING.fullmatch(name)
    return found is not None and (before is None or int(found[2]) < before)


class StepMoves:
    """Renames the published steps of one root. Any thread."""

    def __init__(self, root: DirectoryRoot) -> None:
        self._root = root

    def aside(self, step: int, token: int, where: str) -> str | None:
        """Move a published step to directory `where`, and return its new path; see `Root.move_aside`."""
        self._root.ownership.check(token)
        moving = self._moving(step, token)
        if directories.rename_directory(self._root.step_path(step), moving) is not Rename.DONE:
            return None
        self._check_after(moving, token)
        return self._to_aside(moving, step, where)

    def away(self, step: int, where: str, token: int | None = None) -> str | None:
        """Move a published step to directory `where`, if it exists, and return its new path. Deletes nothing.

        None if it is being read or pinned. FencedError, with the step where it was, if `token` is not the owner's.
        """
        target = os.path.join(where, f"{step_name(step)}-removed-{token or 0}-{secrets.token_hex(4)}")
        if token is None:
            return target if self._rename(step, target) else None
        moving = self._moving(step, token)
        if not self._rename(step, moving):
            return None
        if step in self._root.pinned_steps(fresh=True):  # whoever pins a step looks for it afterwards
            self.back(moving)
            return None
        self._check_after(moving, token)
        try:
            if directories.rename_directory(moving, target) is not Rename.DONE:
                self._root.ownership.check(token)  # a later owner has published it again
                return None if files.exists(self._root.step_path(step)) else target
        except StorageError:
            with contextlib.suppress(StorageError):
                self.back(moving)
            raise
        return target

    def _moving(self, step: int, token: int) -> str:
        """Return a name for a step that the owner with `token` is about to remove or to move aside."""
        return os.path.join(self._root.abandoned_path, f"{step_name(step)}-moving-{token}-{secrets.token_hex(4)}")

    def _check_after(self, moving: str, token: int) -> None:
        """Raise FencedError, and publish the moved step again, unless `token` is the owner's."""
        try:
            self._root.ownership.check(token)
        except FencedError:
            self.back(moving)
            raise

    def back(self, moving: str) -> None:
        """Publish a step again that an earlier owner has moved; or move it aside if a later owner has left its branch.

        Looks at the branch before and after: a later owner, that moves aside what it finds when it has published its
        first step, may just publish that.
        """
        match = _MOVING.fullmatch(os.path.basename(moving))
        assert match is not None
        step, token = int(match[1]), max(int(match[2]), owner_of_step(moving))
        if not self._is_left(step, token):
            result = directories.rename_directory(moving, self._root.step_path(step))
            if result is Rename.SOURCE_GONE or (result is Rename.DONE and not self._is_left(step, token)):
                return
            if result is Rename.DONE:
                moving = self._root.step_path(step)
        self._to_aside(moving, step, self._root.superseded_path)

    def _is_left(self, step: int, token: int) -> bool:
        """Return whether an owner after that with `token` has published steps of a branch without this step."""
        for other in self._root.steps():
            intent = intent_of_step(self._root.step_path(other)) or {}
            save = parse_save_name(str(intent.get("save")))
            if save is None or save.owner <= token:
                continue
            continues = intent.get("continues")
            before = parse_save_name(str(continues.get("save"))) if isinstance(continues, dict) else None
            if other <= step or (before is not None and before.owner <= token and before.step < step):
                return True
        return False

    def _rename(self, step: int, target: str) -> bool:
        path = self._root.step_path(step)
        try:
            lock = try_lock_exclusive(path)
        except StorageError:
            if not files.exists(path):
                return True
            if not os.path.islink(path):
                raise
            lock = DirectoryLock(-1)  # a link that leads nowhere
        if lock is None:
            return False
        with lock:
            if has_readers(self._root.path, path) or step in self._root.pinned_steps(fresh=True):
                return False
            directories.rename_directory(path, target)
        return True

    def _to_aside(self, path: str, step: int, where: str) -> str | None:
        """Move the directory of a step to `where`, and return its new path; None if it does not exist."""
        directories.make_directories(self._root.path, os.path.basename(where))
        directories.fsync_directory(self._root.path)
        name = ""
        with contextlib.suppress(StorageError):  # a step that cannot be read is moved, too, under its number
            name = str((intent_of_step(path) or {}).get("save", ""))
        if parse_save_name(name) is None:
            name = step_name(step)
        target = os.path.join(where, name)
        while (result := directories.rename_directory(path, target)) is Rename.TARGET_EXISTS:
            target = os.path.join(where, f"{name}-{secrets.token_hex(4)}")
        return target if result is Rename.DONE else None


# -- files of a removed step, for the next save ------------------------------------------------------------------------


def recycled_path(root: DirectoryRoot) -> str:
    """Return the directory of recycled steps. StorageError if it is a symbolic link."""
    return refuse_link(os.path.join(root.path, ".retired"))


def recycle_step(root: DirectoryRoot, moves: StepMoves, step: int, plan: str, token: int | None = None) -> bool:
    """Remove a published step and keep its files for a save with the digest `plan`; False if the step is being read.

    They are to be deleted instead if others are kept already, or if the step has another plan or links for directories.
    `token` is the owner's; FencedError if the step was saved by a later owner. For the coordinator. Deletes only what
    identifies the step.
    """
    ready = os.path.join(recycled_path(root), plan)
    if files.exists(ready) or (intent_of_step(root.step_path(step)) or {}).get("plan") != plan:
        return moves.away(step, root.abandoned_path, token) is not None
    for made in directories.make_directories(root.path, ".retired"):
        directories.fsync_directory(made)
    moved = moves.away(step, recycled_path(root), token)
    if moved is None:
        return False
    if _is_plain(moved):
        _remove_identity(moved)
        if directories.rename_directory(moved, ready) is Rename.DONE:
            return True
    _discard(root, moved)
    return True


def take_recycled(pending: Pending, root: DirectoryRoot, plan: str, names: Iterable[str]) -> None:
    """Give the recycled files with these names to a save, by a rank that is about to write them. Others are made new.

    Never a link, nor a file with a second name: what is linked elsewhere must not change; nor one that cannot be moved.
    """
    source = os.path.join(recycled_path(root), plan)
    if not files.is_directory(source):
        return
    made: set[str] = set()
    for name in names:
        made.update(directories.make_directories(pending.path, os.path.dirname(name), made))
        with contextlib.suppress(StorageError):
            files.take(source, name, pending.path)


def discard_recycled(root: DirectoryRoot, keep: str | None = None) -> list[str]:
    """Let no save take recycled files any more, but those of the plan `keep`, and return the directories to delete.

    One that cannot be renamed stays where it is, and is tried again with the next save.
    """
    folder, moved = recycled_path(root), []
    for name in _names(folder):
        if name != keep:
            with contextlib.suppress(StorageError):
                moved.append(_discard(root, os.path.join(folder, name)))
    return [path for path in moved if path is not None]


def _discard(root: DirectoryRoot, path: str) -> str | None:
    """Give a directory a name that no save takes, and return it; None if it is not there any more."""
    target = os.path.join(root.abandoned_path, f"{os.path.basename(path)}-retired-{secrets.token_hex(4)}")
    return target if directories.rename_directory(path, target) is Rename.DONE else None


def _names(path: str) -> list[str]:
    with storage_errors("list", path):
        try:
            return os.listdir(path)
        except FileNotFoundError:
            return []


def _is_plain(path: str) -> bool:
    """Return whether all directories in a tree are directories, and not links."""
    if os.path.islink(path):
        return False
    with storage_errors("look at", path), os.scandir(path) as entries:
        for entry in entries:
            if entry.is_dir(follow_symlinks=False):
                if not _is_plain(entry.path):
                    return False
            elif entry.is_dir():
                return False
    return True


def _remove_identity(path: str) -> None:
    """Delete the documents that identify a step, durably."""
    for name in _names(path):
        entry = os.path.join(path, name)
        if not files.is_directory(entry):
            files.remove(entry)
    directories.fsync_directory(path)
