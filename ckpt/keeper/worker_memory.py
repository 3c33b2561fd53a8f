"""Memory that a worker has outside of itself: when it dies, the next worker of its program gets it.

    worker (`WorkerMemory`) ─ KeepRegion, DropRegion ─▶ keeper (`LeftMemory`) ─── fork ──▶ next worker (`WorkerMemory`)

The keeper has descriptors and reads nothing. A worker may be killed at any instruction: so it describes in each region
what that holds, and not in a message.
"""

from __future__ import annotations

import contextlib
import socket

from ckpt.keeper.kept_regions import Regions, keep_message
from ckpt.keeper.messages import DropRegion, KeepRegion
from inprocess.ipc.packets import Channel, Codec, PacketError
from inprocess.ipc.shared_memory import SharedMemory

__all__ = ["LeftMemory", "WorkerMemory"]

_Message = KeepRegion | DropRegion
_CODEC: Codec[_Message] = Codec(KeepRegion, DropRegion)


class WorkerMemory:
    """In a worker: what the one before has left, and the connection to the keeper. For one thread at a time.

    Nothing here waits. Of a keeper that has died, or takes nothing, the memory is lost with this worker.
    """

    def __init__(self, link: socket.socket, left: Regions) -> None:
        """Own the socket and the regions."""
        self.left = list(left.values())
        """The regions of the worker before, which the caller closes."""
        self._told = set(left)
        self._channel = Channel(link, _CODEC)

    def keep(self, region: SharedMemory) -> None:
        """Have the keeper keep a region."""
        self._told.add(region.region_id)
        self._send(keep_message(region), region.fd)

    def drop(self, region_id: str) -> None:
        """Have the keeper give up a region."""
        if region_id in self._told:
            self._told.remove(region_id)
            self._send(DropRegion(region_id))

    def close(self) -> None:
        """Have the keeper give up all of them. Idempotent."""
        for region_id in list(self._told):
            self.drop(region_id)
        with contextlib.suppress(OSError):
            self._channel.flush()
        self._channel.close()

    def _send(self, message: _Message, *fds: int) -> None:
        with contextlib.suppress(OSError):  # the kernel has no memory, or this process no descriptor left
            self._channel.send(message, *fds)


class LeftMemory:
    """In the keeper: the memory of the workers of one program, of which one has it at a time."""

    def __init__(self) -> None:
        self._regions = Regions()
        self._link: Channel[_Message] | None = None

    @property
    def link(self) -> Channel[_Message] | None:
        """The connection to the worker, to poll; None if there is none."""
        return self._link

    def take_in(self) -> None:
        """Do what the worker has said, also if it is dead by now."""
        if self._link is None:
            return
        try:
            while (packet := self._link.receive()) is not None:
                if not self._regions.take_in(packet):
                    packet.close_fds()
        except (EOFError, PacketError):
            self._unlink()

    def begin(self) -> socket.socket:
        """Before a worker is forked: return its end of the connection. The one before has no connection any more."""
        self.take_in()
        self._unlink()
        self._link, theirs = Channel.pair(_CODEC)
        return theirs

    def hand_over(self, link: socket.socket) -> WorkerMemory:
        """In the worker just forked: return its memory."""
        self._unlink()
        regions, self._regions = self._regions, Regions()
        return WorkerMemory(link, regions)

    def forget(self) -> None:
        """Close everything: there will be no worker any more, or this is a fork with another purpose. Idempotent."""
        self._unlink()
        self._regions.close()

    def _unlink(self) -> None:
        link, self._link = self._link, None
        if link is not None:
            link.close()
