"""Requests to an etcd cluster, through the JSON gateway that every etcd server has.

The gateway accepts the messages of etcd's gRPC interface as JSON over HTTP: keys and values in base64, numbers as text.
It is used instead of gRPC because it needs only the standard library, and no threads, which a `fork` would break.

Protocol: etcd's documentation, "gRPC gateway" and "API reference", version 3.4 and later (prefix /v3).
"""

from __future__ import annotations

import contextlib
import http.client
import json
import logging
import os
import socket
import ssl
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, TypeVar
from urllib.parse import urlsplit

from inprocess.bounded_waits import BoundedCall
from inprocess.exception import StoreError, StoreLostError
from inprocess.ipc.suspension import Silence

_log = logging.getLogger(__name__)
_PAUSE_S, _LONGEST_PAUSE_S = 0.1, 1.0
_DIAL_S = 2.0
_ANSWER_S = 8.0  # etcd answers with an error after 5 s without a quorum, 7 s during an election
_UNAVAILABLE = {1, 4, 13, 14}  # gRPC: cancelled, deadline exceeded, internal, unavailable
_EXHAUSTED = 8  # no space is left, or too many requests wait
_UNAUTHENTICATED = 16
_R = TypeVar("_R")


@dataclass(frozen=True)
class EtcdCluster:
    """Address of an etcd cluster, and the credentials of this process.

    `endpoints` are client URLs, "http://host:2379" or "https://...", of one or more members. With `user`, the password
    is sent once, and then the token that the cluster returned. `ca_cert`, `cert` and `key` are paths of PEM files.
    """

    endpoints: tuple[str, ...]
    user: str = ""
    password: str = field(default="", repr=False)
    ca_cert: str = ""
    cert: str = ""
    key: str = ""

    def __post_init__(self) -> None:
        if not self.endpoints:
            raise ValueError('endpoints must name at least one member of the cluster, as in "http://host:2379"')
        for url in self.endpoints:
            parts = urlsplit(url)
            if parts.scheme not in ("http", "https") or not parts.hostname or parts.path not in ("", "/"):
                raise ValueError(f'{url!r} is not the client URL of an etcd member, such as "http://host:2379"')
        if bool(self.cert) != bool(self.key):
            raise ValueError("cert and key belong together: pass both or neither")

    @classmethod
    def from_document(cls, document: dict[str, Any]) -> EtcdCluster:
        """Read the JSON form of `dataclasses.asdict`."""
        return cls(**{**document, "endpoints": tuple(document["endpoints"])})

    def tls(self) -> ssl.SSLContext | None:
        """Return the TLS context for https endpoints; None if there are none."""
        if not any(url.startswith("https:") for url in self.endpoints):
            return None
        context = ssl.create_default_context(cafile=self.ca_cert or None)
        if self.cert:
            context.load_cert_chain(self.cert, self.key)
        return context

    def __str__(self) -> str:
        return ", ".join(self.endpoints)

    @property
    def is_open(self) -> bool:
        """Whether the cluster is not local and this process has no credentials, so that anyone may be able to write."""
        local = all(urlsplit(url).hostname in ("127.0.0.1", "localhost", "::1") for url in self.endpoints)
        return not (local or self.user or self.cert)


class EtcdRequest:
    """A pending request. `cancel` may be called from any thread."""

    def __init__(self) -> None:
        self.cancelled = False
        self._connection: http.client.HTTPConnection | None = None

    def cancel(self) -> None:
        """End the request soon. It may or may not have been applied."""
        self.cancelled = True
        connection = self._connection
        sock = None if connection is None else connection.sock
        if sock is not None:
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)

    @contextlib.contextmanager
    def over(self, connection: http.client.HTTPConnection) -> Iterator[None]:
        """A context in which `cancel` shuts this connection down."""
        self._connection = connection
        try:
            if self.cancelled:
                raise ConnectionAbortedError("cancelled")
            yield
        finally:
            self._connection = None


