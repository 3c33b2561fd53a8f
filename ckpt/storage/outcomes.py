"""How a save can end, as all of its ranks see it; and what became of steps that are not published any more."""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from ckpt.errors import CheckpointExistsError, CheckpointNotFoundError, StorageError
from ckpt.ranks.failure import Failure
from ckpt.storage import directories, files
from ckpt.storage.directories import Rename
from ckpt.storage.files import storage_errors
from ckpt.storage.names import SaveId, parse_save_name
from ckpt.storage.step_source import LocalStep, StepSource


class NotDurableError(StorageError):
    """The step is published, but a sync after the commit failed: it may not survive a loss of power."""


@dataclass(frozen=True, slots=True)
class Published:
    """The save is a published step."""


@dataclass(frozen=True, slots=True)
class Abandoned:
    """The save can never be published, for this reason."""

    reason: Failure

    @property
    def is_explained(self) -> bool:
        """Whether it is known why; see `unknown_reason`."""
        return self.reason.is_known


SaveOutcome = Published | Abandoned | None
"""None: not decided, or not begun."""


def unknown_reason(save: SaveId) -> Failure:
    """Return the reason of a save that was abandoned without a record of why."""
    return Failure(
        None,
        "SaveAbandonedError",
        f"save {save.name} was abandoned and left no record of the reason (removed by hand, or no space to write it)",
        is_known=False,
    )


# -- steps that are neither published nor pending ----------------------------------------------------------------------

Aside = Literal["superseded", "damaged"]
"""Why a published step is moved aside."""

MovedTo = Literal["superseded", "damaged", "abandoned", "removed"]
"""The states of steps and saves that are neither published nor pending. The files of the last two may be deleted."""

_NAME = re.compile(r"step_(\d{8,18})(?:-.*)?")


@dataclass(frozen=True, slots=True)
class MovedStep:
    """A step that was moved aside or removed, or an abandoned save; or other files to be deleted, with `step` -1.

    `name` tells it from the others of its root; most times it is that of its save. `has_files` is false if only a
    record is left. `since_s` is when a save was abandoned, in seconds since 1970.
    """

    step: int
    name: str
    why: MovedTo
    source: StepSource
    since_s: float = 0.0
    has_files: bool = True


def find_moved(moved: list[MovedStep], name: str, where: str) -> MovedStep:
    """Return the step with this name. CheckpointNotFoundError if the root `where` has none."""
    for each in moved:
        if each.name == name:
            return each
    raise CheckpointNotFoundError(f"{where} has no step {name} that was moved aside")


def moved_to(folder: str, why: Aside) -> list[MovedStep]:
    """Return the steps that were moved to a directory. Of one that was a link, the link was moved.

    StorageError if that cannot be told: one that is not found here may be taken for one that was removed.
    """
    found = []
    for name in directories.names_in(folder):
        path = os.path.join(folder, name)
        match = _NAME.fullmatch(name)
        if match is not None and (files.is_directory(path, follow=False) or os.path.islink(path)):
            found.append(MovedStep(int(match[1]), name, why, LocalStep(path)))
    return found


def to_be_deleted(folder: str, names: Iterable[str]) -> list[MovedStep]:
    """Return the abandoned saves and removed steps in a directory, without those that are removed meanwhile."""
    found = []
    for name in names:
        path, match = os.path.join(folder, name), _NAME.fullmatch(name)
        step = -1 if match is None else int(match[1])
        if parse_save_name(name) is None:
            found.append(MovedStep(step, name, "removed", LocalStep(path)))
            continue
        with storage_errors("find", path), contextlib.suppress(FileNotFoundError):
            found.append(MovedStep(step, name, "abandoned", LocalStep(path), os.lstat(path).st_mtime))
    return found


def rename_back(path: str, target: str) -> None:
    """Rename the directory of a step that was moved aside to that of a published one, durably.

    CheckpointExistsError if there is one, StorageError if it was removed meanwhile.
    """
    match directories.rename_directory(path, target):
        case Rename.TARGET_EXISTS:
            raise CheckpointExistsError(f"{path} cannot be published again: {target} exists")
        case Rename.DONE:
            return
    raise StorageError(f"{path} cannot be published again: it was removed meanwhile")
