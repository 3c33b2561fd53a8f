"""Sends one replica after the other, in a thread: the newest that waits, when the one before has ended."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass

from ckpt.replication.limiter import Limiter
from ckpt.replication.replica import Address, Piece, Replica, TransportError
from ckpt.replication.tcp import TcpTransport
from inprocess.ipc.threads import JoinableThread

__all__ = ["Sender", "Sent", "Transfer"]


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
