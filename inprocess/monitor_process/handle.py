"""The rank's side of its monitor process: start it, tell it things, and start another one when it dies.

A thread sleeps on the process file descriptor of the monitor. What the next one must know is kept here: the description
of the store, the iteration, and whether time limits count.
"""

from __future__ import annotations

import contextlib
import logging
import os
import select
import subprocess
import threading
import time
from collections.abc import Callable
from typing import Any

from inprocess.exception import InternalError
from inprocess.ipc.process import start_module
from inprocess.ipc.threads import JoinableThread
from inprocess.ipc.wakeup import Wakeup
from inprocess.monitor_process import messages
from inprocess.monitor_process.messages import CODEC, Configure, Failed, Message, MonitorChannel, Started
from inprocess.progress_watchdog import Timestamp

__all__ = ["MonitorProcess"]

_log = logging.getLogger(__name__)
_START_TIMEOUT_S = 60.0
_END_TIMEOUT_S = 5.0
_MOST_DEATHS_IN_A_ROW = 3
_QUIET_S = 60.0


class _KilledAtStart(InternalError):
    """A signal ended it before it had said anything, as one can at any other time."""


class MonitorProcess:
    """The monitor process of this rank.

    `on_lost(error)` is called on the keeper thread when no other one can be started. All methods may be called from any
    thread, and none waits for the monitor process, except `start` and `shutdown`, which are bounded.
    """

    def __init__(
        self,
        config: Configure,
        *,
        stacks_fd: int | None = None,
        on_lost: Callable[[Exception], None] | None = None,
    ) -> None:
        self._config = config
        self._stacks_fd = stacks_fd
        self._on_lost = on_lost
        self._lock = threading.Lock()
        self._channel: MonitorChannel | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._connect: messages.Connect | None = None
        self._iteration: messages.IterationStart | None = None
        self._timeouts_disabled = 0
        self._wake = Wakeup()
        self._closing = False
        self._ended = False
        self._deaths = 0
        self._keeper = JoinableThread(self._keep, "monitor-process-keeper")

    @property
    def pid(self) -> int:
        """The process id of the one that runs now."""
        assert self._process is not None
        return self._process.pid

    def start(self) -> Started:
        """Start it; returns when it runs, and hosts the store if it is to. InternalError if it does not."""
        try:
            started = self._spawn_again_if_killed()
        except BaseException:
            self.shutdown()
            raise
        self._keeper.start()
        return started

    def connect(self, description: dict[str, Any], iteration: int) -> None:
        """All ranks are there: it may open the store, and from `iteration` on speaks for this rank."""
        self._connect = messages.Connect(description, iteration)
        self._send(self._connect)

    def start_iteration(self, rank: int, world_size: int, iteration: int) -> None:
        """Iteration begins: time limits and heartbeats start anew."""
        self._iteration = messages.IterationStart(rank, world_size, iteration)
        self._send(self._iteration)

    def send_timestamp(self, timestamp: Timestamp) -> None:
        """Pass on what the progress watchdog knows. Dropped when the monitor does not read."""
        self._send(messages.progress_of(timestamp))

    def disable_sibling_monitor(self) -> None:
        """The iteration is over."""
        self._send(messages.DisableSiblingMonitor())

    def disable_timeouts(self) -> None:
        """Ignore both time limits until `enable_timeouts` was called as often."""
        with self._lock:
            self._timeouts_disabled += 1
        self._send(messages.DisableTimeouts())

    def enable_timeouts(self) -> None:
        """Count time limits again."""
        with self._lock:
            self._timeouts_disabled = max(0, self._timeouts_disabled - 1)
            enabled = self._timeouts_disabled == 0
        if enabled:
            self._send(messages.EnableTimeouts())

    def leave(self) -> None:
        """This rank has left by itself: nothing is to be said about its end."""
        self._send(messages.Leaving())

    def stop_replacing(self) -> None:
        """From now on a monitor process that dies is not replaced; waits for one that just starts. Idempotent.

        To be called before the store is closed, which a replacement needs.
        """
        if self._ended:
            return
        self._closing = True
        self._wake.set()
        self._keeper.join()

    def shutdown(self) -> None:
        """End it, and wait for its end, a few seconds at most. Idempotent."""
        if self._ended:
            return
        self.stop_replacing()
        self._ended = True
        self._send(messages.Terminate())  # also to one that was started a moment ago
        if self._process is not None:
            self._end(self._process)
        if self._channel is not None:
            self._channel.close()
        self._wake.close()

    def _end(self, process: subprocess.Popen[bytes]) -> None:
        try:
            process.wait(_END_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            _log.error("the monitor process %d does not end; killing it", process.pid)
            process.kill()
            process.wait()

    # -- starting ------------------------------------------------------------------------------------------------------

    def _spawn_again_if_killed(self) -> Started:
        while True:
            try:
                return self._spawn()
            except _KilledAtStart as error:
                self._deaths += 1
                if self._deaths >= _MOST_DEATHS_IN_A_ROW or self._closing:
                    raise
                _log.error("%s; starting another one", error)

    def _spawn(self) -> Started:
        channel, theirs = MonitorChannel.pair(CODEC)
        arguments = [str(theirs.fileno())]
        inherited = [theirs.fileno()]
        if self._stacks_fd is not None:
            arguments.append(str(self._stacks_fd))
            inherited.append(self._stacks_fd)
        if self._config.sections_fd is not None:
            inherited.append(self._config.sections_fd)
        with theirs:
            process = start_module("inprocess.monitor_process", *arguments, pass_fds=inherited)
        channel.send(self._config)
        started = _wait_started(channel, process)
        old, self._channel, self._process = self._channel, channel, process
        if old is not None:
            old.close()
        return started

    # -- watching ------------------------------------------------------------------------------------------------------

    def _keep(self) -> None:
        """Keeper thread: replace the monitor process when it dies."""
        while not self._closing:
            assert self._process is not None
            begin = time.monotonic()
            if not self._wait_death(self._process.pid):
                return
            code = self._process.wait()
            self._deaths = 0 if time.monotonic() - begin > _QUIET_S else self._deaths + 1
            _log.error("the monitor process %d ended (%s); starting another one", self._process.pid, code)
            try:
                if self._deaths >= _MOST_DEATHS_IN_A_ROW:
                    raise InternalError(f"the monitor process died {self._deaths} times in a row")
                self._replace()
            except Exception as error:
                _log.critical("no monitor process watches this rank any more: %s", error)
                if self._on_lost is not None:
                    self._on_lost(error)
                return

    def _wait_death(self, pid: int) -> bool:
        """Sleep until the process has ended: True; or until `shutdown`: False."""
        try:
            pidfd = os.pidfd_open(pid)
        except ProcessLookupError:
            return not self._closing
        try:
            poll = select.poll()
            poll.register(pidfd, select.POLLIN)
            poll.register(self._wake, select.POLLIN)
            poll.poll()
            return not self._closing
        finally:
            os.close(pidfd)

    def _replace(self) -> None:
        self._spawn_again_if_killed()
        if self._connect is None or self._closing:
            return
        self._send(self._connect)
        if self._iteration is not None:
            self._send(self._iteration)
        if self._timeouts_disabled:
            self._send(messages.DisableTimeouts())

    def _send(self, message: Message) -> bool:
        channel = self._channel
        return channel is not None and channel.try_send(message)


def _wait_started(channel: MonitorChannel, process: subprocess.Popen[bytes]) -> Started:
    deadline = time.monotonic() + _START_TIMEOUT_S
    while (left := deadline - time.monotonic()) > 0:
        select.select([channel], [], [], left)
        try:
            packet = channel.receive()
        except EOFError:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(_END_TIMEOUT_S)
            break
        answer = packet and packet.message
        if isinstance(answer, Started):
            return answer
        if isinstance(answer, Failed):
            process.wait()
            channel.close()
            raise InternalError(f"the monitor process could not start: {answer.message}")
    killed_by_others = (process.poll() or 0) < 0
    process.kill()
    code = process.wait()
    channel.close()
    kind = _KilledAtStart if killed_by_others else InternalError
    raise kind(f"the monitor process did not start (exit code {code}); see its log file")
