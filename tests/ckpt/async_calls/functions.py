"""What the tests run in writers, and how they meet it half way."""

import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ckpt.async_calls import AsyncCallsQueue, current
from ckpt.errors import CheckpointError
from inprocess.ipc.shared_memory import SharedMemory


@dataclass(frozen=True)
class Gate:
    """Two pipes with names: `pass_through` stops in the writer until the test has seen it there and lets it go."""

    entered: Path
    leave: Path

    @classmethod
    def create(cls, folder: Path, name: str = "gate") -> "Gate":
        gate = cls(folder / f"{name}.entered", folder / f"{name}.leave")
        os.mkfifo(gate.entered)
        os.mkfifo(gate.leave)
        return gate

    def pass_through(self) -> None:
        self.entered.write_bytes(b"")
        self.leave.read_bytes()

    def wait_entered(self) -> None:
        self.entered.read_bytes()

    def open(self) -> None:
        self.leave.write_bytes(b"")


def nothing() -> None:
    pass


def ignore(message: str) -> None:
    pass


def ignore_two(first: object, second: object) -> None:
    pass


def append(path: Path, text: str) -> None:
    with path.open("a") as file:
        file.write(text)


def stop_at(gate: Gate, path: Path | None = None, text: str = "") -> None:
    gate.pass_through()
    if path is not None:
        append(path, text)


def pid_and(values: object) -> str:
    return f"{os.getpid()} {values}"


def write_pid_and(path: Path, text: str, end: str) -> None:
    path.write_text(f"{os.getpid()} {text}{end}")


def fail(message: str) -> None:
    raise ValueError(message)


def exit_quietly() -> None:
    sys.exit(0)


class _NoText(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no text either")


def fail_without_text() -> None:
    raise _NoText


def die(how: int) -> None:
    os.kill(os.getpid(), how)


def fill(region: SharedMemory, value: int) -> None:
    region.buffer[:] = bytes([value]) * region.size


def report_identity() -> None:
    report({"pid": os.getpid(), "server": os.getppid()})


def report_mappings(name: str) -> None:
    report({"mappings": Path("/proc/self/maps").read_text().count(name)})


def report_state() -> None:
    status = Path("/proc/self/status").read_text()
    report(
        {
            "rss_kb": int(status.split("VmRSS:")[1].split()[0]),
            "name": Path("/proc/self/comm").read_text().strip(),
            "torch": "torch" in sys.modules,
            "sigint_ignored": signal.getsignal(signal.SIGINT) == signal.SIG_IGN,
            "sigterm_ignored": signal.getsignal(signal.SIGTERM) == signal.SIG_IGN,
            "nice": os.getpriority(os.PRIO_PROCESS, 0),
            "session": os.getsid(0),
            "fds": len(os.listdir("/proc/self/fd")),
            "cwd": os.getcwd(),
        }
    )


def report_priorities() -> None:
    import psutil

    report({"nice": os.getpriority(os.PRIO_PROCESS, 0), "io_class": int(psutil.Process().ionice().ioclass)})


def report(event: dict[str, Any]) -> None:
    context = current()
    assert context is not None
    context.report(event)


def report_from_thread(events: list[dict[str, Any]]) -> None:
    context = current()
    assert context is not None
    threads = [threading.Thread(target=context.report, args=(event,)) for event in events]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def hang(gate: Gate) -> None:
    gate.pass_through()
    threading.Event().wait()


def advance_until_killed() -> None:
    context = current()
    assert context is not None
    while True:
        context.progress()


@dataclass
class Call:
    """A recoverable call that remembers, in the trainer, what it was told."""

    fn: Callable[..., Any]
    events: list[dict[str, Any]] = field(default_factory=list)
    abandoned_with: list[CheckpointError] = field(default_factory=list)
    replacement: CheckpointError | None = None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.fn(*args, **kwargs)

    def on_event(self, event: dict[str, Any]) -> None:
        self.events.append(event)

    def abandoned(self, error: CheckpointError) -> CheckpointError:
        self.abandoned_with.append(error)
        return self.replacement or error

    @property
    def in_writer(self) -> Callable[..., Any]:
        return self.fn


@dataclass
class TimedCall:
    """A call with a time limit that the test moves: `left` seconds, from its turn on if it `counts`."""

    fn: Callable[..., Any]
    left: float | None = None
    counts: bool = False
    begun_ns: list[int] = field(default_factory=list)
    late_pids: list[int | None] = field(default_factory=list)
    ended: list[float | None] = field(default_factory=list)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.fn(*args, **kwargs)

    def on_begun(self, at_ns: int) -> "TimedCall":
        self.begun_ns.append(at_ns)
        return self

    def left_s(self) -> float | None:
        if self.left is None or not self.counts:
            return self.left
        return self.left - (time.monotonic_ns() - self.begun_ns[0]) / 1e9

    def overdue(self, pid: int | None) -> str:
        self.late_pids.append(pid)
        return "is late"

    def end(self, taken_s: float | None) -> None:
        self.ended.append(taken_s)

    def __reduce__(self) -> Any:
        return TimedCall, (self.fn,)


def ask(queue: AsyncCallsQueue, fn: Callable[..., Any], *args: Any) -> dict[str, Any]:
    """Run a function that reports once, and return its report."""
    from ckpt.async_calls import AsyncRequest

    call = Call(fn)
    queue.schedule_async_request(AsyncRequest(call, args, []))
    queue.maybe_finalize_async_calls(blocking=True)
    (event,) = call.events
    return event
