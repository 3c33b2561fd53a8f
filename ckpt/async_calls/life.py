"""One writer process from the request to fork it until it is dead: what the trainer holds of it."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import weakref
from typing import Self

from ckpt.async_calls.fork_server import ForkServer
from ckpt.async_calls.messages import CODEC, Attach, Detach, MessageChannel, Run
from ckpt.async_calls.payload import Payload
from ckpt.async_calls.writer import CONTROL_PAGE, ControlPage
from inprocess.ipc.shared_memory import SharedMemory

__all__ = ["WriterLife"]


class WriterLife:
    """Owned by a `WriterProcess`, which replaces it after the writer's death."""

    def __init__(self, channel: MessageChannel, control_region: SharedMemory, writer_id: int) -> None:
        self.channel = channel
        self.page = ControlPage(control_region)
        self.writer_id = writer_id
        self.pid: int | None = None
        self.pidfd: int | None = None  # None until the server has reported the fork
        self.ready = False
        self._control_region = control_region
        self._attached: dict[str, weakref.ref[SharedMemory]] = {}

    @classmethod
    def begin(cls, server: ForkServer) -> Self:
        """Returns before the process exists; its socket takes messages at once. Raises OSError."""
        channel, theirs = MessageChannel.pair(CODEC)
        region: SharedMemory | None = None
        with theirs:
            try:
                region = SharedMemory.create("ckpt-control", ControlPage.SIZE)
                life = cls(channel, region, server.spawn(theirs))
                channel.send(Attach(CONTROL_PAGE, region.name, region.size), region.fd)
            except BaseException:
                channel.close()
                if region is not None:
                    region.close()
                raise
        return life

    def send_call(self, index: int, payload: Payload) -> None:
        """Send the call, and before it the regions that this writer has not got yet."""
        for region_id, region in payload.regions.items():
            if region_id not in self._attached:
                self.channel.send(Attach(region_id, region.name, region.size), region.fd)
                self._attached[region_id] = weakref.ref(region)
        self.channel.send(Run(index), payload.fd)

    def detach_closed_regions(self) -> None:
        """Have the writer unmap, after the calls it has, the regions that were closed here."""
        for region_id, reference in list(self._attached.items()):
            region = reference()
            if region is None or region.closed:
                del self._attached[region_id]
                self.channel.send(Detach(region_id))

    def take_spawned(self, server: ForkServer) -> None:
        if self.pidfd is None and (spawned := server.take_spawned(self.writer_id)) is not None:
            self.pid, self.pidfd = spawned
            if self.page.aborted:
                self.kill()

    def wait_dead(self, timeout_s: float) -> bool:
        """Whether the process is known to be dead."""
        if self.pidfd is None:
            return False
        poll = select.poll()
        poll.register(self.pidfd, select.POLLIN)
        return bool(poll.poll(timeout_s * 1000))

    def kill(self) -> None:
        """SIGKILL, at once or when we are told the pid; until then the process starts no call any more."""
        self.page.abort()
        if self.pidfd is not None:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(self.pidfd, signal.SIGKILL)

    def release(self) -> None:
        """Close our end: a living writer finishes what it was sent, then ends. Idempotent."""
        self.channel.close()
        self._control_region.close()
        if self.pidfd is not None:
            os.close(self.pidfd)
            self.pidfd = None
