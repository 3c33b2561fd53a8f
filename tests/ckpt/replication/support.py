"""Shares of known bytes, a holder that runs, and a relay that does harm at a given byte."""

import contextlib
import hashlib
import socket
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from ckpt.replication.connection import Limiter
from ckpt.replication.held_replicas import ReplicaMemory
from ckpt.replication.replica import Address, Piece, Replica
from ckpt.replication.tcp import TcpTransport
from ckpt.replication.tcp_server import TcpServer
from inprocess.ipc.shared_memory import SharedMemory

SECRET = "a secret of a job, known to both ends of a connection"
HOST = "127.0.0.1"
UNLIMITED = 1 << 40


def content(seed: object, nbytes: int) -> bytes:
    """Bytes that look random and are the same for the same seed."""
    return hashlib.shake_128(repr(seed).encode()).digest(nbytes)


@contextlib.contextmanager
def staged(data: bytes) -> Iterator[SharedMemory]:
    """Shared memory with these bytes."""
    with SharedMemory.create("test-slot", len(data)) as region:
        region.buffer[:] = data
        yield region


@contextlib.contextmanager
def serving(limit_bytes: int = UNLIMITED, silence_s: float = 10.0) -> Iterator[tuple[ReplicaMemory, TcpServer]]:
    """A holder that serves its memory."""
    memory = ReplicaMemory(limit_bytes)
    server = TcpTransport(HOST, SECRET, silence_s).serve(memory)
    try:
        yield memory, server
    finally:
        server.close()
        memory.close()


def send(
    holder: Address, snapshot: str, data: bytes, *, rank: int = 0, keep: str | None = None, silence_s: float = 10.0
) -> Replica:
    """Store a replica with these bytes."""
    replica = Replica(snapshot, rank, len(data), len(data))
    with staged(data) as region:
        transport = TcpTransport(HOST, SECRET, silence_s)
        transport.store(holder, replica, [Piece(region, 0, len(data))], keep=keep, limiter=Limiter(None))
    return replica


def read(holder: Address, replica: Replica, *, silence_s: float = 10.0) -> bytes:
    """All bytes of a replica."""
    data = bytearray(replica.nbytes)
    with TcpTransport(HOST, SECRET, silence_s).open(holder) as remote:
        remote.read_into(replica, 0, memoryview(data))
    return bytes(data)


def bytes_held(memory: ReplicaMemory, replica: Replica) -> bytes:
    """What a holder has of a replica."""
    with memory.reading(replica) as region:
        return bytes(region.buffer[: replica.nbytes])


@dataclass(frozen=True)
class Harm:
    """What happens at byte number `at` of one direction: the connection ends, the byte changes, nothing more comes."""

    kind: Literal["cut", "flip", "hold"]
    upwards: bool  # from the client to the holder
    at: int


class Relay:
    """Passes connections to a holder, and does the harm to the first. `passed` counts bytes, upwards and downwards."""

    def __init__(self, target: Address, harm: Harm | None = None) -> None:
        self._target = target
        self._harm = harm
        self._listener = socket.create_server((HOST, 0))
        self.address = Address(HOST, self._listener.getsockname()[1])
        self.passed = {True: 0, False: 0}
        self._sockets: list[socket.socket] = []
        self._threads = [threading.Thread(target=self._accept)]
        self._threads[0].start()

    def __enter__(self) -> "Relay":
        return self

    def __exit__(self, *_: object) -> None:
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._threads[0].join()
        self._listener.close()
        for sock in self._sockets:
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)
        for thread in self._threads:
            thread.join()
        for sock in self._sockets:
            sock.close()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                client, _ = self._listener.accept()
                self._sockets.append(client)
                holder = socket.create_connection((self._target.host, self._target.port))
                self._sockets.append(holder)
                harm, self._harm = self._harm, None
                for source, target, upwards in ((client, holder, True), (holder, client, False)):
                    thread = threading.Thread(target=self._pass, args=(source, target, upwards, harm))
                    self._threads.append(thread)
                    thread.start()

    def _pass(self, source: socket.socket, target: socket.socket, upwards: bool, harm: Harm | None) -> None:
        mine = harm if harm is not None and harm.upwards is upwards else None
        at = 0
        with contextlib.suppress(OSError):
            while data := source.recv(1 << 16):
                if mine is not None and at <= mine.at < at + len(data):
                    offset = mine.at - at
                    if mine.kind == "flip":
                        data = data[:offset] + bytes([data[offset] ^ 1]) + data[offset + 1 :]
                    else:
                        target.sendall(data[:offset])
                        if mine.kind == "hold":
                            while source.recv(1 << 16):
                                pass
                        break
                self.passed[upwards] += len(data)  # before the other end can have it
                target.sendall(data)
                at += len(data)
        for sock in (source, target):
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)