class EtcdGateway:
    """Connections to an etcd cluster. For any number of threads.

    A request is sent to one member after another until one answers, so sending it twice must be harmless. If no member
    answers a request for `patience_s`, or the cluster has no space for a change for so long, the cluster is lost for
    good: `failure` is set, and all requests end with that StoreLostError. A forked child has no connection: requests
    there end with StoreError.
    """

    def __init__(self, cluster: EtcdCluster, patience_s: float) -> None:
        self.cluster = cluster
        self.failure: StoreLostError | None = None
        self._patience_s = patience_s
        self._tls = cluster.tls()
        self._member = 0
        self._token = ""
        self._idle: list[tuple[int, http.client.HTTPConnection]] = []
        self._requests: set[EtcdRequest] = set()
        self._lock = threading.Lock()
        self._pid = os.getpid()
        self._closed = False
        _gateways.add(self)

    # -- in the thread of the caller -----------------------------------------------------------------------------------

    def run(self, function: Callable[[EtcdRequest], _R]) -> _R:
        """Call `function(request)`, and return what it returns.

        For the main thread the function runs in another thread, so that an exception thrown into the main thread ends
        the wait, and cancels the request.
        """
        if os.getpid() != self._pid:
            raise StoreError("this process was forked from one that uses the coordination store, and cannot use it")
        request = EtcdRequest()
        with self._lock:
            self._requests.add(request)
        try:
            if threading.current_thread() is not threading.main_thread():
                return function(request)
            result: _R = BoundedCall(lambda: function(request), "inprocess-etcd-request").result(None)
            return result
        finally:
            request.cancel()
            with self._lock:
                self._requests.discard(request)

    def close(self) -> None:
        """Close all connections; pending requests end with StoreError. Idempotent."""
        if os.getpid() != self._pid:
            return
        self._closed = True
        with self._lock:
            requests = list(self._requests)
        for request in requests:
            request.cancel()
        while self._idle:
            self._idle.pop()[1].close()

    # -- in the thread of the request ----------------------------------------------------------------------------------

    def post(self, request: EtcdRequest, path: str, document: dict[str, Any]) -> dict[str, Any]:
        """Send a message and return the answer. StoreError if the cluster refuses it, or this gateway is closed."""
        silence, pause_s = Silence(self._patience_s), _PAUSE_S
        while True:
            self.require_usable(request)
            member = self._member
            try:
                silence.expect(_ANSWER_S)
                return self._post_to(member, request, path, document)
            except _RefusedError as refusal:
                raise StoreError(f"etcd refuses {path}: {refusal}") from None
            except (OSError, http.client.HTTPException, _UnavailableError, ValueError) as error:
                self.require_usable(request)
                if silence.seconds() >= self._patience_s:
                    raise self._lost(error) from None
                _log.info("etcd at %s: %s", self.cluster.endpoints[member], error)
                self._move_on(member)
                silence.expect(pause_s)
                time.sleep(pause_s)
                if isinstance(error, _ExhaustedError):  # it answers, and should not be asked by all ranks all the time
                    pause_s = min(2 * pause_s, _LONGEST_PAUSE_S, max(_PAUSE_S, self._patience_s / 10))

    def wait_for_event(
        self, request: EtcdRequest, places: Iterable[dict[str, Any]], revision: int, timeout_s: float
    ) -> None:
        """Wait until something has changed after `revision` in one of these places, at most `timeout_s`.

        It may return early without any change; the caller checks. A place is `key` and perhaps `range_end`, as in the
        messages of etcd.
        """
        creations = [{"create_request": {**place, "start_revision": str(revision + 1)}} for place in places]
        body = "\n".join(json.dumps(creation) for creation in creations)
        member = self._member
        deadline = time.monotonic() + timeout_s
        try:
            connection = self._connect(member)
            try:
                with request.over(connection):
                    sock = connection.sock
                    connection.request("POST", "/v3/watch", body, self._headers())
                    if not _wait_for_event(connection.getresponse(), sock, deadline):
                        raise _UnavailableError("etcd ended the watch")
            finally:
                connection.close()
        except (OSError, http.client.HTTPException, _UnavailableError, ValueError) as error:
            if not request.cancelled and time.monotonic() < deadline:
                _log.debug("watching %s: %s", self.cluster.endpoints[member], error)
                time.sleep(_PAUSE_S)

    def give_up(self, why: str) -> StoreLostError:
        """Let the cluster be lost for good; return the error with which all requests end. Any thread."""
        self.failure = self.failure or StoreLostError(f"the coordination store is lost: {why}")
        return self.failure

    def require_usable(self, request: EtcdRequest) -> None:
        """Raise if the cluster is lost, this gateway is closed, or the request was cancelled."""
        if self.failure is not None:
            raise self.failure
        if self._closed:
            raise StoreError("the client of the coordination store is closed")
        if request.cancelled:
            raise StoreError("the request was cancelled")

    def _post_to(self, member: int, request: EtcdRequest, path: str, document: dict[str, Any]) -> dict[str, Any]:
        for is_fresh in (False, True):
            connection = None if is_fresh else self._take_idle(member)
            reused = connection is not None
            if connection is None:
                connection = self._connect(member)
            try:
                with request.over(connection):
                    answer = self._exchange(connection, path, document)
            except (OSError, http.client.HTTPException):
                connection.close()
                if reused and not request.cancelled:
                    continue  # the member may have closed the idle connection
                raise
            except BaseException:
                connection.close()
                raise
            self._idle.append((member, connection))
            if self._closed or self._pid != os.getpid():
                connection.close()
            return answer
        raise AssertionError("unreachable")

    def _take_idle(self, member: int) -> http.client.HTTPConnection | None:
        while True:
            try:
                index, connection = self._idle.pop()
            except IndexError:
                return None
            if index == member:
                return connection
            connection.close()

    def _exchange(self, connection: http.client.HTTPConnection, path: str, document: dict[str, Any]) -> dict[str, Any]:
        if self.cluster.user and not self._token and path != "/v3/auth/authenticate":
            credentials = {"name": self.cluster.user, "password": self.cluster.password}
            self._token = self._exchange(connection, "/v3/auth/authenticate", credentials)["token"]
        connection.request("POST", path, json.dumps(document), self._headers())
        response = connection.getresponse()
        answer = json.loads(response.read())
        if response.status == 200:
            result: dict[str, Any] = answer.get("result", answer)
            return result
        text = f"{answer.get('error') or answer.get('message') or answer}"
        code = int(answer.get("code", 0))
        if code == _UNAUTHENTICATED and self._token:
            self._token = ""  # it has expired; the next attempt gets another one
            raise _UnavailableError(text)
        if code == _EXHAUSTED:
            raise _ExhaustedError(text)
        if code in _UNAVAILABLE or response.status in (502, 503, 504):
            raise _UnavailableError(text)
        raise _RefusedError(text)

    def _headers(self) -> dict[str, str]:
        return {"Authorization": self._token} if self._token else {}

    def _connect(self, member: int) -> http.client.HTTPConnection:
        parts = urlsplit(self.cluster.endpoints[member])
        assert parts.hostname is not None
        port = parts.port or 2379
        connection: http.client.HTTPConnection
        if parts.scheme == "https":
            connection = http.client.HTTPSConnection(parts.hostname, port, timeout=_DIAL_S, context=self._tls)
        else:
            connection = http.client.HTTPConnection(parts.hostname, port, timeout=_DIAL_S)
        connection.connect()
        connection.sock.settimeout(max(1.0, min(_ANSWER_S, self._patience_s / 3)))
        return connection

    def _move_on(self, member: int) -> None:
        if self._member == member:
            self._member = (member + 1) % len(self.cluster.endpoints)

    def _lost(self, error: Exception) -> StoreLostError:
        what = f"no member of the etcd cluster at {self.cluster} answered for"
        why = "The cluster has no quorum, or this node is cut off from it"
        if isinstance(error, _ExhaustedError):
            what = f"the etcd cluster at {self.cluster} has refused changes for"
            why = "If it is full, compact and defragment it, then disarm its alarm (`etcdctl alarm disarm`)"
        return self.give_up(f"{what} {self._patience_s:g} s: {error}. {why}")

    def _forked(self) -> None:
        """Close the connections in a forked child, so that they end when the parent closes them."""
        while self._idle:
            sock = self._idle.pop()[1].sock
            if sock is not None:
                with contextlib.suppress(OSError):
                    os.close(sock.detach())


