"""How a process gets what the holders of its job have, and makes them give it up.

A holder that cannot be reached, does not answer in time, or does not prove that it is one of this job, is left out. All
together are waited for as long as one.
"""

from __future__ import annotations

import contextlib
import hmac
import logging
import os
import secrets
import socket
import time
from collections.abc import Iterator
from dataclasses import dataclass

from ckpt.lingering.job import Address, Job
from ckpt.lingering.messages import (
    PUBLIC,
    Challenge,
    Hello,
    InUse,
    Kept,
    Public,
    Record,
    Region,
    Release,
    Take,
    Welcome,
    greeting,
)
from inprocess.ipc.packets import Packet, PacketError, receive, send
from inprocess.ipc.proofs import NONCE_BYTES
from inprocess.ipc.shared_memory import SharedMemory
from inprocess.ipc.unix_sockets import connect

__all__ = ["Taken", "release", "take"]

_log = logging.getLogger("ckpt")
_TIMEOUT_S = 5.0  # for all holders together: what they keep is not needed
_LEAST_S = 0.05
_MAX_REGIONS = 4096


@dataclass(frozen=True, slots=True, eq=False)
class Taken:
    """What one holder has: the regions, which the taker closes, and what holds of them."""

    address: Address
    record: Record
    regions: tuple[SharedMemory, ...]

    def close(self) -> None:
        """Unmap the memory, which the holder goes on to keep. Idempotent."""
        for region in self.regions:
            region.close()


def take(job: Job) -> list[Taken]:
    """Return what is kept for this job on this node, of trainers that are dead. Never raises; any thread."""
    found = []
    try:
        addresses = job.addresses()
    except OSError as error:
        _log.warning("memory of an earlier start of the job cannot be looked for: %s", error)
        return []
    deadline = time.monotonic() + _TIMEOUT_S
    for address in addresses:
        try:
            if (taken := _take(address, job, max(_LEAST_S, deadline - time.monotonic()))) is not None:
                found.append(taken)
        except ConnectionRefusedError:
            address.remove()  # its process is dead: it listens as long as there is a key
        except (OSError, EOFError, PacketError) as error:
            if not isinstance(error, FileNotFoundError):  # it has ended since
                _log.warning("the memory kept at %s cannot be taken over: %s", address.socket, error)
    return found


def release(address: Address, job: Job) -> None:
    """Have a holder give up its memory; return when it has. OSError, EOFError or PacketError if that fails."""
    with _greeted(address, job) as connection:
        send(connection, PUBLIC, Release())
        _receive(connection)


def _take(address: Address, job: Job, timeout_s: float) -> Taken | None:
    regions: list[SharedMemory] = []
    try:
        with _greeted(address, job, timeout_s) as connection:
            send(connection, PUBLIC, Take())
            while len(regions) <= _MAX_REGIONS:
                packet = _receive(connection)
                match packet.message, packet.fds:
                    case Region(size), (fd,):
                        regions.append(_region(fd, size))
                    case Kept(record), () if _is_valid(record):
                        return Taken(address, record, tuple(regions))
                    case InUse(), ():
                        return None
                    case _:
                        packet.close_fds()
                        raise PacketError(f"an unexpected {type(packet.message).__name__}")
            raise PacketError(f"more than {_MAX_REGIONS} regions")
    except BaseException:
        for region in regions:
            region.close()
        raise


def _is_valid(record: Record) -> bool:
    pairs = all(isinstance(pair, list) and len(pair) == 2 for pair in record.fences)
    return pairs and all(type(number) is int for pair in record.fences for number in pair)


def _region(fd: int, size: int) -> SharedMemory:
    region = SharedMemory(fd, size, "ckpt-lingering", secrets.token_hex(16))
    if size < 1 or os.fstat(fd).st_size < size:
        region.close()
        raise PacketError(f"a region of {size} bytes is smaller than that")
    return region


@contextlib.contextmanager
def _greeted(address: Address, job: Job, timeout_s: float = _TIMEOUT_S) -> Iterator[socket.socket]:
    """Yield a connection on which both ends have proved that they know the secret, and mean the same job."""
    secret = address.read_key()
    with connect(address.socket, timeout_s) as connection:
        challenge = _receive(connection).message
        if not isinstance(challenge, Challenge):
            raise PacketError("no challenge")
        ours = secrets.token_hex(NONCE_BYTES)
        said = greeting(secret, b"taker", job.digest, challenge.nonce, ours)
        send(connection, PUBLIC, Hello(ours, said))
        welcome = _receive(connection).message
        wanted = greeting(secret, b"holder", job.digest, challenge.nonce, ours)
        if not isinstance(welcome, Welcome) or not hmac.compare_digest(welcome.proof.encode(), wanted.encode()):
            raise PermissionError("it does not know the secret of this job")
        yield connection


def _receive(connection: socket.socket) -> Packet[Public]:
    return receive(connection, PUBLIC)
