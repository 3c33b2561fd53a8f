"""What a transport of replicas between nodes has to do. Implemented over TCP in `tcp.py`."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from types import TracebackType
from typing import Self

from ckpt.replication.limiter import Limiter
from ckpt.replication.memory import ReplicaMemory
from ckpt.replication.replica import Address, Piece, Replica

__all__ = ["RemoteHolder", "Server", "Transport"]


class Server(ABC):
    """Lets other processes store replicas in a `ReplicaMemory`, and read them. Any thread."""

    @property
    @abstractmethod
    def address(self) -> Address:
        """Where it listens."""

    @abstractmethod
    def close(self) -> None:
        """End all connections, and the threads that serve them. Idempotent."""


class RemoteHolder(ABC):
    """A connection to a holder, to read from it. A context manager, for one thread."""

    @abstractmethod
    def replicas(self) -> list[Replica]:
        """Return what the holder has complete. TransportError."""

    @abstractmethod
    def read_into(self, replica: Replica, offset: int, memory: memoryview) -> None:
        """Fill `memory` with bytes of a replica, from `offset` on, verified on arrival. TransportError."""

    @abstractmethod
    def close(self) -> None:
        """End the connection. Idempotent."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class Transport(ABC):
    """Moves replicas between the nodes of one job. Every wait has a deadline. Any thread, several at once.

    Both ends prove that they belong to the job before anything else is read from a connection.
    """

    @abstractmethod
    def serve(self, memory: ReplicaMemory) -> Server:
        """Listen, and return the server. OSError if the address cannot be used."""

    @abstractmethod
    def store(
        self, holder: Address, replica: Replica, pieces: Sequence[Piece], *, keep: str | None, limiter: Limiter
    ) -> None:
        """Bring a replica to a holder; on return the holder has it complete and verified.

        The bytes must not change meanwhile; if they do, the holder may refuse them. The holder keeps replicas of the
        snapshot `keep` and of this one only. Meanwhile the limiter decides how fast it goes, and whether it goes on.
        TransportError if the holder does not have the replica; it then has what it had before of the snapshot `keep`.
        """

    @abstractmethod
    def open(self, holder: Address) -> RemoteHolder:
        """Connect to a holder, to read. TransportError."""
