"""Steps in the layout of the other kind of root: files that another program has copied one by one.

    directory        step_00000003/zarr.json ...                     a rename publishes it
    store            saves/<save>/zarr.json ..., records/<save>/000.json   the newest record publishes it

A directory that was copied into a bucket, or the other way round, has the files of its steps and no step. That must not
look like a root where training has not begun.
"""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Iterable

from ckpt.errors import CheckpointCorruptError, StorageError
from ckpt.storage import files
from ckpt.storage.documents import decode_document
from ckpt.storage.files import storage_errors
from ckpt.storage.interface import Root
from ckpt.storage.names import SaveId, parse_save_name
from ckpt.storage.regular_files import DamagedFileError, read_regular
from ckpt.storage.step_source import LocalStep, StepSource

__all__ = ["copied_from_objects", "refuse_copied_steps"]

_SHOWN = 5
_RECORD = re.compile(r"(\d{3,9})\.json")
_MAX_RECORD_BYTES = 1 << 20


def refuse_copied_steps(root: Root) -> None:
    """Raise StorageError if files of steps lie in a root that has no step: they were copied there one by one."""
    found = root.copied_steps()
    if found:
        shown = ", ".join(map(str, sorted(found)[-_SHOWN:]))
        raise StorageError(
            f"{root.path} has no step of its own, but files of step {shown} in the layout of {root.other_layout}: they "
            f"were copied there one by one. Take them in: inspect_ckpt import {shlex.quote(root.path)} ROOT; or choose "
            f"another place to start from scratch"
        )


def copied_from_objects(root: str) -> dict[int, StepSource]:
    """Return the published steps in a directory that has the objects of a root in an object store.

    Those of which the records say so; if no record was copied, those saves that look complete, the newest of each step.
    StorageError if the directory cannot be listed, or a record cannot be read.
    """
    saves = [save for name in _names(root, "saves") if (save := parse_save_name(name)) is not None]
    has_records = bool(saves) and bool(_names(root, "records"))
    found: dict[int, SaveId] = {}
    for save in sorted(saves, key=lambda save: (save.step, save.owner, save.nonce)):
        is_published = _is_published(root, save) if has_records else _has_root(root, save)
        if is_published:
            found[save.step] = save
    return {step: LocalStep(os.path.join(root, "saves", save.name)) for step, save in found.items()}


def _names(root: str, folder: str) -> Iterable[str]:
    path = os.path.join(root, folder)
    try:
        return os.listdir(path)
    except (FileNotFoundError, NotADirectoryError):
        return []
    except OSError as error:
        raise StorageError(f"cannot list {path}: {error.strerror}") from error


def _is_published(root: str, save: SaveId) -> bool:
    numbers = [int(match[1]) for name in _names(root, f"records/{save.name}") if (match := _RECORD.fullmatch(name))]
    record = f"records/{save.name}/{max(numbers, default=0):03d}.json"
    try:
        with storage_errors("read", os.path.join(root, record)):  # else training would start from scratch
            found = decode_document(read_regular(root, record, _MAX_RECORD_BYTES), record)
            return found.get("state") == "published" or found.get("by") is not None
    except (CheckpointCorruptError, DamagedFileError):
        return False


def _has_root(root: str, save: SaveId) -> bool:
    return files.exists(os.path.join(root, "saves", save.name, "zarr.json"))
