"""One writer process at a time, seen from the trainer.

    submit() ──▶ [ outbox ] ════ socket ════▶ writer (see `writer_main`)
    poll()  ◀─── CallOutcome, Notice ═════════ writer
      ├── pidfd, end of socket: the writer died
      ├── its progress counter does not advance: the writer hangs, and is killed
      └── the call is over its time limit (`CallTimer`): the same

    no writer ──submit / start──▶ starting ──Ready──▶ serving ──death──▶ no writer
                                     └──start_timeout_s──▶ killed ──────────┘

The trainer never waits for a writer to start: its socket takes messages before the process exists. A death fails the
call that was running; calls behind it, which the writer had not begun, go to the next writer in the same order, once.
"""

from __future__ import annotations

import contextlib
import select
import time
import weakref
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Literal

from ckpt.async_calls.call import Call
from ckpt.async_calls.writer_main import CODEC, CONTROL_PAGE, ControlPage, Message, Ready, Run
from ckpt.errors import RemoteTraceback, WriterError
from ckpt.keeper.messages import DropRegion, Finished, Notice, keep_message
from ckpt.keeper.trainer_side import Keeper, Worker
from ckpt.ranks.group import own_rank
from inprocess.ipc.deadline import Deadline
from inprocess.ipc.forks import in_forked_children
from inprocess.ipc.shared_memory import SharedMemory
from inprocess.ipc.wakeup import Wakeup


@dataclass(frozen=True)
class WriterConfig:
    """How writer processes are run. Times are in seconds.

    `nice` is added to the trainer's own niceness. `io_class` and `io_level` are the Linux I/O priority; None does not
    change it. `start_timeout_s` bounds the start of a writer, `close_timeout_s` its end. A writer that runs a call and
    reports no progress (`WriterContext.progress`) for `writer_timeout_s` is killed; None: no limit.
    """

    nice: int = 10
    io_class: Literal["best-effort", "idle"] | None = "best-effort"
    io_level: int = 7
    start_timeout_s: float = 60.0
    close_timeout_s: float = 60.0
    writer_timeout_s: float | None = None


def with_priorities(config: WriterConfig, nice: int | None, io_class: int | None) -> WriterConfig:
    """Return the config with other priorities; None keeps one as it is.

    `io_class` is a scheduling class of Linux: 0 does not change it, 2 is best-effort, 3 idle. ValueError for any other
    (with 1, realtime, checkpoints would precede all other I/O), and for a negative `nice`.
    """
    if nice is not None:
        if nice < 0:
            raise ValueError(f"the priority of writers cannot be above the trainer's: {nice} is negative")
        config = replace(config, nice=nice)
    match io_class:
        case None:
            return config
        case 0:
            return replace(config, io_class=None)
        case 2:
            return replace(config, io_class="best-effort")
        case 3:
            return replace(config, io_class="idle")
    raise ValueError(f"io_priority must be 0, 2 or 3 (unchanged, best-effort, idle), not {io_class}")


_MAX_ATTEMPTS = 2
_EXIT_WAIT_S = 2.0
_KILLED_WAIT_S = 0.5  # for the end of a killed process; one that waits for storage in the kernel does not end


@dataclass(frozen=True)
class CallOutcome:
    """A call is over. `error` is None when its function returned."""

    index: int
    error: WriterError | None
    problem: str = ""
    """The end of the message of the error, for a message with another subject."""


