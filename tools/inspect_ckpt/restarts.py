"""The restarts of a job in its processes: why each happened, from the events that `ckpt.observe` has recorded."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from .goodput import Event
from .output import plural


@dataclass(frozen=True)
class Restart:
    """A restart at `time`, in seconds since 1970, that began an iteration: its cause, and what to do about it."""

    time: float
    iteration: str
    fault_class: str
    cause: str
    advice: str
    evidence: str

    @property
    def at(self) -> str:
        """The local time."""
        return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(self.time))

    def document(self) -> dict[str, Any]:
        """Return the values as JSON knows them."""
        return asdict(self)


def of_lowest_rank(events: Sequence[Event], name: str) -> list[Event]:
    """Return the events of a kind, of the lowest rank that has any."""
    found = [event for event in events if event["event"] == name]
    lowest = min((event["rank"] for event in found), default=0)
    return [event for event in found if event["rank"] == lowest]


def restarts_of(events: Sequence[Event]) -> list[Restart]:
    """Return the restarts, the oldest first; events of earlier versions have no class, and are "unknown"."""
    return [
        Restart(
            float(event["time"]),
            str(event.get("iteration", "")),
            str(event.get("fault_class") or "unknown"),
            str(event.get("cause") or ""),
            str(event.get("advice") or ""),
            "; ".join(map(str, evidence if isinstance(evidence := event.get("evidence"), list) else ())),
        )
        for event in of_lowest_rank(events, "Restarted")
    ]


def summary(restarts: Sequence[Restart]) -> str:
    """Return how many restarts there were of each class, the most frequent one first."""
    classes = Counter(restart.fault_class for restart in restarts)
    parts = ", ".join(f"{number} {name}" for name, number in classes.most_common())
    return f"{plural(len(restarts), 'restart')}: {parts}"
