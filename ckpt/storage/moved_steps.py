"""Published steps that were moved aside, because another branch was continued or because they are damaged."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from typing import Literal

from ckpt.errors import CheckpointExistsError, CheckpointNotFoundError, StorageError
from ckpt.storage import directories, files
from ckpt.storage.directories import Rename
from ckpt.storage.step_source import LocalStep, StepSource

__all__ = ["Aside", "MovedStep", "find_moved", "moved_to", "rename_back"]

Aside = Literal["superseded", "damaged"]
"""Why a published step is moved aside."""

_NAME = re.compile(r"step_(\d{8,18})(?:-.*)?")


@dataclass(frozen=True, slots=True)
class MovedStep:
    """A step that was moved aside. `name` tells it from the others of its root; most times it is that of its save."""

    step: int
    name: str
    why: Aside
    source: StepSource


def find_moved(moved: list[MovedStep], name: str, where: str) -> MovedStep:
    """Return the step with this name. CheckpointNotFoundError if the root `where` has none."""
    for each in moved:
        if each.name == name:
            return each
    raise CheckpointNotFoundError(f"{where} has no step {name} that was moved aside")


def moved_to(folder: str, why: Aside) -> list[MovedStep]:
    """Return the steps that were moved to a directory, by step and name. Of one that was a link, the link was moved.

    StorageError if that cannot be told: one that is not found here may be taken for one that was removed.
    """
    found = []
    for name in directories.names_in(folder):
        path = os.path.join(folder, name)
        match = _NAME.fullmatch(name)
        if match is not None and (files.is_directory(path, follow=False) or os.path.islink(path)):
            found.append(MovedStep(int(match[1]), name, why, LocalStep(path)))
    return sorted(found, key=lambda each: (each.step, each.name))


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
