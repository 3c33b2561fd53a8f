"""Two mounts of one directory, and jobs on them."""

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

import ckpt
from tests.ckpt.crash.killers import KillingWriter, wait_until, with_writer

ELEMENTS = 300_000  # several files


@dataclass(frozen=True)
class Mounts:
    """`folder` itself, two mounts of it (the second writes slowly), and one that is read-only."""

    folder: Path
    one: Path
    two: Path
    read_only: Path


def state_of(value: float) -> dict[str, Any]:
    return {"w": torch.full((ELEMENTS,), value), "v": torch.full((ELEMENTS,), value), "number": value}


def value_of(state: dict[str, Any]) -> float:
    """Return the value of all elements of the state."""
    values = {*state["w"].unique().tolist(), *state["v"].unique().tolist(), state["number"]}
    assert len(values) == 1, f"of several steps: {values}"
    return float(values.pop())


class Held(KillingWriter):
    """A save that waits at a point for the file `hold`: "write" is before this rank's part, "decide" after it.

    The file ``<hold>.<point>.<rank>`` shows that it waits.
    """

    def _write(self) -> Any:
        self._wait("write")
        return super()._write()

    def _decide(self, part: Any) -> Any:
        self._wait("decide")
        return super()._decide(part)

    def _wait(self, point: str) -> None:
        if self.at.point != point:
            return
        open(f"{self.at.hold}.{point}.{self.task.rank}", "w").close()
        wait_until(lambda: os.path.exists(self.at.hold), "the signal to go on", 60)

    def strike(self, point: str) -> None:
        """Do nothing: no process is killed."""


def held(checkpointer: ckpt.Checkpointer, value: float, step: int, point: str, hold: Path) -> None:
    """Schedule a save that waits at `point`."""
    request = checkpointer.save_request(state_of(value), step)
    checkpointer.queue.schedule_async_request(with_writer(request, Held, point=point, hold=str(hold)))


def wait_for(path: Path, what: str) -> None:
    wait_until(path.exists, what, 30)
