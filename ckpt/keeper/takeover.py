"""How a process finds the keepers of its job on this node, gets their memory, and makes them give it up.

    linger-JOB-NODE-NUMBER.sock     the socket of a keeper: mode 0600, in the private directory of this user
    linger-JOB-NODE-NUMBER.key      its secret: mode 0600, there as long as the socket listens

JOB is a hash of the marks of the job, and NODE of the node, as the directory may be seen by several nodes or
containers. Both ends prove that they can read the secret. With INPROCESS_SECRET in the environment they also prove that
they know that.

A keeper that cannot be reached, does not answer in time, or does not prove that it is one of this job, is left out. All
together are waited for as long as one.
"""

from __future__ import annotations

import contextlib
import glob
import hashlib
import hmac
import logging
import os
import secrets
import socket
import stat
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from ckpt.keeper.messages import PUBLIC, GiveUp, Greeting, KeepRegion, Kept, MemoryRecord, Public, greeting
from inprocess.ipc.packets import Packet, PacketError, receive, send
from inprocess.ipc.proofs import NONCE_BYTES, job_secret
from inprocess.ipc.shared_memory import SharedMemory
from inprocess.ipc.unix_sockets import connect, private_directory, remove_socket

_log = logging.getLogger("ckpt")
_TIMEOUT_S = 5.0  # for all keepers together: what they keep is not needed
_LEAST_S = 0.05
_MAX_REGIONS = 4096
_KEY_CHARACTERS = 64
_NO_RUN_ID = ("", "none")  # the second one is torchrun's, if it is not told any


@dataclass(frozen=True, slots=True)
class Job:
    """The identity of a job on a node: its `name`, the checkpoint root, and the node."""

    name: str
    root: str
    node: str

    @classmethod
    def of(cls, linger_id: str | None, root: str, node: str) -> Job:
        """Return the job of this process: `linger_id`, or that of the launcher. ValueError if there is neither."""
        run_id = os.environ.get("TORCHELASTIC_RUN_ID", "")
        name = linger_id if linger_id is not None else run_id
        if (linger_id is None and run_id in _NO_RUN_ID) or not name:
            raise ValueError(
                f"linger: nothing says which processes are of the same job (TORCHELASTIC_RUN_ID is {run_id!r}). Start "
                "it with ckpt_launcher or torchrun, and --standalone or --rdzv-id=ID; or give "
                "Snapshots(linger_id=...), a text that is the same after a restart of the job, and that no other job "
                "with this root has"
            )
        return cls(name, root, node)

    @property
    def digest(self) -> str:
        """A text without zero bytes that only this job on this node has."""
        return hashlib.sha256(f"{self.name}\0{self.root}\0{self.node}".encode(errors="surrogateescape")).hexdigest()

    def new_address(self) -> KeeperAddress:
        """Return where a keeper of this job can listen. OSError if there is no private directory."""
        return KeeperAddress(os.path.join(private_directory(), f"{self._prefix}{secrets.token_hex(4)}"))

    def addresses(self) -> list[KeeperAddress]:
        """Return the addresses of all keepers of this job on this node. OSError."""
        pattern = os.path.join(glob.escape(private_directory()), f"{self._prefix}*.key")
        return [KeeperAddress(path.removesuffix(".key")) for path in sorted(glob.glob(pattern))]

    @property
    def _prefix(self) -> str:
        node = hashlib.sha256(self.node.encode()).hexdigest()
        return f"linger-{self.digest[:12]}-{node[:6]}-"


