"""The holder of a rank: keeps the memory of its trainer, and gives it to the next processes of the job.

    channel to the trainer ──▶ ┌───────────────┐ trainer died, or sent Linger ┌───────────────────────┐
                               │    KEEPING    │ ───────────────────────────▶ │  LINGERING            │ Take: sent
    processes that take over ──▶ (InUse)       │                              │  until the deadline   │ Release: end
                               └───────┬───────┘                              └───────────┬───────────┘
                                       ▼ Leave                                            ▼ deadline, Release
                                      end                                                end

It holds descriptors, and neither maps nor reads the memory. It ends, and its files are removed, when the trainer
leaves, at the deadline, when the memory was released, and at once if there is nothing to keep when the trainer dies.
One thread; free of torch. The end of the trainer is seen by its pidfd: children that it forked may have the channel.

What it knows is also in a memfd for `inspect_ckpt memory`, see `status`.
"""

from __future__ import annotations

import contextlib
import ctypes
import hmac
import json
import os
import select
import signal
import socket
import sys
import time

from ckpt.lingering.job import Address, Job
from ckpt.lingering.messages import (
    CONTROL,
    PUBLIC,
    Challenge,
    Control,
    Drop,
    Hello,
    InUse,
    Keep,
    Kept,
    Leave,
    Linger,
    Record,
    Region,
    Release,
    Released,
    Serve,
    Settled,
    Take,
    Welcome,
    greeting,
)
from ckpt.lingering.takeover import release
from inprocess.ipc.packets import Channel, Packet, PacketError, receive, send
from inprocess.ipc.proofs import NONCE_BYTES
from inprocess.ipc.unix_sockets import peer_pid

__all__ = ["STATUS", "Holder", "main"]

STATUS = "ckpt-linger"
"""The name of the memfd that says what a holder keeps, as JSON."""

_PR_SET_NAME = 15
_CLIENT_S = 5.0  # a taker answers at once, and holds up the others meanwhile


