"""`Prometheus`: counters, histograms and gauges of the ranks of a node, at one HTTP address.

local rank ──▶ Prometheus ──▶ leads this node?  yes: Metrics ──▶ HTTP server ◀── scrape
local rank ──▶ Prometheus ──▶                   no: a datagram to the process that leads (see `node`)
"""

from __future__ import annotations

import hashlib
import logging
import os
import threading
import time
import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from ckpt.events import (
    Event,
    EventsDropped,
    ExportDone,
    ExportFailed,
    MirrorDone,
    MirrorFailed,
    Restarted,
    Restored,
    RestoreFailed,
    Retained,
    SaveAbandoned,
    SavePublished,
    SaveStaged,
    SaveStarted,
    SectionLate,
    from_document,
    to_document,
)
from ckpt.sinks.node import Leadership, NodeSocket, private_directory
from ckpt.sinks.optional import optional

__all__ = ["Metrics", "Prometheus"]

_log = logging.getLogger("ckpt")

_STALL_S = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 5.0, 30.0)
_SAVE_S = (0.1, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 180.0, 600.0)
_RESTORE_S = (0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 15.0, 60.0, 300.0)
_BYTES_PER_S = (1e7, 3e7, 1e8, 3e8, 5e8, 1e9, 2e9, 5e9, 1e10, 2e10)
_SEND_S = 1.0  # for a process that leads but is slow, or is only just beginning
_SERVER_CLOSE_S = 5.0
_EXPORTING_RANK = 0  # which alone exports and removes steps


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


@dataclass
class _Process:
    """What was counted of the process that has a rank."""

    pid: int
    in_flight: list[int] = field(default_factory=list)  # steps; one may be there twice
    dropped: int = 0
    mirrored: int = 0  # the newest step

    def end(self, step: int) -> None:
        if step in self.in_flight:  # else its start was lost, or counted by an earlier server
            self.in_flight.remove(step)


