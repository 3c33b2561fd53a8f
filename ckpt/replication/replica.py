"""Replicas of snapshots on other nodes, each rank keeping as many as the others; and the messages about them.

Those of a replica process with its trainer go over a packet channel, those with its peers over TCP:

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
or, any   ─── Read ──────────────────────────────▶
number    ◀── Answer, and all blocks ─────────────

A client is the replica process of another rank, or its trainer. Over TCP:

message := length (4 bytes, big-endian) signature JSON of a dataclass (see `inprocess.ipc.packets`)
block   := length (4 bytes) CRC-32C (4 bytes) bytes
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from typing import get_args

from ckpt.errors import CheckpointError
from ckpt.keeper.messages import DropRegion, GiveUp, Notice
from inprocess.ipc.packets import Channel, Codec
from inprocess.ipc.shared_memory import SharedMemory


class TransportError(CheckpointError):
    """A replica was not stored, or cannot be read: the message says by which holder and why."""


@dataclass(frozen=True)
class Replica:
    """The name of what one rank has staged of one snapshot: `nbytes` bytes. `rank` is its number in that snapshot.

    The first `slot_bytes` are those of a slot, the others the documents behind it.
    """

    snapshot: str
    rank: int
    slot_bytes: int
    nbytes: int


@dataclass(frozen=True)
class Address:
    """Where a holder listens."""

    host: str
    port: int

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


@dataclass(frozen=True)
class Piece:
    """A range of shared memory. The bytes of a replica are those of its pieces, one behind the other."""

    region: SharedMemory
    offset: int
    nbytes: int


def buddies(places: Sequence[Hashable]) -> list[int | None]:
    """Return for each rank the one that holds its replica, never one at the same place; None for all at one place.

    `places` says where each rank is: its node, or what else fails as a whole, such as its rack. The ranks are put into
    a ring, place by place in the order of their first ranks, and a rank's buddy is as many ranks further as the largest
    place has. So each rank holds exactly one replica, with nodes of one size those of the node before. Where one
    place has more than half of all ranks, the others hold their replicas evenly.
    """
    members: dict[Hashable, list[int]] = {}
    for rank, place in enumerate(places):
        members.setdefault(place, []).append(rank)
    if len(members) < 2:
        return [None] * len(places)
    ring = [rank for ranks in members.values() for rank in ranks]
    largest = max(members.values(), key=len)
    result: list[int | None] = [None] * len(places)
    if 2 * len(largest) <= len(ring):
        for position, rank in enumerate(ring):
            result[rank] = ring[(position + len(largest)) % len(ring)]
        return result
    others = [rank for rank in ring if places[rank] != places[largest[0]]]
    for position, rank in enumerate(largest):
        result[rank] = others[position % len(others)]
    for position, rank in enumerate(others):
        result[rank] = largest[position]
    return result


# -- messages ----------------------------------------------------------------------------------------------------------


PROTOCOL = b"ckpt replicas 03"


@dataclass(frozen=True)
class Answer:
    """The end of the answer to the request with this number. `error` is empty if it is accepted, or done."""

    number: int
    error: str = ""


# -- of trainers -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Held:
    """The sender has this replica complete, and the receiver may read it in the memory that is sent with this.

    `number` is that of the request: this one, or the `List` that it answers.
    """

    number: int
    replica: Replica


@dataclass(frozen=True)
class List:
    """List the complete replicas that are held for others."""

    number: int


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


PeerMessage = Answer | StoreReplica | Read
PEERS: Codec[PeerMessage] = Codec(*get_args(PeerMessage))
