"""How much of the time of a job was training that counted, from the events that `ckpt.observe` has recorded.

Every moment from the first event to the last is one of these. Where several apply, the first of the list does:

    restoring     from the begin of a restore, also one that fails, to its end, on the ranks together
    restarting    from a fault to the end of the restart in the processes; or, if the processes have died and were
                  started again, from the last event before a restore to that restore
    saving        the stall of each save, on the rank that stalled longest
    lost          from the time at which the restored step was staged to the fault: this work was done again. All work
                  since the first event, if there is no restore, or the step was staged before. Of restores of a process
                  without a save between the last counts; after its last save, without a fault, none does
    requeued      from the end of a run that was asked to stop (`Stopped`) to the first event of the next
    not running   from the end of a run whose processes all said that their work is done (`Closed`), and of which no
                  event follows, to the first event of the next
    training      the rest

    goodput = training / (training + lost + saving + restarting + restoring)

Requeued and not running are pauses, in which the job waited for a scheduler or a person; goodput with the pauses is
training / all time.

A fault is when it was noticed: until then a hang is lost time. The moment at which killed processes died is in no
event, so the time between the last event and the kill counts as restarting, not as lost; goodput is the same. The time
before the first event is not known.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from types import MappingProxyType
from typing import Any

from .output import CannotReadError, duration

Event = Mapping[str, Any]

PAUSES = ("requeued", "not_running")
"""Those of `KINDS` in which the job did not run, and no fault is to blame."""

KINDS = ("restoring", "restarting", "saving", "lost", *PAUSES, "training")
"""What a moment can be, in the order of precedence."""

WORDS = MappingProxyType(
    {
        "training": "training",
        "lost": "lost: done again after a fault",
        "saving": "saving: stalls",
        "restarting": "restarting",
        "restoring": "restoring",
        "requeued": "requeued: stopped when asked to",
        "not_running": "not running: a run had ended",
    }
)
"""What to call each of `KINDS`, in the order of a table."""

_SECONDS = {"SaveStaged": "stall_s", "Restored": "seconds", "RestoreFailed": "seconds", "Restarted": "seconds"}
_MAX_SECONDS = 1e10
_SAVES = ("SaveStarted", "SaveStaged")
_STEPS = ("SaveStarted", "SaveStaged", "SavePublished", "SaveAbandoned", "Restored")


@dataclass(frozen=True)
class Events:
    """Events by time. `skipped` counts lines that are no events, such as the last one of a process that was killed."""

    events: tuple[Event, ...]
    skipped: int


@dataclass(frozen=True)
class Span:
    """The time from `begin` to `end`, in seconds since 1970, and what it was: one of `KINDS`."""

    kind: str
    begin: float
    end: float


@dataclass(frozen=True)
class Goodput:
    """What became of the time of a job: `spans` follow one another without gaps."""

    spans: tuple[Span, ...]

    @property
    def wall_s(self) -> float:
        """From the first event to the last."""
        return self.spans[-1].end - self.spans[0].begin if self.spans else 0.0

    def seconds(self, kind: str) -> float:
        """Return the time of one of `KINDS`."""
        return math.fsum(span.end - span.begin for span in self.spans if span.kind == kind)

    @property
    def ran_s(self) -> float:
        """The time without the pauses."""
        return math.fsum(self.seconds(kind) for kind in KINDS if kind not in PAUSES)

    @property
    def goodput(self) -> float:
        """The part of the time without pauses that was training which counted, from 0 to 1; 0 if there is no time."""
        return self.seconds("training") / self.ran_s if self.ran_s else 0.0

    @property
    def goodput_with_pauses(self) -> float:
        """The part of all time that was training which counted."""
        return self.seconds("training") / self.wall_s if self.wall_s else 0.0

    @property
    def share(self) -> str:
        """The goodput as text; with pauses, both."""
        text = f"{100 * self.goodput:.1f}% of {duration(self.ran_s)}"
        if not any(map(self.seconds, PAUSES)):
            return text
        return f"{text} ({100 * self.goodput_with_pauses:.1f}% of {duration(self.wall_s)} with the pauses)"

    def rows(self) -> list[tuple[str, str, str]]:
        """Return lines of a table: what the time was for, how much it was, and its share."""
        return [
            (about, duration(self.seconds(kind)), f"{100 * self.seconds(kind) / self.wall_s:.1f}%")
            for kind, about in WORDS.items()
            if self.wall_s and (self.seconds(kind) or kind == "training")
        ]

    def document(self) -> dict[str, float]:
        """Return the figures as JSON."""
        times = {f"{kind}_s": self.seconds(kind) for kind in reversed(KINDS)}
        with_pauses = {"goodput_with_pauses": self.goodput_with_pauses}
        return {"goodput": self.goodput, **with_pauses, "wall_s": self.wall_s, **times}


def read_events(paths: Iterable[str]) -> Events:
    """Read files of JSON lines, such as `ckpt.sinks.JsonLines` writes, of all ranks and starts of one job.

    OSError if one cannot be read; CannotReadError if there is no event in any.
    """
    events, skipped, files = [], 0, list(paths)
    for path in files:
        with open(path, encoding="utf-8", errors="replace") as stream:
            for text in stream:
                event = _event(text)
                if event is None:
                    skipped += bool(text.strip())
                else:
                    events.append(event)
    if not events:
        raise CannotReadError(f"{', '.join(files)}: there are no events; write them with ckpt.sinks.JsonLines")
    return Events(tuple(sorted(events, key=lambda event: float(event["time"]))), skipped)


def goodput(events: Sequence[Event]) -> Goodput:
    """Return what became of the time of a job, from the events of all its ranks, by time. See the module."""
    if not events:
        return Goodput(())
    begin = min(_begin(event) for event in events)
    restarts = _merged([(_begin(event), event["time"]) for event in events if event["event"] == "Restarted"])
    stalls = _stalls(events)
    spans = [Span("saving", _begin(event), event["time"]) for event in stalls]
    spans += [Span("restarting", *restart) for restart in restarts]
    spans += [Span("restoring", _begin(event), event["time"]) for event in events if event["event"] == "RestoreFailed"]
    pauses = _pauses(events)
    spans += pauses
    for restores in _restores(events, restarts):
        at, step = _begin(restores[0]), restores[-1]["step"]
        spans += [Span("restoring", _begin(restored), restored["time"]) for restored in restores]
        if _has_ended(events, restores):
            continue
        spans.append(Span("restarting", at, _begin(restores[-1])))
        fault = next((first for first, last in restarts if first <= at <= last), None)
        if fault is None:
            fault = max((event["time"] for event in events if event["time"] <= at), default=begin)
            pause = next((each for each in pauses if each.begin == fault), None)
            spans.append(Span("restarting", fault if pause is None else pause.end, at))
            if pause is not None and step == _newest(stalls, fault):
                continue  # what followed on the last save was to wait for it
        spans.append(Span("lost", min(_worth_until(stalls, step, fault, begin), fault), fault))
    spans += [Span("lost", begin, first) for first, last in restarts if _from_scratch(events, first, last)]
    return Goodput(tuple(_painted(spans, begin, max(event["time"] for event in events))))


def _begin(event: Event) -> float:
    """Return when what an event reports began."""
    return float(event["time"]) - float(event.get(_SECONDS.get(event["event"], ""), 0.0))


def _stalls(events: Sequence[Event]) -> list[Event]:
    """Return the SaveStaged of each save on the rank that stalled longest, by time."""
    saves: list[dict[int, Event]] = []
    open_saves: dict[int, dict[int, Event]] = {}
    for event in events:
        if event["event"] in ("Restored", "Restarted"):
            open_saves = {}  # the same step may be saved again
        elif event["event"] == "SaveStaged":
            save = open_saves.get(event["step"])
            if save is None or event["rank"] in save:
                save = open_saves[event["step"]] = {}
                saves.append(save)
            save[event["rank"]] = event
    return sorted((max(save.values(), key=lambda each: float(each["stall_s"])) for save in saves), key=_begin)


def _worth_until(stalls: Sequence[Event], step: int, fault: float, begin: float) -> float:
    """Return when a step that was restored after a fault had been staged: the work until then is in it."""
    return max((stall["time"] for stall in stalls if stall["step"] == step and stall["time"] <= fault), default=begin)


def _restores(events: Sequence[Event], restarts: Sequence[tuple[float, float]]) -> list[list[Event]]:
    """Return the restores of each process that no save separates: training went on from the last of them.

    Those before it may be of another training, whose weights this one begins with. A restore in a restart follows on
    none.
    """
    found: list[list[Event]] = []
    following: dict[tuple[str, int], list[Event]] = {}
    for event in events:
        key = _process(event), event["rank"]
        if event["event"] in _SAVES:
            following.pop(key, None)
        elif event["event"] == "Restored":
            at = _begin(event)
            if not key[0] or key not in following or any(first <= at <= last for first, last in restarts):
                following[key] = []
                found.append(following[key])
            following[key].append(event)
    return found


def _has_ended(events: Sequence[Event], restores: Sequence[Event]) -> bool:
    """Return whether a process has saved for the last time before these restores, and had no fault since then.

    Then it only looks at what it has saved, as for a test at its end.
    """
    process = _process(restores[0])
    own = [each for each in events if process and _process(each) == process]
    saved = max((each["time"] for each in own if each["event"] in _SAVES), default=None)
    if saved is None or saved > restores[0]["time"]:
        return False
    return not any(each["event"] == "Restarted" and each["time"] > saved for each in own)


def _newest(stalls: Sequence[Event], until: float) -> int | None:
    """Return the step that was staged last."""
    return next((int(stall["step"]) for stall in reversed(stalls) if stall["time"] <= until), None)


def _pauses(events: Sequence[Event]) -> list[Span]:
    """Return the times between runs that have ended by themselves, and the next events.

    A run has ended when all its ranks that had events since its last restore or restart have closed, or stopped. A
    process of which more events follow has not closed.
    """
    pauses: list[Span] = []
    ranks: dict[int, str] = {}  # what each rank of the run did last: "runs", "stopped" or "closed"
    processes: dict[int, str] = {}  # of the ranks, those of which the events say it
    last = {_process(event): number for number, event in enumerate(events)}
    is_stopped, end = False, 0.0
    for number, event in enumerate(events):
        name, rank, process = event["event"], event["rank"], _process(event)
        goes_on = bool(process) and process in processes.values()
        is_next = bool(process) and not goes_on and rank in processes
        begins = name in ("Restored", "RestoreFailed", "Restarted")
        has_ended = bool(ranks) and "runs" not in ranks.values() and not goes_on
        if has_ended and (begins or is_next or "stopped" not in ranks.values()) and name != "Restarted":
            pauses.append(Span("requeued" if is_stopped else "not_running", end, max(end, _begin(event))))
            ranks, is_stopped = {}, False
        elif begins:
            ranks = {}
        if name == "Stopped":
            is_stopped = True
        state = ranks.get(rank, "runs") if processes.get(rank, process) == process else "runs"
        if name == "Stopped":
            state = "stopped"
        elif name == "Closed" and (not process or last[process] == number):
            state = "closed"
        ranks[rank] = state
        if process:
            processes[rank] = process
        end = float(event["time"])
    return pauses


def _process(event: Event) -> str:
    """Return the name of the process of an event; "" if it has none, as in files of earlier versions."""
    return str(event.get("process") or "")


def _from_scratch(events: Sequence[Event], first: float, last: float) -> bool:
    """Return whether training went on after a restart without a restore in it or before the next save."""
    for event in events:
        if event["time"] > first and event["event"] == "Restored":
            return False
        if event["time"] > last and event["event"] in ("SaveStarted", "SaveStaged", "Restarted"):
            return True
    return True


def _merged(ranges: list[tuple[float, float]]) -> list[tuple[float, float]]:
    """Return the union of ranges: those of the ranks of one restart overlap."""
    merged: list[tuple[float, float]] = []
    for first, last in sorted(ranges):
        if merged and first <= merged[-1][1]:
            merged[-1] = merged[-1][0], max(last, merged[-1][1])
        else:
            merged.append((first, last))
    return merged


def _painted(spans: list[Span], begin: float, end: float) -> list[Span]:
    """Return the spans that follow one another from `begin` to `end`: at each moment the first of `KINDS` there."""
    changes = sorted({begin, end, *(at for span in spans for at in (span.begin, span.end) if begin < at < end)})
    starts: dict[float, list[tuple[str, int]]] = {at: [] for at in changes}
    for span in spans:
        first, last = max(span.begin, begin), min(span.end, end)
        if first < last:
            starts[first].append((span.kind, 1))
            starts[last].append((span.kind, -1))
    painted: list[Span] = []
    open_spans = dict.fromkeys(KINDS, 0) | {"training": 1}
    for at, following in pairwise(changes):
        for kind, change in starts[at]:
            open_spans[kind] += change
        kind = next(kind for kind in KINDS if open_spans[kind])
        if painted and painted[-1].kind == kind:
            painted[-1] = Span(kind, painted[-1].begin, following)
        else:
            painted.append(Span(kind, at, following))
    return painted


def _event(text: str) -> Event | None:
    """Return the event of a line; None if it is none, or has not the numbers that are needed of it."""
    try:
        event = json.loads(text)
        name = event["event"]
        seconds = [event["time"], *([event[_SECONDS[name]]] if name in _SECONDS else [])]
        whole = [event["rank"], *([event["step"]] if name in _STEPS else [])]
        possible = all(type(each) in (int, float) and 0 <= each < _MAX_SECONDS for each in seconds)
        if isinstance(name, str) and possible and all(type(each) is int for each in whole):
            return dict(event)
    except (ValueError, KeyError, TypeError, RecursionError):
        pass
    return None
