"""The holder's end of the transport over TCP: a thread that accepts, and one for each connection.

A connection that has proved nothing within 5 s is closed; so is the oldest of them when too many are open. After that a
peer may ask for anything that the messages allow, each bounded in time and bytes, as it belongs to the job. When too
many peers are connected, the one that has asked for nothing for longest is closed: it can connect again.
"""

from __future__ import annotations

import contextlib
import logging
import socket
import threading
import time

from ckpt.replication.connection import BlockError, Connection, Limiter
from ckpt.replication.held_replicas import ReplicaMemory
from ckpt.replication.replica import Address, Answer, PeerMessage, Piece, Read, StoreReplica, TransportError
from inprocess.ipc.packets import PacketError
from inprocess.ipc.threads import JoinableThread

_log = logging.getLogger("ckpt")
_BACKLOG = 1024
_MOST_STRANGERS = 64  # connections that have not proved anything yet
_MOST_PEERS = 128  # connections that have; more wait in the backlog for one that is idle
_IDLE_S = 60.0  # between two requests of one connection
_ACCEPT_PAUSE_S = 0.2
_WHY_CHARACTERS = 500


class TcpServer:
    """Lets processes that know the secret store replicas in a `ReplicaMemory`, and read them, at one address.

    Any thread.
    """

    def __init__(self, host: str, secret: str, silence_s: float, memory: ReplicaMemory) -> None:
        """Listen at `host` only, at a free port, and begin to serve. OSError if the address cannot be used."""
        self._secret = secret
        self._silence_s = silence_s
        self._memory = memory
        self._unlimited = Limiter(None)
        self._changed = threading.Condition()  # guards the fields below
        self._strangers: dict[Connection, None] = {}  # in the order of arrival
        self._peers: dict[Connection, None] = {}
        self._idle: dict[Connection, float] = {}  # when each peer without a request became idle; longest first
        self._threads: set[threading.Thread] = set()
        self._closing = False
        self._listener = _listen(host)
        self._address = Address(host, int(self._listener.getsockname()[1]))
        self._acceptor = JoinableThread(self._accept, "ckpt-replicas-accept")
        self._acceptor.start()

    @property
    def address(self) -> Address:
        """Where it listens."""
        return self._address

    @property
    def connection_count(self) -> tuple[int, int]:
        """How many connections have not proved the secret yet, and how many have."""
        with self._changed:
            return len(self._strangers), len(self._peers)

    def close(self) -> None:
        """End all connections, and the threads that serve them. Idempotent."""
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        self._unlimited.stop()
        with contextlib.suppress(OSError):  # it was closed before
            self._listener.shutdown(socket.SHUT_RDWR)
        self._acceptor.join()
        self._listener.close()
        with self._changed:
            for connection in (*self._strangers, *self._peers):
                connection.shut()
            threads = set(self._threads)
        for thread in threads:
            thread.join()

    # -- accepting -----------------------------------------------------------------------------------------------------

    def _accept(self) -> None:
        while self._wait_for_room():
            try:
                sock, _ = self._listener.accept()
            except OSError as error:
                if not self._closing:  # most likely out of descriptors: try again later
                    _log.error("the holder of replicas cannot accept a connection: %s", error)
                    with self._changed:
                        self._changed.wait_for(lambda: self._closing, _ACCEPT_PAUSE_S)
                continue
            connection = Connection(sock, self._silence_s)
            thread = JoinableThread(self._serve, "ckpt-replicas-serve", (connection,))
            with self._changed:
                if len(self._strangers) >= _MOST_STRANGERS:
                    oldest = next(iter(self._strangers))
                    del self._strangers[oldest]
                    oldest.shut()
                self._strangers[connection] = None
                self._threads.add(thread)
            try:
                thread.start()
            except RuntimeError as error:  # this process may have no more threads
                _log.error("the holder of replicas cannot serve a connection: %s", error)
                self._forget(connection, thread)

    def _wait_for_room(self) -> bool:
        """Return whether to accept one more connection; False if the server is closing."""
        with self._changed:
            while not self._closing and len(self._peers) >= _MOST_PEERS:
                longest = next(iter(self._idle), None)
                if longest is not None and time.monotonic() - self._idle[longest] >= _ACCEPT_PAUSE_S:
                    del self._idle[longest]
                    longest.shut()
                self._changed.wait(_ACCEPT_PAUSE_S)
            return not self._closing

    # -- one connection ------------------------------------------------------------------------------------------------

    def _serve(self, connection: Connection) -> None:
        try:
            connection.greet_client(self._secret)
            with self._changed:
                if connection not in self._strangers:
                    return  # there were too many
                del self._strangers[connection]
                self._peers[connection] = None
                if self._closing:
                    return
            while True:
                self._handle(connection, self._next_request(connection))
        except ConnectionResetError as end:  # the usual end
            _log.debug("holder of replicas: %s", end)
        except (OSError, PacketError, BlockError) as error:
            _log.info("holder of replicas: a connection was closed: %s", error)
        finally:
            self._forget(connection, threading.current_thread())

    def _next_request(self, connection: Connection) -> PeerMessage:
        with self._changed:
            self._idle[connection] = time.monotonic()
        try:
            return connection.receive(_IDLE_S)
        finally:
            with self._changed:
                self._idle.pop(connection, None)

    def _forget(self, connection: Connection, thread: threading.Thread) -> None:
        with self._changed:  # in which `shut` may be called
            connection.close()
            self._strangers.pop(connection, None)
            self._peers.pop(connection, None)
            self._threads.discard(thread)
            self._changed.notify_all()

    def _handle(self, connection: Connection, message: PeerMessage) -> None:
        match message:
            case StoreReplica():
                self._store(connection, message)
            case Read():
                self._read(connection, message)
            case _:
                raise PacketError(f"{type(message).__name__} is not a request")

    def _store(self, connection: Connection, request: StoreReplica) -> None:
        number = request.number
        try:
            arrival = self._memory.begin(request.replica, request.keep)
        except TransportError as error:
            connection.send(_refusal(number, error))
            return
        try:
            connection.send(Answer(number))
            sound = connection.receive_blocks(arrival.memory)
        except BaseException:
            self._memory.discard(arrival)
            raise
        if not sound:
            self._memory.discard(arrival)
            connection.send(Answer(number, "a checksum is wrong: bytes changed on the way, or while they were sent"))
            return
        try:
            self._memory.complete(arrival)
        except TransportError as error:
            connection.send(_refusal(number, error))
            return
        connection.send(Answer(number))

    def _read(self, connection: Connection, request: Read) -> None:
        number, replica, offset, nbytes = request.number, request.replica, request.offset, request.nbytes
        if not (offset >= 0 and nbytes > 0 and offset + nbytes <= replica.nbytes):
            connection.send(Answer(number, f"{nbytes} bytes at {offset} are not in a replica of {replica.nbytes}"))
            return
        try:
            with self._memory.reading(replica) as region:
                connection.send(Answer(number))
                connection.send_piece(Piece(region, offset, nbytes), self._unlimited)
        except TransportError as error:
            connection.send(_refusal(number, error))


def _refusal(number: int, error: TransportError) -> Answer:
    return Answer(number, str(error)[:_WHY_CHARACTERS])


def _listen(host: str) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        listener.bind((host, 0))
        listener.listen(_BACKLOG)
    except BaseException:
        listener.close()
        raise
    return listener
