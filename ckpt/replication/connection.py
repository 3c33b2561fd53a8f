"""One end of a TCP connection between two processes of a job: greeting, messages, blocks (see `replica`).

The limit of bandwidth is a token bucket, and the way to end what it limits.
"""

from __future__ import annotations

import contextlib
import errno
import hmac
import os
import select
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from ckpt.native import crc32c
from ckpt.replication.replica import PEERS, PROTOCOL, Address, PeerMessage, Piece
from inprocess.ipc.packets import PacketError
from inprocess.ipc.proofs import NONCE_BYTES, PROOF_BYTES, fresh_nonce, proof
from inprocess.ipc.suspension import Suspension

BLOCK_BYTES = 256 << 10
"""Bytes that are sent, and checked, at once."""

MIN_BANDWIDTH = 64 << 10  # bytes per second: a block takes less time than a peer may be silent
_BURST_S = 0.05
_LONGER_S = 0.02  # than necessary, and less than a burst: the next blocks pass without a wait, so fewer wake-ups


class Limiter:
    """Lets at most `bandwidth` bytes per second pass, and a burst of 50 ms or one block; None for no limit.

    Any thread, several at once: they share the bandwidth. `clock` is in seconds.
    """

    def __init__(self, bandwidth: float | None, clock: Callable[[], float] = time.monotonic) -> None:
        if bandwidth is not None and not bandwidth >= MIN_BANDWIDTH:
            raise ValueError(f"the bandwidth must be at least {MIN_BANDWIDTH} bytes per second, not {bandwidth}")
        self._bandwidth = bandwidth
        self._clock = clock
        self._lock = threading.Lock()
        self._stopped = threading.Event()
        self._on_stop: list[Callable[[], None]] = []
        self._burst = max(BLOCK_BYTES, (bandwidth or 0) * _BURST_S)
        self._tokens = self._burst
        self._filled_at = clock()

    def reserve(self, nbytes: int) -> float:
        """Take the tokens for these bytes, and return in how many seconds they may be sent."""
        if self._bandwidth is None:
            return 0.0
        with self._lock:
            now = self._clock()
            self._tokens = min(self._burst, self._tokens + (now - self._filled_at) * self._bandwidth)
            self._filled_at = now
            self._tokens -= nbytes
            return max(0.0, -self._tokens / self._bandwidth)

    def wait(self, nbytes: int) -> bool:
        """Wait until these bytes may be sent. False if nothing more may be sent at all: `stop` was called."""
        delay_s = self.reserve(nbytes)
        return not (self._stopped.wait(delay_s + _LONGER_S) if delay_s > 0 else self._stopped.is_set())

    @property
    def is_stopped(self) -> bool:
        """Whether `stop` was called."""
        return self._stopped.is_set()

    @contextmanager
    def stopping(self, callback: Callable[[], None]) -> Iterator[None]:
        """Call `callback` when `stop` is called meanwhile, or was before."""
        with self._lock:
            self._on_stop.append(callback)
        try:
            if self._stopped.is_set():
                callback()
            yield
        finally:
            with self._lock:
                self._on_stop.remove(callback)

    def stop(self) -> None:
        """Let nothing more pass, and end every wait at once. Idempotent."""
        self._stopped.set()
        with self._lock:
            for callback in self._on_stop:
                callback()


GREETING_S = 5.0
_CONNECT_S = 10.0
_MAX_MESSAGE = 4 << 10
_LENGTH = struct.Struct(">I")
_BLOCK = struct.Struct(">II")


class GreetingError(ConnectionError):
    """The other end does not know the secret of the job, or speaks another protocol."""


class BlockError(ValueError):
    """What arrived are not the blocks that were announced."""


