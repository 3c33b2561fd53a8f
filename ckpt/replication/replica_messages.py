"""The messages of a replica process: with its trainer, over a packet channel, and with its peers, over TCP.

trainer                                           replica process
          --- Admit + pidfd ----------------------▶
          ◀-- Notice: the port, Answer -----------
          --- Send + memory ----------------------▶  to a holder, until DropRegion gives it up
          ◀-- Answer, when that has ended ---------
          --- Held + memory ----------------------▶  for others to read, until Retain
          ◀-- Answer ------------------------------
          --- List --------------------------------▶
          ◀-- Held + memory for each, Answer -------
          --- Retain, GiveUp ----------------------▶

client                                            holder
          ◀── PROTOCOL, nonce ────────────────────
          ─── nonce, proof ──────────────────────▶
          ◀── proof ──────────────────────────────
either    ─── StoreReplica ──────────────────────▶
          ◀── Answer ─────────────────────────────
          ─── all blocks of the replica ─────────▶
          ◀── Answer ─────────────────────────────
or        ─── List ──────────────────────────────▶
          ◀── Held for each replica, Answer ──────
or, any   ─── Read ──────────────────────────────▶
number    ◀── Answer, and all blocks ─────────────

A client is the replica process of another rank, or its trainer. Over TCP:

message := length (4 bytes, big-endian) signature JSON of a dataclass (see `inprocess.ipc.packets`)
block   := length (4 bytes) CRC-32C (4 bytes) bytes
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import get_args

from ckpt.keeper.messages import DropRegion, GiveUp, Notice
from ckpt.replication.replica import Address, Replica
from inprocess.ipc.packets import Channel, Codec

__all__ = [
    "CONTROL",
    "PEERS",
    "PROTOCOL",
    "Admit",
    "Answer",
    "ControlChannel",
    "ControlMessage",
    "Held",
    "List",
    "PeerMessage",
    "Read",
    "Retain",
    "Send",
    "StoreReplica",
]

PROTOCOL = b"ckpt replicas 03"


@dataclass(frozen=True)
class Answer:
    """The end of the answer to the request with this number. `error` is empty if it is accepted, or done."""

    number: int
    error: str = ""


@dataclass(frozen=True)
class Held:
    """The sender has this replica complete. Where memory can be sent with it, the receiver may read it there.

    `number` is that of the request: this one, or the `List` that it answers.
    """

    number: int
    replica: Replica


@dataclass(frozen=True)
class List:
    """List the complete replicas that are held for others."""

    number: int


# -- of trainers -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Admit:
    """Serve, at this address, those that know this secret; send with this bandwidth; hold at most so many bytes.

    The pidfd of the trainer is sent with this. When that has died, serve for `linger_s` seconds more.
    """

    number: int
    host: str
    secret: str = field(repr=False)
    bandwidth: float | None
    limit_bytes: int
    linger_s: float


@dataclass(frozen=True)
class Send:
    """Bring the memory that is sent with this to a holder. The answer says that it is not read any more.

    The key of the memory is the snapshot of the replica.
    """

    number: int
    replica: Replica
    holder: Address
    keep: str | None


@dataclass(frozen=True)
class Retain:
    """Drop all replicas but those of these snapshots, and all that was lent."""

    snapshots: list[str]


ControlMessage = Answer | Notice | Held | List | Admit | Send | DropRegion | Retain | GiveUp
ControlChannel = Channel[ControlMessage]
CONTROL: Codec[ControlMessage] = Codec(*get_args(ControlMessage))


# -- of peers ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class StoreReplica:
    """Blocks of this replica follow. Keep replicas of this snapshot and of `keep`, and drop others."""

    number: int
    replica: Replica
    keep: str | None


@dataclass(frozen=True)
class Read:
    """Send these bytes of a replica."""

    number: int
    replica: Replica
    offset: int
    nbytes: int


PeerMessage = Answer | Held | List | StoreReplica | Read
PEERS: Codec[PeerMessage] = Codec(*get_args(PeerMessage))
