"""How writer processes are run and how long anybody waits for them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

__all__ = ["WriterConfig"]


@dataclass(frozen=True)
class WriterConfig:
    """One object for the whole layer. Times are seconds.

    `nice` is added to the trainer's own niceness. `io_class` and `io_level` are the Linux I/O priority; None leaves it
    alone. `start_timeout_s` bounds the start of a writer, `close_timeout_s` its end. A writer that runs a call and
    reports no progress (`WriterContext.progress`) for `writer_timeout_s` is killed; None waits for ever.
    """

    nice: int = 10
    io_class: Literal["best-effort", "idle"] | None = "best-effort"
    io_level: int = 7
    start_timeout_s: float = 60.0
    close_timeout_s: float = 60.0
    writer_timeout_s: float | None = None
