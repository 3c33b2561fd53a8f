"""`OpenTelemetry`: the spans and metrics of a job, as its SDK has them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import ckpt
from ckpt import events

pytest.importorskip("opentelemetry.sdk")

from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from ckpt.sinks import OpenTelemetry


class Telemetry:
    """A sink, and what it has told the SDK."""

    def __init__(self) -> None:
        self._exporter = InMemorySpanExporter()
        self._reader = InMemoryMetricReader()
        self.tracer_provider = TracerProvider()
        self.tracer_provider.add_span_processor(SimpleSpanProcessor(self._exporter))
        meters = MeterProvider(metric_readers=[self._reader])
        self.sink = OpenTelemetry(
            tracer_provider=self.tracer_provider, meter_provider=meters, attributes={"job": "example"}
        )

    def spans(self, name: str) -> list[ReadableSpan]:
        return [span for span in self._exporter.get_finished_spans() if span.name == name]

    def points(self, name: str) -> list[Any]:
        data: Any = self._reader.get_metrics_data()
        metrics = data.resource_metrics[0].scope_metrics[0].metrics
        return [point for metric in metrics if metric.name == name for point in metric.data.data_points]


def test_a_job_has_a_trace_for_each_save(tmp_path: Path) -> None:
    telemetry = Telemetry()
    tracer = telemetry.tracer_provider.get_tracer("program")
    state = {"w": torch.ones(1000)}
    with ckpt.observe(telemetry.sink) as handle, ckpt.Checkpointer(tmp_path) as checkpointer:
        with tracer.start_as_current_span("step") as current:
            checkpointer.save(state, 1)
        with pytest.raises(ckpt.CheckpointExistsError):
            checkpointer.save(state, 1)
        checkpointer.restore(state)
    assert (handle.failed, handle.dropped) == (0, 0)

    published, abandoned = telemetry.spans("ckpt.save")
    (link,) = published.links
    assert link.context.span_id == current.get_span_context().span_id
    assert published.attributes is not None
    assert dict(published.attributes) == {"job": "example", "ckpt.rank": 0, "ckpt.step": 1, "ckpt.durable": True}
    children = [telemetry.spans(f"ckpt.{name}")[0] for name in ("stage", "write", "publish")]
    for child in children:
        assert child.parent is not None
        assert published.context is not None
        assert child.parent.span_id == published.context.span_id
    assert not abandoned.status.is_ok
    assert "already published" in str(abandoned.status.description)
    (restored,) = telemetry.spans("ckpt.restore")
    assert restored.attributes is not None
    assert restored.attributes["ckpt.step"] == 1

    saves = {point.attributes["outcome"]: point.value for point in telemetry.points("ckpt.saves")}
    assert saves == {"published": 1, "abandoned": 1}
    assert sum(point.value for point in telemetry.points("ckpt.restored")) == 4000
    (stall,) = telemetry.points("ckpt.save.stall")
    assert stall.count == 2
    assert [point.value for point in telemetry.points("ckpt.newest_step")] == [1]
    assert [point.value for point in telemetry.points("ckpt.saves_in_flight")] == [0]


def test_no_span_ends_before_it_begins() -> None:
    """The clock of the host was set back during a save."""
    telemetry = Telemetry()
    for event in (
        events.SaveStarted(1000.0, 0, 1),
        events.SaveStaged(900.0, 0, 1, 100, 0.5, 0.5, 1.0),
        events.SavePublished(905.0, 0, 1, 90, 6.0, 1.0, 1.0, 1.0, 6e8),
        events.SaveStarted(1000.0, 0, 2),
        events.SaveAbandoned(900.0, 0, 2, None, "Left", "why"),
    ):
        telemetry.sink(event)
    names = ("ckpt.save", "ckpt.stage", "ckpt.write", "ckpt.publish")
    spans = [span for name in names for span in telemetry.spans(name)]
    assert len(spans) == 5
    for span in spans:
        assert span.start_time is not None
        assert span.end_time is not None
        assert span.start_time <= span.end_time, span.name


def test_saves_whose_end_was_dropped_are_forgotten() -> None:
    telemetry = Telemetry()
    telemetry.sink(events.SaveStarted(1000.0, 0, 1))
    telemetry.sink(events.EventsDropped(1001.0, 0, 3))
    telemetry.sink(events.EventsDropped(1002.0, 0, 5))
    telemetry.sink(events.SavePublished(1003.0, 0, 1, 90, 6.0, 1.0, 1.0, 1.0, 6e8))
    assert telemetry.spans("ckpt.save") == []
    (dropped,) = telemetry.points("ckpt.events_dropped")
    assert dropped.value == 5
