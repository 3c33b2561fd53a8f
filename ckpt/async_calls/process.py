"""One writer process at a time, seen from the trainer.

    submit() --▶ [ outbox ] ==== socket ====▶ writer (see `writer`)
    poll()  ◀--- Outcome, Event ============= writer
      ├── pidfd, end of socket: the writer died
      ├── control page stands still: the writer hangs, and is killed
      └── the call is over its time limit (`CallTimer`): the same

    no writer ──submit / start──▶ starting ──Ready──▶ serving ──death──▶ no writer
                                     └──start_timeout_s──▶ killed ──────────┘

Nobody waits for a writer to start: its socket takes messages before the process exists. A death fails the call that
was running; calls behind it, which the writer had not started, go to the next writer in the same order, once.
"""

from __future__ import annotations

import select
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from ckpt.async_calls.agreement import own_rank
from ckpt.async_calls.config import WriterConfig
from ckpt.async_calls.fork_server import ForkServer, release_in_forked_children
from ckpt.async_calls.life import WriterLife
from ckpt.async_calls.messages import Event, Finished, Message, Ready
from ckpt.async_calls.sent import SentCall
from ckpt.errors import RemoteTraceback, WriterError
from inprocess.ipc.wakeup import Wakeup

__all__ = ["Outcome", "WriterProcess", "wait_for_any"]

_MAX_ATTEMPTS = 2
_EXIT_WAIT_S = 2.0


@dataclass(frozen=True)
class Outcome:
    """A call is over. `error` is None when its function returned."""

    index: int
    error: WriterError | None


