"""The few operations on an object store that a checkpoint root needs, with the errors of `ckpt`.

obstore does the work: signing, connections, and the repetition, with growing pauses, of requests that fail for a
moment. What matters here: a put is atomic and, when it returns, durable; a list shows what was put before it; `create`
and `replace` are conditional, so that of several processes exactly one succeeds. No service without these will do
(see `check_conditional_puts`).
"""

from __future__ import annotations

import errno
import itertools
import math
import re
import secrets
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn, TypeVar

from ckpt.errors import StorageError

__all__ = ["BRIEF_S", "SHOWN", "ObjectAbout", "ObjectStore", "StoredObject"]

_Answer = TypeVar("_Answer")

BRIEF_S = 2.0
"""How long a request is repeated after others have failed."""

SHOWN = 300
"""Characters of an error of the library that a message has at most."""

_CONFLICT_PAUSES_S = (0.05, 0.1, 0.2, 0.4, 0.8, 1.6, 3.2)
_CLOCK_S = 600.0
_KEYS_PER_DELETE = 1000
_DENIED = ("PermissionDeniedError", "UnauthenticatedError")
_CODE = re.compile(r"<Code>([^<]{1,80})</Code>")

_HINTS = {
    "NoSuchBucket": "the bucket does not exist; make it, or correct the URL",
    "ContainerNotFound": "the container does not exist; make it, or correct the URL",
    "ExpiredToken": "the credentials have expired; renew them",
    "ExpiredTokenException": "the credentials have expired; renew them",
    "InvalidAccessKeyId": "the access key is unknown; check the credentials",
    "RequestTimeTooSkewed": "the clock of this host is off; correct it",
    "SignatureDoesNotMatch": "the secret key is wrong; check the credentials",
    "AccessDenied": "the credentials do not allow this; docs/object_stores.md has the policy that is needed",
    "SlowDown": "the store asks for fewer requests, for longer than the timeout; use fewer prefixes per bucket",
}


@dataclass(frozen=True, slots=True)
class ObjectAbout:
    """A key, and what the store says of its object. `modified_s`: when it was put, in seconds since 1970."""

    key: str
    nbytes: int
    etag: str
    version: str | None
    modified_s: float


@dataclass(frozen=True, slots=True)
class StoredObject:
    """An object that was read."""

    about: ObjectAbout
    data: bytes


