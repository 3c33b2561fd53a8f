"""The messages of a keeper: with its trainer, over an inherited channel, and with takers of memory, at its socket.

trainer --- Fork + socket ------------------------------------------------▶ keeper        workers
trainer ◀-- ForkedWorker + pidfd, Exited ---------------------------------- keeper
trainer --- Linger + listener, then KeepRegion, DropRegion, Settled ------▶ keeper        memory
trainer --- GiveUp -------------------------------------------------------▶ keeper, or its replica process
worker  --- KeepRegion, DropRegion ---------------------------------------▶ keeper        see `kept_memory`
trainer --- KeepRegion, DropRegion ---------------------------------------▶ writer        see `ckpt.async_calls`
trainer ◀-- Notice, Finished ---------------------------------------------- workers

taker   ◀-- Greeting ---------------------- keeper        both prove that they know the secret of the keeper
        --- Greeting ---------------------▶
        ◀-- Greeting ----------------------
        ◀-- KeepRegion for each, Kept -----               the memory is kept nevertheless
        --- GiveUp -----------------------▶               if a newer keeper has what is needed of it
        ◀-- Kept --------------------------

Free of torch. The memory itself is passed as a descriptor, and not read here: `Regions` has what was passed.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from inprocess.ipc.packets import Channel, Codec, Packet
from inprocess.ipc.proofs import proof
from inprocess.ipc.shared_memory import SharedMemory

_PROTOCOL = b"ckpt linger 4"


@dataclass(frozen=True, slots=True)
class MemoryRecord:
    """What the trainer says about its memory, for who takes it over.

    `start` is the number of the start of the job that the memory is of, larger than those before it. `origin` is the
    snapshot that this start began with, if it was one, and `token` that of the owner of the root then. `fences` are the
    restores since: pairs of a restart index and a step. `root` is the identity of the root. `restores`
    is the number of the last restore that the ranks agreed on, and `left` has the names of the published saves that
    training has left. Training `began_anew` if that restore was of no step.
    """

    start: int
    origin: str | None
    token: int
    fences: list[list[int]]
    root: str = ""
    restores: int = 0
    left: list[str] = field(default_factory=list)
    began_anew: bool = False


# -- workers -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Fork:
    """Fork a worker that runs `program` with the socket sent with this, at these priorities."""

    worker_id: int
    program: str
    nice: int
    io_class: str | None
    io_level: int


@dataclass(frozen=True, slots=True)
class ForkedWorker:
    """The worker exists; its pidfd is sent with this."""

    worker_id: int
    pid: int


@dataclass(frozen=True, slots=True)
class Exited:
    """The worker has exited, or could not be forked. `how` says which, as the end of a sentence."""

    worker_id: int
    how: str


@dataclass(frozen=True, slots=True)
class Notice:
    """A worker tells its trainer something about an order, by the number that the trainer gave to that."""

    index: int
    event: dict[str, Any]


@dataclass(frozen=True, slots=True)
class Finished:
    """An order is done. `error` is empty if it succeeded, else the last line of `traceback`, if there is one.

    It took from `began_ns` to `ended_ns` of CLOCK_MONOTONIC, which all processes of a host share.
    """

    index: int
    began_ns: int
    ended_ns: int
    error: str = ""
    traceback: str = ""


# -- memory ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Linger:
    """Keep memory for this job, and for `linger_s` seconds without the trainer.

    The socket that is sent with this listens at the address `base`; who asks there has to know the secret.
    """

    base: str
    secret: str = field(repr=False)
    name: str
    root: str
    node: str
    linger_s: float


@dataclass(frozen=True, slots=True)
class KeepRegion:
    """Keep the memory whose descriptor is sent with this, until `DropRegion`. `name` is that of `SharedMemory`."""

    key: str
    size: int
    name: str


@dataclass(frozen=True, slots=True)
class DropRegion:
    """Keep it no longer."""

    key: str


@dataclass(frozen=True, slots=True)
class Settled:
    """A restore is over: the record of the memory from now on. Have the keepers in `taken` give up theirs.

    What is needed of it was sent in a `KeepRegion` before.
    """

    rank: int
    record: MemoryRecord
    taken: list[str]


@dataclass(frozen=True, slots=True)
class GiveUp:
    """All memory that the receiver keeps is not needed any more."""


Control = Fork | ForkedWorker | Exited | Linger | KeepRegion | DropRegion | Settled | GiveUp
ControlChannel = Channel[Control]
CONTROL: Codec[Control] = Codec(Fork, ForkedWorker, Exited, Linger, KeepRegion, DropRegion, Settled, GiveUp)


# -- at the socket -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Greeting:
    """The nonce of one end, and its proof that it knows the secret, made of the nonces of both."""

    nonce: str = ""
    proof: str = field(default="", repr=False)


@dataclass(frozen=True, slots=True)
class Kept:
    """The end of an answer. Without a record the trainer of this memory is alive, and none was sent."""

    record: MemoryRecord | None


Public = Greeting | KeepRegion | Kept | GiveUp
PUBLIC: Codec[Public] = Codec(Greeting, KeepRegion, Kept, GiveUp)


def greeting(secret: str, who: bytes, job: str, first: str, second: str) -> str:
    """Return the proof of one end that it knows the secret; the nonce of the keeper comes first."""
    return proof(secret, _PROTOCOL, who, job.encode(), first.encode(), second.encode()).hex()


# -- regions that were sent --------------------------------------------------------------------------------------------


class Regions(dict[str, SharedMemory]):
    """The regions, which this process owns. Nothing here maps or reads them."""

    def take_in(self, packet: Packet[Any]) -> bool:
        """Keep or drop a region, if a message says so; return whether it was one, whose descriptor is then owned.

        A region that is there, or is not there any more, is not one: the other process may tell that again.
        """
        match packet.message, packet.fds:
            case KeepRegion(key, size, name), (fd,) if key not in self:
                self[key] = SharedMemory(fd, size, name, key)
            case DropRegion(key), () if key in self:
                self.pop(key).close()
            case _:
                return False
        return True

    def close(self) -> None:
        """Close all. Idempotent."""
        while self:
            self.popitem()[1].close()


def keep_message(region: SharedMemory) -> KeepRegion:
    """Return the message with which the descriptor of a region is sent."""
    return KeepRegion(region.region_id, region.size, region.name)
