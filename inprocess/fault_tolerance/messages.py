"""The messages between rank, monitor and launcher. Each is one packet (see `inprocess.ipc.packets`)."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from inprocess.fault_tolerance.data import RankInfo
from inprocess.ipc.packets import Codec

__all__ = [
    "CODEC",
    "Attach",
    "CloseConnection",
    "Confirm",
    "Failed",
    "Init",
    "Item",
    "Look",
    "Message",
    "Ok",
    "SetCycle",
    "Shutdown",
]


@dataclass(frozen=True, slots=True)
class Init:
    """Rank to monitor, first: who it is. With a descriptor, if it answers `read_stacks` on `stack_signal`.

    `again`: the client was connected before, and has lost the connection.
    """

    rank: RankInfo
    stack_signal: int | None = None
    again: bool = False


@dataclass(frozen=True, slots=True)
class Attach:
    """Rank to monitor, second: here is the descriptor of the board."""


@dataclass(frozen=True, slots=True)
class Confirm:
    """Rank to monitor: look at the board; answered when that was done and it had at least so many events."""

    events: int


@dataclass(frozen=True, slots=True)
class Look:
    """Monitor to monitor, first and last: mine is late and will be killed; where does the rank stand that you watch?"""


@dataclass(frozen=True, slots=True)
class Ok:
    """The answer to everything that worked. To `Init`: the settings. To `Look`: a `Standing`, or nothing."""

    values: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Failed:
    """The answer to what did not work."""

    cause: str


@dataclass(frozen=True, slots=True)
class CloseConnection:
    """Launcher to monitor: its workers have been stopped; make room for the next one."""


@dataclass(frozen=True, slots=True)
class Shutdown:
    """Launcher to monitor: end."""


@dataclass(frozen=True, slots=True)
class SetCycle:
    """Launcher to monitor: the number of the present cycle, for its log."""

    cycle: int


@dataclass(frozen=True, slots=True)
class Item:
    """To an `IpcConnector`: an object of `data`, or of JSON types, in the form that `to_json` returns."""

    value: Any


Message = Init | Attach | Confirm | Look | Ok | Failed | CloseConnection | Shutdown | SetCycle | Item
CODEC: Codec[Message] = Codec(Init, Attach, Confirm, Look, Ok, Failed, CloseConnection, Shutdown, SetCycle, Item)
