"""Messages between rank, monitor and launcher: JSON in packets of SOCK_SEQPACKET unix sockets.

    packet   := [name of the kind, {field: value}]

A packet is one message, whole or not at all: there is no length that could be wrong and no half message. Whatever is
not a message of this schema is a `WireError` and costs its sender the connection. Nothing is ever executed or
unpickled.
"""

from __future__ import annotations

import json
import os
import socket
from dataclasses import asdict, dataclass, field, fields
from typing import Any

from inprocess.fault_tolerance.data import (
    HeartbeatTimeouts,
    RankInfo,
    SectionTimeouts,
    WorkloadAction,
    WorkloadControlRequest,
)

__all__ = [
    "MAX_BYTES",
    "Attach",
    "CloseConnection",
    "Confirm",
    "Failed",
    "Init",
    "Item",
    "Look",
    "Message",
    "Ok",
    "Packet",
    "SetCycle",
    "Shutdown",
    "WireError",
    "receive",
    "send",
]

MAX_BYTES = 128 << 10
_MOST_FDS = 4


class WireError(ValueError):
    """A packet is no message of this schema."""


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
    """To an `IpcConnector`: an object made of JSON's types, tuples and the dataclasses of `data`."""

    value: Any


Message = Init | Attach | Confirm | Look | Ok | Failed | CloseConnection | Shutdown | SetCycle | Item
_KINDS = (Init, Attach, Confirm, Look, Ok, Failed, CloseConnection, Shutdown, SetCycle, Item)
_TYPES: dict[str, tuple[type, ...]] = {
    "rank": (dict,),
    "stack_signal": (int, type(None)),
    "events": (int,),
    "values": (dict,),
    "cause": (str,),
    "cycle": (int,),
    "again": (bool,),
}
_TAG = "__kind__"


@dataclass(frozen=True, slots=True)
class Packet:
    """A message with the descriptors that came with it; whoever gets it closes them."""

    message: Message
    fds: tuple[int, ...] = ()

    def close_fds(self) -> None:
        """Close the descriptors. Once."""
        for fd in self.fds:
            os.close(fd)


def encode(message: Message) -> bytes:
    """Return the packet of a message. WireError if it is too large or holds what JSON does not know."""
    if isinstance(message, Item):
        values: dict[str, Any] = {"value": _tagged(message.value)}
    else:
        values = asdict(message)
    try:
        packet = json.dumps([type(message).__name__, values]).encode()
    except (TypeError, ValueError) as error:
        raise WireError(f"a {type(message).__name__} cannot be sent: {error}") from error
    if len(packet) > MAX_BYTES:
        raise WireError(f"a {type(message).__name__} of {len(packet)} bytes; the limit is {MAX_BYTES}")
    return packet


def decode(packet: bytes) -> Message:
    """Return the message of a packet. WireError if it is none."""
    try:
        name, values = json.loads(packet)
        kind = {kind.__name__: kind for kind in _KINDS}[name]
        if kind is Item:
            return Item(_untagged(values["value"]))
        arguments = {item.name: values[item.name] for item in fields(kind)}
        for key, value in arguments.items():
            if type(value) not in _TYPES[key]:
                raise WireError(f"{key} of {name} is a {type(value).__name__}")
        if kind is Init:
            arguments["rank"] = _rank_info(arguments["rank"])
        return kind(**arguments)
    except WireError:
        raise
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise WireError(f"no message of this protocol: {packet[:80]!r}") from error


def _rank_info(values: dict[str, Any]) -> RankInfo:
    return RankInfo(int(values["global_rank"]), int(values["local_rank"]), str(values["host"]), int(values["pid"]))


def _tagged(value: Any) -> Any:
    """Return an object in JSON's types. WireError for anything a connector does not carry."""
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, list):
        return [_tagged(item) for item in value]
    if isinstance(value, tuple):
        return {_TAG: "tuple", "items": [_tagged(item) for item in value]}
    if isinstance(value, dict) and _TAG not in value and all(isinstance(key, str) for key in value):
        return {key: _tagged(item) for key, item in value.items()}
    if isinstance(value, RankInfo):
        return {_TAG: "RankInfo", **asdict(value)}
    if isinstance(value, WorkloadControlRequest):
        return {_TAG: "WorkloadControlRequest", "action": value.action.value, "description": value.description}
    if isinstance(value, WorkloadAction):
        return {_TAG: "WorkloadAction", "action": value.value}
    if isinstance(value, HeartbeatTimeouts | SectionTimeouts):
        return {_TAG: type(value).__name__, "value": value.to_json()}
    raise WireError(f"a {type(value).__name__} cannot be sent; send JSON types or the dataclasses of `data`")


def _untagged(value: Any) -> Any:
    if isinstance(value, list):
        return [_untagged(item) for item in value]
    if not isinstance(value, dict):
        return value
    match value.get(_TAG):
        case None:
            return {key: _untagged(item) for key, item in value.items()}
        case "tuple":
            return tuple(_untagged(item) for item in value["items"])
        case "RankInfo":
            return _rank_info(value)
        case "WorkloadControlRequest":
            return WorkloadControlRequest(WorkloadAction(value["action"]), str(value["description"]))
        case "WorkloadAction":
            return WorkloadAction(value["action"])
        case "HeartbeatTimeouts":
            return HeartbeatTimeouts.from_json(value["value"])
        case "SectionTimeouts":
            return SectionTimeouts.from_json(value["value"])
    raise WireError(f"no object of this protocol: {str(value)[:80]}")


# -- packets -----------------------------------------------------------------------------------------------------------


def send(end: socket.socket, message: Message, fds: tuple[int, ...] = ()) -> None:
    """Send one packet, as patiently as the socket's timeout says. OSError, WireError."""
    packet = encode(message)
    if fds:
        socket.send_fds(end, [packet], list(fds), socket.MSG_NOSIGNAL)
    else:
        end.send(packet, socket.MSG_NOSIGNAL)


def receive(end: socket.socket) -> Packet:
    """Receive one packet. EOFError at the end, WireError for what is no message, OSError as the socket says."""
    data, fds, flags, _ = socket.recv_fds(end, MAX_BYTES, _MOST_FDS, socket.MSG_CMSG_CLOEXEC)
    try:
        if flags & (socket.MSG_TRUNC | socket.MSG_CTRUNC):
            raise WireError(f"a packet of more than {MAX_BYTES} bytes or {_MOST_FDS} descriptors")
        if not data:
            raise EOFError("the other side has closed the connection")
        return Packet(decode(data), tuple(fds))
    except BaseException:
        for fd in fds:
            os.close(fd)
        raise
