"""Published steps of a directory that are renamed: removed, moved aside, or published again.

A process may be stopped between its look at the token and a rename, while a later owner claims the root and continues
the very step that is renamed then. So it is renamed to a name from which nothing deletes, and the token is looked at
again, before the second rename. Either that look finds the claim of the later owner; or that owner, who looks for such
names after its claim, finds this one, publishes the step again, and the second rename fails. Pins are looked at again,
too, before the second rename: whoever pins a step looks afterwards whether it has its name.
"""

from __future__ import annotations

import contextlib
import os
import re
import secrets

from ckpt.errors import FencedError, StorageError
from ckpt.storage import directories, files
from ckpt.storage.directories import DirectoryLock, Rename, try_lock_exclusive
from ckpt.storage.directory_root import DirectoryRoot
from ckpt.storage.names import parse_save_name, step_name
from ckpt.storage.step_documents import intent_of_step, owner_of_step
from ckpt.storage.step_reader import has_readers

__all__ = ["StepMoves", "is_moving"]

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
