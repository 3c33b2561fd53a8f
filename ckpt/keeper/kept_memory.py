"""The memory that a keeper keeps: for its trainer, to give it to the next processes of the job, and for its workers.

Of a trainer:

    told by the trainer ──▶ ┌───────────────┐ trainer died, or closed the channel ┌───────────────────────┐
                            │    IN USE     │ ──────────────────────────────────▶ │  LINGERING            │
    processes that take over ──▶ refused    │                                     │  until the deadline ──▶ sent
                            └───────┬───────┘                                     └───────────┬───────────┘
                                    ▼ GiveUp                                                  ▼ deadline, GiveUp
                                   gone                                                      gone

It is descriptors, neither mapped nor read. It is gone, and its files are removed, when the trainer gives it up, at the
deadline, when a taker gives it up, and at once if there is nothing to keep when the trainer dies.

It is also described in a memfd for `inspect_ckpt memory`, see `STATUS`.

A worker has memory outside of itself: when it dies, the next worker of its program gets it.

    worker (`WorkerMemory`) ─ KeepRegion, DropRegion ─▶ keeper (`LeftMemory`) ─── fork ──▶ next worker (`WorkerMemory`)

The keeper has descriptors and reads nothing. A worker may be killed at any instruction: so it describes in each region
what that holds, and not in a message.
"""

from __future__ import annotations

import contextlib
import hmac
import json
import os
import socket
import time

from ckpt.keeper.messages import (
    PUBLIC,
    Control,
    DropRegion,
    GiveUp,
    Greeting,
    KeepRegion,
    Kept,
    Linger,
    MemoryRecord,
    Regions,
    Settled,
    greeting,
    keep_message,
)
from ckpt.keeper.takeover import Job, KeeperAddress
from inprocess.ipc.packets import Channel, Codec, Packet, PacketError, receive, send
from inprocess.ipc.proofs import NONCE_BYTES
from inprocess.ipc.shared_memory import SharedMemory
from inprocess.ipc.unix_sockets import peer_pid

STATUS = "ckpt-keeper"
"""The name of the memfd that says what a keeper keeps, as JSON."""

_CLIENT_S = 5.0  # for each answer of a taker


class KeptMemory:
    """The memory of one trainer; nothing before `Linger` says whose it is."""

    def __init__(self, trainer_pid: int) -> None:
        self._trainer_pid = trainer_pid
        self._about: Linger | None = None
        self._rank = -1
        self._record: MemoryRecord | None = None
        self._regions = Regions()
        self._listener: socket.socket | None = None
        self._deadline: float | None = None  # None as long as the trainer needs the memory
        self._status = -1

    @property
    def listener(self) -> socket.socket | None:
        """The socket to accept takers from; None when no memory is kept."""
        return self._listener

    @property
    def is_kept(self) -> bool:
        """Whether there is memory to keep, or may be."""
        return self._listener is not None

    @property
    def left_ms(self) -> int | None:
        """How long `expire` may wait; None for no deadline."""
        return None if self._deadline is None else max(0, int((self._deadline - time.monotonic()) * 1000) + 1)

    @property
    def job(self) -> Job:
        """The job that the memory is of."""
        assert self._about is not None
        return Job(self._about.name, self._about.root, self._about.node)

    # -- the trainer ---------------------------------------------------------------------------------------------------

    def take_in(self, packet: Packet[Control]) -> list[str]:
        """Do what the trainer has said; return the addresses of keepers that are to give up their memory.

        Each order may come again, after an interrupt of the trainer, and is ignored then.
        """
        taken: list[str] = []
        match packet.message, packet.fds:
            case Linger() as about, (fd,):
                self._listen(about, socket.socket(fileno=fd))
            case Settled() as settled, () if self.is_kept:
                self._rank, self._record, taken = settled.rank, settled.record, settled.taken
            case GiveUp(), ():
                self.close()
            case _:
                if not (self.is_kept and self._regions.take_in(packet)):
                    packet.close_fds()
        self._describe()
        return taken

    def _listen(self, about: Linger, listener: socket.socket) -> None:
        """Listen for takers; an interrupt of the trainer may have come between, and it tells another address then."""
        if self._about is not None and self._listener is not None:
            self._listener.close()
            KeeperAddress(self._about.base).remove()
        self._about, self._listener = about, listener
        if self._status < 0:
            self._status = os.memfd_create(STATUS, os.MFD_CLOEXEC)

    def linger(self) -> None:
        """Keep the memory without the trainer from now on, if there is any. Idempotent."""
        if self._deadline is not None or self._about is None:
            return
        if not self._regions or self._record is None:
            self.close()
            return
        self._deadline = time.monotonic() + self._about.linger_s
        self._describe()

    def expire(self) -> None:
        """Give up the memory at the deadline."""
        if self._deadline is not None and time.monotonic() >= self._deadline:
            self.close()

    def tell(self, taker: socket.socket) -> None:
        """Tell the taker that gave up the memory that this was done. Never waits: its socket has room for that."""
        with taker, contextlib.suppress(OSError):
            taker.setblocking(False)
            send(taker, PUBLIC, Kept(self._record))

    def close(self) -> None:
        """Give up the memory, and remove the files. Idempotent."""
        if self._about is not None and self._listener is not None:
            KeeperAddress(self._about.base).remove()
        self.forget()

    def forget(self) -> None:
        """Close everything; in a fork, whose parent goes on to keep the memory. Idempotent."""
        if self._listener is not None:
            self._listener.close()
        self._regions.close()
        if self._status >= 0:
            os.close(self._status)
        self._listener, self._deadline, self._status = None, None, -1

    def _describe(self) -> None:
        """Write what is known to the status: times are those of CLOCK_MONOTONIC."""
        if self._about is None or self._status < 0:
            return
        document = {
            "job": self._about.name,
            "root": self._about.root,
            "rank": self._rank,
            "trainer": self._trainer_pid,
            "linger_s": self._about.linger_s,
            "until": self._deadline,
        }
        with contextlib.suppress(OSError):
            os.ftruncate(self._status, 0)
            os.pwrite(self._status, json.dumps(document).encode(), 0)

    # -- those that take over ------------------------------------------------------------------------------------------

    def greet(self, connection: socket.socket) -> bool:
        """Return whether a taker knows the secret of this memory; prove the same to it. OSError, EOFError."""
        assert self._about is not None
        ours, secret, job = os.urandom(NONCE_BYTES).hex(), self._about.secret, self.job.digest
        send(connection, PUBLIC, Greeting(ours))
        packet = receive(connection, PUBLIC)
        packet.close_fds()
        said = packet.message
        if not isinstance(said, Greeting):
            return False
        wanted = greeting(secret, b"taker", job, ours, said.nonce)
        if not hmac.compare_digest(said.proof.encode(), wanted.encode()):
            return False
        send(connection, PUBLIC, Greeting(proof=greeting(secret, b"holder", job, ours, said.nonce)))
        return True

    def send_all(self, connection: socket.socket) -> None:
        """Send the memory, and its record, to a taker. OSError."""
        for region in self._regions.values():
            send(connection, PUBLIC, keep_message(region), (region.fd,))
        send(connection, PUBLIC, Kept(self._record))

    @property
    def is_lingering(self) -> bool:
        """Whether it is kept without the trainer."""
        return self._deadline is not None


