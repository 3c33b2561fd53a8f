"""A part writer that kills its trainer, itself or both when the save is at a chosen point.

Runs in writer processes: imports neither torch nor pytest.
"""

import os
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any

from ckpt.async_calls import WriterContext, current
from ckpt.saving.part import PartPlan
from ckpt.saving.publish import PartFile
from ckpt.saving.write import PartWriter
from ckpt.storage.chunk_codec import WrittenChunk
from ckpt.storage.chunk_writers import ChunkJob, DirectChunkWriter
from ckpt.storage.commit import Outcome, PendingSave

__all__ = ["KillingWriter", "wait_until"]


def wait_until(condition: Callable[[], Any], what: str, timeout_s: float = 20.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, f"waited {timeout_s:g} s for {what}"
        time.sleep(0.002)


@dataclass
class KillingWriter(PartWriter):
    """`victims` ("trainer", "writer", both or none) die at `point`. The coordinator's writer of a save in which the
    part of another rank is there, and its fate open, waits for `hold` or for the decision of somebody else."""

    point: str = ""
    victims: tuple[str, ...] = ()
    trainer_pid: int = 0
    hold: str = ""
    running: WriterContext | None = None  # not `current()`: that is another one in every thread

    @classmethod
    def instead_of(cls, writer: PartWriter, **more: Any) -> "KillingWriter":
        return cls(**{field.name: getattr(writer, field.name) for field in fields(writer)}, **more)

    def strike(self, point: str) -> None:
        if point != self.point:
            return
        self.point = ""
        if "trainer" in self.victims:
            os.kill(self.trainer_pid, signal.SIGKILL)
            assert self.running is not None
            wait_until(self.running.trainer_gone, "the trainer to die")
        if self.hold and self.victims != ("writer",):
            open(self.hold, "w").close()
        if "writer" in self.victims:
            os.kill(os.getpid(), signal.SIGKILL)

    def __call__(self) -> None:
        self.running = current()
        self.strike("after staging")
        super().__call__()

    def _write(self, pending: PendingSave, plan: PartPlan) -> tuple[list[WrittenChunk], dict[str, float]]:
        original = DirectChunkWriter.write

        def write(writer: DirectChunkWriter, job: ChunkJob) -> WrittenChunk:
            written = original(writer, job)
            self.strike("during write")
            return written

        DirectChunkWriter.write = write  # type: ignore[method-assign]
        try:
            return super()._write(pending, plan)
        finally:
            DirectChunkWriter.write = original  # type: ignore[method-assign]

    def _decide(self, pending: PendingSave, plan: PartPlan, part: PartFile) -> Outcome:
        if self.rank == 0 and self.victims and self.point == "before publish":
            everyone = set(range(plan.world_size))
            wait_until(lambda: pending.parts_present() >= everyone, "all parts")
        if self.rank == 0 and not self.victims and self.hold:
            wait_until(lambda: os.path.exists(self.hold) or pending.outcome() is not None, "the other rank's fate")
        self.strike("before publish")
        outcome = super()._decide(pending, plan, part)
        self.strike("after publish")
        return outcome
