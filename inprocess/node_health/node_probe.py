"""The launcher's end of the process that checks its node."""

from __future__ import annotations

import contextlib
import logging
import os
import select
import signal
import subprocess

from inprocess.ipc.deadline import Deadline
from inprocess.ipc.packets import PacketError
from inprocess.ipc.process import end_process, start_module
from inprocess.node_health.interface import FAILED, CheckResult
from inprocess.node_health.messages import CODEC, CheckReport, HealthChannel, NodeCheckSettings, RunChecks

_log = logging.getLogger(__name__)
_MODULE = "inprocess.node_health"
_START_S = 30.0  # for the process to start on a busy machine, beside the limit of its checks
_END_S = 1.0


class NodeProbe:
    """Runs the checks of this node in a process that is started by the first run. One thread; `close` it.

    `run` returns within the limit of the settings and half a minute, whatever hangs.
    """

    def __init__(self, settings: NodeCheckSettings) -> None:
        self._settings = settings
        self._process: subprocess.Popen[bytes] | None = None
        self._channel: HealthChannel | None = None
        self._number = 0
        self._start_s = _START_S

    @property
    def fd(self) -> int:
        """A descriptor that becomes readable when a cheap check has failed; -1 while no process runs."""
        return -1 if self._channel is None else self._channel.fileno()

    @property
    def pids(self) -> list[int]:
        """The process, if it was started."""
        return [] if self._process is None else [self._process.pid]

    def run(self) -> tuple[CheckResult, ...]:
        """Run all checks and return their results. A process that does not answer is a failure of its own."""
        deadline = Deadline(self._settings.limit_s + self._start_s)
        for is_last in (False, True):  # it may have been killed since the last run
            try:
                channel = self._start()
                self._number += 1
                channel.send(RunChecks(self._number))
                return self._wait(channel, deadline)
            except EOFError:
                self._end()
                why = "the process that checks this node has ended"
            except (OSError, RuntimeError, PacketError) as error:
                self._end()
                why = f"the process that checks this node cannot be started: {error}"
            if is_last or deadline.is_over:
                break
        return (CheckResult("checks", FAILED, why),)

    def take_failures(self) -> tuple[CheckResult, ...]:
        """Return the failures of cheap checks since the last call; does not wait. If the process has ended, none."""
        found: tuple[CheckResult, ...] = ()
        while self._channel is not None:
            try:
                packet = self._channel.receive()
            except (EOFError, PacketError) as error:
                _log.error("this node is not checked until the next rendezvous: its process is gone: %s", error)
                self._end()
                break
            if packet is None:
                break
            if isinstance(packet.message, CheckReport) and packet.message.number == 0:
                found = tuple(result for result in packet.message.results if result.is_failure)
        return found

    def close(self) -> None:
        """End the process, without waiting for a check that hangs in the kernel. Idempotent."""
        self._end()

    def _start(self) -> HealthChannel:
        if self._channel is not None:
            return self._channel
        channel, theirs = HealthChannel.pair(CODEC)
        with theirs:
            try:
                fd = theirs.fileno()
                self._process = start_module(_MODULE, str(fd), pass_fds=[fd], cwd=None, stderr=None)
            except BaseException:
                channel.close()
                raise
        self._channel = channel
        channel.send(self._settings)
        return channel

    def _wait(self, channel: HealthChannel, deadline: Deadline) -> tuple[CheckResult, ...]:
        poll = select.poll()
        poll.register(channel, select.POLLIN)
        while not deadline.is_over:
            poll.poll(deadline.poll_ms())
            while (packet := channel.receive()) is not None:
                if isinstance(packet.message, CheckReport) and packet.message.number == self._number:
                    return packet.message.results
        self._end()
        return (CheckResult("checks", FAILED, f"they have not answered within {deadline.timeout_s:g} s"),)

    def _end(self) -> None:
        channel, self._channel = self._channel, None
        process, self._process = self._process, None
        if channel is not None:
            channel.close()
        if process is not None:
            deadline = Deadline(_END_S)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(deadline.left_s)
            if process.poll() is None:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
            end_process(process, deadline)