def answer(memory: KeptMemory, connection: socket.socket) -> bool:
    """Send the memory to a taker; return whether that then says to give it up, and is still to be told that it was.

    Runs in a fork of the keeper, with the memory as it was then.
    """
    with connection, contextlib.suppress(OSError, EOFError, PacketError):
        connection.settimeout(_CLIENT_S)
        peer_pid(connection)  # PermissionError if it belongs to another user
        if not memory.greet(connection):
            return False
        if not memory.is_lingering:
            send(connection, PUBLIC, Kept(None))
            return False
        memory.send_all(connection)
        packet = receive(connection, PUBLIC)
        packet.close_fds()
        return isinstance(packet.message, GiveUp)
    return False


# -- memory of workers -------------------------------------------------------------------------------------------------


_Message = KeepRegion | DropRegion
_CODEC: Codec[_Message] = Codec(KeepRegion, DropRegion)


class WorkerMemory:
    """In a worker: what the one before has left, and the connection to the keeper. For one thread at a time.

    Nothing here waits. Of a keeper that has died, or takes nothing, the memory is lost with this worker.
    """

    def __init__(self, link: socket.socket, left: Regions) -> None:
        """Own the socket and the regions."""
        self.left = list(left.values())
        """The regions of the worker before, which the caller closes."""
        self._told = set(left)
        self._channel = Channel(link, _CODEC)

    def keep(self, region: SharedMemory) -> None:
        """Have the keeper keep a region."""
        self._told.add(region.region_id)
        self._send(keep_message(region), region.fd)

    def drop(self, region_id: str) -> None:
        """Have the keeper give up a region."""
        if region_id in self._told:
            self._told.remove(region_id)
            self._send(DropRegion(region_id))

    def close(self) -> None:
        """Have the keeper give up all of them. Idempotent."""
        for region_id in list(self._told):
            self.drop(region_id)
        with contextlib.suppress(OSError):
            self._channel.flush()
        self._channel.close()

    def _send(self, message: _Message, *fds: int) -> None:
        with contextlib.suppress(OSError):  # the kernel has no memory, or this process no descriptor left
            self._channel.send(message, *fds)


class LeftMemory:
    """In the keeper: the memory of the workers of one program, of which one has it at a time."""

    def __init__(self) -> None:
        self._regions = Regions()
        self._link: Channel[_Message] | None = None

    @property
    def link(self) -> Channel[_Message] | None:
        """The connection to the worker, to poll; None if there is none."""
        return self._link

    def take_in(self) -> None:
        """Do what the worker has said, also if it is dead by now."""
        if self._link is None:
            return
        try:
            while (packet := self._link.receive()) is not None:
                if not self._regions.take_in(packet):
                    packet.close_fds()
        except (EOFError, PacketError):
            self._unlink()

    def begin(self) -> socket.socket:
        """Before a worker is forked: return its end of the connection. The one before has no connection any more."""
        self.take_in()
        self._unlink()
        self._link, theirs = Channel.pair(_CODEC)
        return theirs

    def hand_over(self, link: socket.socket) -> WorkerMemory:
        """In the worker just forked: return its memory."""
        self._unlink()
        regions, self._regions = self._regions, Regions()
        return WorkerMemory(link, regions)

    def forget(self) -> None:
        """Close everything: there will be no worker any more, or this is a fork with another purpose. Idempotent."""
        self._unlink()
        self._regions.close()

    def _unlink(self) -> None:
        link, self._link = self._link, None
        if link is not None:
            link.close()
