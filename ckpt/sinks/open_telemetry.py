"""`OpenTelemetry`: a trace for each save, and metrics.

    ckpt.save      ├──────────────────────────────────────────┤   from the call until the save is decided
    ckpt.stage     ├───────┤                                       training waits
    ckpt.write               ├──────────────────┤                  the writer process: files written, and durable
    ckpt.publish                                └─────────────┤   until all ranks have written, and the step is renamed

The spans have the times of the events. If the clock was set back meanwhile they have no length, not a negative one.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from ckpt.events import (
    Event,
    EventsDropped,
    Restarted,
    Restored,
    RestoreFailed,
    SaveAbandoned,
    SavePublished,
    SaveStaged,
    SaveStarted,
)
from ckpt.sinks.optional import optional

__all__ = ["OpenTelemetry"]

_NAME = "ckpt"
_SECONDS = (0.001, 0.005, 0.01, 0.05, 0.1, 0.5, 1.0, 5.0, 10.0, 60.0, 300.0)


@dataclass
class _Save:
    """A save in flight: its root span, and when it was staged."""

    span: Any
    begin: float
    staged: float


class OpenTelemetry:
    """Spans and metrics by the API of OpenTelemetry. Its SDK is set up by the program, which also shuts it down.

    Each save is a trace of its own on each rank, linked to the span that was current when the save was called; so are
    restores and restarts. Spans have the attributes ``ckpt.step`` and ``ckpt.rank`` and, as metrics do, `attributes`.
    A save that was abandoned has the status ERROR, with the cause.

    Metrics: the counters ``ckpt.saves`` (by ``outcome``), ``ckpt.written`` (By), ``ckpt.restores`` (by ``outcome``),
    ``ckpt.restored`` (By, by ``source``), ``ckpt.restarts`` and ``ckpt.events_dropped``; the histograms (s)
    ``ckpt.save.stall``, ``ckpt.save.write``, ``ckpt.save.duration``, ``ckpt.restore.duration`` and
    ``ckpt.restart.duration``.

    The providers are the global ones by default. ImportError without opentelemetry-api.
    """

    def __init__(
        self,
        *,
        tracer_provider: Any = None,
        meter_provider: Any = None,
        attributes: Mapping[str, str | int | float | bool] | None = None,
    ) -> None:
        self._trace = optional("opentelemetry.trace", "opentelemetry")
        self._context = optional("opentelemetry.context", "opentelemetry").Context
        metrics = optional("opentelemetry.metrics", "opentelemetry")
        self._tracer = self._trace.get_tracer(_NAME, tracer_provider=tracer_provider)
        self._attributes = dict(attributes or {})
        self._saves: dict[tuple[int, int], list[_Save]] = {}
        self._dropped: dict[int, int] = {}
        meter = metrics.get_meter(_NAME, meter_provider=meter_provider)

        def counter(name: str, text: str, unit: str = "1") -> Callable[..., None]:
            add: Callable[..., None] = meter.create_counter(f"ckpt.{name}", unit, text).add
            return add

        def histogram(name: str, text: str) -> Callable[..., None]:
            record: Callable[..., None] = meter.create_histogram(
                f"ckpt.{name}", "s", text, explicit_bucket_boundaries_advisory=_SECONDS
            ).record
            return record

        self._count_save = counter("saves", "saves that were decided")
        self._count_written = counter("written", "bytes that this rank has written", "By")
        self._count_restore = counter("restores", "restores")
        self._count_restored = counter("restored", "bytes of tensors that were restored", "By")
        self._count_restart = counter("restarts", "restarts in the process")
        self._count_dropped = counter("events_dropped", "events that this sink did not get")
        self._stall = histogram("save.stall", "how long training waited for a save")
        self._write = histogram("save.write", "how long the files of a save took to write and to become durable")
        self._save = histogram("save.duration", "from the call of a save until its step was published")
        self._restore = histogram("restore.duration", "how long a restore took")
        self._restart = histogram("restart.duration", "from a fault until the state was restored")

    def __call__(self, event: Event) -> None:
        """Take an event; its context is the current one."""
        labels = {**self._attributes, "ckpt.rank": event.rank}
        match event:
            case SaveStarted():
                root = self._root("ckpt.save", event.time, labels | {"ckpt.step": event.step})
                save = _Save(root, event.time, event.time)
                self._saves.setdefault((event.rank, event.step), []).append(save)
            case SaveStaged():
                self._stall(event.stall_s, labels)
                if (staged := self._newest(event.rank, event.step)) is not None:
                    staged.staged = event.time
                    self._child(staged, "ckpt.stage", staged.begin, event.time, {"ckpt.bytes": event.bytes})
            case SavePublished():
                self._published(event, labels)
            case SaveAbandoned():
                self._count_save(1, labels | {"outcome": "abandoned"})
                if (abandoned := self._ended(event.rank, event.step)) is not None:
                    self._fail(abandoned.span, event.kind, event.cause)
                    abandoned.span.end(_ns(max(event.time, abandoned.begin)))
            case Restored():
                self._restored(event, labels)
            case RestoreFailed():
                self._count_restore(1, labels | {"outcome": "failed"})
                span = self._root("ckpt.restore", event.time - event.seconds, labels)
                self._fail(span, event.kind, event.cause)
                span.end(_ns(event.time))
            case Restarted():
                self._count_restart(1, labels)
                self._restart(event.seconds, labels)
                attributes = labels | {"ckpt.iteration": event.iteration, "ckpt.cause": event.cause}
                self._root("ckpt.restart", event.time - event.seconds, attributes).end(_ns(event.time))
            case EventsDropped():
                self._count_dropped(event.dropped - self._dropped.get(event.rank, 0), labels)
                self._dropped[event.rank] = event.dropped
                self._saves.clear()  # the end of some may be lost: they have no spans

    def _published(self, event: SavePublished, labels: dict[str, Any]) -> None:
        self._count_save(1, labels | {"outcome": "published"})
        self._count_written(event.bytes, labels)
        self._save(event.seconds, labels)
        save = self._ended(event.rank, event.step)
        if event.write_s:
            self._write(event.write_s + event.sync_s, labels)
        if save is None:
            return
        if event.write_s:
            begin = save.staged + event.queue_s
            end = min(begin + event.write_s + event.sync_s, event.time)
            self._child(save, "ckpt.write", begin, end, {"ckpt.bytes": event.bytes, "ckpt.sync_s": event.sync_s})
            self._child(save, "ckpt.publish", end, event.time, {})
        save.span.set_attribute("ckpt.durable", event.durable)
        save.span.end(_ns(max(event.time, save.begin)))

    def _restored(self, event: Restored, labels: dict[str, Any]) -> None:
        self._count_restore(1, labels | {"outcome": "restored"})
        self._restore(event.seconds, labels)
        sources = {
            "own_memory": event.own_memory_bytes,
            "neighbour_memory": event.neighbour_memory_bytes,
            "storage": event.storage_bytes,
        }
        for source, nbytes in sources.items():
            self._count_restored(nbytes, labels | {"source": source})
        attributes = labels | {"ckpt.step": event.step, "ckpt.damaged_steps": list(event.damaged)}
        attributes |= {f"ckpt.{source}_bytes": nbytes for source, nbytes in sources.items()}
        self._root("ckpt.restore", event.time - event.seconds, attributes).end(_ns(event.time))

    def _newest(self, rank: int, step: int) -> _Save | None:
        saves = self._saves.get((rank, step))
        return saves[-1] if saves else None

    def _ended(self, rank: int, step: int) -> _Save | None:
        """Return the save that ends: of several of one step the first, since they end in order."""
        saves = self._saves.get((rank, step))
        if not saves:
            return None
        save = saves.pop(0)
        if not saves:
            del self._saves[rank, step]
        return save

    def _root(self, name: str, begin: float, attributes: dict[str, Any]) -> Any:
        """Begin a trace, linked to the current span."""
        current = self._trace.get_current_span().get_span_context()
        links = [self._trace.Link(current)] if current.is_valid else []
        return self._tracer.start_span(
            name, context=self._context(), links=links, start_time=_ns(begin), attributes=attributes
        )

    def _child(self, save: _Save, name: str, begin: float, end: float, attributes: dict[str, Any]) -> None:
        context = self._trace.set_span_in_context(save.span, self._context())
        self._tracer.start_span(name, context=context, start_time=_ns(begin), attributes=attributes).end(
            _ns(max(begin, end))
        )

    def _fail(self, span: Any, kind: str, cause: str) -> None:
        span.set_attribute("error.type", kind)
        span.set_status(self._trace.Status(self._trace.StatusCode.ERROR, f"{kind}: {cause}"))


def _ns(seconds: float) -> int:
    return int(seconds * 1e9)
