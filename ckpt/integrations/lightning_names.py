"""The names of Lightning's checkpoints: small documents beside the steps of a root that list the numbers of steps.

A name is a file in a directory, or an object in an object store. Its place is an absolute path, or a URL.
"""

from __future__ import annotations

import json
import os

from ckpt import CheckpointError, CheckpointNotFoundError, SmallFiles

__all__ = [
    "exists",
    "is_link",
    "located",
    "names_in",
    "read_name",
    "remove_name",
    "resolved",
    "root_of",
    "write_name",
]

_MEMBER = "ckpt_steps"
_SUFFIX = ".ckpt"


def located(path: str | os.PathLike[str]) -> str:
    """Return the place of a name: an absolute path, or a URL. StorageError for a URL that is not supported."""
    text = os.fspath(path)
    if not _is_url(text):
        return os.path.abspath(text)
    beside, name = _split(text)
    return text if _is_url(beside.path) else os.path.join(beside.path, name)  # of a file:// URL


def root_of(place: str) -> str:
    """Return the checkpoint root in which a name is."""
    return place.rpartition("/")[0] if _is_url(place) else os.path.realpath(os.path.dirname(place))


def resolved(place: str) -> str:
    """Return the place of the name that a symbolic link leads to."""
    return place if _is_url(place) else os.path.realpath(place)


def is_link(place: str) -> bool:
    """Return whether a name is a symbolic link (``save_last="link"``)."""
    return not _is_url(place) and os.path.islink(place)


def exists(place: str) -> bool:
    """Return whether there is something of this name."""
    beside, name = _split(place)
    return beside.exists(name)


def write_name(place: str, steps: list[int]) -> None:
    """Write a name durably, as a whole or not at all, and the directory that it is in."""
    beside, name = _split(place)
    beside.write(name, json.dumps({_MEMBER: steps}).encode())


def remove_name(place: str) -> None:
    """Remove a name, if it exists."""
    beside, name = _split(place)
    beside.remove(name)


def read_name(place: str) -> list[int]:
    """Return the steps that a name lists, newest first. CheckpointError if the file is no name."""
    try:
        beside, name = _split(place)
        content = beside.read(name)
        if content is None:
            raise CheckpointNotFoundError(f"Checkpoint file not found: {place}")
        document = json.loads(content)
        steps = [step for step in document[_MEMBER] if type(step) is int]
        if len(steps) != len(document[_MEMBER]) or not steps:
            raise ValueError("not a list of steps")
    except (ValueError, KeyError, TypeError) as error:
        raise CheckpointError(
            f"{place} is not a checkpoint that CkptIO saved. Load a file of torch.save with a Trainer without CkptIO; "
            "move it away if CkptIO is to save under its name"
        ) from error
    return steps


def names_in(root: str) -> list[str]:
    """Return the places of what may be names in a root, sorted."""
    return [os.path.join(root, name) for name in SmallFiles(root).names() if name.endswith(_SUFFIX)]


def _is_url(place: str) -> bool:
    return "://" in place


def _split(place: str) -> tuple[SmallFiles, str]:
    """Return the files beside a name, and the name. The options of an object store are those of the environment."""
    root, _, name = place.rpartition("/")
    return SmallFiles(root or "/"), name
