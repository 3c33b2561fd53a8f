"""The names of Lightning's checkpoints: small documents beside the steps of a root that list the numbers of steps.

A name is a file in a directory, or an object in an object store. Its place is an absolute path, or a URL.
"""

from __future__ import annotations

import json
import os

from ckpt import CheckpointError, CheckpointNotFoundError, StorageError
from ckpt.storage import directories, files
from ckpt.storage.options import StorageOptions
from ckpt.storage.roots import is_object_url, open_root
from ckpt.storage.stores.interface import Store
from ckpt.storage.stores.opening import open_store

__all__ = [
    "exists",
    "is_link",
    "located",
    "make_directory",
    "names_in",
    "read_name",
    "remove_name",
    "resolved",
    "root_of",
    "undecided_steps",
    "write_name",
]

_MEMBER = "ckpt_steps"
_MAX_BYTES = 1 << 20
_TIMEOUT_S = 60.0  # for requests that an object store does not answer
_SUFFIX = ".ckpt"


def located(path: str | os.PathLike[str]) -> str:
    """Return the place of a name: an absolute path, or a URL. StorageError for a URL that is not supported."""
    text = os.fspath(path)
    if is_object_url(text):
        return text
    if "://" in text:
        raise StorageError(f"{text}: CkptIO saves to directories and to s3://, gs:// and az:// URLs")
    return os.path.abspath(text)


def root_of(place: str) -> str:
    """Return the checkpoint root in which a name is."""
    return place.rpartition("/")[0] if is_object_url(place) else os.path.realpath(os.path.dirname(place))


def resolved(place: str) -> str:
    """Return the place of the name that a symbolic link leads to."""
    return place if is_object_url(place) else os.path.realpath(place)


def is_link(place: str) -> bool:
    """Return whether a name is a symbolic link (``save_last="link"``)."""
    return not is_object_url(place) and os.path.islink(place)


def exists(place: str) -> bool:
    """Return whether there is something of this name."""
    if not is_object_url(place):
        return os.path.lexists(place)
    store, key = _object(place)
    return store.about(key) is not None


def make_directory(root: str) -> None:
    """Make the directory of a root, durably, if it is one."""
    if not is_object_url(root):
        directories.make_with_parents(root)


def write_name(place: str, steps: list[int]) -> None:
    """Write a name durably, as a whole or not at all."""
    data = json.dumps({_MEMBER: steps}).encode()
    if is_object_url(place):
        store, key = _object(place)
        store.put(key, data)
    else:
        files.write_durable(place, data)


def remove_name(place: str) -> None:
    """Remove a name, if it exists."""
    if is_object_url(place):
        store, key = _object(place)
        store.delete([key])
    else:
        files.remove(place)


def read_name(place: str) -> list[int]:
    """Return the steps that a name lists, newest first. CheckpointError if the file is no name."""
    try:
        document = json.loads(_content(place))
        steps = [step for step in document[_MEMBER] if type(step) is int]
        if len(steps) != len(document[_MEMBER]) or not steps:
            raise ValueError("not a list of steps")
    except FileNotFoundError:
        raise CheckpointNotFoundError(f"there is no checkpoint {place}") from None
    except OSError as error:
        raise StorageError(f"cannot read {place}: {error.strerror}") from error
    except (ValueError, KeyError, TypeError) as error:
        raise CheckpointError(
            f"{place} is not a checkpoint that CkptIO saved. Load a file of torch.save with a Trainer without CkptIO; "
            "move it away if CkptIO is to save under its name"
        ) from error
    return steps


def names_in(root: str) -> list[str]:
    """Return the places of what may be names in a root, sorted."""
    if is_object_url(root):
        store, _ = _object(f"{root}/")
        found = [f"{root}/{each.key}" for each in store.names("")[1]]
    else:
        found = [os.path.join(root, name) for name in (os.listdir(root) if os.path.isdir(root) else ())]
    return sorted(place for place in found if place.endswith(_SUFFIX))


def undecided_steps(root: str) -> list[int]:
    """Return the steps of the saves in a root that are neither published nor abandoned."""
    return [save.step for save in open_root(root).pending()]


def _content(place: str) -> bytes:
    """Return the content of a name. FileNotFoundError if there is none, ValueError if it is too large."""
    if not is_object_url(place):
        with open(place, "rb") as file:
            return file.read(_MAX_BYTES)
    store, key = _object(place)
    found = store.get(key, _MAX_BYTES)
    if found is None:
        raise FileNotFoundError(place)
    return found


def _object(place: str) -> tuple[Store, str]:
    """Return the object store of a root, and the key of a name in it. The options are those of the environment."""
    root, _, name = place.rpartition("/")
    return open_store(root, StorageOptions.of(None, _TIMEOUT_S)), name
