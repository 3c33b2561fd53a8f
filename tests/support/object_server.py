"""A real S3 server on loopback, and a proxy in front of it that loses, delays and changes what a test says.

    ranks, writers ---HTTP---> FaultProxy (thread of the test) ---HTTP---> moto (a process)

moto keeps the objects in memory and honours conditional puts. The proxy counts the requests.
"""

import contextlib
import http.client
import os
import signal
import socket
import struct
import subprocess
import sys
import threading
import uuid
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Protocol

KEY_ID, SECRET_KEY, REGION = "test-key-id", "test-secret-key", "us-east-1"
"""The credentials that the servers of tests accept."""

_MAIN = """
import logging, sys, threading
from moto.server import ThreadedMotoServer
logging.getLogger("werkzeug").setLevel(logging.ERROR)
server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
server.start()
print(server.get_host_and_port()[1], flush=True)
sys.stdin.read()
"""
_SIGNED = "AWS4-HMAC-SHA256 Credential=a/20260101/us-east-1/s3/aws4_request, SignedHeaders=host, Signature=0"
_HOP = frozenset({"connection", "keep-alive", "transfer-encoding", "content-length"})
_SLOW_DOWN = b"<?xml version='1.0'?><Error><Code>SlowDown</Code><Message>Reduce your request rate.</Message></Error>"


class Server(Protocol):
    """A server of the S3 protocol."""

    port: int

    def request(self, method: str, path: str, body: bytes = b"") -> tuple[int, bytes]:
        """Send one request straight to the server."""


class S3Server:
    """A process of moto, which ends with this one. A context manager."""

    def __init__(self) -> None:
        environment = {key: value for key, value in os.environ.items() if not key.startswith("AWS_")}
        self._process = subprocess.Popen(
            [sys.executable, "-c", _MAIN],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=environment,
            text=True,
            start_new_session=True,
        )
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        assert line.strip(), "moto did not start"
        self.port = int(line)

    def request(self, method: str, path: str, body: bytes = b"") -> tuple[int, bytes]:
        """Send one request straight to the server."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=20)
        with contextlib.closing(connection):
            connection.request(method, path, body, {"Authorization": _SIGNED})
            answer = connection.getresponse()
            return answer.status, answer.read()

    def __enter__(self) -> "S3Server":
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def stop(self) -> None:
        """Stop the process: it accepts connections, and never answers. Until `close`."""
        self._process.send_signal(signal.SIGSTOP)

    def close(self) -> None:
        """End the process. Idempotent."""
        self._process.kill()
        self._process.communicate()


@dataclass(frozen=True)
class Request:
    """A request at the proxy. `number` counts those before it."""

    method: str
    path: str
    headers: dict[str, str]
    nbytes: int
    number: int

    @property
    def key(self) -> str:
        """The path without the bucket and the query."""
        return self.path.partition("?")[0].split("/", 2)[-1]


Answer = tuple[int, bytes] | str | None
"""What the proxy does: answers with a status and a body, or "reset" before or "lost" after the server has worked."""


class FaultProxy:
    """Forwards requests to a server, but for what `rule` says. A context manager."""

    def __init__(self, server: Server) -> None:
        self.rule: Callable[[Request], Answer] = lambda request: None
        """Called in a thread of its own for each request; may wait."""
        self.hidden_headers: set[str] = set()
        """Names of headers, in lower case, that the server does not get."""
        self.counts: Counter[str] = Counter()
        self.requests: list[Request] = []
        self._lock = threading.Lock()
        proxy = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"
            wbufsize = 1 << 16
            disable_nagle_algorithm = True

            def log_message(self, format: str, *args: Any) -> None:
                pass

            def handle_one_request(self) -> None:
                with contextlib.suppress(ConnectionError):
                    super().handle_one_request()

            def _serve(self) -> None:
                proxy.serve(self, server)

            do_GET = do_PUT = do_HEAD = do_DELETE = do_POST = _serve  # noqa: N815

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self._server.block_on_close = False
        self.port = int(self._server.server_address[1])
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.05,), daemon=True)
        self._thread.start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def serve(self, handler: BaseHTTPRequestHandler, server: Server) -> None:
        """Handle a request."""
        body = handler.rfile.read(int(handler.headers.get("content-length") or 0))
        headers = {name.lower(): value for name, value in handler.headers.items()}
        with self._lock:
            request = Request(handler.command, handler.path, headers, len(body), len(self.requests))
            self.requests.append(request)
            self.counts[request.method] += 1
        answer = self.rule(request)
        if answer == "reset":
            _reset(handler)
            return
        if isinstance(answer, tuple):
            _send(handler, answer[0], {"content-type": "application/xml"}, answer[1])
            return
        kept = {name: value for name, value in headers.items() if name not in _HOP | self.hidden_headers}
        connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=60)
        with contextlib.closing(connection):
            connection.request(handler.command, handler.path, body, kept)
            result = connection.getresponse()
            data = result.read()
        if answer == "lost":
            _reset(handler)
            return
        found = {name: value for name, value in result.getheaders() if name.lower() not in _HOP}
        if handler.command == "HEAD":
            found["content-length"] = result.getheader("content-length") or "0"
        _send(handler, result.status, found, data)

    def __enter__(self) -> "FaultProxy":
        return self

    def __exit__(self, *exception: object) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join(10)


def slow_down() -> tuple[int, bytes]:
    """Return the answer of an overloaded server."""
    return 503, _SLOW_DOWN


def _send(handler: BaseHTTPRequestHandler, status: int, headers: dict[str, str], data: bytes) -> None:
    handler.send_response_only(status)
    for name, value in headers.items():
        handler.send_header(name, value)
    if "content-length" not in {name.lower() for name in headers}:
        handler.send_header("content-length", str(len(data)))
    handler.end_headers()
    if handler.command != "HEAD":
        handler.wfile.write(data)
    handler.wfile.flush()


def _reset(handler: BaseHTTPRequestHandler) -> None:
    """Close the connection with a RST."""
    handler.close_connection = True
    with contextlib.suppress(OSError):
        handler.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        handler.connection.shutdown(socket.SHUT_RDWR)


@dataclass(frozen=True)
class Bucket:
    """An empty bucket behind a proxy of its own. `url` is a root in it, `env` and `options` are what opens it."""

    name: str
    server: Server
    proxy: FaultProxy

    @property
    def url(self) -> str:
        return f"s3://{self.name}/team/run7"

    @property
    def env(self) -> dict[str, str]:
        return {
            "AWS_ENDPOINT_URL": self.proxy.url,
            "AWS_REGION": REGION,
            "AWS_ACCESS_KEY_ID": KEY_ID,
            "AWS_SECRET_ACCESS_KEY": SECRET_KEY,
        }

    @property
    def options(self) -> dict[str, str]:
        return {name.removeprefix("AWS_").lower(): value for name, value in self.env.items()}


@contextlib.contextmanager
def bucket_of(server: Server) -> Iterator[Bucket]:
    """Make a bucket with a proxy in front of it."""
    name = f"test-{uuid.uuid4().hex[:12]}"
    status, text = server.request("PUT", f"/{name}")
    assert status == 200, text
    with FaultProxy(server) as proxy:
        yield Bucket(name, server, proxy)