class Metrics:
    """The metrics of several ranks, in a registry of `client`, which is the module prometheus_client. Any thread."""

    def __init__(self, client: Any, run: str, registry: Any) -> None:
        self._run = run
        self._registry = registry
        self._lock = threading.Lock()
        self._ranks: dict[int, _Process] = {}
        self._all: list[Any] = []

        def metric(kind: Any, name: str, text: str, *labels: str, **options: Any) -> Any:
            made = kind(f"ckpt_{name}", text, ("run", "rank", *labels), registry=registry, **options)
            self._all.append(made)
            return made

        counter, gauge, histogram = client.Counter, client.Gauge, client.Histogram
        self._started = metric(counter, "saves_started_total", "Saves that were called.")
        self._saves = metric(counter, "saves_total", "Saves that were decided, by outcome.", "outcome")
        self._in_flight = metric(gauge, "saves_in_flight", "Saves that were called and are not decided yet.")
        self._newest_step = metric(gauge, "newest_step", "The newest step that was published.")
        self._newest_time = metric(
            gauge, "newest_step_timestamp_seconds", "When that was, or before the first one when the rank began."
        )
        self._staged = metric(counter, "staged_bytes_total", "Bytes that this rank has copied to shared memory.")
        self._written = metric(counter, "written_bytes_total", "Bytes that this rank has written of published steps.")
        self._stall = metric(histogram, "save_stall_seconds", "How long training waited for a save.", buckets=_STALL_S)
        self._write = metric(
            histogram,
            "save_write_seconds",
            "How long the files of a save took to write and to become durable.",
            buckets=_SAVE_S,
        )
        self._save = metric(
            histogram, "save_seconds", "From the call of a save until its step was published.", buckets=_SAVE_S
        )
        self._rate = metric(
            histogram,
            "save_write_bytes_per_second",
            "Bytes per second that were written and made durable, of a save.",
            buckets=_BYTES_PER_S,
        )
        self._restores = metric(counter, "restores_total", "Restores, by outcome.", "outcome")
        self._restored = metric(
            counter, "restored_bytes_total", "Bytes of tensors that were restored, by source.", "source"
        )
        self._restore = metric(histogram, "restore_seconds", "How long a restore took.", buckets=_RESTORE_S)
        self._damaged = metric(counter, "damaged_steps_total", "Steps that a restore found damaged.")
        self._restarts = metric(counter, "restarts_total", "Restarts in the process.")
        self._restart_s = metric(
            counter, "restart_seconds_total", "Time from faults until the state was restored, of all restarts."
        )
        self._late = metric(counter, "sections_late_total", "Saves whose writer was killed as it was over its limit.")
        self._kept = metric(gauge, "steps_kept", "Published steps after the last removal.")
        self._removed = metric(counter, "steps_removed_total", "Steps that were removed after a save.")
        self._exports = metric(counter, "exports_total", "Exports beside training, by outcome.", "outcome")
        self._copies = metric(counter, "mirror_copies_total", "Copies to the mirror, by outcome.", "outcome")
        self._mirrored = metric(gauge, "newest_mirrored_step", "The newest step that was copied to the mirror.")
        self._dropped = metric(counter, "events_dropped_total", "Events that these metrics do not count.")

    def close(self) -> None:
        """Take the metrics out of the registry."""
        for made in self._all:
            self._registry.unregister(made)

    def take(self, event: Event, pid: int) -> None:
        """Count an event of the process `pid`, which has the rank of the event now."""
        rank = str(event.rank)
        with self._lock:
            process = self._ranks.get(event.rank)
            if process is None:
                self._begin(event.rank, event.time)
            if process is None or process.pid != pid:  # what an earlier one had in flight died with it
                process = self._ranks[event.rank] = _Process(pid)
            match event:
                case SaveStarted():
                    self._started.labels(self._run, rank).inc()
                    process.in_flight.append(event.step)
                case SaveStaged():
                    self._staged.labels(self._run, rank).inc(event.bytes)
                    self._stall.labels(self._run, rank).observe(event.stall_s)
                case SavePublished():
                    self._published(event, rank)
                    process.end(event.step)
                case SaveAbandoned():
                    self._saves.labels(self._run, rank, "abandoned").inc()
                    process.end(event.step)
                case Restored():
                    self._restores.labels(self._run, rank, "restored").inc()
                    self._restore.labels(self._run, rank).observe(event.seconds)
                    self._damaged.labels(self._run, rank).inc(len(event.damaged))
                    self._restored.labels(self._run, rank, "own_memory").inc(event.own_memory_bytes)
                    self._restored.labels(self._run, rank, "neighbour_memory").inc(event.neighbour_memory_bytes)
                    self._restored.labels(self._run, rank, "storage").inc(event.storage_bytes)
                case RestoreFailed():
                    self._restores.labels(self._run, rank, "failed").inc()
                    self._damaged.labels(self._run, rank).inc(event.kind == "CheckpointCorruptError")
                case Restarted():
                    self._restarts.labels(self._run, rank).inc()
                    self._restart_s.labels(self._run, rank).inc(event.seconds)
                case SectionLate():
                    self._late.labels(self._run, rank).inc()
                case Retained():
                    self._kept.labels(self._run, rank).set(event.kept)
                    self._removed.labels(self._run, rank).inc(len(event.removed))
                case ExportDone():
                    self._exports.labels(self._run, rank, "done").inc()
                case ExportFailed():
                    self._exports.labels(self._run, rank, "failed").inc()
                case MirrorDone():
                    self._copies.labels(self._run, rank, "done").inc()
                    process.mirrored = max(process.mirrored, event.step)
                    self._mirrored.labels(self._run, rank).set(process.mirrored)
                case MirrorFailed():
                    self._copies.labels(self._run, rank, "failed").inc()
                case EventsDropped():
                    self._dropped.labels(self._run, rank).inc(max(0, event.dropped - process.dropped))
                    process.dropped = event.dropped
            self._in_flight.labels(self._run, rank).set(len(process.in_flight))

    def _begin(self, rank: int, at: float) -> None:
        """Make the series of a rank, with 0, so that the first event of each kind is an increase."""
        labels = self._run, str(rank)
        for each in (
            self._staged,
            self._written,
            self._stall,
            self._write,
            self._save,
            self._rate,
            self._restore,
            self._damaged,
            self._restarts,
            self._restart_s,
            self._late,
            self._dropped,
        ):
            each.labels(*labels)
        self._started.labels(*labels)
        self._in_flight.labels(*labels)
        for outcome in ("published", "abandoned"):
            self._saves.labels(*labels, outcome)
        for outcome in ("restored", "failed"):
            self._restores.labels(*labels, outcome)
        for source in ("own_memory", "neighbour_memory", "storage"):
            self._restored.labels(*labels, source)
        if rank == _EXPORTING_RANK:
            self._removed.labels(*labels)
            for outcome in ("done", "failed"):
                self._exports.labels(*labels, outcome)
                self._copies.labels(*labels, outcome)
        self._newest_time.labels(*labels).set(at)

    def _published(self, event: SavePublished, rank: str) -> None:
        self._saves.labels(self._run, rank, "published").inc()
        self._newest_step.labels(self._run, rank).set(event.step)
        self._newest_time.labels(self._run, rank).set(event.time)
        self._written.labels(self._run, rank).inc(event.bytes)
        self._save.labels(self._run, rank).observe(event.seconds)
        if event.write_s:
            self._write.labels(self._run, rank).observe(event.write_s + event.sync_s)
            self._rate.labels(self._run, rank).observe(event.bytes_per_s)