class Holder:
    """The loop, in the main thread of the process."""

    def __init__(self, channel: Channel[Control], trainer: int, trainer_pid: int) -> None:
        """`trainer` is a pidfd."""
        self._channel = channel
        self._trainer = trainer
        self._trainer_pid = trainer_pid
        self._serve = Serve("", "", "", "", "", 0.0)
        self._rank = -1
        self._record: Record | None = None
        self._regions: dict[str, tuple[int, int]] = {}  # descriptor and size
        self._listener: socket.socket | None = None
        self._address: Address | None = None
        self._deadline: float | None = None  # None as long as the trainer needs the memory
        self._is_over = False
        self._is_told = True  # whether the trainer has the channel still
        self._status = os.memfd_create(STATUS, os.MFD_CLOEXEC)

    def run(self) -> None:
        """Keep the memory until it is given up. Removes the files and closes everything, whatever happens."""
        try:
            while not self._is_over:
                self._wait()
                self._listen_to_trainer()
                if not self._is_over and self._listener is not None:
                    self._accept(self._listener)
                if self._deadline is not None and time.monotonic() >= self._deadline:
                    self._is_over = True
        finally:
            if self._address is not None:
                self._address.remove()
            if self._listener is not None:
                self._listener.close()
            for fd, _ in self._regions.values():
                os.close(fd)
            self._channel.close()
            os.close(self._trainer)
            os.close(self._status)

    def _wait(self) -> None:
        poll = select.poll()
        timeout_ms = None
        if self._deadline is None:
            poll.register(self._trainer, select.POLLIN)
            if self._is_told:
                poll.register(self._channel, select.POLLIN)
        else:
            timeout_ms = max(0, int((self._deadline - time.monotonic()) * 1000) + 1)
        if self._listener is not None:
            poll.register(self._listener, select.POLLIN)
        poll.poll(timeout_ms)

    # -- the trainer ---------------------------------------------------------------------------------------------------

    def _listen_to_trainer(self) -> None:
        """Do what the trainer has said, also if it is dead by now; begin to linger if it is."""
        if self._deadline is not None:
            return
        poll = select.poll()
        poll.register(self._trainer, select.POLLIN)
        is_dead = bool(poll.poll(0))  # before the channel is read, so that no message is missed
        try:
            while not self._is_over and self._is_told and (packet := self._channel.receive()) is not None:
                self._handle(packet)
        except (EOFError, PacketError):
            self._is_told = False
        if is_dead and self._deadline is None:
            self._linger()

    def _handle(self, packet: Packet[Control]) -> None:
        match packet.message, packet.fds:
            case Serve() as serve, (fd,) if self._listener is None:
                self._begin(serve, socket.socket(fileno=fd))
            case Keep(key, size), (fd,) if key not in self._regions:
                self._regions[key] = fd, size
            case Drop(key), () if key in self._regions:
                os.close(self._regions.pop(key)[0])
            case Settled(rank, record, taken), ():
                self._rank, self._record = rank, record
                self._release(taken)
            case Linger(), ():
                self._linger()
            case Leave(), ():
                self._is_over = True
            case _:
                packet.close_fds()
        self._tell()

    def _begin(self, serve: Serve, listener: socket.socket) -> None:
        self._serve, self._listener, self._address = serve, listener, Address(serve.base)

    @property
    def _job(self) -> Job:
        return Job(self._serve.name, self._serve.root, self._serve.node)

    def _release(self, taken: list[str]) -> None:
        """Make earlier holders end: what is needed of their memory is here."""
        for base in taken:
            with contextlib.suppress(OSError, EOFError, PacketError):  # another rank was faster, or it expires
                release(Address(base), self._job)

    def _linger(self) -> None:
        self._deadline = time.monotonic() + self._serve.linger_s
        if not self._regions or self._record is None:
            self._is_over = True
        self._tell()

    # -- those that take over ------------------------------------------------------------------------------------------

    def _accept(self, listener: socket.socket) -> None:
        while not self._is_over:
            try:
                connection, _ = listener.accept()
            except BlockingIOError:
                return
            except OSError:
                continue  # it has left again
            with connection, contextlib.suppress(OSError, EOFError, PacketError):
                connection.settimeout(_CLIENT_S)
                self._answer(connection)

    def _answer(self, connection: socket.socket) -> None:
        peer_pid(connection)  # PermissionError if it belongs to another user
        ours = os.urandom(NONCE_BYTES).hex()
        send(connection, PUBLIC, Challenge(ours))
        packet = receive(connection, PUBLIC)
        packet.close_fds()
        hello, job = packet.message, self._job.digest
        if not isinstance(hello, Hello):
            return
        wanted = greeting(self._serve.secret, b"taker", job, ours, hello.nonce)
        if not hmac.compare_digest(hello.proof.encode(), wanted.encode()):
            return
        send(connection, PUBLIC, Welcome(greeting(self._serve.secret, b"holder", job, ours, hello.nonce)))
        packet = receive(connection, PUBLIC)
        packet.close_fds()
        self._listen_to_trainer()  # which may have died just now
        if self._deadline is None or self._record is None:
            send(connection, PUBLIC, InUse())
        elif isinstance(packet.message, Take):
            for fd, size in self._regions.values():
                send(connection, PUBLIC, Region(size), (fd,))
            send(connection, PUBLIC, Kept(self._record))
        elif isinstance(packet.message, Release):
            self._is_over = True
            send(connection, PUBLIC, Released())

    # -- for people ----------------------------------------------------------------------------------------------------

    def _tell(self) -> None:
        """Write what is known to the status: times are those of CLOCK_MONOTONIC."""
        document = {
            "job": self._serve.name,
            "root": self._serve.root,
            "rank": self._rank,
            "trainer": self._trainer_pid,
            "linger_s": self._serve.linger_s,
            "until": self._deadline,
        }
        with contextlib.suppress(OSError):
            os.ftruncate(self._status, 0)
            os.pwrite(self._status, json.dumps(document).encode(), 0)


def main(fd: int, trainer: int, trainer_pid: int) -> None:
    """Run the process: `fd` is its end of the channel, `trainer` a pidfd."""
    for ignored in (signal.SIGINT, signal.SIGTERM):  # as writers do: it is there for after the end of its trainer
        signal.signal(ignored, signal.SIG_IGN)
    ctypes.CDLL(None).prctl(_PR_SET_NAME, b"ckpt-linger", 0, 0, 0)
    Holder(Channel(socket.socket(fileno=fd), CONTROL), trainer, trainer_pid).run()
    os._exit(0)


if __name__ == "__main__":
    main(*map(int, sys.argv[1:4]))
