"""What a holder is told by its trainer, over an inherited channel, and by processes that take over, at its socket.

trainer --- Serve + socket, then Keep + memfd, Drop, Settled, Linger, Leave -------------------------▶ holder

taker   ◀-- Challenge --------------------- holder        both prove that they know the secret of the holder
        --- Hello ------------------------▶
        ◀-- Welcome -----------------------
        --- Take -------------------------▶
        ◀-- InUse, or Region + memfd for each, then Kept
        --- Release ----------------------▶               the memory is given up
        ◀-- Released ----------------------

Free of torch. The memory itself is passed as a descriptor and not read here.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from inprocess.ipc.packets import Codec
from inprocess.ipc.proofs import proof

__all__ = [
    "CONTROL",
    "PUBLIC",
    "Challenge",
    "Control",
    "Drop",
    "Hello",
    "InUse",
    "Keep",
    "Kept",
    "Leave",
    "Linger",
    "Public",
    "Record",
    "Region",
    "Release",
    "Released",
    "Serve",
    "Settled",
    "Take",
    "Welcome",
    "greeting",
]

_PROTOCOL = b"ckpt linger 1"


@dataclass(frozen=True, slots=True)
class Record:
    """What the trainer says about its memory, for who takes it over.

    `start` is the number of the start of the job that the memory is of, larger than those before it. `origin` is the
    snapshot that this start began with, if it was one, and `token` that of the owner of the root then. `fences` are the
    restores since: pairs of a restart index and a step. `root` is the identity of the root. `restores`
    is the number of the last restore that the ranks agreed on, and `left` has the names of the published saves that
    training has left.
    """

    start: int
    origin: str | None
    token: int
    fences: list[list[int]]
    root: str = ""
    restores: int = 0
    left: list[str] = field(default_factory=list)


# -- from the trainer --------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Serve:
    """Which job the memory is of, and how many seconds it is kept without the trainer.

    The socket that is sent with this listens at the address `base`; who asks there has to know the secret.
    """

    base: str
    secret: str = field(repr=False)

    name: str
    root: str
    node: str
    linger_s: float


@dataclass(frozen=True, slots=True)
class Keep:
    """Keep the memory that is sent with this."""

    key: str
    size: int


@dataclass(frozen=True, slots=True)
class Drop:
    """Keep it no longer."""

    key: str


@dataclass(frozen=True, slots=True)
class Settled:
    """A restore is over, and this is what holds of the memory from now on. Have the holders in `taken` give up theirs.

    What is needed of it was sent in a `Keep` before.
    """

    rank: int
    record: Record
    taken: list[str]


@dataclass(frozen=True, slots=True)
class Linger:
    """The trainer will need it no longer; the next processes may."""


@dataclass(frozen=True, slots=True)
class Leave:
    """End now: the memory is not needed any more."""


Control = Serve | Keep | Drop | Settled | Linger | Leave
CONTROL: Codec[Control] = Codec(Serve, Keep, Drop, Settled, Linger, Leave)


# -- at the socket -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Challenge:
    """The nonce of the holder."""

    nonce: str


@dataclass(frozen=True, slots=True)
class Hello:
    """The nonce of the taker, and its proof."""

    nonce: str
    proof: str = field(repr=False)


@dataclass(frozen=True, slots=True)
class Welcome:
    """The proof of the holder."""

    proof: str = field(repr=False)


@dataclass(frozen=True, slots=True)
class Take:
    """Send all memory. It is kept nevertheless, until `Release`."""


@dataclass(frozen=True, slots=True)
class InUse:
    """The trainer of this memory is alive."""


@dataclass(frozen=True, slots=True)
class Region:
    """One region, whose memory is sent with this."""

    size: int


@dataclass(frozen=True, slots=True)
class Kept:
    """That was all; what holds of it."""

    record: Record


@dataclass(frozen=True, slots=True)
class Release:
    """Give up the memory: a newer holder has what is needed of it."""


@dataclass(frozen=True, slots=True)
class Released:
    """It is given up."""


Public = Challenge | Hello | Welcome | Take | InUse | Region | Kept | Release | Released
PUBLIC: Codec[Public] = Codec(Challenge, Hello, Welcome, Take, InUse, Region, Kept, Release, Released)


def greeting(secret: str, who: bytes, job: str, first: str, second: str) -> str:
    """Return the proof of one end that it knows the secret; the nonce of the holder comes first."""
    return proof(secret, _PROTOCOL, who, job.encode(), first.encode(), second.encode()).hex()
