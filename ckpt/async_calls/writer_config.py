"""The priorities and time limits of writer processes."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

__all__ = ["WriterConfig", "with_priorities"]


@dataclass(frozen=True)
class WriterConfig:
    """How writer processes are run. Times are in seconds.

    `nice` is added to the trainer's own niceness. `io_class` and `io_level` are the Linux I/O priority; None does not
    change it. `start_timeout_s` bounds the start of a writer, `close_timeout_s` its end. A writer that runs a call and
    reports no progress (`WriterContext.progress`) for `writer_timeout_s` is killed; None: no limit.
    """

    nice: int = 10
    io_class: Literal["best-effort", "idle"] | None = "best-effort"
    io_level: int = 7
    start_timeout_s: float = 60.0
    close_timeout_s: float = 60.0
    writer_timeout_s: float | None = None


def with_priorities(config: WriterConfig, nice: int | None, io_class: int | None) -> WriterConfig:
    """Return the config with other priorities; None keeps one as it is.

    `io_class` is a scheduling class of Linux: 0 does not change it, 2 is best-effort, 3 idle. ValueError for any other
    (with 1, realtime, checkpoints would precede all other I/O), and for a negative `nice`.
    """
    if nice is not None:
        if nice < 0:
            raise ValueError(f"the priority of writers cannot be above the trainer's: {nice} is negative")
        config = replace(config, nice=nice)
    match io_class:
        case None:
            return config
        case 0:
            return replace(config, io_class=None)
        case 2:
            return replace(config, io_class="best-effort")
        case 3:
            return replace(config, io_class="idle")
    raise ValueError(f"io_priority must be 0, 2 or 3 (unchanged, best-effort, idle), not {io_class}")
