"""What is replicated, from where, to where."""

from __future__ import annotations

from dataclasses import dataclass

from ckpt.errors import CheckpointError
from inprocess.ipc.shared_memory import SharedMemory

__all__ = ["Address", "Piece", "Replica", "TransportError"]


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
