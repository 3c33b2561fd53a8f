"""Places for bytes: one narrow interface, and one file for each kind of store.

`open_store` says which store a URL names, and opens it.
"""

from __future__ import annotations

import functools
import os

from ckpt.errors import StorageError
from ckpt.storage.stores.directory import DirectoryStore
from ckpt.storage.stores.interface import StorageOptions, Store
from ckpt.storage.stores.memory import MemoryStore

__all__ = ["open_store"]


def open_store(url: str, options: StorageOptions) -> Store:
    """Return the store of a URL, the same for each call of one process. StorageError if it cannot be opened."""
    if url.startswith("memory:"):  # one for the process, whatever the options
        options = StorageOptions()
    return _opened(url.rstrip("/"), options, os.getpid())


@functools.lru_cache(maxsize=64)
def _opened(url: str, options: StorageOptions, pid: int) -> Store:
    match url.partition("://")[0]:
        case "memory":
            return MemoryStore(url)
        case "directory":
            return DirectoryStore(url.partition("://")[2], url)
        case "s3" | "s3a" | "gs" | "az" | "azure":
            from ckpt.storage.stores.bucket import open_bucket  # needs obstore

            return open_bucket(url, options)
        case "sftp":
            from ckpt.storage.stores.sftp import open_sftp  # needs paramiko

            return open_sftp(url, options)
        case scheme:
            raise StorageError(
                f"{url}: there is no store for {scheme!r}; give s3://, gs://, az://, sftp:// or directory://"
            )
