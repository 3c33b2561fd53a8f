"""A prefix of a bucket as a store: S3 and what speaks its protocol, GCS, Azure.

obstore does the work: signing, connections, and the repetition, with growing pauses, of requests that fail for a
moment. What matters here: a put is atomic and, when it returns, durable; a list shows what was put before it; `create`
is a conditional put (``If-None-Match: *``), so that of several processes exactly one succeeds. No service without these
will do (see `interface.check_create`).
"""

from __future__ import annotations

import errno
import ipaddress
import math
import re
import time
import urllib.parse
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from types import MappingProxyType
from typing import Any, NoReturn, TypeVar

from ckpt.errors import StorageError
from ckpt.storage.stores.interface import About, StorageOptions, Store, StoreClock

_Answer = TypeVar("_Answer")

_BRIEF_S = 2.0  # how long a request is repeated after others have failed
_SHORT = 3  # texts of so many characters, and empty ones, are no secrets
_SHOWN = 300  # characters of an error of the library that a message has at most
_REQUEST_S, _LEAST_REQUEST_S = 60.0, 10.0  # for one attempt, with the data of a pack file
_CONNECT_S = 10.0
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.1, 10.0
_RETRIES = 1000  # the time ends before
_ENVIRONMENT = MappingProxyType({"s3": "aws_", "s3a": "aws_", "gs": "google_", "az": "azure_", "azure": "azure_"})
_SECRET = re.compile("key|secret|token|password|credential")
_CLIENT_OPTIONS = frozenset({"allow_http", "allow_invalid_certificates", "proxy_url", "user_agent"})
_BRIEF_REQUEST_S = 5.0
_CONFLICT_PAUSES_S = (0.05, 0.1, 0.2, 0.4, 0.8, 1.6, 3.2)
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
    "AccessDenied": (
        "the credentials do not allow this; a job needs s3:ListBucket, and below the root s3:GetObject, s3:PutObject, "
        "and s3:DeleteObject"
    ),
    "SlowDown": "the store asks for fewer requests, for longer than the timeout; use fewer prefixes per bucket",
}


class BucketStore(Store):
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

        It repeats requests for `timeout_s`; `brief` is the same, and does so for `_BRIEF_S`.
        """
        import obstore

        self.url = url
        self._obstore = obstore
        self._store = store
        self._brief = brief
        self._timeout_s = timeout_s
        self._is_failing = False
        self._secret = secret
        self._clock = StoreClock()

    def _ask(self, request: Callable[..., _Answer], *args: Any, **options: Any) -> _Answer:
        """Call `request` with a store of obstore's: one that soon gives up, if a request has just failed."""
        store, limit_s = (self._brief, _BRIEF_S) if self._is_failing else (self._store, self._timeout_s)
        begin = time.monotonic()
        try:
            answer = request(store, *args, **options)
        except Exception:
            self._is_failing = time.monotonic() - begin >= limit_s  # else it was an answer
            raise
        self._is_failing = False
        return answer

    def create(self, key: str, data: bytes) -> About | None:
        """See `Store.create`. Its time is that of this host, unless the library has repeated the request."""
        for pause_s in _CONFLICT_PAUSES_S:
            try:
                result = self._ask(self._obstore.put, key, data, mode="create", use_multipart=False)
            except Exception as error:
                if not self._is_refusal(error):
                    self._raise("create", key, error)
                if (found := self.read(key, 0, len(data) + 1)) is not None:
                    return self.about(key) if found == data else None
                time.sleep(pause_s)  # a conflict of puts at the same time, of which none may have succeeded
            else:
                return _about_put(key, data, result)
        raise StorageError(f"cannot create {self.place(key)}: the store reports conflicts, but there is no object")

    def put(self, key: str, data: bytes | memoryview) -> None:
        """See `Store.put`. One request, and no copy of the data."""
        try:
            self._ask(self._obstore.put, key, data, use_multipart=False)
        except Exception as error:
            self._raise("write", key, error)

    def about(self, key: str) -> About | None:
        """See `Store.about`."""
        try:
            return _about(self._ask(self._obstore.head, key))
        except Exception as error:
            if self._is_missing(error):
                return None
            self._raise("find", key, error)

    def read(self, key: str, offset: int, nbytes: int) -> memoryview | None:
        """See `Store.read`. A range of no bytes does not exist in HTTP."""
        if nbytes == 0:
            return None if self.about(key) is None else memoryview(b"")
        try:
            return memoryview(self._ask(self._obstore.get_range, key, start=offset, length=nbytes))
        except Exception as error:
            if self._is_missing(error):
                return None
            if not self._is_failing and (about := self.about(key)) is not None and offset >= about.nbytes:
                return memoryview(b"")  # it has no such range
            self._raise("read", key, error)

    def below(self, prefix: str) -> Iterator[About]:
        """See `Store.below`."""

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

    def names(self, prefix: str) -> tuple[list[str], list[About]]:
        """See `Store.names`."""
        try:
            found = self._ask(self._obstore.list_with_delimiter, prefix)
        except Exception as error:
            if self._is_missing(error):
                return [], []
            self._raise("list", prefix, error)
        folders = sorted(name.rstrip("/").rpartition("/")[2] for name in found["common_prefixes"])
        return folders, sorted(map(_about, found["objects"]), key=lambda each: each.key)

    def delete(self, keys: Sequence[str]) -> None:
        """See `Store.delete`. Many with one request where the store can do that."""
        for first in range(0, len(keys), _KEYS_PER_DELETE):
            try:
                self._ask(self._obstore.delete, list(keys[first : first + _KEYS_PER_DELETE]))
            except Exception as error:
                if not self._is_missing(error):
                    self._raise("delete", keys[first], error)

    def now(self) -> float:
        """See `Store.now`."""
        return self._clock.now(self)

    def _is_refusal(self, error: Exception) -> bool:
        """Return whether a conditional put was refused: its condition is not met, or another one is going on."""
        refusals = self._obstore.exceptions.AlreadyExistsError, self._obstore.exceptions.PreconditionError
        return isinstance(error, (*refusals, FileNotFoundError)) or _code(error) == "ConditionalRequestConflict"

    def _is_missing(self, error: Exception) -> bool:
        """Return whether an object does not exist. A bucket that does not exist is another matter."""
        return isinstance(error, FileNotFoundError) and _code(error) not in ("NoSuchBucket", "ContainerNotFound")

    def _raise(self, action: str, key: str, error: Exception) -> NoReturn:
        """Raise an error of the library as StorageError, without its text in full: that may have a whole request."""
        code = _code(error)
        text = str(error).split("\n\nDebug source")[0].partition("<?xml")[0].partition("<Error>")[0].strip()
        for secret in self._secret:
            text = text.replace(secret, "***")
        text = f"{code}: {text}"[:_SHOWN] if code else text[:_SHOWN]
        hint = _HINTS.get(code or "", "it was tried until the timeout; check the endpoint, the credentials and the net")
        denied = isinstance(error, PermissionError) or type(error).__name__ in _DENIED
        cause = OSError(errno.EACCES if denied else errno.EIO, text)
        raise StorageError(f"cannot {action} {self.place(key)}: {text} ({hint})") from cause