class Connection:
    """Owns a socket. For one thread, except `shut`.

    Every failure is an OSError, a PacketError for what is no message, or a BlockError. A peer that moves less than a
    block, or a message, in `silence_s` seconds is given up: TimeoutError.
    """

    def __init__(self, sock: socket.socket, silence_s: float) -> None:
        self._socket = sock
        self._silence_s = silence_s
        self._key = ""  # of the signatures, after the greeting
        self._sending, self._receiving = _Direction(b"client"), _Direction(b"holder")
        sock.setblocking(False)
        with contextlib.suppress(OSError):  # a connection that is closed already is reported by the first read
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    @classmethod
    def to(cls, address: Address, silence_s: float) -> Connection:
        """Return a connection that is not connected yet; see `connect`. OSError."""
        family = socket.AF_INET6 if ":" in address.host else socket.AF_INET
        return cls(socket.socket(family, socket.SOCK_STREAM), silence_s)

    def connect(self, address: Address) -> None:
        """Connect. OSError."""
        number = self._socket.connect_ex((address.host, address.port))
        if number == errno.EINPROGRESS:
            self._wait(select.POLLOUT, time.monotonic() + min(_CONNECT_S, self._silence_s))
            number = self._socket.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
        if number:
            raise OSError(number, os.strerror(number))

    # -- the greeting --------------------------------------------------------------------------------------------------

    def greet_holder(self, secret: str) -> None:
        """Prove to a holder that this process knows the secret, and have it prove the same. GreetingError.

        A holder with many peers accepts others later.
        """
        until = self._until()
        challenge = self._receive_exactly(len(PROTOCOL) + NONCE_BYTES, until)
        if challenge[: len(PROTOCOL)] != PROTOCOL:
            raise GreetingError("is not a holder of replicas of this version")
        theirs, ours = challenge[len(PROTOCOL) :], fresh_nonce()
        self._send(ours + _proof(secret, b"client", theirs, ours), until)
        try:
            answer = self._receive_exactly(PROOF_BYTES, until)
        except ConnectionError:
            raise GreetingError("has ended the greeting; it may belong to another job, with another secret") from None
        if not hmac.compare_digest(answer, _proof(secret, b"holder", theirs, ours)):
            raise GreetingError("does not know the secret of this job")
        self._key = _proof(secret, b"messages", theirs, ours).hex()

    def greet_client(self, secret: str) -> None:
        """Have a client prove that it knows the secret, and then prove the same. GreetingError."""
        until = time.monotonic() + min(GREETING_S, self._silence_s)
        ours = fresh_nonce()
        self._send(PROTOCOL + ours, until)
        answer = self._receive_exactly(NONCE_BYTES + PROOF_BYTES, until)
        theirs = answer[:NONCE_BYTES]
        if not hmac.compare_digest(answer[NONCE_BYTES:], _proof(secret, b"client", ours, theirs)):
            raise GreetingError("does not know the secret of this job")
        self._send(_proof(secret, b"holder", ours, theirs), until)
        self._key = _proof(secret, b"messages", ours, theirs).hex()
        self._sending, self._receiving = self._receiving, self._sending

    # -- messages ------------------------------------------------------------------------------------------------------

    def send(self, message: PeerMessage) -> None:
        """Send a message."""
        data = PEERS.encode(message)
        self._send(_LENGTH.pack(len(data)) + self._sending.sign(self._key, data) + data, self._until())

    def receive(self, within_s: float | None = None) -> PeerMessage:
        """Receive a message, within `silence_s` or another time. ConnectionResetError at the end."""
        until = self._until() if within_s is None else time.monotonic() + within_s
        size = int(_LENGTH.unpack(self._receive_exactly(_LENGTH.size, until))[0])
        if size > _MAX_MESSAGE:
            raise PacketError(f"a message of {size} bytes; the limit is {_MAX_MESSAGE}")
        signature = self._receive_exactly(PROOF_BYTES, until)
        data = self._receive_exactly(size, until)
        if not hmac.compare_digest(signature, self._receiving.sign(self._key, data)):
            raise PacketError("a message with a wrong signature")
        return PEERS.decode(data)

    # -- blocks --------------------------------------------------------------------------------------------------------

    def send_piece(self, piece: Piece, limiter: Limiter) -> None:
        """Send all blocks of a piece, straight from its memory. ConnectionAbortedError if the limiter is stopped."""
        for start in range(0, piece.nbytes, BLOCK_BYTES):
            nbytes = min(BLOCK_BYTES, piece.nbytes - start)
            if not limiter.wait(nbytes):
                raise ConnectionAbortedError("the transfer was given up")
            offset = piece.offset + start
            until = self._until()
            checksum = crc32c(piece.region.buffer[offset : offset + nbytes])
            self._send(_BLOCK.pack(nbytes, checksum), until, socket.MSG_MORE)
            self._send_file(piece.region.fd, offset, nbytes, until)

    def receive_blocks(self, memory: memoryview) -> bool:
        """Fill the memory with blocks; return whether all had the checksums that were sent with them.

        All are received in any case, so that the connection can be used further. BlockError if they do not fit.
        """
        sound, at = True, 0
        while at < len(memory):
            until = self._until()
            nbytes, checksum = _BLOCK.unpack(self._receive_exactly(_BLOCK.size, until))
            if not 0 < nbytes <= min(BLOCK_BYTES, len(memory) - at):
                raise BlockError(f"a block of {nbytes} bytes where {len(memory) - at} are left")
            block = memory[at : at + nbytes]
            self._receive_into(block, until)
            sound = crc32c(block) == checksum and sound
            at += nbytes
        return sound

    def fileno(self) -> int:
        """Return the descriptor of the socket."""
        return self._socket.fileno()

    def shut(self) -> None:
        """Break the connection: every wait on it ends. From any thread; idempotent."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Close the socket. Idempotent."""
        self._socket.close()

    # -- bytes ---------------------------------------------------------------------------------------------------------

    def _until(self) -> float:
        return time.monotonic() + self._silence_s

    def _wait(self, events: int, until: float) -> None:
        poll = select.poll()
        poll.register(self._socket, events)
        suspension, remaining_s = Suspension(), max(0.0, until - time.monotonic())
        while True:
            suspension.expect(remaining_s)
            if poll.poll(remaining_s * 1000):
                return
            remaining_s = suspension.missed_s()  # the other end may have been suspended with this process
            if not remaining_s:
                raise TimeoutError("the other end was silent for too long")

    def _send(self, data: bytes, until: float, flags: int = 0) -> None:
        view = memoryview(data)
        while view:
            try:
                view = view[self._socket.send(view, flags | socket.MSG_NOSIGNAL) :]
            except BlockingIOError:
                self._wait(select.POLLOUT, until)

    def _send_file(self, fd: int, offset: int, nbytes: int, until: float) -> None:
        end = offset + nbytes
        while offset < end:
            try:
                sent = os.sendfile(self._socket.fileno(), fd, offset, end - offset)
            except BlockingIOError:
                self._wait(select.POLLOUT, until)
                continue
            if sent == 0:
                raise ConnectionAbortedError("the memory to send from has become smaller")
            offset += sent

    def _receive_exactly(self, nbytes: int, until: float) -> bytes:
        data = bytearray(nbytes)
        self._receive_into(memoryview(data), until)
        return bytes(data)

    def _receive_into(self, memory: memoryview, until: float) -> None:
        while memory:
            try:
                received = self._socket.recv_into(memory)
            except BlockingIOError:
                # To wake up for each segment that arrives would cost training more than the bytes do.
                self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, min(len(memory), BLOCK_BYTES))
                self._wait(select.POLLIN, until)
                continue
            if received == 0:
                raise ConnectionResetError("the other end closed the connection")
            memory = memory[received:]


class _Direction:
    """The messages from one end, by number."""

    def __init__(self, sender: bytes) -> None:
        self._sender = sender
        self._count = 0

    def sign(self, key: str, data: bytes) -> bytes:
        """Return the signature of the next message."""
        self._count += 1
        return proof(key, self._sender, b"%d" % self._count, data.hex().encode())


def _proof(secret: str, role: bytes, holders: bytes, clients: bytes) -> bytes:
    return proof(secret, PROTOCOL, role, holders.hex().encode(), clients.hex().encode())
