"""The replica process of a rank: sends its staged bytes to another node, and holds those of a rank there.

    channel to the trainer ──▶ main thread ──▶ Sender (a thread) ══▶ replica process of the holder
                                    └────────▶ server (threads) ◀══▶ replica processes of others

It is a worker of the keeper, ordered by `replica_process`. When its trainer dies it goes on serving for a while:
others may restore from what it holds. When its trainer leaves, it ends at once. The end of the trainer is seen by its
pidfd, too: children that it forked may have the channel. When this process is killed, the keeper has the memory of
what it held, and the next one goes on with that."""

from __future__ import annotations

import contextlib
import logging
import os
import select
import socket
import time
from collections import deque

from ckpt.keeper.forking import let_go_of_terminal
from ckpt.keeper.kept_memory import WorkerMemory
from ckpt.keeper.messages import DropRegion, GiveUp, Notice
from ckpt.replication.held_replicas import ReplicaMemory
from ckpt.replication.replica import (
    CONTROL,
    Admit,
    Answer,
    ControlChannel,
    ControlMessage,
    Held,
    List,
    Piece,
    Replica,
    Retain,
    Send,
    TransportError,
)
from ckpt.replication.tcp import Sender, Sent, TcpTransport, Transfer
from ckpt.replication.tcp_server import TcpServer
from inprocess.ipc.packets import Packet
from inprocess.ipc.process import has_ended
from inprocess.ipc.shared_memory import SharedMemory
from inprocess.ipc.wakeup import Wakeup

_log = logging.getLogger("ckpt")
_WHY_CHARACTERS = 1000


class _ReplicaLoop:
    """The loop, in the main thread of the process."""

    def __init__(self, channel: ControlChannel, kept: WorkerMemory) -> None:
        self._channel = channel
        self._kept = kept
        self._memory = ReplicaMemory(0, kept)
        self._trainer = -1  # a pidfd, from the first `Admit` on
        self._linger_s = 0.0
        self._server: TcpServer | None = None
        self._sender: Sender | None = None
        self._wake = Wakeup()
        self._sent: deque[Sent] = deque()  # filled by the sender's thread
        self._sending: dict[Replica, tuple[int, SharedMemory]] = {}  # the number of the request, and the memory

    def run(self) -> None:
        """Serve the trainer until it leaves; if it dies, serve others for a while."""
        try:
            if self._serve_trainer():
                self._linger()
            else:
                self._close_transport()
                self._kept.close()
        finally:
            self._close_transport()
            self._memory.close()
            for _, region in self._sending.values():
                region.close()
            self._wake.close()
            self._channel.close()
            self._know_trainer(-1)

    def _serve_trainer(self) -> bool:
        """Return when the trainer is gone: whether it ended without `GiveUp`."""
        while True:
            is_dead = self._trainer >= 0 and has_ended(
                self._trainer
            )  # before the channel is read, so that no message is missed
            self._channel.flush()
            try:
                while (packet := self._channel.receive()) is not None:
                    if isinstance(packet.message, GiveUp):
                        return False
                    self._handle(packet)
            except EOFError:
                return True
            if is_dead:
                return True
            self._report()
            poll = select.poll()
            poll.register(self._wake, select.POLLIN)
            poll.register(self._channel, self._channel.poll_events)
            if self._trainer >= 0:
                poll.register(self._trainer, select.POLLIN)
            poll.poll()  # no deadline: the trainer's death ends it
            self._wake.clear()

    def _know_trainer(self, pidfd: int) -> None:
        known, self._trainer = self._trainer, pidfd
        if known >= 0:
            os.close(known)

    def _linger(self) -> None:
        """Let others read. What this rank was sending is given up: its trainer is dead."""
        let_go_of_terminal()
        self._give_up(*self._sending)
        if self._server is not None:
            time.sleep(self._linger_s)

    def _report(self) -> None:
        while self._sent:
            sent = self._sent.popleft()
            number, region = self._sending.pop(sent.replica)
            region.close()
            self._channel.send(Answer(number, sent.error[:_WHY_CHARACTERS]))

    def _handle(self, packet: Packet[ControlMessage]) -> None:
        match packet.message, packet.fds:
            case Admit() as admit, (pidfd,):
                self._know_trainer(pidfd)
                self._channel.send(Answer(admit.number, self._admit(admit)))
            case Send() as send, (fd,):
                self._send(send, SharedMemory(fd, send.replica.nbytes, "ckpt-slot", send.replica.snapshot))
            case DropRegion(snapshot), ():
                self._give_up(*(replica for replica in self._sending if replica.snapshot == snapshot))
            case Retain(snapshots), ():
                self._memory.retain(snapshots)
            case Held(number, replica), (fd,):
                region = SharedMemory(fd, replica.nbytes, "ckpt-slot", replica.snapshot)
                try:
                    self._memory.lend(replica, region)
                except TransportError:  # what is there was verified on arrival, and serves as well
                    region.close()
                self._channel.send(Answer(number))
            case List(number), ():
                self._list_held(number)
            case _:
                packet.close_fds()

    def _admit(self, admit: Admit) -> str:
        """Begin to serve, or go on with another secret at another port: who has not got that one is cut off.

        Tell the port, or return the error.
        """
        self._close_transport()
        self._report()
        self._memory.limit_bytes, self._linger_s = admit.limit_bytes, admit.linger_s
        try:
            transport = TcpTransport(admit.host, admit.secret)
            self._server = transport.serve(self._memory)
        except (OSError, ValueError) as error:
            return f"replicas cannot be received at {admit.host}: {error}"[:_WHY_CHARACTERS]
        self._sender = Sender(transport, admit.bandwidth, self._ended)
        self._channel.send(Notice(admit.number, {"port": self._server.address.port}))
        return ""

    def _send(self, send: Send, region: SharedMemory) -> None:
        replica = send.replica
        if self._sender is None or replica in self._sending:
            region.close()
            self._channel.send(Answer(send.number, "it is being sent already, or nothing can be sent"))
            return
        self._sending[replica] = send.number, region
        self._sender.submit(Transfer(replica, (Piece(region, 0, replica.nbytes),), send.holder, send.keep))

    def _give_up(self, *replicas: Replica) -> None:
        for replica in replicas:
            if self._sender is not None:
                self._sender.give_up(replica)

    def _ended(self, sent: Sent) -> None:
        """Note the end of a transfer. Runs in the thread of the sender, too."""
        self._sent.append(sent)
        self._wake.set()

    def _list_held(self, number: int) -> None:
        for replica in self._memory.replicas():
            with contextlib.suppress(TransportError), self._memory.reading(replica) as region:
                self._channel.send(Held(number, replica), region.fd)
        self._channel.send(Answer(number))

    def _close_transport(self) -> None:
        sender, server, self._sender, self._server = self._sender, self._server, None, None
        if sender is not None:
            sender.close()
        if server is not None:
            server.close()


def run(worker_socket: socket.socket, kept: WorkerMemory) -> None:
    """Be a replica process, for the trainer at the other end of the socket."""
    os.chdir("/")
    _ReplicaLoop(ControlChannel(worker_socket, CONTROL), kept).run()