class WriterProcess:
    """Runs calls in one background process at a time, in the order submitted.

    Used by one thread of the trainer; forked children must not use it.
    """

    def __init__(self, config: WriterConfig, keeper: Keeper, program: str = "writer") -> None:
        """`program` is the name of its processes."""
        self._config = config
        self._keeper = keeper
        self._program = program
        self._process: _Process | None = None
        self._calls: dict[int, Call] = {}  # in the order submitted
        self._results: list[CallOutcome | Notice] = []  # for the next `poll`
        self._alive_at = time.monotonic()  # when the writer was last seen to make progress, or had nothing to do
        self._last_progress = 0
        in_forked_children(self.release)

    @property
    def pid(self) -> int | None:
        """The id of the process; None as long as it does not exist."""
        return self._process.pid if self._process is not None else None

    def start(self) -> None:
        """Start the process in the background, if there is none. Raises OSError when that fails."""
        if self._process is None:
            self._process = _Process(self._keeper, self._program, self._config)
            self._alive_at, self._last_progress = time.monotonic(), 0

    def submit(self, call: Call) -> None:
        """Take a call, without waiting for the process. Indices only grow. Every failure is the call's outcome."""
        if not self._calls:
            self._alive_at = time.monotonic()
        self._calls[call.index] = call
        self._send(call)
        self._begin_first(time.monotonic_ns())

    @property
    def busy(self) -> bool:
        """Whether there are calls without an outcome."""
        return bool(self._calls)

    def poll(self) -> list[CallOutcome | Notice]:
        """Return what happened since the last call, without waiting.

        Notices a process that died or hangs, and replaces it if calls are left for it.
        """
        if self._process is None:
            self._keeper.pump()
        elif self._receive(self._process):
            self._handle_death(self._process)
        elif (reason := self._overdue(self._process)) is not None:
            self._handle_death(self._process, reason)
        else:
            self._process.detach_closed_regions()
        results, self._results = self._results, []
        return results

    def kill(self) -> None:
        """Kill the process with SIGKILL.

        The running call fails, as `poll` will report. No call behind it begins in this process.
        """
        if self._process is not None:
            self._keeper.pump()
            self._process.refresh()
            self._process.kill()

    def kill_from_any_thread(self) -> None:
        """Kill the process, as `kill` does. It may just have been replaced; then that one is not killed."""
        if (process := self._process) is not None:
            with contextlib.suppress(OSError):  # it was released meanwhile
                process.kill()

    def nudge(self) -> None:
        """Ask the running function to look now at what it waits for; see `WriterContext.nudges`."""
        if self._process is not None:
            self._process.page.nudge()

    def forget_calls(self) -> None:
        """Drop all calls without an outcome. A process that works on one is killed; the next call gets another.

        Does not wait for its end: it may still write for a moment.
        """
        if self._calls:
            self.discard()
        self._results.clear()

    def discard(self) -> None:
        """Kill the process, without reading what it sent, nor waiting for its end."""
        self.kill()
        self.release()

    def abort(self, known: Deadline) -> None:
        """Kill the process as soon as its pid is known, and wait for its end for a moment. Idempotent.

        One that is not forked until the deadline begins no call.
        """
        if (process := self._process) is not None:
            process.page.abort()
            process.abort(known)
        self.release()

    def close(self, ending: Deadline) -> None:
        """Let the process finish what it has, wait for its end until the deadline, then kill it.

        A process that has nothing to do and is still starting is not waited for. Outcomes are dropped. Idempotent.
        """
        if (process := self._process) is not None:
            process.channel.end_sending()
            if not self._calls and not self._receive(process) and not process.ready:
                process.kill()
                self._keeper.give_up_start(process.worker_id)
                process.refresh()
                if process.pidfd is None:
                    ending = Deadline(0.0)  # it was never forked
            while not self._receive(process) and not ending.is_over:
                self._results.clear()
                wait_for_any([self], ending.left_s)
            process.kill()
            process.is_dead(Deadline(_KILLED_WAIT_S))
        self.release()

    def release(self) -> None:
        """Close the connection without waiting: the process finishes what it was sent, then ends. Idempotent."""
        process, self._process = self._process, None
        if process is not None:
            process.release()
        for call in self._calls.values():
            call.leave_writer()
        self._calls.clear()

    def handles(self) -> list[tuple[int, int]]:
        """Return the file descriptors to poll, with the events to poll for."""
        handles = []
        if self._process is not None:
            handles.append((self._process.channel.fileno(), self._process.channel.poll_events))
            if self._process.pidfd is not None:
                handles.append((self._process.pidfd, select.POLLIN))
        if (control := self._keeper.control) is not None:
            handles.append((control.fileno(), control.poll_events))
        return handles

    def timeout_s(self) -> float | None:
        """Return when to `poll` at the latest, in seconds from now, even if the process sends nothing; None: never."""
        if self._results:
            return 0.0
        limit_s, left_s = self._limit_s(), self._left_s()
        times = [] if limit_s is None else [self._alive_at + limit_s - time.monotonic()]
        times += [] if left_s is None else [left_s]
        return max(0.0, min(times)) if times else None

    def _limit_s(self) -> float | None:
        if self._process is None or not self._calls:
            return None
        return self._config.writer_timeout_s if self._process.ready else self._config.start_timeout_s

    def _left_s(self) -> float | None:
        """Return how long the running call may go on; None if it has no limit."""
        first = self._first()
        return None if first is None or first.timer is None else first.timer.left_s()

    def _first(self) -> Call | None:
        """Return the call that is running, or next."""
        return next(iter(self._calls.values()), None)

    def _begin_first(self, at_ns: int) -> None:
        """Start the clock of the call that is next, if a process is there to run it."""
        first = self._first()
        if first is not None and self._process is not None and self._process.ready:
            first.begin(at_ns)

    def _send(self, call: Call) -> None:
        call.attempts += 1
        try:
            self.start()
            assert self._process is not None
            self._process.send_call(call)
        except OSError as error:
            self._settle(call.index, f"could not be given to a writer process: {error}")

    def _receive(self, process: _Process) -> bool:
        """Take in what the process sent. True when it is dead and everything it sent has been read."""
        return process.receive(lambda packet: self._handle(process, packet.message))

    def _handle(self, process: _Process, message: Message) -> None:
        if isinstance(message, Ready):
            process.ready = True
            self._alive_at = time.monotonic()
            self._begin_first(time.monotonic_ns())
        elif isinstance(message, Notice):
            self._results.append(message)
        elif isinstance(message, Finished) and message.index in self._calls:
            taken_s = None if message.error else (message.ended_ns - message.began_ns) / 1e9
            self._settle(message.index, message.error and f"raised {message.error}", message.traceback, taken_s)
            self._begin_first(message.ended_ns)

    def _overdue(self, process: _Process) -> str | None:
        """Return why the process must be killed now; None if it need not be."""
        now = time.monotonic()
        progress = process.page.progress
        if not self._calls or progress != self._last_progress:
            self._alive_at, self._last_progress = now, progress
        first, left_s = self._first(), self._left_s()
        if first is not None and first.timer is not None and left_s is not None and left_s <= 0:
            return first.timer.overdue(process.pid)
        limit_s = self._limit_s()
        if limit_s is None or now - self._alive_at < limit_s:
            return None
        if not process.ready:
            if process.pidfd is None:
                self._keeper.kill()  # it may hang: the next process is forked by another one
            return f"did not start within {limit_s:g} s"
        return f"made no progress for {limit_s:g} s and was killed"

    def _handle_death(self, process: _Process, reason: str | None = None) -> None:
        """Settle the calls of a dead or hanging process: fail them, or send them to the next one."""
        process.kill()  # it may hang, or its children may live
        process.is_dead(Deadline(_EXIT_WAIT_S))  # its function has no effect any more when the failure is reported
        how = reason or process.how_ended(_EXIT_WAIT_S)
        name = "the writer process" if process.pid is None else f"the writer process (pid {process.pid})"
        self._process = None
        process.release()
        for call in list(self._calls.values()):
            if process.page.has_begun(call.index) or call.attempts >= _MAX_ATTEMPTS:
                self._settle(call.index, f"failed: {name} {how}", then=". The next call gets a new one")
            else:
                self._send(call)

    def _settle(
        self, index: int, problem: str, trace: str = "", taken_s: float | None = None, *, then: str = ""
    ) -> None:
        call = self._calls.pop(index)
        call.leave_writer(taken_s)
        error = None
        if problem:
            rank = own_rank()
            where = "" if rank is None else f" on rank {rank}"
            error = WriterError(f"background call {index} ({call.label}){where} {problem}{then}", rank=rank)
            error.__cause__ = RemoteTraceback(trace) if trace else None
        self._results.append(CallOutcome(index, error, problem))


