"""Map the slots of the other ranks on this node.

Every rank keeps the descriptors of its neighbours' slots. What a neighbour has staged can be read from them without its
help, and also after its death. They are passed once, when the state is planned, over unix sockets in the abstract
namespace: nothing has a name in a file system.

    bind -> exchange addresses (collective) -> a thread gives this rank's descriptors to each neighbour that connects
                                            -> connect to each neighbour and take its descriptors

Only the first part waits for ranks of other nodes. The second needs the slots, and may be left to another thread.
A neighbour that cannot be reached is left out: what it staged is read from storage instead.

Every process of the node can see such an address, and connect to it. So a neighbour says who it is, by a text that only
the ranks know; other connections are dropped, and take no neighbour's place.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import secrets
import select
import socket
import time
from collections.abc import Iterable, Iterator
from dataclasses import astuple, dataclass
from pathlib import Path

from ckpt.ranks.group import Group
from inprocess.ipc.process import Process
from inprocess.ipc.shared_memory import SharedMemory
from inprocess.ipc.threads import JoinableThread
from inprocess.ipc.unix_sockets import peer_pid

_log = logging.getLogger("ckpt")
_TIMEOUT_S = 10.0
_LEAST_S, _PAUSE_S = 0.05, 0.005
_LOOK_S = 0.25  # between looks whether a neighbour that is waited for is alive
_MAX_SLOTS = 64
_TOKEN_BYTES = 32
_MOST_STRANGERS = 128


@dataclass(frozen=True, slots=True)
class _Neighbour:
    """Another rank of this node. `token` is the text by which it says who it is."""

    rank: int
    address: str
    token: str
    process: Process


class SlotExchange:
    """Gives this rank's slots to all ranks on its node and takes theirs. To be made on all ranks: collective.

    A rank that never gives its slots, or never takes these, delays its neighbours by 10 s at most; one that has died or
    left, by a fraction of a second, also if a child of it has inherited its socket.
    """

    def __init__(self, ranks: Group) -> None:
        self.rank = ranks.rank
        self._neighbours: list[_Neighbour] = []
        self._closed: set[str] = set()  # tokens of neighbours that have stopped listening, and take nothing any more
        self._cancelled = False
        self._name, self._token = secrets.token_hex(16), secrets.token_hex(_TOKEN_BYTES // 2)
        self._deadline = 0.0
        self._woken: socket.socket | None = None  # readable when the thread that gives is to end
        self._wake: socket.socket | None = None
        self._listener: socket.socket | None = None
        self._taking: socket.socket | None = None
        try:
            if ranks.world_size > 1:
                self._meet(ranks)
        except BaseException:
            self.close()
            raise

    def _meet(self, ranks: Group) -> None:
        """Exchange addresses. A rank without a socket takes part, and is left out: the others are in the collective."""
        try:
            self._listen()
        except OSError as error:
            _log.warning("the staging memory of rank %d is not shared with its neighbours: %s", self.rank, error)
            self._name = ""
        here = node()
        offer = json.dumps([here, self._name, self._token, *astuple(Process.here())])
        offers = [json.loads(offer) for offer in ranks(offer.encode())]
        if self._name:
            self._neighbours = [
                _Neighbour(rank, str(name), str(token), Process(*process))
                for rank, (where, name, token, *process) in enumerate(offers)
                if where == here and name not in ("", self._name)
            ]

    def _listen(self) -> None:
        self._woken, self._wake = socket.socketpair()
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._listener.bind(f"\0ckpt-{self._name}")
        self._listener.listen(_MOST_STRANGERS)
        self._listener.setblocking(False)

    def run(self, own: Iterable[SharedMemory]) -> dict[int, list[SharedMemory]]:
        """Give these regions, and return those of the neighbours, by rank, which the caller closes. Once, any thread.

        A neighbour whose regions cannot be had, or all after `cancel`, are left out.
        """
        self._deadline = time.monotonic() + _TIMEOUT_S
        giver = JoinableThread(self._give, "ckpt-neighbors", (list(own),))
        taken: dict[int, list[SharedMemory]] = {}
        try:
            giver.start()
            for neighbour in self._neighbours:
                if not self._cancelled and (regions := self._take(neighbour)):
                    taken[neighbour.rank] = regions
            giver.join()
        except BaseException:  # interrupted, as the neighbours may be: do not wait for them to connect
            for region in (region for regions in taken.values() for region in regions):
                region.close()
            self.cancel()
            giver.join()
            raise
        finally:
            self.close()
        return taken

    def cancel(self) -> None:
        """Leave: `run` ends soon, a later one at once, and no neighbour waits. From any thread; idempotent."""
        self._cancelled = True
        if (taking := self._taking) is not None:
            with contextlib.suppress(OSError):
                taking.shutdown(socket.SHUT_RDWR)
        if self._wake is not None:
            with contextlib.suppress(OSError):
                self._wake.send(b".")
        self._turn_away()

    def close(self) -> None:
        """Leave, when `run` will not be called. Idempotent."""
        self._turn_away()
        for end in (self._listener, self._woken, self._wake):
            if end is not None:
                end.close()

    def _turn_away(self) -> None:
        """Refuse neighbours, also those that have connected. To close the socket is not enough: a child may have it."""
        if self._listener is not None:
            with contextlib.suppress(OSError):  # there is none any more, or it is closed already
                self._listener.shutdown(socket.SHUT_RDWR)
                while True:
                    self._listener.accept()[0].close()

    def _give(self, regions: list[SharedMemory]) -> None:
        """Give the regions to all neighbours, as they say who they are. Runs in a thread."""
        sizes = json.dumps([region.size for region in regions]).encode()
        left = {neighbour.token: neighbour for neighbour in self._neighbours}
        strangers = dict[int, socket.socket]()  # these have said nothing yet
        poll = select.poll()
        for end in (self._listener, self._woken):
            if end is not None:
                poll.register(end, select.POLLIN)
        try:
            while left and not self._cancelled and (left_s := self._deadline - time.monotonic()) > 0:
                ready = poll.poll(1000 * min(left_s, _LOOK_S))
                if not ready:  # also no neighbour that has connected before it ended
                    left = {token: neighbour for token, neighbour in left.items() if self._may_take(neighbour)}
                for fd, _ in ready:
                    if (stranger := strangers.pop(fd, None)) is None:
                        self._accept(strangers, poll)
                        continue
                    poll.unregister(fd)
                    with stranger, contextlib.suppress(OSError):
                        said = stranger.recv(_TOKEN_BYTES + 1, socket.MSG_DONTWAIT).decode("ascii", "replace")
                        if said in left:
                            del left[said]
                            socket.send_fds(stranger, [sizes], [region.fd for region in regions])
        except OSError as error:  # there are no more descriptors: who has not connected reads from storage
            if not self._cancelled:
                _log.warning("the staging memory of rank %d is not shared with all neighbours: %s", self.rank, error)
        finally:
            for stranger in strangers.values():
                stranger.close()

    def _may_take(self, neighbour: _Neighbour) -> bool:
        return neighbour.token not in self._closed and neighbour.process.alive is not False

    def _accept(self, strangers: dict[int, socket.socket], poll: select.poll) -> None:
        """Accept a connection of this user, if there is one; of too many that say nothing, the oldest is closed."""
        assert self._listener is not None
        try:
            connection, _ = self._listener.accept()
        except (BlockingIOError, ConnectionAbortedError):
            return
        try:
            peer_pid(connection)
        except PermissionError as error:
            _log.debug("a connection to the staging memory of rank %d is closed: %s", self.rank, error)
            connection.close()
            return
        connection.settimeout(_TIMEOUT_S)
        if len(strangers) >= _MOST_STRANGERS:
            oldest = next(iter(strangers))
            poll.unregister(oldest)
            strangers.pop(oldest).close()
        strangers[connection.fileno()] = connection
        poll.register(connection, select.POLLIN)

    def _take(self, neighbour: _Neighbour) -> list[SharedMemory]:
        """Return the regions of a neighbour; empty if they cannot be had."""
        rank = neighbour.rank
        try:
            with self._connected(neighbour) as self._taking:
                peer_pid(self._taking)  # PermissionError if it belongs to another user
                self._taking.send(self._token.encode())
                self._wait_for(neighbour, self._taking)
                data, fds, _, _ = socket.recv_fds(self._taking, 1 << 16, _MAX_SLOTS)
                for fd in fds:
                    os.set_inheritable(fd, False)  # the memory must not live as long as a child of this process
        except ConnectionError as error:  # it has closed, or died, since the ranks met
            _log.debug("rank %d does not share its staging memory any more: %s", rank, error)
            self._closed.add(neighbour.token)
            return []
        except OSError as error:
            _log.warning("the staging memory of rank %d cannot be shared: %s", rank, error)
            return []
        return _regions(rank, data, fds)

    def _wait_for(self, neighbour: _Neighbour, connection: socket.socket) -> None:
        """Wait until something is received. ConnectionError if the neighbour has died, TimeoutError at the deadline.

        The end of the connection does not tell the death: a child of the neighbour may have the same socket.
        """
        poll = select.poll()
        poll.register(connection, select.POLLIN)
        if self._woken is not None:
            poll.register(self._woken, select.POLLIN)
        while not poll.poll(1000 * max(0.0, min(_LOOK_S, self._deadline - time.monotonic()))):
            has_died = neighbour.process.alive is False
            is_over = time.monotonic() >= self._deadline
            if (has_died or is_over) and not poll.poll(0):  # it may have answered just before
                if has_died:
                    raise ConnectionResetError(f"its process {neighbour.process.pid} has died")
                raise TimeoutError(f"it has not answered within {_TIMEOUT_S:g} s")
        if self._cancelled:
            raise ConnectionAbortedError("cancelled")

    @contextlib.contextmanager
    def _connected(self, neighbour: _Neighbour) -> Iterator[socket.socket]:
        with contextlib.closing(socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)) as connection:
            while True:
                connection.settimeout(max(_LEAST_S, self._deadline - time.monotonic()))
                try:
                    connection.connect(f"\0ckpt-{neighbour.address}")
                    break
                except BlockingIOError:  # others fill its queue, which it empties; the kernel does not wait for that
                    is_over = time.monotonic() >= self._deadline
                    if self._cancelled or is_over or neighbour.process.alive is False:
                        raise
                    time.sleep(_PAUSE_S)
            yield connection


def node() -> str:
    """Return a text that is the same for processes that can reach each other's sockets and memory."""
    with contextlib.suppress(OSError):
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot}/{os.readlink('/proc/self/ns/net')}"
    return secrets.token_hex(16)


def _regions(rank: int, data: bytes, fds: list[int]) -> list[SharedMemory]:
    """Return the regions that a neighbour has sent; empty if it sent something else."""
    try:
        sizes = [int(size) for size in json.loads(data)]
        if len(sizes) == len(fds) and all(os.fstat(fd).st_size >= size for fd, size in zip(fds, sizes, strict=True)):
            return [
                SharedMemory(fd, size, f"ckpt-slot-of-{rank}", secrets.token_hex(16))
                for fd, size in zip(fds, sizes, strict=True)
            ]
    except (ValueError, TypeError):
        pass
    for fd in fds:
        os.close(fd)
    return []
