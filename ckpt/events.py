"""What a job does with its checkpoints, as typed events: plain data, for `ckpt.observe`.

    save       SaveStarted ──▶ SaveStaged ──▶ SavePublished
                    └──────────────┴────────▶ SaveAbandoned
    snapshot   SnapshotStaged; SnapshotReplicated or SnapshotNotReplicated
    restore    Restored or RestoreFailed
    restart    Restarted, after Restored
    others     SectionLate, PaceChanged, Retained, ExportDone, ExportFailed, MirrorDone, MirrorFailed
    sinks      EventsDropped, for one that was too slow

Every save that has a SaveStarted gets exactly one SavePublished or SaveAbandoned on the same rank, unless the process
dies. Times are seconds since 1970 by the clock of the host, durations are seconds, sizes are bytes.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from inprocess.ipc.process import Process

__all__ = [
    "Closed",
    "Event",
    "EventsDropped",
    "ExportDone",
    "ExportFailed",
    "MirrorDone",
    "MirrorFailed",
    "PaceChanged",
    "Restarted",
    "Restored",
    "RestoreFailed",
    "Retained",
    "SaveAbandoned",
    "SavePublished",
    "SaveStaged",
    "SaveStarted",
    "SectionLate",
    "SnapshotNotReplicated",
    "SnapshotReplicated",
    "SnapshotStaged",
    "Stopped",
    "from_document",
    "to_document",
]


def _this_process() -> str:
    here = Process.here()
    return f"{here.host}.{here.pid}.{here.start}"


@dataclass(frozen=True, slots=True)
class Event:
    """What all events have.

    time: when it happened, in seconds since 1970
    rank: that of the process, at that time
    process: the process, by a name that no other one has, on any host; "" if a file of an earlier version has none
    """

    time: float
    rank: int
    process: str = field(default_factory=_this_process, kw_only=True)


@dataclass(frozen=True, slots=True)
class SaveStarted(Event):
    """A save was called: `save_request`, `async_save` or `save`.

    step: what is saved; one step may be saved again after it failed
    """

    step: int


@dataclass(frozen=True, slots=True)
class SaveStaged(Event):
    """This rank's share is in shared memory, and training goes on.

    bytes: what this rank will write, before compression
    wait_s: seconds until there was a free slot; in the first save also until there was a plan
    stage_s: seconds that the copy took; with `overlap` until it was begun
    stall_s: seconds that training waited, from the call: `wait_s` and `stage_s`
    """

    step: int
    bytes: int
    wait_s: float
    stage_s: float
    stall_s: float


@dataclass(frozen=True, slots=True)
class SavePublished(Event):
    """The step is published. `time` is when the writer of this rank knew it; the trainer learns it in its next call.

    If the writer of this rank died just then, `bytes` is that of SaveStaged, and `queue_s`, `write_s`, `sync_s` and
    `bytes_per_s` are 0.

    bytes: what this rank has written, after compression
    seconds: from SaveStarted until the step was published
    queue_s: seconds from SaveStaged until the writer began to write
    write_s: seconds that the files took to write
    sync_s: seconds that they took to become durable
    bytes_per_s: bytes per second that were written and made durable
    durable: False if the step may not survive a loss of power: `maybe_finalize` raises that, too
    """

    step: int
    bytes: int
    seconds: float
    queue_s: float
    write_s: float
    sync_s: float
    bytes_per_s: float
    durable: bool = True


@dataclass(frozen=True, slots=True)
class SaveAbandoned(Event):
    """The save will not become a step, or this rank will never know.

    by_rank: the rank that gave it up; None if that is unknown
    kind: the type of the error, such as "StorageError"; "Interrupted" if a restart threw an exception into the save,
        "Left" if this rank stopped looking before the save was decided, because its Checkpointer was closed
    cause: the message of the error, shortened
    """

    step: int
    by_rank: int | None
    kind: str
    cause: str


@dataclass(frozen=True, slots=True)
class SnapshotStaged(Event):
    """This rank's share of a snapshot is in shared memory, and training goes on. A save has SaveStaged instead.

    bytes: what was copied
    wait_s: seconds until there was a free slot; in the first one also until there was a plan
    stage_s: seconds that the copy took; with `overlap` until it was begun
    stall_s: seconds that training waited, from the call: `wait_s` and `stage_s`
    """

    step: int
    bytes: int
    wait_s: float
    stage_s: float
    stall_s: float


@dataclass(frozen=True, slots=True)
class Restored(Event):
    """A state was restored: by a Checkpointer, an adapter of a framework, or `Checkpoint.restoring`.

    step: what was restored
    own_memory_bytes: bytes of tensors from this rank's staging memory
    neighbour_memory_bytes: from that of other ranks on this host
    storage_bytes: from storage
    seconds: what the call took
    damaged: newer steps that were tried first and could not be restored
    tier: the farthest place that bytes came from: "own memory", "neighbour memory", "lingering memory" (of an earlier
        start of the job), "memory of another node" or "storage"
    remote_memory_bytes: from the memory of other nodes
    """

    step: int
    own_memory_bytes: int
    neighbour_memory_bytes: int
    storage_bytes: int
    seconds: float
    damaged: tuple[int, ...] = ()
    tier: str = "storage"
    remote_memory_bytes: int = 0


@dataclass(frozen=True, slots=True)
class RestoreFailed(Event):
    """A restore raised.

    step: the step that was asked for, or the one that is named by the error; None if there is none
    kind: the type of the error, such as "CheckpointCorruptError"
    cause: its message, shortened
    seconds: what the call took
    """

    step: int | None
    kind: str
    cause: str
    seconds: float


@dataclass(frozen=True, slots=True)
class Restarted(Event):
    """The function is about to be called again in this process: the saves in flight are decided, the state is restored.

    iteration: the iteration that begins; 1 after the first fault
    seconds: from `fault_time` until now; if that is unknown, since the end of the function
    cause: the first fault: its rank, message and place, shortened
    fault_time: when this rank learned of the fault, in seconds since 1970; None if no `CheckpointAbort` was there
    step: the step that training continues from; None if it starts anew
    fault_class: "user code", "data", "out of memory", "hardware", "network", "storage", "preempted" or "unknown"
    advice: what to do about faults of this class, one sentence
    evidence: further lines: the host of that rank, and what its kernel says
    """

    iteration: int
    seconds: float
    cause: str
    fault_time: float | None
    step: int | None
    fault_class: str = "unknown"
    advice: str = ""
    evidence: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Stopped(Event):
    """Training stops because it was asked to (`PreemptionWatcher`); usually the job is started again later.

    step: after which all ranks stop
    cause: the request, such as "signal SIGTERM"
    """

    step: int
    cause: str


@dataclass(frozen=True, slots=True)
class Closed(Event):
    """The work of this process is done. The last event that a sink gets, when its observation or the process ends.

    Only if the last `Checkpointer` that ended was closed with all its saves decided and without an exception, none is
    open, and no exception ends the observation. Any number of Checkpointers may be closed before. If more events of the
    same process follow, for another observation, it was not the end.
    """


@dataclass(frozen=True, slots=True)
class SectionLate(Event):
    """A section in the background was over its limit, and its writer was killed; SaveAbandoned follows.

    name: the section, such as "ckpt.write"
    seconds: how long it had gone on
    """

    name: str
    seconds: float


@dataclass(frozen=True, slots=True)
class PaceChanged(Event):
    """The interval between saves that a policy of `save_every` wants has changed by a quarter. Of rank 0.

    policy: the policy, such as "Optimal(mtbf=None)"
    interval_s: seconds from the begin of a save to the next
    cost_s: seconds of training that a save takes, as measured
    mtbf_s: estimated seconds between faults
    faults: those that were counted
    """

    policy: str
    interval_s: float
    cost_s: float
    mtbf_s: float
    faults: int


@dataclass(frozen=True, slots=True)
class Retained(Event):
    """Steps were removed after a save, as `keep` says. Of rank 0.

    kept: how many published steps there are now
    removed: these steps are gone
    """

    kept: int
    removed: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class ExportDone(Event):
    """An export beside training has ended. Of rank 0.

    step: what was exported
    target: the path
    seconds: from its start
    """

    step: int
    target: str
    seconds: float


@dataclass(frozen=True, slots=True)
class ExportFailed(Event):
    """An export beside training has failed, or was never begun. Of rank 0.

    step: what was not exported
    target: the path
    cause: why, shortened
    """

    step: int
    target: str
    cause: str


@dataclass(frozen=True, slots=True)
class MirrorDone(Event):
    """A published step was copied to the mirror, and is a step there. Of rank 0.

    step: what was copied
    root: the mirror
    bytes: what was written; less than the step has if an earlier attempt had written some of it
    seconds: from the begin of the copy
    """

    step: int
    root: str
    bytes: int
    seconds: float


@dataclass(frozen=True, slots=True)
class MirrorFailed(Event):
    """A step is not in the mirror, perhaps not yet. Of rank 0.

    step: what was to be copied; None if the mirror cannot be used at all
    root: the mirror
    cause: why, shortened
    again: whether it is tried again; of such failures at most one in a minute is reported
    """

    step: int | None
    root: str
    cause: str
    again: bool


@dataclass(frozen=True, slots=True)
class SnapshotReplicated(Event):
    """The shares of all ranks are complete in the memory of other nodes, as far as known to this rank.

    step: that of the snapshot
    bytes: what this rank has sent of it
    """

    step: int
    bytes: int


@dataclass(frozen=True, slots=True)
class SnapshotNotReplicated(Event):
    """The share of this rank is not on another node; the replicas of the snapshot before stay.

    step: that of the snapshot
    cause: why, shortened
    """

    step: int
    cause: str


@dataclass(frozen=True, slots=True)
class EventsDropped(Event):
    """This sink did not get all events, as it was too slow; comes before the next one that it gets.

    dropped: how many it did not get so far
    """

    dropped: int


def to_document(event: Event) -> dict[str, Any]:
    """Return an event as JSON: ``{"event": "SavePublished", "time": ..., "rank": ..., ...}``."""
    fields = {field.name: getattr(event, field.name) for field in dataclasses.fields(event)}
    return {"event": type(event).__name__, **fields}


def from_document(document: Mapping[str, Any]) -> Event:
    """Return the event that `to_document` made this of; fields of later versions are ignored. ValueError if it is none.

    The types of fields are not checked.
    """
    kind: Any = {kind.__name__: kind for kind in Event.__subclasses__()}.get(str(document.get("event")))
    if kind is None:
        raise ValueError(f"not an event: {document!r:.200}")
    names = [field.name for field in dataclasses.fields(kind)]
    values = {"process": ""} | {name: document[name] for name in names if name in document}
    try:
        event: Event = kind(**{name: tuple(each) if isinstance(each, list) else each for name, each in values.items()})
        return event
    except TypeError as error:
        raise ValueError(f"not an event of the kind {kind.__name__}: {error}") from None
