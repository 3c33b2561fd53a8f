"""Events of a rank: a log with times that can be compared across ranks, and marks to wait for.

A line of the log is one write in append mode, so a rank that is killed leaves whole lines. Times are of
CLOCK_MONOTONIC, which is one clock for all processes of a machine.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

_POLL_S = 0.003


@dataclass(frozen=True)
class Event:
    """`process` is the initial rank; `rank` and `world_size` are those of `iteration`."""

    name: str
    time: float
    process: int
    iteration: int
    rank: int | None = None
    world_size: int | None = None
    details: dict[str, Any] = field(default_factory=dict)


class Journal:
    """The log of a rank, as the rank writes it. `folder` is shared by all ranks of a job. Any thread."""

    def __init__(self, folder: Path, process: int) -> None:
        self.folder = folder
        self.process = process
        self._fd = os.open(folder / f"{process}.events", os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC)

    def note(self, name: str, state: Any = None, **details: Any) -> None:
        """Write an event with the current time."""
        event = Event(name, time.monotonic(), self.process, -1, details=details)
        if state is not None:
            event = replace(event, iteration=state.iteration, rank=state.rank, world_size=state.world_size)
        os.write(self._fd, json.dumps(asdict(event)).encode() + b"\n")

    def mark(self, name: str) -> None:
        """Set a mark that all processes see."""
        (self.folder / f"{name}.mark").touch()

    def wait_marks(self, *names: str, timeout_s: float = 20.0) -> None:
        """Wait for marks, in bytecode."""
        files = [str(self.folder / f"{name}.mark") for name in names]
        wait_until(lambda: all(os.path.exists(file) for file in files), f"the marks {names}", timeout_s)


def read_events(folder: Path, process: int) -> list[Event]:
    """Return what one rank has written so far."""
    file = folder / f"{process}.events"
    lines = file.read_text().splitlines() if file.exists() else []
    return [Event(**json.loads(line)) for line in lines]


def wait_until(condition: Callable[[], Any], what: str, timeout_s: float = 20.0) -> None:
    """Wait until `condition()` holds; AssertionError if it does not in time."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() > deadline:
            raise AssertionError(f"waited {timeout_s:g} s for {what}")
        time.sleep(_POLL_S)
