"""What a writer process runs: one call after the other.

    socket ──▶ receive ──▶ KeepRegion / DropRegion: regions that calls refer to
                  │
                  └──────▶ Run: begun ──▶ load ──▶ function(*args) ──▶ Finished
                                                     │
                          control page ◀─ progress() ┴ report() ──▶ Notice

One thread, one call at a time, in the order sent. The end of the socket means that the trainer is done with this
writer, or dead: what is already in the socket is still run, then the process exits. An exception of a function is an
answer, never the end of the loop. Nothing the loop sends can block it: a trainer that is busy for an hour finds all
answers waiting.
"""

from __future__ import annotations

import contextlib
import gc
import os
import select
import socket
import time
import traceback
from collections.abc import Hashable
from typing import Any

from ckpt.async_calls.call import unpickled
from ckpt.async_calls.context import WriterContext
from ckpt.async_calls.messages import (
    CODEC,
    Message,
    MessageChannel,
    Ready,
    Run,
)
from ckpt.async_calls.request import Work
from ckpt.keeper.kept_regions import Regions
from ckpt.keeper.messages import Finished, Notice
from ckpt.ranks.failure import clip
from inprocess.ipc.packets import Packet
from inprocess.ipc.shared_memory import SharedMemory

__all__ = ["CONTROL_PAGE", "ControlPage", "failed", "run"]

CONTROL_PAGE = "control"  # region id of the page that `ControlPage` describes; attached before anything else
_MAX_ERROR_BYTES = 4 << 10
_MAX_TRACEBACK_BYTES = 32 << 10


class ControlPage:
    """Four words in memory that trainer and writer share: they hold however the writer ends.

    The writer sets a progress counter, and the last call begun; the trainer sets the abort flag, and counts nudges.
    """

    SIZE = 4096

    def __init__(self, region: SharedMemory) -> None:
        self._words = region.buffer.cast("Q")  # aligned 8-byte stores: never seen half written

    @property
    def progress(self) -> int:
        """A counter that changes as long as the writer makes progress."""
        return self._words[0]

    def advance(self) -> None:
        """Count progress."""
        self._words[0] = (self._words[0] + 1) % 2**64

    @property
    def aborted(self) -> bool:
        """Whether no further call may begin."""
        return self._words[1] != 0

    def has_begun(self, index: int) -> bool:
        """Whether the call may have had effects. Calls reach a writer in the order of their indices."""
        return index < self._words[2]

    def begin(self, index: int) -> None:
        """Record, before it runs, that this call has begun."""
        self._words[2] = index + 1
        self.advance()

    def abort(self) -> None:
        """Let no further call begin, even in a writer that is only just being forked."""
        self._words[1] = 1

    @property
    def nudges(self) -> int:
        """How often the trainer has asked the running function to look now at what it waits for."""
        return self._words[3]

    def nudge(self) -> None:
        """Ask the running function to look now at what it waits for."""
        self._words[3] = (self._words[3] + 1) % 2**64


class _WriterLoop:
    """The loop, in the main thread of a writer process."""

    def __init__(self, channel: MessageChannel) -> None:
        self._channel = channel
        self._regions = Regions()
        self._kept: dict[Hashable, Any] = {}

    def run(self) -> None:
        """Run calls until the trainer closes its end, or dies, and everything it had sent is done."""
        self._channel.send(Ready(os.getpid()))
        while (packet := self._next()) is not None:
            match packet.message, packet.fds:
                case Run(index), (fd,):
                    page = ControlPage(self._regions[CONTROL_PAGE])
                    if page.aborted:
                        return
                    self._channel.send(self._call(index, fd, page))
                    os.close(fd)
                case _:
                    if not self._regions.take_in(packet):
                        packet.close_fds()
        self._close_kept()

    def _close_kept(self) -> None:
        for kept in self._kept.values():
            if callable(close := getattr(kept, "close", None)):
                with contextlib.suppress(Exception):
                    close()

    def _next(self) -> Packet[Message] | None:
        """Wait for the next message; return None when the connection is closed."""
        poll = select.poll()
        while True:
            self._channel.flush()
            try:
                if (packet := self._channel.receive()) is not None:
                    return packet
            except EOFError:
                return None
            poll.register(self._channel, self._channel.poll_events)
            poll.poll()  # no deadline: the trainer's death ends it

    def _call(self, index: int, fd: int, page: ControlPage) -> Finished:
        began_ns = time.monotonic_ns()
        page.begin(index)
        context = WriterContext(
            index,
            page.advance,
            lambda event: self._channel.send(Notice(index, event)),
            lambda: self._channel.peer_gone,
            self._kept,
            lambda: page.nudges,
        )
        try:
            work: Work = unpickled(fd, self._regions)
            with context.entered():
                work.run()
        except BaseException as error:  # SystemExit and KeyboardInterrupt of a function do not end the writer, either
            return failed(index, began_ns, error)
        return Finished(index, began_ns, time.monotonic_ns())


def failed(index: int, began_ns: int, error: BaseException) -> Finished:
    """Return the end of an order that failed with this error; what its frames hold is released."""
    ended_ns = time.monotonic_ns()
    lines: list[Any] = traceback.format_exception(error)
    summary = traceback.format_exception_only(error)[-1].strip()
    traceback.clear_frames(error.__traceback__)  # frames hold the arguments, and with them views of shared memory
    gc.collect()
    trace = clip("".join(lines), _MAX_TRACEBACK_BYTES)
    return Finished(index, began_ns, ended_ns, clip(summary, _MAX_ERROR_BYTES), trace)


def run(writer_socket: socket.socket) -> None:
    """Be a writer: run calls from the socket."""
    _WriterLoop(MessageChannel(writer_socket, CODEC)).run()
