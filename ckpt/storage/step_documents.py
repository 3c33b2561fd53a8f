"""The documents of saves and steps in directories."""

from __future__ import annotations

import os
from typing import Any

from ckpt.errors import CheckpointCorruptError
from ckpt.storage.documents import MAX_DOCUMENT_BYTES, decode_document, well_formed
from ckpt.storage.names import PUBLISHED_STEP, parse_save_name
from ckpt.storage.regular_files import read_document_at

__all__ = [
    "FORMAT_VERSION",
    "INTENT",
    "checked_intent",
    "intent_of_step",
    "owner_of_step",
    "read_bytes",
    "read_json",
    "step_around",
]

FORMAT_VERSION = 2
INTENT = "intent.json"
_MAX_RANKS = 1 << 20
_OF_STEP = (INTENT, "index.json", "state.json", "parts", "packs")
_FEW_OF_STEP = 3


def checked_intent(document: dict[str, Any], where: str) -> dict[str, Any]:
    """Return the intent of a save, after checking what a reader relies on; one of another format as it is.

    CheckpointCorruptError if it is invalid: nothing else says how many ranks to look for.
    """
    if document.get("format") == FORMAT_VERSION:
        with well_formed(where):
            world_size = document["world_size"]
            if type(world_size) is not int or not 0 < world_size <= _MAX_RANKS:
                raise ValueError(f"{world_size!r:.40} is not a number of ranks from 1 to {_MAX_RANKS}")
    return document


def intent_of_step(path: str) -> dict[str, Any] | None:
    """Return the intent of the published step in directory `path`; None if it is missing or damaged.

    StorageError if it cannot be read: then nothing is known of the step, and nothing may be deleted for that.
    """
    try:
        return read_json(os.path.join(path, INTENT))
    except CheckpointCorruptError:
        return None


def owner_of_step(path: str) -> int:
    """Return the token of the owner that saved the step in directory `path`; 0 if its intent does not say.

    StorageError if it cannot be read.
    """
    save = parse_save_name(str((intent_of_step(path) or {}).get("save", "")))
    return 0 if save is None else save.owner


def step_around(path: str) -> str | None:
    """Return the directory of the step that a path is in, or is itself, or leads to; None if there is none."""
    if "\0" in path:
        return None  # no file has such a path: its first use says so
    for folder in dict.fromkeys((os.path.realpath(path), path)):
        while (parent := os.path.dirname(folder)) != folder:
            if _is_step(folder):
                return folder
            folder = parent
    return None


def _is_step(path: str) -> bool:
    """Return whether there is a step, perhaps damaged, or a name in a root that a step will have."""
    found = sum(_is_seen(os.path.join(path, name)) for name in _OF_STEP)
    if PUBLISHED_STEP.fullmatch(os.path.basename(path)) is None:
        return found >= _FEW_OF_STEP
    return found > 0 or any(_is_seen(os.path.join(os.path.dirname(path), name)) for name in (".owner", "records"))


def _is_seen(path: str) -> bool:
    """Return whether there is something at `path`. If that cannot be told, the first use of the root fails anyway.

    An error here would reach one rank alone, before ranks can agree.
    """
    try:
        os.lstat(path)
    except OSError:
        return False
    return True


def read_json(path: str) -> dict[str, Any] | None:
    """Return the document at `path`; None if it does not exist.

    CheckpointCorruptError if it is damaged, StorageError if it cannot be read.
    """
    data = read_bytes(path)
    return None if data is None else decode_document(data, path)


def read_bytes(path: str) -> bytes | None:
    """Return the content of a document; None if it does not exist."""
    return read_document_at(path, MAX_DOCUMENT_BYTES)
