"""Map the slots of the other ranks on this node.

Every rank keeps the descriptors of its neighbours' slots. What a neighbour has staged can be read from them without its
help, and also after its death. They are passed once, when the state is planned, over unix sockets in the abstract
namespace: nothing has a name in a file system.

    bind -> exchange addresses (collective) -> a thread gives this rank's descriptors to each neighbour that connects
                                            -> connect to each neighbour and take its descriptors

A neighbour that cannot be reached is left out: what it staged is read from storage instead.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import secrets
import socket
from collections.abc import Iterable
from pathlib import Path

from ckpt.ranks import Ranks
from inprocess.ipc.shared_memory import SharedMemory
from inprocess.ipc.threads import JoinableThread
from inprocess.ipc.unix_sockets import peer_pid

__all__ = ["exchange_slots"]

_log = logging.getLogger("ckpt")
_TIMEOUT_S = 10.0
_MAX_SLOTS = 64


def exchange_slots(ranks: Ranks, own: Iterable[SharedMemory]) -> dict[int, list[SharedMemory]]:
    """Give this rank's regions to all ranks on this node, and return theirs, by rank. Collective.

    The caller closes the returned regions.
    """
    regions = list(own)
    with contextlib.closing(socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)) as listener:
        name = secrets.token_hex(16)
        listener.bind(f"\0ckpt-{name}")
        listener.listen(128)
        listener.settimeout(_TIMEOUT_S)
        offers = [json.loads(offer) for offer in ranks(json.dumps([_node(), name]).encode())]
        neighbours = {
            rank: str(offer[1])
            for rank, offer in enumerate(offers)
            if offer[0] == _node() and rank != ranks.rank and offer[1] != name
        }
        giver = JoinableThread(_give, "ckpt-neighbors", (listener, regions, len(neighbours)))
        giver.start()
        taken: dict[int, list[SharedMemory]] = {}
        try:
            for rank, address in neighbours.items():
                if regions_of_rank := _take(rank, address):
                    taken[rank] = regions_of_rank
            giver.join()
        except BaseException:  # interrupted, as the neighbours may be: do not wait for them to connect
            with contextlib.suppress(OSError):
                listener.shutdown(socket.SHUT_RDWR)
            for region in (region for regions in taken.values() for region in regions):
                region.close()
            giver.join()
            raise
        return taken


def _node() -> str:
    """Return a text that is the same for processes that can reach each other's sockets and memory."""
    with contextlib.suppress(OSError):
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot}/{os.readlink('/proc/self/ns/net')}"
    return secrets.token_hex(16)


def _give(listener: socket.socket, regions: list[SharedMemory], count: int) -> None:
    """Give the regions to so many neighbours. Runs in a thread."""
    sizes = json.dumps([region.size for region in regions]).encode()
    for _ in range(count):
        try:
            connection, _ = listener.accept()
        except OSError:
            return  # a neighbour that has not connected reads from storage
        with connection, contextlib.suppress(OSError):
            connection.settimeout(_TIMEOUT_S)
            peer_pid(connection)  # PermissionError if it belongs to another user
            socket.send_fds(connection, [sizes], [region.fd for region in regions])


def _take(rank: int, address: str) -> list[SharedMemory]:
    """Return the regions of a neighbour; empty if they cannot be had."""
    try:
        with contextlib.closing(socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)) as connection:
            connection.settimeout(_TIMEOUT_S)
            connection.connect(f"\0ckpt-{address}")
            peer_pid(connection)  # PermissionError if it belongs to another user
            data, fds, _, _ = socket.recv_fds(connection, 1 << 16, _MAX_SLOTS)
    except OSError as error:
        _log.warning("the staging memory of rank %d cannot be shared: %s", rank, error)
        return []
    try:
        sizes = [int(size) for size in json.loads(data)]
        if len(sizes) == len(fds) and all(os.fstat(fd).st_size == size for fd, size in zip(fds, sizes, strict=True)):
            return [
                SharedMemory(fd, size, f"ckpt-slot-of-{rank}", secrets.token_hex(16))
                for fd, size in zip(fds, sizes, strict=True)
            ]
    except (ValueError, TypeError):
        pass
    for fd in fds:
        os.close(fd)
    return []