class _Process(Worker[Message]):
    """One writer process, from the request to fork it until it is dead."""

    def __init__(self, keeper: Keeper, program: str, config: WriterConfig) -> None:
        """Ask for a process; it takes messages before it exists. OSError."""
        self.ready = False
        self._attached: dict[str, weakref.ref[SharedMemory]] = {}
        self._control_region = SharedMemory.create("ckpt-control", ControlPage.SIZE)
        try:
            super().__init__(
                keeper, program, CODEC, nice=config.nice, io_class=config.io_class, io_level=config.io_level
            )
            self.page = ControlPage(self._control_region)
            self.channel.send(replace(keep_message(self._control_region), key=CONTROL_PAGE), self._control_region.fd)
        except BaseException:
            self._control_region.close()
            raise

    def send_call(self, call: Call) -> None:
        """Send the call, and before it the regions that this process has not got yet."""
        for region_id, region in call.regions.items():
            if region_id not in self._attached:
                self.channel.send(keep_message(region), region.fd)
                self._attached[region_id] = weakref.ref(region)
        self.channel.send(Run(call.index), call.fd)

    def detach_closed_regions(self) -> None:
        """Ask the process to unmap, after the calls it has, the regions that were closed here."""
        for region_id, reference in list(self._attached.items()):
            region = reference()
            if region is None or region.closed:
                del self._attached[region_id]
                self.channel.send(DropRegion(region_id))

    def refresh(self) -> None:
        super().refresh()
        if self.page.aborted:
            self.kill()

    def kill(self) -> None:
        """Send SIGKILL, now or when the pid is known; until then the process begins no call any more."""
        self.page.abort()
        super().kill()

    def release(self) -> None:
        """Close the connection: the process, if alive, finishes what it was sent, then ends. Idempotent."""
        super().release()
        self._control_region.close()


