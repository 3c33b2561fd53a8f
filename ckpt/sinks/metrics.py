"""The metrics of `ckpt`, in one table, and what each event adds to them. `Prometheus` and `OpenTelemetry` export them.

OpenTelemetry has the names of the table after ``ckpt.``; in Prometheus they are what its translation of these makes of
them: ``ckpt.save.stall``, of seconds, is ``ckpt_save_stall_seconds``.

`optional` imports the package that a sink needs.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from importlib import import_module
from typing import Any, Literal

from ckpt.events import (
    Event,
    EventsDropped,
    ExportDone,
    ExportFailed,
    MirrorDone,
    MirrorFailed,
    PaceChanged,
    Restarted,
    Restored,
    RestoreFailed,
    Retained,
    SaveAbandoned,
    SavePublished,
    SaveStaged,
    SaveStarted,
    SectionLate,
)

_STALL_S = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 5.0, 30.0)
_SAVE_S = (0.1, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 180.0, 600.0)
_RESTORE_S = (0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 15.0, 60.0, 300.0)
_BYTES_PER_S = (1e7, 3e7, 1e8, 3e8, 5e8, 1e9, 2e9, 5e9, 1e10, 2e10)
_NO_FAILURE = ("Interrupted", "Left")  # the kinds of saves that a restart, or the end of the job, gave up
_EXPORTING_RANK = 0  # which alone exports, copies and removes steps


@dataclass(frozen=True)
class Metric:
    """One metric. `unit` is that of UCUM: "1", "s", "By", "By/s". Its samples have a label if there are `values` of it.

    `from_start` says whether its series begin with the rank, at 0, so that the first event is an increase.
    """

    name: str
    kind: Literal["counter", "gauge", "histogram"]
    text: str
    unit: str = "1"
    label: str = ""
    values: tuple[str, ...] = ()
    buckets: tuple[float, ...] = ()
    from_start: Literal["all ranks", "the exporting rank", "no rank"] = "all ranks"

    def begins_with(self, rank: int) -> bool:
        """Return whether the series of a rank begin with it."""
        return self.from_start == "all ranks" or (self.from_start == "the exporting rank" and rank == _EXPORTING_RANK)


def _outcomes(*values: str) -> tuple[str, tuple[str, ...]]:
    return "outcome", values


_STARTED = Metric("saves_started", "counter", "Saves that were called.")
_SAVES = Metric("saves", "counter", "Saves that were decided, by outcome.", "1", *_outcomes("published", "abandoned"))
_FAILED = Metric("failed_saves", "gauge", "Saves that have failed since the last one that was published.")
_IN_FLIGHT = Metric("saves_in_flight", "gauge", "Saves that were called and are not decided yet.")
_NEWEST = Metric("newest_step", "gauge", "The newest step that was published.", from_start="no rank")
_NEWEST_TIME = Metric(
    "newest_step_timestamp", "gauge", "When that was, or before the first one when the rank began.", "s"
)
_STAGED = Metric("staged", "counter", "Bytes that this rank has copied to shared memory.", "By")
_WRITTEN = Metric("written", "counter", "Bytes that this rank has written of published steps.", "By")
_STALL = Metric("save.stall", "histogram", "How long training waited for a save.", "s", buckets=_STALL_S)
_WRITE = Metric(
    "save.write", "histogram", "How long the files of a save took to write and to become durable.", "s", buckets=_SAVE_S
)
_SAVE = Metric(
    "save.duration", "histogram", "From the call of a save until its step was published.", "s", buckets=_SAVE_S
)
_RATE = Metric(
    "save.write_rate",
    "histogram",
    "Bytes written and made durable per second, of a save.",
    "By/s",
    buckets=_BYTES_PER_S,
)
_RESTORES = Metric("restores", "counter", "Restores, by outcome.", "1", *_outcomes("restored", "failed"))
_RESTORED = Metric(
    "restored", "counter", "Bytes of tensors that were restored, by source.", "By", "source",
    ("own_memory", "neighbour_memory", "storage"),
)  # fmt: skip
_RESTORE = Metric("restore.duration", "histogram", "How long a restore took.", "s", buckets=_RESTORE_S)
_DAMAGED = Metric("damaged_steps", "counter", "Steps that a restore found damaged.")
_RESTARTS = Metric("restarts", "counter", "Restarts in the process.")
_RESTART = Metric(
    "restart.duration", "histogram", "From a fault until the state was restored.", "s", buckets=_RESTORE_S
)
_LATE = Metric("sections_late", "counter", "Saves whose writer was killed as it was over its limit.")
_INTERVAL = Metric(
    "save.interval", "gauge", "From the begin of a save to the next, as the policy chooses.", "s", from_start="no rank"
)
_COST = Metric("save.cost", "gauge", "Training time that a save takes, as measured.", "s", from_start="no rank")
_MTBF = Metric("mtbf", "gauge", "The time between faults, as estimated.", "s", from_start="no rank")
_KEPT = Metric("steps_kept", "gauge", "Published steps after the last removal.", from_start="no rank")
_REMOVED = Metric("steps_removed", "counter", "Steps that were removed after a save.", from_start="the exporting rank")
_EXPORTS = Metric(
    "exports", "counter", "Exports beside training, by outcome.", "1", *_outcomes("done", "failed"),
    from_start="the exporting rank",
)  # fmt: skip
_COPIES = Metric(
    "mirror_copies", "counter", "Copies to the mirror, by outcome.", "1", *_outcomes("done", "failed"),
    from_start="the exporting rank",
)  # fmt: skip
_MIRRORED = Metric(
    "newest_mirrored_step", "gauge", "The newest step that was copied to the mirror.", from_start="no rank"
)
_DROPPED = Metric("events_dropped", "counter", "Events that these metrics do not count.")

METRICS = (
    _STARTED, _SAVES, _FAILED, _IN_FLIGHT, _NEWEST, _NEWEST_TIME, _STAGED, _WRITTEN, _STALL, _WRITE, _SAVE, _RATE,
    _RESTORES, _RESTORED, _RESTORE, _DAMAGED, _RESTARTS, _RESTART, _LATE, _KEPT, _REMOVED, _EXPORTS, _COPIES, _MIRRORED,
    _DROPPED,
)  # fmt: skip


@dataclass(frozen=True)
class Sample:
    """A number that an event adds to a counter or histogram, or sets a gauge to; `label` is a value of the metric's."""

    metric: Metric
    number: float
    label: str = ""


