"""The messages between the writer of a rank and a holder of replicas, over one connection.

client                                            holder
          ◀── PROTOCOL, nonce ───────────────────
          ─── nonce, proof ─────────────────────▶
          ◀── proof ─────────────────────────────
either    ─── Store ────────────────────────────▶
          ◀── Go, or Refused ────────────────────
          ─── all blocks of the replica ──────────▶
          ◀── Stored, or Refused ────────────────
or        ─── List ─────────────────────────────▶
          ◀── Held for each replica, End ──────────
or, any   ─── Read ─────────────────────────────▶
number    ◀── Go and all blocks, or Refused ─────

message := length (4 bytes, big-endian) JSON of a dataclass (see `inprocess.ipc.packets`)
block   := length (4 bytes) CRC-32C (4 bytes) bytes
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import get_args

from ckpt.replication.replica import Replica
from inprocess.ipc.packets import Codec

__all__ = ["CODEC", "PROTOCOL", "End", "Go", "Held", "List", "Message", "Read", "Refused", "Store", "Stored"]

PROTOCOL = b"ckpt replicas 01"


@dataclass(frozen=True)
class Store:
    """Blocks of this replica follow. Keep replicas of this snapshot and of `keep`, and drop others."""

    replica: Replica
    keep: str | None


@dataclass(frozen=True)
class List:
    """Say which replicas are complete."""


@dataclass(frozen=True)
class Read:
    """Send these bytes of a replica."""

    replica: Replica
    offset: int
    nbytes: int


@dataclass(frozen=True)
class Go:
    """The request is accepted."""


@dataclass(frozen=True)
class Stored:
    """The replica is complete, and its checksums are right."""


@dataclass(frozen=True)
class Refused:
    """The request was not done, and why."""

    why: str


@dataclass(frozen=True)
class Held:
    """The holder has this replica complete."""

    replica: Replica


@dataclass(frozen=True)
class End:
    """There are no more replicas."""


Message = Store | List | Read | Go | Stored | Refused | Held | End
CODEC: Codec[Message] = Codec(*get_args(Message))
