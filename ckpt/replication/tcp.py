"""The transport over TCP; and the sender, which has the newest replica sent when the one before has ended."""

from __future__ import annotations

import ipaddress
import itertools
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from types import TracebackType
from typing import Self

from ckpt.replication.connection import BlockError, Connection, Limiter
from ckpt.replication.held_replicas import ReplicaMemory
from ckpt.replication.replica import (
    Address,
    Answer,
    PeerMessage,
    Piece,
    Read,
    Replica,
    StoreReplica,
    TransportError,
)
from ckpt.replication.tcp_server import TcpServer
from inprocess.ipc.packets import PacketError
from inprocess.ipc.threads import JoinableThread

SILENCE_S = 30.0
_FIRST = 1  # the number of the first request of a connection
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
            connection.send(StoreReplica(_FIRST, replica, keep))
            _check(connection.receive(self._silence_s + replica.nbytes / _FAULTED_IN_PER_S), _FIRST)
            for piece in pieces:
                connection.send_piece(piece, limiter)
            _check(connection.receive(), _FIRST)

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
        self._numbers = itertools.count(_FIRST)  # of requests

    def read_into(self, replica: Replica, offset: int, memory: memoryview) -> None:
        """Fill `memory` with bytes of a replica, from `offset` on, verified on arrival. TransportError."""
        with _failures_of(self._address):
            for start in range(0, len(memory), _READ_BYTES):
                part = memory[start : start + _READ_BYTES]
                number = next(self._numbers)
                self._connection.send(Read(number, replica, offset + start, len(part)))
                _check(self._connection.receive(), number)
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


def _check(message: PeerMessage, number: int) -> None:
    """Raise unless a message says that a request is accepted, or done."""
    if not isinstance(message, Answer) or message.number != number:
        raise PacketError(f"{message!r:.200} instead of the answer to request {number}")
    if message.error:
        raise _RefusedError(message.error)


@contextmanager
def _failures_of(holder: Address) -> Iterator[None]:
    """Turn every failure of a connection into a TransportError."""
    try:
        yield
    except (OSError, PacketError, BlockError, _RefusedError) as error:
        raise TransportError(f"the holder of replicas at {holder}: {error}") from error


# -- one transfer after the other --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Transfer:
    """A replica to be sent to a holder, which keeps the snapshot `keep` beside it."""

    replica: Replica
    pieces: tuple[Piece, ...]
    holder: Address
    keep: str | None


@dataclass(frozen=True)
class Sent:
    """A transfer has ended: the holder has the replica, or `error`, which is empty then, says why not.

    One that a newer one replaced before it had begun has ended, too.
    """

    replica: Replica
    error: str


class Sender:
    """Has one transfer in flight and at most one that waits, which a newer one replaces.

    `ended` is called with the outcome of every transfer, in the thread of the sender or of the caller of `submit`. For
    one thread.
    """

    def __init__(self, transport: TcpTransport, bandwidth: float | None, ended: Callable[[Sent], None]) -> None:
        self._transport = transport
        self._ended = ended
        self._bandwidth = bandwidth
        self._limiter = Limiter(bandwidth)  # of the transfer in flight
        self._changed = threading.Condition()
        self._waiting: Transfer | None = None
        self._in_flight: Replica | None = None  # or the last one
        self._closing = False
        self._thread = JoinableThread(self._run, "ckpt-replicas-send")
        self._thread.start()

    def submit(self, transfer: Transfer) -> None:
        """Send a replica as soon as the one in flight has ended. Its memory must stay as it is until `ended`."""
        with self._changed:
            replaced, self._waiting = self._waiting, transfer
            self._changed.notify_all()
        if replaced is not None:
            self._ended(Sent(replaced.replica, "superseded by a newer one before it was sent"))

    def give_up(self, replica: Replica) -> None:
        """Send this replica no further, whether it is in flight or waits."""
        with self._changed:
            waits = self._waiting is not None and self._waiting.replica == replica
            if waits:
                self._waiting = None
            elif self._in_flight == replica:
                self._limiter.stop()
        if waits:
            self._ended(Sent(replica, "given up before it was sent"))

    def close(self) -> None:
        """Give up what is in flight, and end the thread. Idempotent."""
        with self._changed:
            self._closing = True
            self._limiter.stop()
            self._changed.notify_all()
        self._thread.join()

    def _run(self) -> None:
        while (transfer := self._next()) is not None:
            self._ended(Sent(transfer.replica, self._send(transfer)))

    def _next(self) -> Transfer | None:
        with self._changed:
            self._changed.wait_for(lambda: self._closing or self._waiting is not None)
            transfer, self._waiting = self._waiting, None
            if self._closing or transfer is None:
                return None
            self._in_flight = transfer.replica
            self._limiter = Limiter(self._bandwidth)  # an earlier one may be stopped
            return transfer

    def _send(self, transfer: Transfer) -> str:
        """Return why the holder does not have the replica; an empty text if it has."""
        limiter = self._limiter  # only this thread replaces it
        try:
            self._transport.store(
                transfer.holder, transfer.replica, transfer.pieces, keep=transfer.keep, limiter=limiter
            )
        except TransportError as error:
            return "given up by this rank" if limiter.is_stopped else str(error)
        return ""
