"""The journal that a rank writes while it works, and that the judge reads.

A line is one write in append mode to a file of the process, so a rank that is killed leaves whole lines. Times are of
CLOCK_MONOTONIC, which is one clock in all network namespaces of a machine.
"""

from __future__ import annotations

import json
import os
import time
from dataclasses import asdict, dataclass
from pathlib import Path


@dataclass(frozen=True)
class Line:
    """One event of a process.

    `process` is the initial rank; `rank` and `world_size` are those of `iteration`, None outside of one. `event` is
    "begin", "step", "end", the name of a phase of a restart, "done", or "left" and the name of an exception. `members`
    is in lines of steps: the initial ranks that took part, bit by bit, as the step itself has found out.
    """

    time: float
    pid: int
    process: int
    event: str
    iteration: int = -1
    rank: int | None = None
    world_size: int | None = None
    members: int | None = None


class Journal:
    """The journal of a rank, as the rank writes it. `folder` is shared by all ranks of a job. Any thread."""

    def __init__(self, folder: Path, process: int) -> None:
        self.folder = folder
        self.process = process
        self._fd = os.open(folder / f"{process}.journal", os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC)

    def note(
        self,
        event: str,
        iteration: int = -1,
        rank: int | None = None,
        world_size: int | None = None,
        members: int | None = None,
    ) -> None:
        """Write an event with the current time."""
        line = Line(time.monotonic(), os.getpid(), self.process, event, iteration, rank, world_size, members)
        os.write(self._fd, json.dumps(asdict(line)).encode() + b"\n")


def read_journals(folder: Path) -> list[Line]:
    """Return all lines that the ranks of a job have written so far, in the order of time."""
    lines = [
        Line(**json.loads(text)) for file in folder.glob("*.journal") for text in file.read_text().splitlines() if text
    ]
    return sorted(lines, key=lambda line: line.time)