class WriterPool:
    """The writers of a queue, all of one keeper."""

    def __init__(self, config: WriterConfig, count: int, keeper: Keeper) -> None:
        self.keeper = keeper
        self.writers = [WriterProcess(config, keeper) for _ in range(count)]

    def replace_all(self, config: WriterConfig) -> WriterPool:
        """Take new processes, none of which is started yet, and return a pool of the old ones."""
        old, new = WriterPool(config, 0, self.keeper), WriterPool(config, len(self.writers), self.keeper)
        old.writers, self.writers = self.writers, new.writers
        return old

    def release(self) -> None:
        """Close all connections without waiting: the writers finish what they were sent, then all end. Idempotent."""
        for writer in self.writers:
            writer.release()

    def discard(self) -> None:
        """Kill the writers without waiting for their end. Idempotent."""
        for writer in self.writers:
            writer.discard()


def wait_for_any(writers: Iterable[WriterProcess], timeout_s: float, interrupted: Wakeup | None = None) -> None:
    """Wait until one of them has something to `poll` for, at most `timeout_s`, or until `interrupted` is set."""
    poll = select.poll()
    if interrupted is not None:
        poll.register(interrupted, select.POLLIN)
    for writer in writers:
        for fd, events in writer.handles():
            poll.register(fd, events)
        if (writer_timeout_s := writer.timeout_s()) is not None:
            timeout_s = min(timeout_s, writer_timeout_s)
    ready = poll.poll(max(0, int(timeout_s * 1000) + 1))
    if interrupted is not None and any(fd == interrupted.fileno() for fd, _ in ready):
        interrupted.clear()
