"""What a trainer and its replica process tell each other, over a packet channel with descriptors.

trainer --- Admit + pidfd, Send + memfd, Abort, Retain, Lend + memfd, ListHeld, GiveUp -▶ replica process
trainer ◀-- Answer, Answer + memfd for each replica held, Ended -------------------------- replica process
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import get_args

from ckpt.keeper.messages import GiveUp
from ckpt.replication.replica import Address, Replica
from inprocess.ipc.packets import Channel, Codec

__all__ = [
    "CODEC",
    "Abort",
    "Admit",
    "Answer",
    "ControlChannel",
    "ControlMessage",
    "Ended",
    "Lend",
    "ListHeld",
    "Retain",
    "Send",
]


@dataclass(frozen=True)
class Answer:
    """The end of the answer to a request; `error` is empty if it was done. `address`: where replicas are received.

    Before that of `ListHeld` there is one with each `replica`, whose memory is sent with it.
    """

    request: int
    error: str = ""
    address: Address | None = None
    replica: Replica | None = None


@dataclass(frozen=True)
class Admit:
    """Serve, at this address, those that know this secret; send with this bandwidth; hold at most so many bytes.

    The pidfd of the trainer is sent with this. When that has died, serve for `linger_s` seconds more.
    """

    request: int
    host: str
    secret: str = field(repr=False)
    bandwidth: float | None
    limit_bytes: int
    linger_s: float


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
    """Drop all replicas but those of these snapshots, and all that was lent."""

    snapshots: list[str]


@dataclass(frozen=True)
class Lend:
    """Let other nodes read the memory that is sent with this."""

    request: int
    replica: Replica


@dataclass(frozen=True)
class ListHeld:
    """List the replicas that are held for others."""

    request: int


ControlMessage = Answer | Admit | Send | Ended | Abort | Retain | Lend | ListHeld | GiveUp
ControlChannel = Channel[ControlMessage]
CODEC: Codec[ControlMessage] = Codec(*get_args(ControlMessage))