class _UnavailableError(Exception):
    """This member cannot answer now, but another one may."""


class _ExhaustedError(_UnavailableError):
    """The cluster answers, and has no space for changes; reads may go on."""


class _RefusedError(Exception):
    """The request is invalid or not permitted; sending it again is pointless."""


def _wait_for_event(response: http.client.HTTPResponse, sock: socket.socket, until: float) -> bool:
    """Read the answers of a watch until one is an event. False if the watch ends without one.

    TimeoutError at `until`.
    """
    while response.status == 200:
        sock.settimeout(max(0.001, until - time.monotonic()))
        line = response.readline()
        result = json.loads(line).get("result", {}) if line else {"canceled": True}
        if result.get("events"):
            return True
        if result.get("canceled"):
            return False
    return False


def address_towards(peer: str) -> str:
    """Return the address that this machine has towards a host. StoreError if that has no address."""
    try:
        family, kind, proto, _, address = socket.getaddrinfo(peer, 9, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind, proto) as probe:
            probe.connect(address)  # sends nothing
            return str(probe.getsockname()[0])
    except OSError as error:
        raise StoreError(f"the address of this machine towards {peer!r} is not known: {error}") from None


_gateways: weakref.WeakSet[EtcdGateway] = weakref.WeakSet()


def _after_fork() -> None:
    for gateway in list(_gateways):
        gateway._forked()


os.register_at_fork(after_in_child=_after_fork)
