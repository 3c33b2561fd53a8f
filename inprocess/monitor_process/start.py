"""Starting and ending a monitor process, by a rank's wrapper or by a launcher.

The process is started from scratch, so it has no torch, no CUDA context, no lock and no socket of the caller:

    caller                                       python -m inprocess.monitor_process FD
      start_monitor ── WatchRank or ServeRanks ──▶ RankMonitor or NodeMonitor
      MonitorHandle ◀── Started or RequestFailed ─
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import subprocess
import time
from collections.abc import Mapping
from typing import Any

from inprocess.exception import InternalError
from inprocess.ipc import unix_sockets
from inprocess.ipc.packets import receive, send
from inprocess.ipc.process import start_module
from inprocess.monitor_process import messages
from inprocess.monitor_process.messages import CODEC, MonitorChannel

_REQUEST_TIMEOUT_S = 10.0
_END_TIMEOUT_S = 5.0


class MonitorStartError(InternalError):
    """A monitor process did not start. `killed`: a signal ended it, as it can at any other time."""

    def __init__(self, text: str, killed: bool = False) -> None:
        super().__init__(f"the monitor process did not start: {text}")
        self.killed = killed


class MonitorControl:
    """Requests of a launcher to a monitor. Each connects, is answered, and takes 10 s at most. OSError, PacketError."""

    def __init__(self, path: str) -> None:
        self.path = path

    def close_worker_connection(self) -> None:
        """The workers have been stopped: make room for the next ones."""
        self._request(messages.CloseConnection())

    def set_cycle(self, cycle: int) -> None:
        """Set the number of the present cycle."""
        self._request(messages.SetCycle(cycle))

    def end_with_launcher(self, pid: int) -> None:
        """Have the monitor end this worker, in place of one named before, when the launcher dies."""
        self._request(messages.EndWithLauncher(pid))

    def shutdown(self) -> None:
        """End the monitor."""
        self._request(messages.Shutdown())

    def _request(self, message: messages.Message) -> None:
        with unix_sockets.connect(self.path, _REQUEST_TIMEOUT_S) as end:
            send(end, CODEC, message)
            try:
                answer = receive(end, CODEC).message
            except EOFError:
                raise ConnectionError(f"the monitor at {self.path} closed the connection") from None
        if isinstance(answer, messages.RequestFailed):
            raise ConnectionError(answer.cause)


class MonitorHandle:
    """A monitor process, with the methods of `multiprocessing.Process` that launchers use. One thread at a time.

    `channel` is the connection that the process has inherited. `sentinel` is a process descriptor that becomes readable
    when the process ends. `close` it.
    """

    def __init__(self, process: subprocess.Popen[bytes], channel: MonitorChannel) -> None:
        self.channel = channel
        self.sentinel = os.pidfd_open(process.pid)
        self._process = process
        self._control_path = ""

    @property
    def control(self) -> MonitorControl:
        """What sends a launcher's requests."""
        return MonitorControl(self._control_path)

    @property
    def pid(self) -> int:
        """The process id."""
        return self._process.pid

    @property
    def exitcode(self) -> int | None:
        """The exit code, negative for a signal; None while the process runs."""
        return self._process.poll()

    def is_alive(self) -> bool:
        """Whether the process runs."""
        return self.exitcode is None

    def wait_started(self, timeout_s: float) -> None:
        """Wait until the monitor has answered. MonitorStartError if it cannot run, has ended, or does not answer."""
        deadline = time.monotonic() + timeout_s
        while (left_s := deadline - time.monotonic()) > 0:
            select.select([self.channel], [], [], left_s)
            try:
                packet = self.channel.receive()
            except EOFError:
                self.join(_END_TIMEOUT_S)
                break
            answer = packet and packet.message
            if isinstance(answer, messages.Started):
                self._control_path = answer.control_path or ""
                return
            if isinstance(answer, messages.RequestFailed):
                raise MonitorStartError(answer.cause)
        code = self.exitcode
        if code is None:
            raise MonitorStartError(f"no answer within {timeout_s:g} s")
        raise MonitorStartError(f"it ended with exit code {code}; see its log", killed=code < 0)

    def terminate(self) -> None:
        """Send SIGTERM: a launcher's monitor ends."""
        self._signal(signal.SIGTERM)

    def kill(self) -> None:
        """Send SIGKILL. A launcher's rank then connects to the next monitor at the same path."""
        self._signal(signal.SIGKILL)

    def join(self, timeout: float | None = None) -> None:
        """Wait until the process has ended, at most `timeout` seconds."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(timeout)

    def close(self, timeout_s: float = _REQUEST_TIMEOUT_S) -> bool:
        """End the process and release everything. Idempotent. False if it did not end in time, and was killed."""
        self.channel.try_send(messages.Shutdown())
        self.channel.close()
        self.join(timeout_s)
        ended = not self.is_alive()
        if not ended:
            self.kill()
            self.join(timeout_s)  # one that waits in the kernel for a file system ends with that wait
        fd, self.sentinel = self.sentinel, -1
        if fd >= 0:
            os.close(fd)
        return ended

    def __enter__(self) -> MonitorHandle:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _signal(self, number: signal.Signals) -> None:
        if self.is_alive():
            self._process.send_signal(number)


def start_monitor(
    task: messages.WatchRank | messages.ServeRanks,
    *,
    timeout_s: float,
    env: Mapping[str, str] | None = None,
    **streams: Any,
) -> MonitorHandle:
    """Start a monitor process, and return when it runs. MonitorStartError if it does not, within `timeout_s`.

    `env` is added to the environment; `streams` are as in `start_module`.
    """
    channel, theirs = MonitorChannel.pair(CODEC)
    fds = [theirs.fileno()]
    if isinstance(task, messages.WatchRank):
        fds += task.inherited_fds
    with theirs:
        process = start_module("inprocess.monitor_process", str(theirs.fileno()), pass_fds=fds, env=env, **streams)
    handle = MonitorHandle(process, channel)
    try:
        channel.send(task)
        handle.wait_started(timeout_s)
    except BaseException:
        handle.kill()
        handle.close()
        raise
    return handle
