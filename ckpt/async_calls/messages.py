"""The messages between trainer and writer.

    trainer --- KeepRegion + memfd, DropRegion, Run + memfd ----▶ writer
    trainer ◀-- Ready, Event, Finished -------------------------- writer

Each is one packet (see `inprocess.ipc.packets`) with at most one file descriptor. Nothing here is pickled: the pickled
call lies in the memfd that is sent with `Run`, so a packet stays small whatever the arguments are. Calls refer to the
regions of shared memory that were sent before.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, get_args

from ckpt.keeper.messages import DropRegion, KeepRegion
from inprocess.ipc.packets import Channel, Codec

__all__ = [
    "CODEC",
    "Event",
    "Finished",
    "Message",
    "MessageChannel",
    "Ready",
    "Run",
]


@dataclass(frozen=True)
class Run:
    """Run the call in the memfd sent with it."""

    index: int


@dataclass(frozen=True)
class Ready:
    """The writer has started, and reads its socket."""

    pid: int


@dataclass(frozen=True)
class Event:
    """The running function reports something to the trainer."""

    index: int
    event: dict[str, Any]


@dataclass(frozen=True)
class Finished:
    """The call is over. `error` is empty if it returned, else the last line of `traceback`.

    It ran from `began_ns` to `ended_ns` of CLOCK_MONOTONIC, which all processes of a host share.
    """

    index: int
    began_ns: int
    ended_ns: int
    error: str = ""
    traceback: str = ""


Message = KeepRegion | DropRegion | Run | Ready | Event | Finished
MessageChannel = Channel[Message]
CODEC: Codec[Message] = Codec(*get_args(Message))
