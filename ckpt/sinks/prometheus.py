"""`Prometheus`: counters, histograms and gauges of the ranks of a node, at one HTTP address.

local rank ──▶ Prometheus ──▶ leads this node?  yes: Metrics ──▶ HTTP server ◀── scrape
local rank ──▶ Prometheus ──▶                   no: a datagram to the process that leads

One process of a node gets the events of all, and leads:

    rank 1 ──┐ datagrams of JSON, through a socket in a directory that only this user can enter
    rank 2 ──┼──────────▶ the leader: the process that holds the lock beside the socket
    rank 3 ──┘            if it dies, the next process that has an event for it takes the lock, and leads

Who leads is decided by the lock alone, which the kernel releases when its holder dies.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import logging
import os
import select
import socket
import stat
import tempfile
import threading
import time
import weakref
from collections.abc import Callable
from typing import Any

from ckpt.events import Event, EventsDropped, from_document, to_document
from ckpt.sinks.metrics import METRICS, Metric, RankCounts, Sample, optional
from inprocess.ipc.threads import JoinableThread

_log = logging.getLogger("ckpt")

_SEND_S = 1.0  # for a process that leads but is slow, or is only just beginning
_SERVER_CLOSE_S = 5.0
_MAX_BYTES = 64 << 10  # of a datagram
_PAUSE_S = 0.02
_CLOSE_S = 5.0
_TOUCH_S = 3600.0  # much less than the age at which systemd-tmpfiles removes temporary files
_UNITS = {"1": "", "s": "_seconds", "By": "_bytes", "By/s": "_bytes_per_second"}


class Prometheus:
    """Serves metrics of all ranks of this node at ``http://ADDRESS:PORT/metrics``.

    Every rank makes one, with the same arguments: one only, outside of a function that restarts, as two would count
    each event twice. The first process of the node serves, the others send it their events; if it ends, another one
    takes over at its next event, and its counters begin at 0, as after any restart of a program. `run` is the label of
    all series, next to ``rank`` and what docs/operations/metrics.md lists; it also says which processes of a node
    belong together. `port` 0 takes a free one: see `port`. The `address` is that of this host alone by default: to be
    scraped from another, give "0.0.0.0" or the address of a network that only Prometheus reaches, as there is no
    password. `registry` is a ``prometheus_client.CollectorRegistry`` to add to; by default there is nothing else.
    `directory` is where the processes meet, by default one for this user in that for temporary files.

    ImportError without prometheus_client. OSError, saying which, if the port is in use, or if the directory is not
    this user's alone.
    """

    def __init__(
        self,
        run: str,
        *,
        port: int = 9464,
        address: str = "127.0.0.1",
        registry: Any = None,
        directory: str | os.PathLike[str] | None = None,
    ) -> None:
        self._client = optional("prometheus_client", "prometheus")
        self._run = run
        self._wanted = address, port
        self._registry = registry
        self._server: _Server | None = None
        self._lost, self._dropped = 0, 0  # of this process: not received by the leader, not received by this sink
        self._reachable = True
        given = None if directory is None else os.path.abspath(os.path.expanduser(directory))
        folder = private_directory("ckpt-sinks") if given is None else given
        name = hashlib.blake2b(f"{run}\0{port}".encode(), digest_size=8).hexdigest()
        self._node = NodeSocket(os.path.join(folder, f"prometheus-{name}"))
        try:
            self._lead()
        except BaseException:
            self._node.close()
            raise

    @property
    def port(self) -> int | None:
        """The port that this process serves at; None if another one of this node does."""
        return None if self._server is None else self._server.port

    def __call__(self, event: Event) -> None:
        """Count an event, here or in the process that serves."""
        if isinstance(event, EventsDropped):
            self._dropped = event.dropped
            event = EventsDropped(event.time, event.rank, self._dropped + self._lost)
        if self._server is None and not self._send(event):
            self._lost += 1
        if self._server is not None:
            self._server.metrics.take(event, os.getpid())

    def close(self) -> None:
        """End the server, if it is here. Idempotent."""
        server, self._server = self._server, None
        if server is not None:
            server.close()
        self._node.close()

    def _lead(self) -> None:
        """Serve, unless another process of this node does. OSError if the port is in use."""
        leadership = self._node.try_lead()
        if leadership is not None:
            try:
                self._server = _Server(self._client, self._run, self._wanted, self._registry, leadership)
            except BaseException:
                leadership.close()
                raise

    def _send(self, event: Event) -> bool:
        """Send an event to the process that serves; False if it is lost, or if that process is this one from now on."""
        deadline = time.monotonic() + (_SEND_S if self._reachable else 0.0)
        while True:
            try:
                if self._lost and not self._reachable:
                    lost = EventsDropped(event.time, event.rank, self._lost + self._dropped)
                    self._node.send(to_document(lost) | {"pid": os.getpid()})
                self._node.send(to_document(event) | {"pid": os.getpid()})
                self._reachable = True
                return True
            except BlockingIOError:
                pass
            except (ConnectionRefusedError, FileNotFoundError):
                try:
                    self._lead()
                except OSError as error:
                    if self._reachable:
                        _log.warning("the metrics of this node have no server any more: %s", error)
            if self._server is not None:
                self._reachable = True
                return True
            if (left_s := deadline - time.monotonic()) <= 0:
                self._reachable = False
                return False
            self._node.wait(left_s)


class _Server:
    """The metrics, the HTTP server, and what other processes send."""

    def __init__(self, client: Any, run: str, wanted: tuple[str, int], registry: Any, leadership: Leadership) -> None:
        address, port = wanted
        registry = client.CollectorRegistry() if registry is None else registry
        try:
            self._http, self._thread = client.start_http_server(port, addr=address, registry=registry)
        except OSError as error:
            raise OSError(
                error.errno,
                f"metrics cannot be served at {address}:{port}, {error.strerror}: give Prometheus(port=...) one "
                "that is free, or 0",
            ) from error
        self.port = int(self._http.server_port)
        self._leadership = leadership
        try:
            self.metrics = Metrics(client, run, registry)
            leadership.receive(lambda document: self.metrics.take(from_document(document), int(document["pid"])))
        except BaseException:
            self._close_http()
            raise
        _close_in_children(weakref.ref(self))
        _log.info("metrics of run %s: http://%s:%d/metrics", run, address, self.port)

    def close_in_child(self) -> None:
        """Close what a forked process has inherited: as long as it has them open, no other process can serve."""
        self._leadership.close_in_child()
        self._http.socket.close()

    def close(self) -> None:
        self._leadership.close()
        self._close_http()
        self.metrics.close()

    def _close_http(self) -> None:
        self._http.shutdown()
        self._http.server_close()
        self._thread.join(_SERVER_CLOSE_S)


def _close_in_children(server: Callable[[], _Server | None]) -> None:
    def in_child() -> None:
        found = server()
        if found is not None:
            found.close_in_child()

    os.register_at_fork(after_in_child=in_child)


class Metrics:
    """The metrics of several ranks, in a registry of `client`, which is the module prometheus_client. Any thread."""

    def __init__(self, client: Any, run: str, registry: Any) -> None:
        self._run = run
        self._registry = registry
        self._lock = threading.Lock()
        self._ranks: dict[int, tuple[int, RankCounts]] = {}  # by rank: its process, and what was counted of that
        self._made = {metric: self._make(client, metric) for metric in METRICS}

    def _make(self, client: Any, metric: Metric) -> Any:
        kind = {"counter": client.Counter, "gauge": client.Gauge, "histogram": client.Histogram}[metric.kind]
        name = f"ckpt_{metric.name.replace('.', '_')}{_UNITS[metric.unit]}"
        labels = ("run", "rank", metric.label) if metric.label else ("run", "rank")
        options = {"buckets": metric.buckets} if metric.buckets else {}
        return kind(name, metric.text, labels, registry=self._registry, **options)  # a counter adds _total to its name

    def close(self) -> None:
        """Take the metrics out of the registry."""
        for made in self._made.values():
            self._registry.unregister(made)

    def take(self, event: Event, pid: int) -> None:
        """Count an event of the process `pid`, which has the rank of the event now."""
        with self._lock:
            known = self._ranks.get(event.rank)
            if known is None:
                self._begin(event.rank, event.time)
            if known is None or known[0] != pid:  # what an earlier one had in flight died with it
                known = self._ranks[event.rank] = pid, RankCounts()
            for sample in known[1].samples(event):
                self._record(event.rank, sample)

    def _begin(self, rank: int, at: float) -> None:
        for metric in METRICS:
            if metric.begins_with(rank):
                for value in metric.values or ("",):
                    self._series(rank, metric, value)
        self._record(rank, RankCounts.first(at))

    def _record(self, rank: int, sample: Sample) -> None:
        series = self._series(rank, sample.metric, sample.label)
        record = {"counter": "inc", "gauge": "set", "histogram": "observe"}[sample.metric.kind]
        getattr(series, record)(sample.number)

    def _series(self, rank: int, metric: Metric, value: str) -> Any:
        return self._made[metric].labels(self._run, str(rank), *([value] if metric.label else []))


# -- one process of a node ---------------------------------------------------------------------------------------------


def private_directory(name: str) -> str:
    """Make a directory of this user in the directory for temporary files, and return its path.

    OSError if it belongs to another user, or others can enter it.
    """
    path = os.path.join(tempfile.gettempdir(), f"{name}-{os.getuid()}")
    with contextlib.suppress(FileExistsError):
        os.mkdir(path, 0o700)
    found = os.lstat(path)
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or found.st_mode & 0o077:
        raise PermissionError(
            f"{path} must be a directory of user {os.getuid()} alone (mode 0700): remove it, or name another directory"
        )
    return path


class NodeSocket:
    """The address of the leader. For one thread of a process."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._folder_fd = os.open(os.path.dirname(path), os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._socket.setblocking(False)

    def try_lead(self) -> Leadership | None:
        """Become the leader; None if a process is, also if it is this one. One thread of a process at a time."""
        if self._is_led():  # this process would lose its lock with the first descriptor of it that it closes
            return None
        fd = os.open(f"{self._path}.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        try:
            fcntl.lockf(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except (BlockingIOError, PermissionError):
            os.close(fd)
            return None
        except BaseException:
            os.close(fd)
            raise
        return Leadership(self._path, self._short_path, fd)

    def _is_led(self) -> bool:
        """Return whether a process receives."""
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as probe:
            try:
                probe.connect(self._short_path)
            except OSError:
                return False
            return True

    @property
    def _short_path(self) -> str:
        """The same file, by a path that is short enough for a socket (108 bytes)."""
        return f"/proc/self/fd/{self._folder_fd}/{os.path.basename(self._path)}"

    def send(self, document: dict[str, Any]) -> None:
        """Send a document to the leader.

        ConnectionRefusedError or FileNotFoundError if there is none; BlockingIOError if it does not receive.
        """
        self._socket.sendto(json.dumps(document).encode(), self._short_path)

    def wait(self, timeout_s: float) -> None:
        """Wait a moment for the leader, at most `timeout_s`."""
        time.sleep(min(timeout_s, _PAUSE_S))

    def close(self) -> None:
        """Close this end. Idempotent."""
        self._socket.close()
        if self._folder_fd >= 0:
            os.close(self._folder_fd)
            self._folder_fd = -1


class Leadership:
    """The lock, and the socket that receives what other processes send."""

    def __init__(self, path: str, address: str, lock_fd: int) -> None:
        self._path = path
        self._address = address
        self._lock_fd = lock_fd
        self._thread: JoinableThread | None = None
        self._wake_fd, self._woken_fd = -1, -1
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)

    def receive(self, take: Callable[[dict[str, Any]], None]) -> None:
        """Call ``take(document)`` with what is sent from now on, in a thread of its own. OSError if it cannot."""
        with contextlib.suppress(FileNotFoundError):
            os.unlink(self._path)  # of a leader that died
        self._socket.bind(self._address)
        self._woken_fd, self._wake_fd = os.pipe2(os.O_CLOEXEC)
        self._thread = JoinableThread(self._run, "ckpt-sink-node", (take,))
        self._thread.start()

    def close(self) -> None:
        """Take what was sent, then lead no more. Idempotent."""
        if self._lock_fd < 0:
            return
        if self._thread is not None:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(self._path)  # nothing more is sent to it
            os.close(self._wake_fd)
            self._thread.join(_CLOSE_S)
            os.close(self._woken_fd)
        self._socket.close()
        os.close(self._lock_fd)
        self._lock_fd = -1

    def close_in_child(self) -> None:
        """Close the socket in a forked process, which would keep it alive. The lock is not inherited."""
        self._socket.close()

    def _run(self, take: Callable[[dict[str, Any]], None]) -> None:
        poll = select.poll()
        poll.register(self._socket, select.POLLIN)
        poll.register(self._woken_fd, select.POLLHUP)
        failed = False
        touched = time.monotonic()
        while True:
            ready = {fd for fd, _ in poll.poll(1000 * _TOUCH_S)}
            if time.monotonic() - touched >= _TOUCH_S:
                touched = time.monotonic()
                self._touch()
            if not ready:
                continue
            if self._socket.fileno() not in ready:
                return
            try:
                take(json.loads(self._socket.recv(_MAX_BYTES)))
            except Exception as error:
                if not failed:
                    _log.warning("an event of another process of this node was not understood: %s", error)
                failed = True

    def _touch(self) -> None:
        """Make the files new, so that nothing removes them because they are old."""
        for file in (self._lock_fd, self._path, os.path.dirname(self._path)):
            with contextlib.suppress(OSError):
                os.utime(file)
