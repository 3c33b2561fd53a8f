"""`TensorBoard`: curves of saves and restores."""

from __future__ import annotations

import os
from typing import Any

from ckpt.events import Event, Restarted, Restored, SaveAbandoned, SavePublished, SaveStaged
from ckpt.sinks.metrics import optional


class TensorBoard:
    """Writes scalars, at the step that they belong to.

    ==============================  ================================================================
    ``ckpt/stall_seconds``          of each save: how long training waited
    ``ckpt/save_seconds``           of each save: from the call until the step was published
    ``ckpt/write_bytes_per_second`` of each save
    ``ckpt/abandoned_saves``        how many there were so far
    ``ckpt/restore_seconds``        of each restore
    ``ckpt/restarts``               how many there were so far, at the step that was restored
    ==============================  ================================================================

    `writer` is a ``torch.utils.tensorboard.SummaryWriter`` (or anything with its `add_scalar`), which stays open; or a
    directory, in which ``{rank}`` is replaced by the rank of the first event. ImportError for a directory without the
    package tensorboard. Mostly rank 0 alone has such a sink.
    """

    def __init__(self, writer: Any) -> None:
        self._directory: str | None = None
        self._writer: Any = writer
        if isinstance(writer, str | os.PathLike):
            self._directory, self._writer = os.fspath(writer), None
            self._make = optional("torch.utils.tensorboard", "tensorboard").SummaryWriter
        self._counts = {"abandoned_saves": 0, "restarts": 0}

    def __call__(self, event: Event) -> None:
        """Write what the event has."""
        match event:
            case SaveStaged():
                self._add(event, event.step, "stall_seconds", event.stall_s)
            case SavePublished():
                self._add(event, event.step, "save_seconds", event.seconds)
                if event.bytes_per_s:
                    self._add(event, event.step, "write_bytes_per_second", event.bytes_per_s)
            case SaveAbandoned():
                self._count(event, event.step, "abandoned_saves")
            case Restored():
                self._add(event, event.step, "restore_seconds", event.seconds)
            case Restarted():
                self._count(event, event.step or 0, "restarts")

    def close(self) -> None:
        """Close the writer, if it was made here. Idempotent."""
        if self._directory is not None and self._writer is not None:
            self._writer.close()
            self._writer = None

    def _count(self, event: Event, step: int, name: str) -> None:
        self._counts[name] += 1
        self._add(event, step, name, self._counts[name])

    def _add(self, event: Event, step: int, name: str, value: float) -> None:
        if self._writer is None and self._directory is not None:
            self._writer = self._make(self._directory.replace("{rank}", str(event.rank)))
        self._writer.add_scalar(f"ckpt/{name}", value, step, walltime=event.time)
