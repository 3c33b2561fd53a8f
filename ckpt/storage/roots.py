"""Open a checkpoint root by its path or URL."""

from __future__ import annotations

import os

from ckpt.storage.interface import Root
from ckpt.storage.options import StorageOptions
from ckpt.storage.root import CheckpointRoot, local_path

__all__ = ["absolute", "is_object_url", "open_root"]

_TIMEOUT_S = 60.0  # for requests that a storage does not answer
_OBJECT_SCHEMES = ("s3://", "s3a://", "gs://", "az://", "azure://", "memory://")


def is_object_url(path: str | os.PathLike[str]) -> bool:
    """Return whether a path is the URL of an object store."""
    return os.fspath(path).startswith(_OBJECT_SCHEMES)


def absolute(path: str | os.PathLike[str]) -> str:
    """Return the absolute path of a directory, or the URL of an object store as its root has it."""
    return os.fspath(path).rstrip("/") if is_object_url(path) else local_path(path)


def open_root(path: str | os.PathLike[str], options: StorageOptions | None = None) -> Root:
    """Return the root at a path or URL, without looking whether it is there.

    The options of the environment are taken if there are none. StorageError for a URL that is not supported.
    """
    if not is_object_url(path):
        return CheckpointRoot(local_path(path))
    from ckpt.storage.object_root import object_root  # needs obstore

    return object_root(os.fspath(path), options or StorageOptions.of(None, _TIMEOUT_S))
