"""The transport over TCP."""

from __future__ import annotations

import ipaddress
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from types import TracebackType
from typing import Self

from ckpt.replication.connection import BlockError, Connection
from ckpt.replication.limiter import Limiter
from ckpt.replication.memory import ReplicaMemory
from ckpt.replication.messages import Confirmed, Held, List, Message, Read, Refused, Store
from ckpt.replication.replica import Address, Piece, Replica, TransportError
from ckpt.replication.tcp_server import TcpServer
from inprocess.ipc.packets import PacketError

__all__ = ["SILENCE_S", "RemoteHolder", "TcpTransport"]

SILENCE_S = 30.0
_READ_BYTES = 64 << 20  # of one request
_FAULTED_IN_PER_S = 256 << 20  # bytes; a holder with new memory is faster than that


class TcpTransport:
    """Moves replicas between the nodes of one job. Every wait has a deadline. Any thread, several at once.

    Listens at `host`, an address of this node and no wider; `secret` is that of the job: both ends prove that they know
    it before anything else is read from a connection. A peer that moves less than a block in `silence_s` is given up.
    """

    def __init__(self, host: str, secret: str, silence_s: float = SILENCE_S) -> None:
        """ValueError if `host` is no address, or that of all interfaces, or if the secret is too short."""
        if ipaddress.ip_address(host).is_unspecified:
            raise ValueError(f"{host} is every address of this node: replicas are received at one that is named")
        if len(secret) < 32:
            raise ValueError("the secret of a job has at least 32 characters")
        self._host = host
        self._secret = secret
        self._silence_s = silence_s

    def serve(self, memory: ReplicaMemory) -> TcpServer:
        """Listen, and return the server. OSError if the address cannot be used."""
        return TcpServer(self._host, self._secret, self._silence_s, memory)

    def store(
        self, holder: Address, replica: Replica, pieces: Sequence[Piece], *, keep: str | None, limiter: Limiter
    ) -> None:
        """Bring a replica to a holder; on return the holder has it complete and verified.

        The bytes must not change meanwhile; if they do, the holder may refuse them. The holder keeps replicas of the
        snapshot `keep` and of this one only. Meanwhile the limiter decides how fast it goes, and whether it goes on.
        TransportError if the holder does not have the replica; it then has what it had before of the snapshot `keep`.
        """
        if replica.nbytes != sum(piece.nbytes for piece in pieces):
            raise ValueError(f"the pieces do not have the {replica.nbytes} bytes of the replica")
        with (
            _failures_of(holder),
            closing(Connection.to(holder, self._silence_s)) as connection,
            limiter.stopping(connection.shut),
        ):
            connection.connect(holder)
            connection.greet_holder(self._secret)
            connection.send(Store(replica, keep))
            _expect(Confirmed, connection.receive(self._silence_s + replica.nbytes / _FAULTED_IN_PER_S))
            for piece in pieces:
                connection.send_piece(piece, limiter)
            _expect(Confirmed, connection.receive())

    def open(self, holder: Address) -> RemoteHolder:
        """Connect to a holder, to read. TransportError."""
        with _failures_of(holder):
            connection = Connection.to(holder, self._silence_s)
            try:
                connection.connect(holder)
                connection.greet_holder(self._secret)
            except BaseException:
                connection.close()
                raise
            return RemoteHolder(holder, connection)


class RemoteHolder:
    """A connection to a holder, to read from it. A context manager, for one thread."""

    def __init__(self, address: Address, connection: Connection) -> None:
        self._address = address
        self._connection = connection

    def replicas(self) -> list[Replica]:
        """Return the complete replicas of the holder. TransportError."""
        found = []
        with _failures_of(self._address):
            self._connection.send(List())
            while not isinstance(message := self._connection.receive(), Confirmed):
                _expect(Held, message)
                assert isinstance(message, Held)
                found.append(message.replica)
        return found

    def read_into(self, replica: Replica, offset: int, memory: memoryview) -> None:
        """Fill `memory` with bytes of a replica, from `offset` on, verified on arrival. TransportError."""
        with _failures_of(self._address):
            for start in range(0, len(memory), _READ_BYTES):
                part = memory[start : start + _READ_BYTES]
                self._connection.send(Read(replica, offset + start, len(part)))
                _expect(Confirmed, self._connection.receive())
                if not self._connection.receive_blocks(part):
                    raise BlockError("a checksum is wrong: bytes changed on the way")

    def close(self) -> None:
        """End the connection. Idempotent."""
        self._connection.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class _RefusedError(Exception):
    """The holder refuses the request."""


def _expect(kind: type[Message], message: Message) -> None:
    if isinstance(message, Refused):
        raise _RefusedError(message.why)
    if not isinstance(message, kind):
        raise PacketError(f"{type(message).__name__} instead of {kind.__name__}")


@contextmanager
def _failures_of(holder: Address) -> Iterator[None]:
    """Turn every failure of a connection into a TransportError."""
    try:
        yield
    except (OSError, PacketError, BlockError, _RefusedError) as error:
        raise TransportError(f"the holder of replicas at {holder}: {error}") from error
