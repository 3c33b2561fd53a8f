"""The messages between the replica process of a rank, or its trainer, and a holder of replicas, over one connection.

client                                            holder
          ◀── PROTOCOL, nonce ────────────────────
          ─── nonce, proof ──────────────────────▶
          ◀── proof ──────────────────────────────
either    ─── Store ─────────────────────────────▶
          ◀── Confirmed, or Refused ──────────────
          ─── all blocks of the replica ─────────▶
          ◀── Confirmed, or Refused ──────────────
or        ─── List ──────────────────────────────▶
          ◀── Held for each replica, Confirmed ───
or, any   ─── Read ──────────────────────────────▶
number    ◀── Confirmed and all blocks, or Refused

message := length (4 bytes, big-endian) JSON of a dataclass (see `inprocess.ipc.packets`)
block   := length (4 bytes) CRC-32C (4 bytes) bytes
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import get_args

from ckpt.replication.replica import Replica
from inprocess.ipc.packets import Codec

__all__ = ["CODEC", "PROTOCOL", "Confirmed", "Held", "List", "Message", "Read", "Refused", "Store"]

PROTOCOL = b"ckpt replicas 02"


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
class Confirmed:
    """The request is accepted, and blocks may follow; or the replica is complete, or the list."""


@dataclass(frozen=True)
class Refused:
    """The request was not done, and why."""

    why: str


@dataclass(frozen=True)
class Held:
    """The holder has this replica complete."""

    replica: Replica


Message = Store | List | Read | Confirmed | Refused | Held
CODEC: Codec[Message] = Codec(*get_args(Message))
