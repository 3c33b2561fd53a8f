"""`events.jsonl`: one line per restart, next to the log file of the monitor processes.

Written by the lowest surviving rank. Each line is one write in append mode, so lines of several writers do not mix.
"""

from __future__ import annotations

import json
import logging
import os
import time
from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from pathlib import Path

from inprocess.attribution import InterruptionRecord, cause_of
from inprocess.fault_classes import FaultClass

__all__ = ["RestartClock", "RestartEvents"]

_log = logging.getLogger(__name__)


_ENDED = ("outcome", "last_call", "aborted", "thrown", "acknowledged")
_ORDER = (*_ENDED, "release", "finalize", "health", "barrier", "end")


class RestartClock:
    """When this rank entered each phase of one restart."""

    def __init__(self) -> None:
        self._since: dict[str, float] = {}

    def note(self, phase: str, at: float | None) -> None:
        """Note that the phase began at this time of `time.monotonic`; None if it was skipped."""
        if at is not None:
            self._since[phase] = at

    def seconds(self) -> dict[str, float]:
        """Return how long each phase took, and the total until now."""
        steps = [(phase, self._since[phase]) for phase in _ORDER if phase in self._since]
        seconds = {phase: later - at for (phase, at), (_, later) in pairwise(steps)}
        return {**seconds, "total": time.monotonic() - steps[0][1] if steps else 0.0}

    def clear(self) -> None:
        """Forget this restart."""
        self._since.clear()


class RestartEvents:
    """Appends to ``events.jsonl`` in the directory of `logfile`; does nothing if that is None."""

    def __init__(self, logfile: str | None) -> None:
        self._path = None if logfile is None else Path(logfile).parent / "events.jsonl"

    def restarted(
        self,
        *,
        iteration: int,
        records: Sequence[InterruptionRecord],
        terminated_ranks: Iterable[int],
        world_size: tuple[int, int],
        seconds: Mapping[str, float],
        pause_s: float = 0.0,
        flight_recorder: Iterable[str] = (),
    ) -> None:
        """Write that `iteration` was interrupted: why, which ranks are lost, and how long each phase took on this rank.

        `pause_s` is how long the ranks wait before the next iteration, `flight_recorder` are the files that torch's
        recorder of collectives has written.
        """
        event = {
            "event": "restart",
            "iteration": iteration,
            **_why(records),
            "terminated_ranks": sorted(terminated_ranks),
            "world_size_before": world_size[0],
            "world_size_after": world_size[1],
            "seconds": {name: round(value, 6) for name, value in seconds.items()},
            "pause_s": pause_s,
            "flight_recorder": list(flight_recorder),
        }
        self._append(event)

    def gave_up(self, rank: int | None, iteration: int, records: Sequence[InterruptionRecord], why: str) -> None:
        """Write that the job ends after `iteration`, because faults came back too often. Only rank 0 writes."""
        if rank == 0:
            self._append({"event": "gave_up", "iteration": iteration, **_why(records), "why": why})

    def node_unfit(self, host: str, cycle: int, failed: Mapping[str, str], fault_class: FaultClass) -> None:
        """Write that a node takes no part in `cycle` of its launcher, or leaves: which checks have failed, and why."""
        what = {"event": "node_unfit", "host": host, "cycle": cycle, "fault_class": fault_class.value}
        self._append({**what, "failed": dict(failed)})

    def _append(self, event: Mapping[str, object]) -> None:
        """Write a line. An error of writing is only logged."""
        if self._path is None:
            return
        event = {"time": time.time(), **event}
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            fd = os.open(self._path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)
            try:
                os.write(fd, json.dumps(event).encode() + b"\n")
            finally:
                os.close(fd)
        except OSError as error:
            _log.error("cannot write %s: %s", self._path, error)


def _why(records: Sequence[InterruptionRecord]) -> dict[str, object]:
    cause = cause_of(records)
    reasons = [record.document() for record in records]
    return {"cause": None if cause is None else cause.document(), "reasons": reasons}