@dataclass(frozen=True, slots=True)
class KeeperAddress:
    """The files of one keeper: `base` with two endings."""

    base: str

    @property
    def socket(self) -> str:
        """The path of the socket."""
        return f"{self.base}.sock"

    def write_key(self) -> str:
        """Make the secret of a keeper that listens, and return what its greetings are made with. OSError."""
        key = secrets.token_hex(_KEY_CHARACTERS // 2)
        fd = os.open(f"{self.base}.new", os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        try:
            os.fchmod(fd, 0o600)
            os.write(fd, key.encode())
        finally:
            os.close(fd)
        os.rename(f"{self.base}.new", f"{self.base}.key")
        return job_secret(key) or key

    def read_key(self) -> str:
        """Return the secret of the greetings of this keeper. OSError; PermissionError if the file is not ours."""
        fd = os.open(f"{self.base}.key", os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        try:
            found = os.fstat(fd)
            if not stat.S_ISREG(found.st_mode) or found.st_uid != os.geteuid() or stat.S_IMODE(found.st_mode) != 0o600:
                raise PermissionError(f"{self.base}.key is not a file that only this user can read")
            key = os.read(fd, _KEY_CHARACTERS + 1).decode("ascii", "replace")
        finally:
            os.close(fd)
        if len(key) != _KEY_CHARACTERS:
            raise OSError(f"{self.base}.key holds no key")
        return job_secret(key) or key

    def remove(self) -> None:
        """Remove what is there. Idempotent."""
        for ending in (".key", ".new"):
            with contextlib.suppress(OSError):
                os.unlink(self.base + ending)
        remove_socket(self.socket)


@dataclass(frozen=True, slots=True, eq=False)
class Taken:
    """The memory of one keeper: regions, which the taker closes, and their record."""

    address: KeeperAddress
    record: MemoryRecord
    regions: tuple[SharedMemory, ...]

    def close(self) -> None:
        """Unmap the memory, which the keeper goes on to keep. Idempotent."""
        for region in self.regions:
            region.close()


def take(job: Job) -> list[Taken]:
    """Return the memory kept for this job on this node, of trainers that are dead. Never raises; any thread."""
    found = []
    try:
        addresses = job.addresses()
    except OSError as error:
        _log.warning("memory of an earlier start of the job cannot be looked for: %s", error)
        return []
    deadline = time.monotonic() + _TIMEOUT_S
    for address in addresses:
        try:
            with _greeted(address, job, max(_LEAST_S, deadline - time.monotonic())) as connection:
                taken = _taken(connection, address)
            if taken is not None:
                found.append(taken)
        except ConnectionRefusedError:
            address.remove()  # its process is dead: it listens as long as there is a key
        except (OSError, EOFError, PacketError) as error:
            if not isinstance(error, FileNotFoundError):  # it has ended since
                _log.warning("the memory kept at %s cannot be taken over: %s", address.socket, error)
    return found


def release(address: KeeperAddress, job: Job) -> None:
    """Have a keeper give up its memory; return when it has. OSError, EOFError or PacketError if that fails."""
    with _greeted(address, job) as connection:
        taken = _taken(connection, address)
        if taken is None:
            raise PacketError(f"the trainer of the memory kept at {address.socket} is alive")
        taken.close()
        send(connection, PUBLIC, GiveUp())
        _receive(connection)


def release_all(bases: Iterable[str], job: Job) -> int:
    """Have keepers give up their memory, by their addresses, as far as they can be reached; return 0."""
    for base in bases:
        with contextlib.suppress(OSError, EOFError, PacketError):  # another rank was faster, or it expires
            release(KeeperAddress(base), job)
    return 0


def _taken(connection: socket.socket, address: KeeperAddress) -> Taken | None:
    """Return the memory that a keeper sends after the greeting; None if its trainer is alive."""
    regions: list[SharedMemory] = []
    try:
        while len(regions) <= _MAX_REGIONS:
            packet = _receive(connection)
            match packet.message, packet.fds:
                case KeepRegion(_, size), (fd,):
                    regions.append(_region(fd, size))
                case Kept(None), ():
                    return None
                case Kept(MemoryRecord() as record), () if _is_valid(record):
                    return Taken(address, record, tuple(regions))
                case _:
                    packet.close_fds()
                    raise PacketError(f"an unexpected {type(packet.message).__name__}")
        raise PacketError(f"more than {_MAX_REGIONS} regions")
    except BaseException:
        for region in regions:
            region.close()
        raise


def _is_valid(record: MemoryRecord) -> bool:
    pairs = all(isinstance(pair, list) and len(pair) == 2 for pair in record.fences)
    return pairs and all(type(number) is int for pair in record.fences for number in pair)


def _region(fd: int, size: int) -> SharedMemory:
    region = SharedMemory(fd, size, "ckpt-lingering", secrets.token_hex(16))
    if size < 1 or os.fstat(fd).st_size < size:
        region.close()
        raise PacketError(f"a region of {size} bytes is smaller than that")
    return region


@contextlib.contextmanager
def _greeted(address: KeeperAddress, job: Job, timeout_s: float = _TIMEOUT_S) -> Iterator[socket.socket]:
    """Yield a connection on which both ends have proved that they know the secret, and mean the same job."""
    secret = address.read_key()
    with connect(address.socket, timeout_s) as connection:
        challenge = _receive(connection).message
        if not isinstance(challenge, Greeting):
            raise PacketError("no greeting")
        ours = secrets.token_hex(NONCE_BYTES)
        said = greeting(secret, b"taker", job.digest, challenge.nonce, ours)
        send(connection, PUBLIC, Greeting(ours, said))
        welcome = _receive(connection).message
        wanted = greeting(secret, b"holder", job.digest, challenge.nonce, ours)
        if not isinstance(welcome, Greeting) or not hmac.compare_digest(welcome.proof.encode(), wanted.encode()):
            raise PermissionError("it does not know the secret of this job")
        yield connection


def _receive(connection: socket.socket) -> Packet[Public]:
    return receive(connection, PUBLIC)