class ObjectStore:
    """The objects below one URL, by their keys relative to it. Any thread; not across a fork.

    Every failure is a `StorageError` that names the URL, and no credentials. After a request that was repeated for the
    whole time in vain, those that follow are repeated for a moment only, until one succeeds: so a process with many
    requests to make does not wait that long for each.
    """

    def __init__(
        self,
        url: str,
        store: Any,
        secret: Sequence[str] = (),
        *,
        brief: Any = None,
        timeout_s: float = math.inf,
    ) -> None:
        """`store` is one of obstore's; texts in `secret` appear in no message.

        It repeats requests for `timeout_s`; `brief` is the same, and does so for `BRIEF_S`.
        """
        import obstore

        self.url = url
        self._obstore = obstore
        self._store = store
        self._brief = brief
        self._timeout_s = timeout_s
        self._is_failing = False
        self._secret = [text for text in secret if len(text) > 3]
        self._keeps_buffers = type(store).__name__ == "MemoryStore"
        self._clock: tuple[float, float] | None = None  # when it was read, and how far the store's is ahead

    def place(self, key: str) -> str:
        """Return the URL of an object, for messages."""
        return f"{self.url}/{key}"

    def _ask(self, request: Callable[..., _Answer], *args: Any, **options: Any) -> _Answer:
        """Call `request` with a store of obstore's: one that soon gives up, if a request has just failed."""
        store, limit_s = (self._brief, BRIEF_S) if self._is_failing else (self._store, self._timeout_s)
        begin = time.monotonic()
        try:
            answer = request(store, *args, **options)
        except Exception:
            self._is_failing = time.monotonic() - begin >= limit_s  # else it was an answer
            raise
        self._is_failing = False
        return answer

    def create(self, key: str, data: bytes) -> ObjectAbout | None:
        """Put an object unless the key exists, atomically; return it, or None if this call has not put it.

        A request that is repeated may find its own object, so the content is compared: it must be different for
        different callers. Its time is that of this host.
        """
        for pause_s in _CONFLICT_PAUSES_S:
            try:
                result = self._ask(self._obstore.put, key, data, mode="create", use_multipart=False)
            except Exception as error:
                if not self._is_refusal(error):
                    self._raise("create", key, error)
                if (found := self._found(key, data)) is not None:
                    return found.about if found.data == data else None
                time.sleep(pause_s)  # a conflict of puts at the same time, of which none may have succeeded
            else:
                return _about_put(key, data, result)
        raise StorageError(f"cannot create {self.place(key)}: the store reports conflicts, but there is no object")

    def replace(self, about: ObjectAbout, data: bytes) -> ObjectAbout | None:
        """Put an object if the one that is there is still the one described; returns what `create` does."""
        version = {} if about.version is None else {"version": about.version}
        etags = itertools.cycle((about.etag, about.etag.strip('"')))  # Ceph compares without the quotation marks
        for pause_s in _CONFLICT_PAUSES_S:
            mode = {"e_tag": next(etags)} | version
            try:
                result = self._ask(self._obstore.put, about.key, data, mode=mode, use_multipart=False)
            except Exception as error:
                if not self._is_refusal(error):
                    self._raise("replace", about.key, error)
                if (found := self._found(about.key, data)) is not None and found.data == data:
                    return found.about
                now = self.about(about.key)
                if now is None or now.etag != about.etag:
                    return None
                time.sleep(pause_s)
            else:
                return _about_put(about.key, data, result)
        raise StorageError(f"cannot replace {self.place(about.key)}: the store reports a conflict again and again")

    def put(self, key: str, data: bytes | memoryview) -> None:
        """Put an object, with one request and no copy of the data. What was there is replaced."""
        try:
            content = bytes(data) if self._keeps_buffers else data
            self._ask(self._obstore.put, key, content, use_multipart=False)
        except Exception as error:
            self._raise("write", key, error)

    def get(self, key: str, max_bytes: int) -> StoredObject | None:
        """Return an object; None if it does not exist. ValueError if it has more bytes; nothing is read then."""

        def read(store: Any) -> StoredObject | int:
            result = self._obstore.get(store, key)
            about = _about(result.meta)
            return about.nbytes if about.nbytes > max_bytes else StoredObject(about, bytes(result.bytes()))

        try:
            found = self._ask(read)
        except Exception as error:
            if self._is_missing(error):
                return None
            self._raise("read", key, error)
        if isinstance(found, int):
            raise ValueError(f"has {found} bytes")
        return found

    def about(self, key: str) -> ObjectAbout | None:
        """Return what the store says of an object; None if it does not exist."""
        try:
            return _about(self._ask(self._obstore.head, key))
        except Exception as error:
            if self._is_missing(error):
                return None
            self._raise("find", key, error)

    def get_range(self, key: str, offset: int, nbytes: int) -> memoryview | None:
        """Return bytes of an object, fewer at its end; None if it does not exist."""
        if nbytes == 0:
            return memoryview(b"")
        try:
            return memoryview(self._ask(self._obstore.get_range, key, start=offset, length=nbytes))
        except Exception as error:
            if self._is_missing(error):
                return None
            if (about := self.about(key)) is not None and offset >= about.nbytes:
                return memoryview(b"")
            self._raise("read", key, error)

    def below(self, prefix: str) -> Iterator[ObjectAbout]:
        """Yield all objects below a prefix, which ends at a ``/``."""

        def begin(store: Any) -> tuple[Iterator[Any], Any]:
            batches = iter(self._obstore.list(store, prefix))
            return batches, next(batches, None)

        try:
            batches, batch = self._ask(begin)
            while batch is not None:
                yield from map(_about, batch)
                batch = self._ask(lambda store: next(batches, None))
        except Exception as error:
            if not self._is_missing(error):
                self._raise("list", prefix, error)

    def names(self, prefix: str) -> tuple[list[str], list[ObjectAbout]]:
        """Return what is directly below a prefix: the names of prefixes, and the objects. Sorted."""
        try:
            found = self._ask(self._obstore.list_with_delimiter, prefix)
        except Exception as error:
            if self._is_missing(error):
                return [], []
            self._raise("list", prefix, error)
        folders = sorted(name.rstrip("/").rpartition("/")[2] for name in found["common_prefixes"])
        return folders, sorted(map(_about, found["objects"]), key=lambda each: each.key)

    def delete(self, keys: Sequence[str]) -> None:
        """Delete objects, if they exist, many with one request where the store can do that."""
        for first in range(0, len(keys), _KEYS_PER_DELETE):
            try:
                self._ask(self._obstore.delete, list(keys[first : first + _KEYS_PER_DELETE]))
            except Exception as error:
                if not self._is_missing(error):
                    self._raise("delete", keys[first], error)

    def now(self) -> float:
        """Return the time by the clock of the store, in seconds; that of this host if nothing may be put.

        StorageError if the store failed: by another clock, processes of other hosts would seem to be dead.
        """
        if self._clock is None or time.monotonic() - self._clock[0] > _CLOCK_S:
            key = f"owner/clock/{secrets.token_hex(8)}"
            try:
                begin = time.time()
                self.put(key, b"")
                about = self.about(key)
                self.delete([key])
                ahead = 0.0 if about is None else about.modified_s - begin
            except StorageError as error:
                if not (isinstance(error.__cause__, OSError) and error.__cause__.errno == errno.EACCES):
                    raise
                ahead = 0.0
            self._clock = time.monotonic(), ahead
        return time.time() + self._clock[1]

    def check_conditional_puts(self, folder: str) -> None:
        """Raise StorageError unless the store refuses a put whose condition is not met.

        Without that two jobs could both publish, so no such store is used.
        """
        key, mine = f"{folder}/probe-{secrets.token_hex(8)}", secrets.token_bytes(8)
        try:
            self.create(key, mine)
            about = self.about(key)
            honoured = self.create(key, b"another") is None and self._has(key, mine)
            if honoured and about is not None:
                wrong = ObjectAbout(key, 0, '"00000000000000000000000000000000"', None, 0.0)
                honoured = self.replace(wrong, b"another") is None and self._has(key, mine)
        finally:
            self.delete([key])
        if not honoured:
            raise StorageError(
                f"{self.url}: the store ignores conditions of puts (If-None-Match, If-Match), so two jobs could both "
                "publish a step; use a store that honours them (AWS S3, GCS, Azure, MinIO), or a newer version of "
                "this one"
            )

    def _is_refusal(self, error: Exception) -> bool:
        """Return whether a conditional put was refused: its condition is not met, or another one is going on."""
        refusals = self._obstore.exceptions.AlreadyExistsError, self._obstore.exceptions.PreconditionError
        return isinstance(error, (*refusals, FileNotFoundError)) or _code(error) == "ConditionalRequestConflict"

    def _found(self, key: str, data: bytes) -> StoredObject | None:
        """Return an object to compare with `data`, without its content if that is longer; None if it does not exist."""
        try:
            return self.get(key, len(data))
        except ValueError:
            return StoredObject(ObjectAbout(key, 0, "", None, 0.0), b"")

    def _has(self, key: str, data: bytes) -> bool:
        found = self._found(key, data)
        return found is not None and found.data == data

    def _is_missing(self, error: Exception) -> bool:
        """Return whether an object does not exist. A bucket that does not exist is another matter."""
        return isinstance(error, FileNotFoundError) and _code(error) not in ("NoSuchBucket", "ContainerNotFound")

    def _raise(self, action: str, key: str, error: Exception) -> NoReturn:
        """Raise an error of the library as StorageError, without its text in full: that may have a whole request."""
        code = _code(error)
        text = str(error).split("\n\nDebug source")[0].partition("<?xml")[0].partition("<Error>")[0].strip()
        for secret in self._secret:
            text = text.replace(secret, "***")
        text = f"{code}: {text}"[:SHOWN] if code else text[:SHOWN]
        hint = _HINTS.get(code or "", "it was tried until the timeout; check the endpoint, the credentials and the net")
        denied = isinstance(error, PermissionError) or type(error).__name__ in _DENIED
        cause = OSError(errno.EACCES if denied else errno.EIO, text)
        raise StorageError(f"cannot {action} {self.place(key)}: {text} ({hint})") from cause


def _code(error: Exception) -> str | None:
    found = _CODE.search(str(error))
    return None if found is None else found[1]


def _about(meta: Any) -> ObjectAbout:
    version = meta.get("version")
    return ObjectAbout(meta["path"], meta["size"], meta["e_tag"] or "", version, meta["last_modified"].timestamp())


def _about_put(key: str, data: bytes, result: Any) -> ObjectAbout:
    return ObjectAbout(key, len(data), result["e_tag"] or "", result.get("version"), time.time())