def _code(error: Exception) -> str | None:
    found = _CODE.search(str(error))
    return None if found is None else found[1]


def _about(meta: Any) -> About:
    return About(meta["path"], meta["size"], meta["last_modified"].timestamp(), meta["e_tag"] or "")


def _about_put(key: str, data: bytes, result: Any) -> About:
    return About(key, len(data), time.time(), result["e_tag"] or "")


def open_bucket(url: str, options: StorageOptions) -> BucketStore:
    """Return the store of a URL. StorageError if it cannot be opened."""
    try:
        import obstore.store
    except ImportError:
        raise StorageError(f"{url} needs obstore: pip install 'ckpt-inprocess[objects]'") from None
    config, client = _config(url, options)
    endpoint = next((value for name, value in config.items() if name.endswith(("endpoint", "endpoint_url"))), "")
    if endpoint.startswith("http://") and client.get("allow_http") != "true":
        if not _is_loopback(endpoint):
            raise StorageError(
                f"{url}: the endpoint {endpoint.partition('?')[0]} is not encrypted; use https, or allow it with "
                "storage_options={'allow_http': True}"
            )
        client["allow_http"] = "true"
    given = (*options.given, *options.environment)
    secret = [value for name, value in given if _SECRET.search(name) and len(value) > _SHORT]

    def opened(timeout_s: float, request_s: float) -> Any:
        pause = {
            "init_backoff": timedelta(seconds=_FIRST_PAUSE_S),
            "max_backoff": timedelta(seconds=min(_LONGEST_PAUSE_S, timeout_s / 4)),
            "base": 2,
        }
        retry = {"max_retries": _RETRIES, "retry_timeout": timedelta(seconds=timeout_s), "backoff": pause}
        times = {"timeout": timedelta(seconds=request_s), "connect_timeout": timedelta(seconds=_CONNECT_S)}
        return obstore.store.from_url(url, config=config, client_options=times | client, retry_config=retry)

    request_s = min(_REQUEST_S, max(_LEAST_REQUEST_S, 2 * options.timeout_s))
    try:
        store, brief = opened(options.timeout_s, request_s), opened(_BRIEF_S, min(request_s, _BRIEF_REQUEST_S))
    except Exception as error:
        text = str(error).split("\n\nDebug source")[0]
        for value in secret:
            text = text.replace(value, "***")
        raise StorageError(f"{url} cannot be opened: {text[:_SHOWN]} (check the URL and storage_options)") from None
    return BucketStore(url, store, secret, brief=brief, timeout_s=options.timeout_s)


def _config(url: str, options: StorageOptions) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the options of the store and those of the connections: of the environment only those that are known."""
    import obstore.exceptions
    import obstore.store

    prefix = _ENVIRONMENT[url.partition(":")[0]]
    config: dict[str, Any] = {}
    for name, value in options.environment:
        name = {"aws_endpoint_url_s3": "aws_endpoint_url"}.get(name, name)
        if name.startswith(prefix) and name.removeprefix(prefix) not in _CLIENT_OPTIONS:
            try:
                obstore.store.from_url(url, config={name: value}, client_options={"allow_http": "true"})
            except obstore.exceptions.UnknownConfigurationKeyError:
                continue
            except Exception:  # it is known, and needs others beside it: a key and its id
                pass
            config[name] = value
    client = {name: value for name, value in options.given if name in _CLIENT_OPTIONS}
    for name, value in options.given:
        if name not in _CLIENT_OPTIONS:
            config.pop(f"{prefix}{name}", None)
            config[name] = value
    return config, client


def _is_loopback(endpoint: str) -> bool:
    host = urllib.parse.urlsplit(endpoint).hostname or ""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
