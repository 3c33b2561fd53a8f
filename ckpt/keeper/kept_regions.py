"""Regions of shared memory that another process has given to this one, by key."""

from __future__ import annotations

from typing import Any

from ckpt.keeper.messages import DropRegion, KeepRegion
from inprocess.ipc.packets import Packet
from inprocess.ipc.shared_memory import SharedMemory

__all__ = ["Regions", "keep_message"]


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
