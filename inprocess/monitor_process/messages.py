"""The messages between a rank and its monitor process.

Each is one packet (see `inprocess.ipc.packets`). Neither side ever waits until the other reads: a rank must not stop
because its monitor does.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from inprocess.ipc.packets import Channel, Codec
from inprocess.progress_watchdog import Timestamp

__all__ = [
    "CODEC",
    "Configure",
    "Connect",
    "DisableSiblingMonitor",
    "DisableTimeouts",
    "EnableTimeouts",
    "Failed",
    "IterationStart",
    "Leaving",
    "Message",
    "MonitorChannel",
    "Progress",
    "Started",
    "Terminate",
]


@dataclass(frozen=True, slots=True)
class Configure:
    """The first message: whom to watch, and how. Times in seconds.

    The stacks of the rank are asked for with signal number `stack_signal`. `sections_fd` is the inherited descriptor of
    the section board.
    """

    target_pid: int
    initial_rank: int
    initial_world_size: int
    soft_timeout_s: float
    hard_timeout_s: float
    heartbeat_interval_s: float
    heartbeat_timeout_s: float
    barrier_timeout_s: float
    termination_grace_s: float
    interval_s: float
    logfile: str | None = None
    pidfile: str | None = None
    log_level: int = 10
    stack_signal: int | None = None
    sections_fd: int | None = None


@dataclass(frozen=True, slots=True)
class Started:
    """The monitor's answer: it runs."""

    pid: int


@dataclass(frozen=True, slots=True)
class Failed:
    """The monitor's answer: it cannot run."""

    message: str


@dataclass(frozen=True, slots=True)
class Connect:
    """All ranks are there: open the store described by `store`. From `iteration` on they count on this rank."""

    store: dict[str, Any] = field(repr=False)
    iteration: int = 0


@dataclass(frozen=True, slots=True)
class Progress:
    """A timestamp of the progress watchdog."""

    auto: float | None
    manual: float | None


@dataclass(frozen=True, slots=True)
class IterationStart:
    """Iteration `iteration` begins on this rank; both timeouts start anew."""

    rank: int
    world_size: int
    iteration: int


@dataclass(frozen=True, slots=True)
class DisableSiblingMonitor:
    """The iteration is over: watch nobody until the next begins."""


@dataclass(frozen=True, slots=True)
class DisableTimeouts:
    """Ignore soft and hard timeout."""


@dataclass(frozen=True, slots=True)
class EnableTimeouts:
    """Watch soft and hard timeout again."""


@dataclass(frozen=True, slots=True)
class Leaving:
    """This rank takes no part any more and has said so itself: nothing is to be said when it ends."""


@dataclass(frozen=True, slots=True)
class Terminate:
    """The call is over."""


Message = (
    Configure
    | Started
    | Failed
    | Connect
    | Progress
    | IterationStart
    | DisableSiblingMonitor
    | DisableTimeouts
    | EnableTimeouts
    | Leaving
    | Terminate
)

MonitorChannel = Channel[Message]
CODEC: Codec[Message] = Codec(
    Configure,
    Started,
    Failed,
    Connect,
    Progress,
    IterationStart,
    DisableSiblingMonitor,
    DisableTimeouts,
    EnableTimeouts,
    Leaving,
    Terminate,
)


def progress_of(timestamp: Timestamp) -> Progress:
    """Return the message that carries `timestamp`."""
    return Progress(timestamp.auto, timestamp.manual)
