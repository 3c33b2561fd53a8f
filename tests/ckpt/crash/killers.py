"""A writer that kills its trainer, itself or both when the save is at a chosen point.

Runs in writer processes: imports neither torch nor pytest.
"""

import functools
import os
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from ckpt.async_calls import AsyncRequest
from ckpt.saving.publish import PartFile
from ckpt.saving.task import WriteTask
from ckpt.saving.write import ShareWriter
from ckpt.storage.commit import Abandoned, Published
from ckpt.storage.pack_writers import FileJob, PackWriter, WrittenFile


def wait_until(condition: Callable[[], Any], what: str, timeout_s: float = 40.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, f"waited {timeout_s:g} s for {what}"
        time.sleep(0.002)


@dataclass(frozen=True)
class Strike:
    """`victims` ("trainer", "writer", both or none) die at `point`.

    The coordinator's writer of a save in which the part of another rank is there, and its fate open, waits for the file
    `hold` or for the decision of another process.
    """

    point: str = ""
    victims: tuple[str, ...] = ()
    trainer_pid: int = 0
    hold: str = ""


class KillingWriter(ShareWriter):
    """Strikes once."""

    def __init__(self, task: WriteTask, strike: Strike) -> None:
        super().__init__(task)
        self.at = strike
        self.has_struck = False

    def strike(self, point: str) -> None:
        if point != self.at.point or self.has_struck:
            return
        self.has_struck = True
        if "trainer" in self.at.victims:
            os.kill(self.at.trainer_pid, signal.SIGKILL)
            assert self.context is not None
            wait_until(self.context.trainer_left, "the trainer to die")
        if self.at.hold and self.at.victims != ("writer",):
            open(self.at.hold, "w").close()
        if "writer" in self.at.victims:
            os.kill(os.getpid(), signal.SIGKILL)

    def run(self) -> None:
        self.strike("after staging")
        super().run()

    def _write(self) -> tuple[list[WrittenFile], dict[str, float]]:
        original = PackWriter.write

        def write(writer: PackWriter, job: FileJob) -> WrittenFile:
            written = original(writer, job)
            self.strike("during write")
            return written

        PackWriter.write = write  # type: ignore[method-assign]
        try:
            return super()._write()
        finally:
            PackWriter.write = original  # type: ignore[method-assign]

    def _decide(self, part: PartFile) -> Published | Abandoned:
        pending, hold, is_coordinator = self.pending, self.at.hold, self.task.rank == 0
        if is_coordinator and self.at.victims and self.at.point == "before publish" and not self.has_struck:
            everyone = set(range(self.plan.world_size))
            wait_until(lambda: pending.parts_present() >= everyone, "all parts")
        if is_coordinator and not self.at.victims and hold:
            wait_until(lambda: os.path.exists(hold) or pending.outcome() is not None, "the other rank's fate")
        self.strike("before publish")
        outcome = super()._decide(part)
        self.strike("after publish")
        return outcome


def with_writer(request: AsyncRequest, kind: type[KillingWriter] = KillingWriter, **strike: Any) -> AsyncRequest:
    """The request of a save, which another kind of writer runs in the writer process."""
    handle: Any = request.async_fn
    handle.in_writer = functools.partial(_run, kind, handle.task, Strike(**strike))
    return request


def _run(kind: type[KillingWriter], task: WriteTask, strike: Strike) -> None:
    kind(task, strike).run()
