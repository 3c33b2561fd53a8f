"""A store: the place where the objects of a root lie, and nothing else.

A key is a path without empty parts, ``.`` or ``..``, such as ``saves/step_00000010-o17-8f0c/intent.json``. An object
has a key and bytes; its key is no folder of others. A backend is one file with a class of these eight operations:

    create   put an object unless the key exists: the only operation that decides anything
    put      put an object, or replace it
    read     bytes of an object
    about    size and time of an object
    below    all objects below a prefix
    names    objects and folders directly below a prefix
    delete   delete objects, if they exist
    now      the clock by which the times of objects are

What a root relies on: an object is there as a whole or not at all, and durable when the call returns; of several
`create` of one key at most one succeeds, whichever processes and hosts they come from, and a list shows what was put
before it began. Folders need not be made; a prefix with no object below it is none. Everything else (saves, records,
owners, leases) is above: see `store_root`. `tests/ckpt/objects/test_stores.py` runs over every backend.

Every failure is a `StorageError` that names the place and says what to do, without credentials; its cause is an
`OSError`, with EACCES if the store does not permit the operation. "Not there" is None, and no error.

`StorageOptions` are what an SDK would take from the environment, credentials among them.
"""

from __future__ import annotations

import errno
import os
import secrets
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ckpt.errors import StorageError

_PREFIXES = ("AWS_", "GOOGLE_", "AZURE_")


@dataclass(frozen=True, slots=True, repr=False)
class StorageOptions:
    """Options by name, and the longest time in seconds that a request is repeated while the storage fails.

    They reach the writer processes with the task of a save, over a socket, and nothing else: the text of this object
    has only their names.
    """

    given: tuple[tuple[str, str], ...] = ()
    environment: tuple[tuple[str, str], ...] = ()
    timeout_s: float = 600.0

    @classmethod
    def of(cls, options: Mapping[str, Any] | None, timeout_s: float) -> StorageOptions:
        """Return `options`, and what the environment has (``AWS_...``, ``GOOGLE_...``, ``AZURE_...``).

        Both are taken here, so that a writer process, whose environment may be older, has the same. TypeError for an
        option that is no text, number or bool.
        """
        environment = {name.lower(): value for name, value in os.environ.items() if name.startswith(_PREFIXES)}
        found = {}
        for name, value in (options or {}).items():
            if not isinstance(value, str | bool | int | float):
                raise TypeError(f"storage_options[{name!r}] is a {type(value).__name__}, not a string, number or bool")
            found[name.lower()] = str(value).lower() if isinstance(value, bool) else str(value)
        return cls(tuple(sorted(found.items())), tuple(sorted(environment.items())), timeout_s)

    def __repr__(self) -> str:
        return f"StorageOptions({', '.join(name for name, _ in self.given)})"


_CLOCK_S = 600.0
_DENIED = (errno.EACCES, errno.EPERM, errno.EROFS)


@dataclass(frozen=True, slots=True)
class About:
    """A key, and what the store says of its object.

    `modified_s`: when it was put, in seconds since 1970 by the clock of the store. `tag` differs between objects that a
    key has had, one after the other; empty if the store cannot tell.
    """

    key: str
    nbytes: int
    modified_s: float
    tag: str


class Store(ABC):
    """The objects below one place, by their keys relative to it. Any thread; not across a fork."""

    url: str
    """The place, for messages, and to open the store again."""

    def place(self, key: str) -> str:
        """Return the place of an object, for messages."""
        return f"{self.url}/{key}" if key else self.url

    @abstractmethod
    def create(self, key: str, data: bytes) -> About | None:
        """Put an object unless the key exists, atomically; return it, or None if this call has not put it.

        A request that is repeated may find its own object, so the content is compared: it must be different for
        different callers. The time that is returned may be that of this host.
        """

    @abstractmethod
    def put(self, key: str, data: bytes | memoryview) -> None:
        """Put an object as a whole. What was there is replaced."""

    @abstractmethod
    def read(self, key: str, offset: int, nbytes: int) -> memoryview | None:
        """Return bytes of an object, fewer at its end; None if it does not exist."""

    @abstractmethod
    def about(self, key: str) -> About | None:
        """Return the size and time of an object, as the store has them; None if it does not exist."""

    @abstractmethod
    def below(self, prefix: str) -> Iterator[About]:
        """Yield all objects below a prefix, which is empty or ends at a ``/``."""

    @abstractmethod
    def names(self, prefix: str) -> tuple[list[str], list[About]]:
        """Return the names of the folders directly below a prefix, and the objects there. Sorted."""

    @abstractmethod
    def delete(self, keys: Sequence[str]) -> None:
        """Delete objects, if they exist: in this order, or several at once."""

    @abstractmethod
    def now(self) -> float:
        """Return the time by the clock of the store, in seconds; that of this host if nothing may be put.

        StorageError if the store failed: by another clock, processes of other hosts would seem to be dead.
        """

    def sync(self, key: str) -> None:  # noqa: B027 - no store must have it
        """Make an object durable that was found, and that another process may be about to put.

        Nothing is to be done where an object that can be found is durable.
        """

    def get(self, key: str, max_bytes: int) -> bytes | None:
        """Return the content of an object; None if it does not exist. ValueError if it has more bytes."""
        found = self.read(key, 0, max_bytes + 1)
        if found is not None and len(found) > max_bytes:
            raise ValueError(f"has more than {max_bytes} bytes")
        return None if found is None else bytes(found)


class StoreClock:
    """The clock of a store that tells times of objects only. It is asked every ten minutes, by a new object."""

    def __init__(self) -> None:
        self._read: tuple[float, float] | None = None  # when it was read, and how far the store's is ahead

    def now(self, store: Store) -> float:
        """See `Store.now`."""
        if self._read is None or time.monotonic() - self._read[0] > _CLOCK_S:
            key = f"owner/clock/{secrets.token_hex(8)}"
            try:
                store.put(key, b"")
                # After the put, which may have been repeated for long: ahead of the store, live processes seem dead.
                end = time.time()
                about = store.about(key)
                store.delete([key])
                ahead = 0.0 if about is None else about.modified_s - end
            except StorageError as error:
                if not is_denied(error):
                    raise
                ahead = 0.0
            self._read = time.monotonic(), ahead
        return time.time() + self._read[1]


def is_denied(error: StorageError) -> bool:
    """Return whether a store has not permitted an operation."""
    return isinstance(error.__cause__, OSError) and error.__cause__.errno in _DENIED


def is_key(key: str) -> bool:
    """Return whether this is a key: a name that cannot lead out of the store."""
    return "\0" not in key and not any(part in ("", ".", "..") for part in key.split("/"))


def check_create(store: Store, folder: str) -> None:
    """Raise StorageError unless the store refuses to create an object that exists.

    Without that two jobs could both publish, so no such store is used.
    """
    key, mine = f"{folder}/probe-{secrets.token_hex(8)}", secrets.token_bytes(8)
    try:
        store.create(key, mine)
        honoured = store.create(key, b"another") is None and store.get(key, len(mine)) == mine
    except ValueError:
        honoured = False
    finally:
        store.delete([key])
    if not honoured:
        raise StorageError(
            f"{store.url}: the store ignores the condition of puts (If-None-Match), so two jobs could both publish a "
            "step; use a store that honours it (AWS S3, GCS, Azure, MinIO), or a newer version of this one"
        )
