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

    trainer --- KeepRegion + memfd, DropRegion, Run + memfd ----▶ writer
    trainer ◀-- Ready, Notice, Finished ------------------------- writer

Each message is one packet (see `inprocess.ipc.packets`) with at most one file descriptor. Nothing in it is pickled: the
pickled call lies in the memfd that is sent with `Run`, so a packet stays small whatever the arguments are. Calls refer
to the regions of shared memory that were sent before.
"""

from __future__ import annotations

import contextlib
import gc
import os
import select
import socket
import threading
import time
import traceback
from collections.abc import Callable, Hashable, Iterator
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, TypeVar, get_args

from ckpt.async_calls.call import unpickled
from ckpt.async_calls.request import Work
from ckpt.keeper.messages import DropRegion, Finished, KeepRegion, Notice, Regions
from ckpt.ranks.failure import clip
from inprocess.ipc.packets import Channel, Codec, Packet
from inprocess.ipc.shared_memory import SharedMemory

CONTROL_PAGE = "control"  # region id of the page that `ControlPage` describes; attached before anything else
_MAX_ERROR_BYTES = 4 << 10
_MAX_TRACEBACK_BYTES = 32 << 10


@dataclass(frozen=True)
class Run:
    """Run the call that is pickled in the memfd sent with this."""

    index: int


@dataclass(frozen=True)
class Ready:
    """The writer has started, and reads its socket."""


Message = KeepRegion | DropRegion | Run | Ready | Notice | Finished
MessageChannel = Channel[Message]
CODEC: Codec[Message] = Codec(*get_args(Message))


# -- what a function knows of its call ---------------------------------------------------------------------------------

_T = TypeVar("_T")
_CURRENT: ContextVar[WriterContext | None] = ContextVar("ckpt_writer_context", default=None)


def current() -> WriterContext | None:
    """Return the context of the call that this thread runs; None in the trainer (`AsyncRequest.execute_sync`).

    A function that starts threads must pass the context to them.
    """
    return _CURRENT.get()


class WriterContext:
    """The context of one call in a writer process. For any of its threads; has no effect once the call is over."""

    def __init__(
        self,
        index: int,
        advance: Callable[[], None],
        report: Callable[[dict[str, Any]], None],
        trainer_left: Callable[[], bool],
        kept: dict[Hashable, Any],
        nudges: Callable[[], int] = lambda: 0,
    ) -> None:
        self.index = index
        self._advance = advance
        self._report = report
        self._trainer_left = trainer_left
        self._kept = kept
        self._nudges = nudges
        self._lock = threading.Lock()
        self._over = False

    def trainer_left(self) -> bool:
        """Whether the trainer has closed the connection: it is dead, or dropped its queue without waiting for calls.

        A function that waits for other processes should then do so for a short time only.
        """
        return self._trainer_left()

    def keep(self, key: Hashable, make: Callable[[], _T]) -> _T:
        """Return the object for `key`, made by `make` at first use and kept as long as this process lives.

        If it has a method `close`, that is called when the trainer is done with this writer and all calls have run.
        """
        if key not in self._kept:
            self._kept[key] = make()
        kept: _T = self._kept[key]
        return kept

    def nudges(self) -> int:
        """Return a counter that the trainer advances to say: look now at what you wait for. One load from memory."""
        return self._nudges()

    def progress(self) -> None:
        """Show that the call makes progress, by one store to shared memory. See `WriterConfig.writer_timeout_s`."""
        self._advance()

    def report(self, event: dict[str, Any]) -> None:
        """Send a small dict of JSON values to the trainer, in order; the trainer calls `on_event` with it.

        Never waits for the trainer. ValueError if `event` is not JSON, or larger than about 100 KB.
        """
        with self._lock:
            if not self._over:
                self._report(event)

    @contextlib.contextmanager
    def entered(self) -> Iterator[None]:
        """Make this the current context while the function runs."""
        token = _CURRENT.set(self)
        try:
            yield
        finally:
            _CURRENT.reset(token)
            with self._lock:
                self._over = True


# -- the process -------------------------------------------------------------------------------------------------------


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
        self._channel.send(Ready())
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
