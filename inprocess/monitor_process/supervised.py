"""The rank's side of its monitor process: start it, send it messages, and start another one when it dies.

A thread waits for the end of the process. What the next process must know is kept here: the description of the store,
the iteration, and whether progress limits count.
"""

from __future__ import annotations

import logging
import select
import threading
import time
from collections.abc import Callable
from typing import Any

from inprocess.exception import InternalError
from inprocess.ipc.threads import JoinableThread
from inprocess.ipc.wakeup import Wakeup
from inprocess.monitor_process import messages
from inprocess.monitor_process.messages import Message, WatchRank
from inprocess.monitor_process.start import MonitorHandle, MonitorStartError, start_monitor
from inprocess.progress_watchdog import Timestamp

_log = logging.getLogger(__name__)
_START_TIMEOUT_S = 60.0
_END_TIMEOUT_S = 5.0
_MOST_DEATHS_IN_A_ROW = 3
_QUIET_S = 60.0


class MonitorProcess:
    """The monitor process of this rank, and those that replace it.

    `on_lost(error)` is called on the supervising thread when no new one can be started. Methods may be called from any
    thread. None waits for the monitor process, except `start` and `shutdown`, for a bounded time.
    """

    def __init__(self, task: WatchRank, *, on_lost: Callable[[Exception], None] | None = None) -> None:
        self._task = task
        self._on_lost = on_lost
        self._lock = threading.Lock()
        self._handle: MonitorHandle | None = None
        self._connect: messages.Connect | None = None
        self._iteration: messages.IterationStart | None = None
        self._leaving: messages.Leaving | None = None
        self._timeouts_disabled = 0
        self._wake = Wakeup()
        self._closing = False
        self._ended = False
        self._deaths = 0
        self._supervisor = JoinableThread(self._supervise, "monitor-process-supervisor")

    @property
    def pid(self) -> int:
        """The process id of the present monitor process."""
        assert self._handle is not None
        return self._handle.pid

    def start(self) -> None:
        """Start the process; returns when it runs. InternalError if it does not start."""
        try:
            self._start_again_if_killed()
        except BaseException:
            self.shutdown()
            raise
        self._supervisor.start()

    def connect(self, description: dict[str, Any], iteration: int) -> None:
        """All ranks have met: have the monitor open the store. From `iteration` on it reports for this rank."""
        self._connect = messages.Connect(description, iteration)
        self._send(self._connect)

    def start_iteration(self, rank: int, world_size: int, iteration: int) -> None:
        """An iteration begins: progress limits and heartbeats start anew."""
        self._iteration = messages.IterationStart(rank, world_size, iteration)
        self._send(self._iteration)

    def send_timestamp(self, timestamp: Timestamp) -> None:
        """Pass on the timestamps of the progress watchdog. Dropped while the monitor does not read."""
        self._send(messages.Progress(timestamp.auto, timestamp.manual))

    def disable_sibling_monitor(self) -> None:
        """The iteration is over: stop heartbeats until the next one."""
        self._send(messages.DisableSiblingMonitor())

    def disable_timeouts(self) -> None:
        """Ignore both progress limits until `enable_timeouts` has been called as often."""
        with self._lock:
            self._timeouts_disabled += 1
        self._send(messages.DisableTimeouts())

    def enable_timeouts(self) -> None:
        """Enforce the progress limits again."""
        with self._lock:
            self._timeouts_disabled = max(0, self._timeouts_disabled - 1)
            enabled = self._timeouts_disabled == 0
        if enabled:
            self._send(messages.EnableTimeouts())

    def leave(self, reported: bool) -> None:
        """Announce that this rank leaves the job by itself; again with `reported` when the others know."""
        self._leaving = messages.Leaving(reported)
        self._send(self._leaving)

    def stop_replacing(self) -> None:
        """Do not replace a monitor process that dies from now on; waits for one that is just starting. Idempotent.

        Call it before the store is closed, which a new process needs.
        """
        if self._ended:
            return
        self._closing = True
        self._wake.set()
        self._supervisor.join()

    def shutdown(self) -> None:
        """End the process, and wait for its end, a few seconds at most. Idempotent."""
        if self._ended:
            return
        self.stop_replacing()
        self._ended = True
        if self._handle is not None and not self._handle.close(_END_TIMEOUT_S):
            _log.error("the monitor process %d did not end and was killed", self._handle.pid)
        self._wake.close()

    # -- watching the process ------------------------------------------------------------------------------------------

    def _start_again_if_killed(self) -> None:
        while True:
            try:
                handle = start_monitor(self._task, timeout_s=_START_TIMEOUT_S)
                break
            except MonitorStartError as error:
                self._deaths += error.killed
                if not error.killed or self._deaths >= _MOST_DEATHS_IN_A_ROW or self._closing:
                    raise
                _log.error("%s; starting another one", error)
        old, self._handle = self._handle, handle
        if old is not None:
            old.close()

    def _supervise(self) -> None:
        """Keeper thread: replace the monitor process when it dies."""
        while not self._closing:
            handle = self._handle
            assert handle is not None
            begin = time.monotonic()
            if not self._wait_death(handle):
                return
            handle.join()
            self._deaths = 0 if time.monotonic() - begin > _QUIET_S else self._deaths + 1
            _log.error("the monitor process %d ended (%s); starting another one", handle.pid, handle.exitcode)
            try:
                if self._deaths >= _MOST_DEATHS_IN_A_ROW:
                    raise InternalError(f"the monitor process died {self._deaths} times in a row")
                self._replace()
            except Exception as error:
                _log.critical("this rank has no monitor process any more: %s", error)
                if self._on_lost is not None:
                    self._on_lost(error)
                return

    def _wait_death(self, handle: MonitorHandle) -> bool:
        """Sleep until the process has ended: True; or until `stop_replacing`: False."""
        poll = select.poll()
        poll.register(handle.sentinel, select.POLLIN)
        poll.register(self._wake, select.POLLIN)
        poll.poll()
        return not self._closing

    def _replace(self) -> None:
        self._start_again_if_killed()
        if self._connect is None or self._closing:
            return
        self._send(self._connect)
        if self._iteration is not None:
            self._send(self._iteration)
        if self._timeouts_disabled:
            self._send(messages.DisableTimeouts())
        if self._leaving is not None:
            self._send(self._leaving)

    def _send(self, message: Message) -> None:
        if self._handle is not None:
            self._handle.channel.try_send(message)
