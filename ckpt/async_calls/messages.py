"""The messages between trainer and writer.

    trainer --- KeepRegion + memfd, DropRegion, Run + memfd ----▶ writer
    trainer ◀-- Ready, Notice, Finished ------------------------- writer

Each is one packet (see `inprocess.ipc.packets`) with at most one file descriptor. Nothing here is pickled: the pickled
call lies in the memfd that is sent with `Run`, so a packet stays small whatever the arguments are. Calls refer to the
regions of shared memory that were sent before.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import get_args

from ckpt.keeper.messages import DropRegion, Finished, KeepRegion, Notice
from inprocess.ipc.packets import Channel, Codec

__all__ = [
    "CODEC",
    "Message",
    "MessageChannel",
    "Ready",
    "Run",
]


@dataclass(frozen=True)
class Run:
    """Run the call that is pickled in the memfd sent with this."""

    index: int


@dataclass(frozen=True)
class Ready:
    """The writer has started, and reads its socket."""

    pid: int


Message = KeepRegion | DropRegion | Run | Ready | Notice | Finished
MessageChannel = Channel[Message]
CODEC: Codec[Message] = Codec(*get_args(Message))
