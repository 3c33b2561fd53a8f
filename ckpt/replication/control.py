"""What a trainer and its replica process tell each other, over a packet channel with descriptors.

trainer --- Admit, Send + memfd, Abort, Retain, Lend + memfd, TakeBack, ListHeld, Leave --▶ replica process
trainer ◀-- Listening or CannotListen, Ended, Lent, HeldHere + memfd, EndOfList ----------- replica process
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import get_args

from ckpt.replication.replica import Address, Replica
from inprocess.ipc.packets import Channel, Codec

__all__ = [
    "CODEC",
    "Abort",
    "Admit",
    "CannotListen",
    "ControlChannel",
    "ControlMessage",
    "EndOfList",
    "Ended",
    "HeldHere",
    "Leave",
    "Lend",
    "Lent",
    "ListHeld",
    "Listening",
    "Retain",
    "Send",
    "TakeBack",
]


@dataclass(frozen=True)
class Admit:
    """Serve, at this address, those that know this secret; send with this bandwidth; hold at most so many bytes."""

    request: int
    host: str
    secret: str = field(repr=False)
    bandwidth: float | None
    limit_bytes: int


@dataclass(frozen=True)
class Listening:
    """The answer: the address."""

    request: int
    address: Address


@dataclass(frozen=True)
class CannotListen:
    """The address cannot be used."""

    request: int
    why: str


@dataclass(frozen=True)
class Send:
    """Bring the memory that is sent with this to a holder; `Ended` follows."""

    replica: Replica
    holder: Address
    keep: str | None


@dataclass(frozen=True)
class Ended:
    """A transfer has ended, and its memory is not read any more. `error` is empty if the holder has the replica."""

    replica: Replica
    error: str
    seconds: float


@dataclass(frozen=True)
class Abort:
    """Give up the transfers."""


@dataclass(frozen=True)
class Retain:
    """Drop all replicas but those of these snapshots."""

    snapshots: list[str]


@dataclass(frozen=True)
class Lend:
    """Let other nodes read the memory that is sent with this; `Lent` follows."""

    request: int
    replica: Replica


@dataclass(frozen=True)
class Lent:
    """It can be read."""

    request: int


@dataclass(frozen=True)
class TakeBack:
    """Let nothing more be read that was lent."""


@dataclass(frozen=True)
class ListHeld:
    """Say what is held for others: a `HeldHere` for each, then `EndOfList`."""

    request: int


@dataclass(frozen=True)
class HeldHere:
    """This replica is complete; its memory is sent with this."""

    request: int
    replica: Replica


@dataclass(frozen=True)
class EndOfList:
    """That was all."""

    request: int


@dataclass(frozen=True)
class Leave:
    """End now: what is held is not needed any more."""


ControlMessage = (
    Admit
    | Listening
    | CannotListen
    | Send
    | Ended
    | Abort
    | Retain
    | Lend
    | Lent
    | TakeBack
    | ListHeld
    | HeldHere
    | EndOfList
    | Leave
)
ControlChannel = Channel[ControlMessage]
CODEC: Codec[ControlMessage] = Codec(*get_args(ControlMessage))
