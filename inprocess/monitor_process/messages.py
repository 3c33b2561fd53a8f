"""The messages between monitor processes, the ranks they watch, the wrapper and the launcher.

    to a monitor, from the process that starts it    WatchRank or ServeRanks; answered by Started or RequestFailed
      from a rank's wrapper, on the same channel     Connect, IterationStart, Progress, ...; not answered
    to a monitor's socket, from a rank               Init, AttachBoard, then Confirm
      from another monitor                           QueryStanding
    to a monitor's control socket, from a launcher   SetCycle, CloseConnection, Shutdown
    to a launcher's inbox, from a rank               InboxItem

Each is one packet (see `inprocess.ipc.packets`). Requests to a socket are answered by Ok or RequestFailed. A rank never
waits until its monitor reads.
"""

from __future__ import annotations

import os
import socket
import sys
from dataclasses import dataclass, field
from typing import Any, get_args

from inprocess.ipc.packets import Channel, Codec
from inprocess.rank_environment import scheduled_ranks


@dataclass(frozen=True)
class RankInfo:
    """The identity of a rank's process. `local_rank` is -1 if it is unknown."""

    global_rank: int
    local_rank: int
    host: str
    pid: int

    @classmethod
    def get_for_current_rank(cls) -> RankInfo:
        """Describe this process: its rank in the default process group, else RANK, else that of the scheduler.

        ValueError if there is none of these. Does not import torch: if it is not imported there is no process group.
        """
        distributed, scheduled = sys.modules.get("torch.distributed"), scheduled_ranks()
        if distributed is not None and distributed.is_available() and distributed.is_initialized():
            rank = int(distributed.get_rank())
        elif (text := os.environ.get("RANK")) is not None:
            rank = int(text)
        elif scheduled is not None:
            rank = scheduled.rank
        else:
            raise ValueError("the rank is unknown: there is no default process group, and RANK is not set")
        local_rank = os.environ.get("LOCAL_RANK") or (None if scheduled is None else scheduled.local_rank)
        return cls(rank, -1 if local_rank is None else int(local_rank), socket.gethostname(), os.getpid())


# -- the first message and its answers ---------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class WatchRank:
    """Watch the rank of an in-process wrapper, whose process starts the monitor. Times in seconds.

    `stack_signal` makes the rank write its stacks to `stacks_fd`. `sections_fd` is the section board. Both descriptors
    are inherited.
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
    stacks_fd: int | None = None
    sections_fd: int | None = None

    @property
    def inherited_fds(self) -> tuple[int, ...]:
        """The descriptors that the monitor process inherits."""
        return tuple(fd for fd in (self.stacks_fd, self.sections_fd) if fd is not None)


@dataclass(frozen=True, slots=True)
class ServeRanks:
    """Watch ranks of a launcher, which connect to sockets: one rank at a time at each path. Times in seconds.

    `settings` are given to each rank. `slot_wait_s` is how long a rank waits until the one before it has ended.
    `neighbors` are the paths of other monitors of the node, which are asked where their ranks are when one is late.
    """

    paths: list[str]
    neighbors: list[str]
    settings: dict[str, Any]
    slot_wait_s: float
    check_interval_s: float
    restart_check_interval_s: float
    health_check_interval_s: float
    checks_network_ports: bool
    termination_signal: int
    termination_grace_s: float
    logs_restarts: bool
    log_level: int


@dataclass(frozen=True, slots=True)
class Started:
    """The monitor runs; `control_path` is the socket on which it listens to its launcher."""

    control_path: str | None = None


@dataclass(frozen=True, slots=True)
class RequestFailed:
    """The answer to what did not work."""

    cause: str


@dataclass(frozen=True, slots=True)
class Ok:
    """The answer to a request that worked. To `Init`: the settings. To `QueryStanding`: a `Standing`, or nothing."""

    values: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Shutdown:
    """From the wrapper: the call is over. From the launcher: end."""


# -- from a wrapper ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Connect:
    """All ranks have met: open the store described by `store`. From `iteration` on they count on this rank."""

    store: dict[str, Any] = field(repr=False)
    iteration: int = 0


@dataclass(frozen=True, slots=True)
class IterationStart:
    """The iteration begins on this rank: both progress limits start anew."""

    rank: int
    world_size: int
    iteration: int


@dataclass(frozen=True, slots=True)
class Progress:
    """The latest timestamps of the progress watchdog."""

    auto: float | None
    manual: float | None


@dataclass(frozen=True, slots=True)
class DisableSiblingMonitor:
    """The iteration is over: watch no other rank until the next begins."""


@dataclass(frozen=True, slots=True)
class DisableTimeouts:
    """Ignore both progress limits."""


@dataclass(frozen=True, slots=True)
class EnableTimeouts:
    """Enforce both progress limits again."""


@dataclass(frozen=True, slots=True)
class Leaving:
    """The rank leaves the job: that the others go on without it is no reason to end it.

    Once it has `reported` that to the others, its end need not be reported for it.
    """

    reported: bool


# -- to a monitor's sockets --------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Init:
    """A rank's first message: who it is. With a descriptor, if it writes its stacks there on `stack_signal`.

    `again`: the client was connected before, and the connection broke. `client` is different for each client.
    """

    rank: RankInfo
    stack_signal: int | None = None
    again: bool = False
    client: str = ""


@dataclass(frozen=True, slots=True)
class AttachBoard:
    """A rank's second message, with the descriptor of its board."""


@dataclass(frozen=True, slots=True)
class Confirm:
    """Read the board, and confirm that it has at least this many events."""

    events: int


@dataclass(frozen=True, slots=True)
class QueryStanding:
    """Another monitor, whose rank is late and will be killed, asks where the rank of this monitor is."""


@dataclass(frozen=True, slots=True)
class CloseConnection:
    """The launcher has stopped its workers: end the session, for the next worker."""


@dataclass(frozen=True, slots=True)
class SetCycle:
    """The launcher's number of the present cycle, for the log."""

    cycle: int


@dataclass(frozen=True, slots=True)
class EndWithLauncher:
    """End this process, the worker of the monitor's rank and the leader of its group, when the launcher dies."""

    pid: int


# -- to a launcher's inbox ---------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class InboxItem:
    """An object for a `fault_tolerance.IpcConnector`, as JSON values."""

    value: Any


Message = (
    WatchRank
    | ServeRanks
    | Started
    | RequestFailed
    | Ok
    | Shutdown
    | Connect
    | IterationStart
    | Progress
    | DisableSiblingMonitor
    | DisableTimeouts
    | EnableTimeouts
    | Leaving
    | Init
    | AttachBoard
    | Confirm
    | QueryStanding
    | CloseConnection
    | SetCycle
    | EndWithLauncher
    | InboxItem
)
MonitorChannel = Channel[Message]
CODEC: Codec[Message] = Codec(*get_args(Message))
