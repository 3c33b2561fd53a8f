"""What a rank and its monitor process tell each other.

Messages are JSON over a SOCK_SEQPACKET pair: one packet is one message. Neither side ever waits for the other to read:
a rank must not stand still because its monitor does.
"""

from __future__ import annotations

import contextlib
import json
import socket
from dataclasses import asdict, dataclass, field, fields
from typing import Any

from inprocess.progress_watchdog import Timestamp

__all__ = [
    "Channel",
    "Configure",
    "Connect",
    "DisableSiblingMonitor",
    "DisableTimeouts",
    "EnableTimeouts",
    "Failed",
    "IterationStart",
    "Leaving",
    "Message",
    "Progress",
    "Started",
    "Terminate",
]

MAX_BYTES = 64 << 10


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

_KINDS: dict[str, type[Message]] = {
    kind.__name__: kind
    for kind in (
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
}


class Channel:
    """One end of the connection. `send` may be called from any thread, `receive` from one."""

    def __init__(self, end: socket.socket) -> None:
        end.setblocking(False)
        self._socket = end

    @staticmethod
    def pair() -> tuple[Channel, socket.socket]:
        """Return this process's end, and the other one to be inherited by the monitor process."""
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        return Channel(ours), theirs

    def fileno(self) -> int:
        return self._socket.fileno()

    def send(self, message: Message) -> bool:
        """Send without waiting. False if the other side is gone, or has not read for long."""
        packet = json.dumps([type(message).__name__, asdict(message)]).encode()
        if len(packet) > MAX_BYTES:
            raise ValueError(f"a {type(message).__name__} of {len(packet)} bytes is longer than {MAX_BYTES}")
        try:
            self._socket.send(packet, socket.MSG_NOSIGNAL)
        except OSError:
            return False
        return True

    def receive(self) -> Message | None:
        """Return the next message; None if there is none yet. EOFError if the other side is gone."""
        try:
            packet = self._socket.recv(MAX_BYTES)
        except BlockingIOError:
            return None
        except OSError as error:
            raise EOFError("the channel is broken") from error
        if not packet:
            raise EOFError("the other side has closed the channel")
        name, values = json.loads(packet)
        kind = _KINDS[name]
        return kind(**{each.name: values[each.name] for each in fields(kind)})

    def close(self) -> None:
        """Close this end. Idempotent."""
        with contextlib.suppress(OSError):
            self._socket.close()


def progress_of(timestamp: Timestamp) -> Progress:
    """Return the message that carries `timestamp`."""
    return Progress(timestamp.auto, timestamp.manual)
