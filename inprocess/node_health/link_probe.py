"""The launcher's end of the processes that transfer between nodes."""

from __future__ import annotations

import contextlib
import math
import os
import select
import signal
import subprocess
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from inprocess.ipc.deadline import Deadline
from inprocess.ipc.packets import PacketError
from inprocess.ipc.process import end_process, start_module
from inprocess.node_health.messages import TRANSFERS, MeasureTransfer, TransferChannel, TransferReport

_MODULE = "inprocess.node_health.transfer_process"
_SLICE_S = 0.2
_GRACE_S = 2.0  # after the limit, for the error of the operation that was too late
_KILLED_S = 1.0


@dataclass(frozen=True)
class TransferTime:
    """The fastest transfer of a node with another one; infinite, and why, if none has ended."""

    seconds: float
    why: str = ""


@dataclass
class _Transferrer:
    """A process. `number` is that of its last request whose end it has reported, -1 before it is ready."""

    process: subprocess.Popen[bytes]
    channel: TransferChannel
    number: int = -1
    seconds: list[float] = field(default_factory=list)  # of the last request
    why: str = ""  # the last request has failed
    is_gone: bool = False

    def take(self) -> None:
        """Read reports. Does not wait."""
        try:
            while (packet := self.channel.receive()) is not None:
                report = packet.message
                if not isinstance(report, TransferReport):
                    continue
                if report.seconds is not None:
                    self.seconds.append(report.seconds)
                else:
                    self.number, self.why = report.number, report.why
        except (EOFError, PacketError):
            self.is_gone = True
            code = self.process.poll()
            self.why = self.why or f"its process has ended{'' if code is None else f' with {code}'}"

    def end(self) -> None:
        """Kill it. One that hangs in the kernel is left."""
        self.channel.close()
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        end_process(self.process, Deadline(_KILLED_S))


class LinkProbe:
    """`count` processes of this node that transfer, one per GPU if there are several. One thread; `close` it.

    A process that has ended, or has not reported the end of its request in time, is replaced by the next `prepare`.
    """

    def __init__(self, count: int) -> None:
        self.count = count
        self._processes: list[_Transferrer | None] = [None] * count

    def prepare(self, timeout_s: float) -> str:
        """Wait until all processes are ready; return why they are not, or nothing."""
        deadline = Deadline(timeout_s)
        try:
            for place, process in enumerate(self._processes):
                if process is None:
                    self._processes[place] = _start()
        except (OSError, RuntimeError) as error:
            return f"the process that transfers cannot be started: {error}"
        self._wait(0, deadline)
        late = [
            process for process in self._processes if process is not None and (process.is_gone or process.number < 0)
        ]
        self._drop(late)
        return "" if not late else f"not ready: {late[0].why or f'it was not started within {timeout_s:g} s'}"

    def measure(self, requests: Sequence[MeasureTransfer], limit_s: float) -> TransferTime:
        """Run a request in each process, which are prepared; return after `limit_s` and seconds at the latest."""
        processes = [process for process in self._processes if process is not None]
        for process, request in zip(processes, requests, strict=True):
            process.seconds, process.why = [], ""
            process.channel.send(request)
        self._wait(requests[0].number, Deadline(limit_s + _GRACE_S))
        slowest = max((min(process.seconds, default=math.inf) for process in processes), default=math.inf)
        errors = [process.why for process in processes if process.why]
        self._drop(process for process in processes if process.is_gone or process.number != requests[0].number)
        if slowest < math.inf:
            return TransferTime(slowest)
        return TransferTime(math.inf, errors[0] if errors else f"no transfer has ended within {limit_s:g} s")

    def close(self) -> None:
        """End the processes. Idempotent."""
        self._drop(process for process in self._processes if process is not None)

    def _drop(self, processes: Iterable[_Transferrer]) -> None:
        for process in list(processes):
            self._processes[self._processes.index(process)] = None
            process.end()

    def _wait(self, number: int, deadline: Deadline) -> None:
        """Wait until all processes have reported the end of this request, or have failed."""
        while True:
            running = []
            for process in self._processes:
                if process is not None:
                    process.take()
                    if not process.is_gone and process.number < number:
                        running.append(process)
            if not running or deadline.is_over:
                return
            poll = select.poll()
            for process in running:
                poll.register(process.channel, select.POLLIN)
            poll.poll(deadline.poll_ms(_SLICE_S))


def _start() -> _Transferrer:
    channel, theirs = TransferChannel.pair(TRANSFERS)
    with theirs:
        try:
            fd = theirs.fileno()
            process = start_module(_MODULE, str(fd), pass_fds=[fd], cwd=None, stderr=None)
        except BaseException:
            channel.close()
            raise
    return _Transferrer(process, channel)