class WriterProcess:
    """Runs calls in one background process, in the order submitted.

    Used by one thread of the trainer; forked children must not use it.
    """

    def __init__(self, config: WriterConfig, server: ForkServer) -> None:
        self._config = config
        self._server = server
        self._life: WriterLife | None = None
        self._calls: dict[int, SentCall] = {}  # in the order submitted
        self._results: list[Outcome | Event] = []  # for the next `poll`
        self._alive_at = time.monotonic()  # when the writer was last seen to make progress, or had nothing to do
        self._last_progress = 0
        release_in_forked_children(self)

    @property
    def pid(self) -> int | None:
        """None as long as the process does not exist."""
        return self._life.pid if self._life is not None else None

    def start(self) -> None:
        """Have the process started in the background, if there is none. Raises OSError when it cannot be."""
        if self._life is None:
            self._life = WriterLife.begin(self._server)
            self._alive_at, self._last_progress = time.monotonic(), 0

    def submit(
        self,
        index: int,
        fn: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        preload_fn: Callable[[], Any] | None = None,
    ) -> None:
        """Queue a call; never waits for the writer. Indices only grow.

        Raises what pickling the call raises; every other failure is the call's outcome.
        """
        call = SentCall(index, fn, args, kwargs, preload_fn)
        if not self._calls:
            self._alive_at = time.monotonic()
        self._calls[index] = call
        self._send(call)
        self._begin_first(time.monotonic_ns())

    @property
    def busy(self) -> bool:
        """Whether calls are without an outcome."""
        return bool(self._calls)

    def poll(self) -> list[Outcome | Event]:
        """What happened since the last time; does not wait.

        Notices a writer that died or hangs, and replaces it if calls are left for it.
        """
        self._server.pump()
        if self._life is not None:
            if self._receive(self._life):
                self._bury(self._life)
            elif (reason := self._overdue(self._life)) is not None:
                self._bury(self._life, reason)
            else:
                self._life.detach_closed_regions()
                self._life.channel.flush()
        results, self._results = self._results, []
        return results

    def wait(self, timeout_s: float) -> list[Outcome | Event]:
        """Like `poll`, but waits until something happens that is worth a look, at most `timeout_s`."""
        wait_for_any([self], timeout_s)
        return self.poll()

    def kill(self) -> None:
        """SIGKILL: the running call fails, as `poll` will tell. No call behind it starts in this process."""
        if self._life is not None:
            self._server.pump()
            self._life.take_spawned(self._server)
            self._life.kill()

    def forget_calls(self) -> None:
        """Drop all calls without an outcome. A process that works on one is killed; the next call gets another.

        Does not wait for its end: it may still write for a moment.
        """
        if self._calls:
            self.discard()
        self._results.clear()

    def discard(self) -> None:
        """Kill the process and let go of it, without a look at what it says, nor waiting for its end."""
        if self._life is not None:
            self._life.kill()
        self.release()

    def close(self, timeout_s: float) -> None:
        """Let the writer finish what it has, wait for its end at most `timeout_s`, then kill it.

        Outcomes are dropped. Idempotent.
        """
        if (life := self._life) is not None:
            life.channel.end_sending()
            deadline = time.monotonic() + timeout_s
            while not self._receive(life) and (remaining_s := deadline - time.monotonic()) > 0:
                self._results.clear()
                wait_for_any([self], remaining_s)
                self._server.pump()
            life.kill()
            life.wait_dead(_EXIT_WAIT_S)
        self.release()

    def release(self) -> None:
        """Let go without waiting: the writer finishes what it was sent, then ends. Idempotent."""
        life, self._life = self._life, None
        if life is not None:
            life.release()
        for call in self._calls.values():
            call.over()
        self._calls.clear()

    def handles(self) -> list[tuple[int, int]]:
        """File descriptors to poll, with the events to poll for."""
        handles = []
        if self._life is not None:
            handles.append((self._life.channel.fileno(), self._life.channel.poll_events))
            if self._life.pidfd is not None:
                handles.append((self._life.pidfd, select.POLLIN))
        if (control := self._server.control) is not None:
            handles.append((control.fileno(), control.poll_events))
        return handles

    def patience_s(self) -> float | None:
        """How long until `poll` has something to say even if the writer stays silent; None for ever."""
        if self._results:
            return 0.0
        limit_s, left_s = self._limit_s(), self._left_s()
        times = [] if limit_s is None else [self._alive_at + limit_s - time.monotonic()]
        times += [] if left_s is None else [left_s]
        return max(0.0, min(times)) if times else None

    def _limit_s(self) -> float | None:
        if self._life is None or not self._calls:
            return None
        return self._config.writer_timeout_s if self._life.ready else self._config.start_timeout_s

    def _left_s(self) -> float | None:
        """How long the running call may go on."""
        first = self._first()
        return None if first is None or first.timer is None else first.timer.left_s()

    def _first(self) -> SentCall | None:
        """Return the call that is running, or next."""
        return next(iter(self._calls.values()), None)

    def _begin_first(self, at_ns: int) -> None:
        """Begin the clock of the call that is next, if a writer is there to run it."""
        first = self._first()
        if first is not None and self._life is not None and self._life.ready:
            first.begin(at_ns)

    def _send(self, call: SentCall) -> None:
        call.attempts += 1
        try:
            self.start()
            assert self._life is not None
            self._life.send_call(call.index, call.payload)
        except OSError as error:
            self._settle(call.index, f"could not be given to a writer process: {error}")

    def _receive(self, life: WriterLife) -> bool:
        """Take in what the writer said. True when it is dead and has no more to say."""
        life.take_spawned(self._server)
        dead = life.wait_dead(0)  # looked at first: then all that it ever said is in the socket
        try:
            while (packet := life.channel.receive()) is not None:
                self._handle(life, packet.message)
        except EOFError:
            return True
        return dead  # a dead writer without an end of the socket: a child of its function still holds it

    def _handle(self, life: WriterLife, message: Message) -> None:
        if isinstance(message, Ready):
            life.ready = True
            self._alive_at = time.monotonic()
            self._begin_first(time.monotonic_ns())
        elif isinstance(message, Event):
            self._results.append(message)
        elif isinstance(message, Finished) and message.index in self._calls:
            taken_s = None if message.error else (message.ended_ns - message.began_ns) / 1e9
            self._settle(message.index, message.error and f"raised {message.error}", message.traceback, taken_s)
            self._begin_first(message.ended_ns)

    def _overdue(self, life: WriterLife) -> str | None:
        """Why the writer must be given up now, if it must."""
        now = time.monotonic()
        progress = life.page.progress
        if not self._calls or progress != self._last_progress:
            self._alive_at, self._last_progress = now, progress
        first, left_s = self._first(), self._left_s()
        if first is not None and first.timer is not None and left_s is not None and left_s <= 0:
            return first.timer.overdue(life.pid)
        limit_s = self._limit_s()
        if limit_s is None or now - self._alive_at < limit_s:
            return None
        if not life.ready:
            self._server.release()  # it does not do its work: the next writer gets another one
            return f"did not start within {limit_s:g} s"
        return f"made no progress for {limit_s:g} s and was killed"

    def _bury(self, life: WriterLife, reason: str | None = None) -> None:
        """Settle the calls that a dead or hanging writer leaves: failed, or sent to the next one."""
        life.kill()  # whatever may be left of it
        life.wait_dead(_EXIT_WAIT_S)  # its function does nothing any more when the failure is told
        how = reason or self._server.wait_exit(life.writer_id, _EXIT_WAIT_S)
        process = "the writer process" if life.pid is None else f"the writer process (pid {life.pid})"
        self._life = None
        life.release()
        for call in list(self._calls.values()):
            if life.page.has_started(call.index) or call.attempts >= _MAX_ATTEMPTS:
                self._settle(call.index, f"failed: {process} {how}. The next call gets a new one")
            else:
                self._send(call)

    def _settle(self, index: int, problem: str, trace: str = "", taken_s: float | None = None) -> None:
        call = self._calls.pop(index)
        call.over(taken_s)
        error = None
        if problem:
            rank = own_rank()
            where = "" if rank is None else f" on rank {rank}"
            error = WriterError(f"background call {index} ({call.label}){where} {problem}", rank=rank)
            error.__cause__ = RemoteTraceback(trace) if trace else None
        self._results.append(Outcome(index, error))


def wait_for_any(writers: Iterable[WriterProcess], timeout_s: float, interrupted: Wakeup | None = None) -> None:
    """Wait until one of them has something to `poll` for, at most `timeout_s`, or until `interrupted` is set."""
    poll = select.poll()
    if interrupted is not None:
        poll.register(interrupted, select.POLLIN)
    for writer in writers:
        for fd, events in writer.handles():
            poll.register(fd, events)
        if (patience_s := writer.patience_s()) is not None:
            timeout_s = min(timeout_s, patience_s)
    ready = poll.poll(max(0, int(timeout_s * 1000) + 1))
    if interrupted is not None and any(fd == interrupted.fileno() for fd, _ in ready):
        interrupted.clear()
