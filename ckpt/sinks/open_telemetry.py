"""`OpenTelemetry`: a trace for each save, and metrics.

    ckpt.save      ├──────────────────────────────────────────┤   from the call until the save is decided
    ckpt.stage     ├───────┤                                       training waits
    ckpt.write               ├──────────────────┤                  the writer process: files written, and durable
    ckpt.publish                                └─────────────┤   until all ranks have written, and the step is renamed

The spans have the times of the events. If the clock was set back meanwhile they have no length, not a negative one.
"""

from __future__ import annotations

from collections import defaultdict
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
from ckpt.sinks.metrics import METRICS, Metric, RankCounts, optional

_NAME = "ckpt"
_RECORD = {"counter": "add", "gauge": "set", "histogram": "record"}


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

    The metrics are those of `ckpt.sinks.metrics`.

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
        self._counts: defaultdict[int, RankCounts] = defaultdict(RankCounts)
        meter = metrics.get_meter(_NAME, meter_provider=meter_provider)
        self._record = {metric: _recorder(meter, metric) for metric in METRICS}

    def __call__(self, event: Event) -> None:
        """Take an event; its context is the current one."""
        labels = {**self._attributes, "ckpt.rank": event.rank}
        for sample in self._counts[event.rank].samples(event):
            own = {sample.metric.label: sample.label} if sample.label else {}
            self._record[sample.metric](sample.number, labels | own)
        match event:
            case SaveStarted():
                root = self._root("ckpt.save", event.time, labels | {"ckpt.step": event.step})
                save = _Save(root, event.time, event.time)
                self._saves.setdefault((event.rank, event.step), []).append(save)
            case SaveStaged():
                if (staged := self._newest(event.rank, event.step)) is not None:
                    staged.staged = event.time
                    self._child(staged, "ckpt.stage", staged.begin, event.time, {"ckpt.bytes": event.bytes})
            case SavePublished():
                self._published(event)
            case SaveAbandoned():
                if (abandoned := self._ended(event.rank, event.step)) is not None:
                    self._fail(abandoned.span, event.kind, event.cause)
                    abandoned.span.end(_ns(max(event.time, abandoned.begin)))
            case Restored():
                self._restored(event, labels)
            case RestoreFailed():
                span = self._root("ckpt.restore", event.time - event.seconds, labels)
                self._fail(span, event.kind, event.cause)
                span.end(_ns(event.time))
            case Restarted():
                attributes = labels | {"ckpt.iteration": event.iteration, "ckpt.cause": event.cause}
                self._root("ckpt.restart", event.time - event.seconds, attributes).end(_ns(event.time))
            case EventsDropped():
                self._saves.clear()  # the end of some may be lost: they have no spans

    def _published(self, event: SavePublished) -> None:
        save = self._ended(event.rank, event.step)
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
        sources = {
            "own_memory": event.own_memory_bytes,
            "neighbour_memory": event.neighbour_memory_bytes,
            "storage": event.storage_bytes,
        }
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


def _recorder(meter: Any, metric: Metric) -> Callable[..., None]:
    """Make an instrument, and return its method that takes a number and attributes."""
    options = {"explicit_bucket_boundaries_advisory": metric.buckets} if metric.buckets else {}
    make = getattr(meter, f"create_{metric.kind}")
    record: Callable[..., None] = getattr(
        make(f"{_NAME}.{metric.name}", metric.unit, metric.text, **options), _RECORD[metric.kind]
    )
    return record


def _ns(seconds: float) -> int:
    return int(seconds * 1e9)