@dataclass
class RankCounts:
    """The events so far of the process that has a rank."""

    in_flight: list[int] = field(default_factory=list)  # steps; one may be there twice
    failed: int = 0  # saves in a row
    dropped: int = 0
    mirrored: int = 0  # the newest step

    def samples(self, event: Event) -> Iterator[Sample]:
        """Take the next event, and yield what it adds."""
        match event:
            case SaveStarted():
                self.in_flight.append(event.step)
                yield Sample(_STARTED, 1)
                yield Sample(_IN_FLIGHT, len(self.in_flight))
            case SaveStaged():
                yield Sample(_STAGED, event.bytes)
                yield Sample(_STALL, event.stall_s)
            case SavePublished():
                yield from self._published(event)
            case SaveAbandoned():
                yield from self._decided(event.step, "abandoned")
                self.failed += event.kind not in _NO_FAILURE
                yield Sample(_FAILED, self.failed)
            case Restored():
                yield Sample(_RESTORES, 1, "restored")
                yield Sample(_RESTORE, event.seconds)
                yield Sample(_DAMAGED, len(event.damaged))
                yield Sample(_RESTORED, event.own_memory_bytes, "own_memory")
                yield Sample(_RESTORED, event.neighbour_memory_bytes, "neighbour_memory")
                yield Sample(_RESTORED, event.storage_bytes, "storage")
            case RestoreFailed():
                yield Sample(_RESTORES, 1, "failed")
                yield Sample(_DAMAGED, event.kind == "CheckpointCorruptError")
            case Restarted():
                yield Sample(_RESTARTS, 1)
                yield Sample(_RESTART, event.seconds)
            case SectionLate():
                yield Sample(_LATE, 1)
            case PaceChanged():
                yield Sample(_INTERVAL, event.interval_s)
                yield Sample(_COST, event.cost_s)
                yield Sample(_MTBF, event.mtbf_s)
            case Retained():
                yield Sample(_KEPT, event.kept)
                yield Sample(_REMOVED, len(event.removed))
            case ExportDone() | ExportFailed():
                yield Sample(_EXPORTS, 1, "done" if isinstance(event, ExportDone) else "failed")
            case MirrorDone():
                self.mirrored = max(self.mirrored, event.step)
                yield Sample(_COPIES, 1, "done")
                yield Sample(_MIRRORED, self.mirrored)
            case MirrorFailed():
                yield Sample(_COPIES, 1, "failed")
            case EventsDropped():
                yield Sample(_DROPPED, max(0, event.dropped - self.dropped))
                self.dropped = event.dropped

    def _published(self, event: SavePublished) -> Iterator[Sample]:
        yield from self._decided(event.step, "published")
        self.failed = 0
        yield Sample(_FAILED, 0)
        yield Sample(_NEWEST, event.step)
        yield Sample(_NEWEST_TIME, event.time)
        yield Sample(_WRITTEN, event.bytes)
        yield Sample(_SAVE, event.seconds)
        if event.write_s:
            yield Sample(_WRITE, event.write_s + event.sync_s)
            yield Sample(_RATE, event.bytes_per_s)

    def _decided(self, step: int, outcome: str) -> Iterator[Sample]:
        if step in self.in_flight:  # else its start was lost, or counted by an earlier server
            self.in_flight.remove(step)
        yield Sample(_SAVES, 1, outcome)
        yield Sample(_IN_FLIGHT, len(self.in_flight))

    @staticmethod
    def first(at: float) -> Sample:
        """Return the time of the newest step of a rank that has none yet, and that began at this time."""
        return Sample(_NEWEST_TIME, at)


def optional(module: str, extra: str) -> Any:
    """Return the module. ImportError, naming what to install, if it is not there."""
    try:
        return import_module(module)
    except ImportError as error:
        raise ImportError(f"this sink needs {module}: pip install 'ckpt-inprocess[{extra}]'", name=module) from error
