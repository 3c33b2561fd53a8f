"""The replica process of a rank: sends its staged bytes to another node, and holds those of a rank there.

    channel to the trainer ──▶ main thread ──▶ Sender (a thread) ══▶ replica process of the holder
                                    └────────▶ server (threads) ◀══▶ replica processes of others

It is started by `process`, with one end of the channel. When its trainer dies it goes on serving for a while: others
may restore from what it holds. When its trainer leaves, it ends at once. The end of the trainer is seen by its pidfd,
too: children that it forked may have the channel.
"""

from __future__ import annotations

import contextlib
import ctypes
import logging
import os
import select
import signal
import socket
import sys
import time
from collections import deque

from ckpt.replication.control import (
    CODEC,
    Abort,
    Admit,
    CannotListen,
    ControlChannel,
    ControlMessage,
    Ended,
    EndOfList,
    HeldHere,
    Leave,
    Lend,
    Lent,
    Listening,
    ListHeld,
    Retain,
    Send,
    TakeBack,
)
from ckpt.replication.interface import Server
from ckpt.replication.memory import ReplicaMemory
from ckpt.replication.replica import Piece, Replica, TransportError
from ckpt.replication.sender import Sender, Sent, Transfer
from ckpt.replication.tcp import TcpTransport
from inprocess.ipc.packets import Packet
from inprocess.ipc.shared_memory import SharedMemory
from inprocess.ipc.wakeup import Wakeup

__all__ = ["ReplicaProcess", "main"]

_log = logging.getLogger("ckpt")
_PR_SET_NAME = 15
_NICE = 10  # as a writer
_WHY_CHARACTERS = 1000


class ReplicaProcess:
    """The loop, in the main thread of the process. `linger_s`: how long it serves without its trainer."""

    def __init__(self, channel: ControlChannel, trainer: int, linger_s: float) -> None:
        """`trainer` is a pidfd."""
        self._channel = channel
        self._trainer = trainer
        self._linger_s = linger_s
        self._memory = ReplicaMemory(0)
        self._server: Server | None = None
        self._sender: Sender | None = None
        self._wake = Wakeup()
        self._sent: deque[Sent] = deque()  # filled by the sender's thread
        self._sending: dict[Replica, tuple[SharedMemory, float]] = {}

    def run(self) -> None:
        """Serve the trainer until it leaves; if it dies, serve others for a while."""
        try:
            if self._serve_trainer():
                self._linger()
        finally:
            self._close_transport()
            self._memory.close()
            for region, _ in self._sending.values():
                region.close()
            self._wake.close()
            self._channel.close()
            os.close(self._trainer)

    def _serve_trainer(self) -> bool:
        """Return when the trainer is gone: whether it ended without `Leave`."""
        poll, trainer = select.poll(), select.poll()
        poll.register(self._wake, select.POLLIN)
        for each in (poll, trainer):
            each.register(self._trainer, select.POLLIN)
        while True:
            is_dead = bool(trainer.poll(0))  # before the channel is read, so that no message is missed
            self._channel.flush()
            try:
                while (packet := self._channel.receive()) is not None:
                    if isinstance(packet.message, Leave):
                        return False
                    self._handle(packet)
            except EOFError:
                return True
            if is_dead:
                return True
            self._report()
            poll.register(self._channel, self._channel.poll_events)
            poll.poll()  # no deadline: the trainer's death ends it
            self._wake.clear()

    def _linger(self) -> None:
        """Let others read. What this rank was sending is given up: its trainer is dead."""
        if self._sender is not None:
            self._sender.abort()
        if self._server is not None:
            time.sleep(self._linger_s)

    def _report(self) -> None:
        while self._sent:
            sent = self._sent.popleft()
            region, begin = self._sending.pop(sent.replica)
            region.close()
            self._channel.send(Ended(sent.replica, (sent.error or "")[:_WHY_CHARACTERS], time.monotonic() - begin))

    def _handle(self, packet: Packet[ControlMessage]) -> None:
        match packet.message, packet.fds:
            case Admit() as admit, ():
                self._channel.send(self._admit(admit))
            case Send() as send, (fd,):
                self._send(send, SharedMemory(fd, send.replica.nbytes, "ckpt-slot", send.replica.snapshot))
            case Abort(), () if self._sender is not None:
                self._sender.abort()
            case Retain(snapshots), ():
                self._memory.retain(snapshots)
            case Lend(request, replica), (fd,):
                region = SharedMemory(fd, replica.nbytes, "ckpt-slot", replica.snapshot)
                try:
                    self._memory.lend(replica, region)
                except TransportError:  # what is there was verified on arrival, and serves as well
                    region.close()
                self._channel.send(Lent(request))
            case TakeBack(), ():
                self._memory.take_back()
            case ListHeld(request), ():
                self._list_held(request)
            case _:
                packet.close_fds()

    def _admit(self, admit: Admit) -> ControlMessage:
        """Begin to serve, or go on with another secret at another port: who has not got that one is cut off."""
        self._close_transport()
        self._report()
        self._memory.limit_bytes = admit.limit_bytes
        try:
            transport = TcpTransport(admit.host, admit.secret)
            self._server = transport.serve(self._memory)
        except (OSError, ValueError) as error:
            return CannotListen(admit.request, f"{admit.host}: {error}"[:_WHY_CHARACTERS])
        self._sender = Sender(transport, admit.bandwidth, self._ended)
        return Listening(admit.request, self._server.address)

    def _send(self, send: Send, region: SharedMemory) -> None:
        replica = send.replica
        if self._sender is None or replica in self._sending:
            region.close()
            self._channel.send(Ended(replica, "it is being sent already, or nothing can be sent", 0.0))
            return
        self._sending[replica] = region, time.monotonic()
        self._sender.submit(Transfer(replica, (Piece(region, 0, replica.nbytes),), send.holder, send.keep))

    def _ended(self, sent: Sent) -> None:
        """Note the end of a transfer. Runs in the thread of the sender, too."""
        self._sent.append(sent)
        self._wake.set()

    def _list_held(self, request: int) -> None:
        for replica in self._memory.replicas():
            with contextlib.suppress(TransportError), self._memory.reading(replica) as region:
                self._channel.send(HeldHere(request, replica), region.fd)
        self._channel.send(EndOfList(request))

    def _close_transport(self) -> None:
        sender, server, self._sender, self._server = self._sender, self._server, None, None
        if sender is not None:
            sender.close()
        if server is not None:
            server.close()


def main(fd: int, trainer: int, linger_s: float) -> None:
    """Run the process; `fd` is its end of the channel, `trainer` a pidfd."""
    for ignored in (signal.SIGINT, signal.SIGTERM):  # as writers do: what it holds is for after the end of a trainer
        signal.signal(ignored, signal.SIG_IGN)
    ctypes.CDLL(None).prctl(_PR_SET_NAME, b"ckpt-replicas", 0, 0, 0)
    with contextlib.suppress(OSError):
        os.nice(_NICE)
    ReplicaProcess(ControlChannel(socket.socket(fileno=fd), CODEC), trainer, linger_s).run()
    with contextlib.suppress(Exception):
        sys.stderr.flush()
    os._exit(0)


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3]))
