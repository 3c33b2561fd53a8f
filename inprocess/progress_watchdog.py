"""The proof that the main thread still executes bytecode.

    watchdog thread                               main thread
      every interval: ask Python to call  ------>  runs the call between two bytecode instructions
      sem_post(semaphore) on the main thread
      sleep in sem_clockwait  <------------------  sem_post, the C function itself
      stamp the time, send the timestamp

A main thread in a C function does not run the call, whether it holds the GIL or not. No Python code runs on the main
thread for this; see `main_thread.probe`.
"""

from __future__ import annotations

import enum
import logging
import math
import os
import threading
import time
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Protocol

from inprocess.bounded_waits import wait_until_set
from inprocess.ipc.threads import JoinableThread
from inprocess.main_thread.probe import MainThreadProbe

__all__ = ["ProgressWatchdog", "Timestamp"]

_log = logging.getLogger(__name__)
_SLICE_S = 0.002  # how long a main thread that waits for the watchdog stays out of bytecode
_LAST_CALL_GRACE_S = 0.2


@dataclass(frozen=True, slots=True)
class Timestamp:
    """When this rank last made progress, in seconds of CLOCK_MONOTONIC: one clock for all processes of a host.

    `auto`: it executed bytecode; `manual`: it called `ping`. None: not watched.
    """

    auto: float | None
    manual: float | None = None

    def timed_out(self, limit_s: float, now: float | None = None) -> bool:
        """Return whether one of the two is more than `limit_s` before `now` (default: the present)."""
        if now is None:
            now = time.monotonic()
        return any(stamp is not None and now - stamp > limit_s for stamp in (self.auto, self.manual))


class TakesTimestamps(Protocol):
    """The monitor process, as far as the watchdog uses it. Must not block: it is called under the watchdog's lock."""

    def send_timestamp(self, timestamp: Timestamp) -> Any: ...


class _State(enum.Enum):
    NEW = enum.auto()
    RUNNING = enum.auto()
    PAUSING = enum.auto()  # waiting for the main thread; nothing is sent
    PAUSED = enum.auto()
    STOPPING = enum.auto()
    STOPPED = enum.auto()


class _Pause:
    """The current pause, or else the next one."""

    def __init__(self) -> None:
        self.over = threading.Event()  # synchronized, or ended by `resume` or `shutdown`
        self.synchronized = False


class ProgressWatchdog:
    """A thread that sends the latest `Timestamp` every `interval` (seconds or timedelta).

    The automatic stamp is the time at which the watchdog learned that the main thread ran bytecode. It learns that at
    once, unless another thread holds the GIL: then nothing is sent either, and the next stamp may be late by that time.
    `rank` appears only in the name of the thread. Create, `start` and `shutdown` it in the process it watches; in a
    forked child all methods do nothing. Errors of `send_timestamp` are logged, not raised.
    """

    def __init__(self, rank: int | None, monitor_process: TakesTimestamps, interval: timedelta | float) -> None:
        seconds = interval.total_seconds() if isinstance(interval, timedelta) else float(interval)
        if not 0 < seconds < math.inf:
            raise ValueError(f"interval must be a positive time, not {interval!r}")
        self._monitor_process = monitor_process
        self._interval_s = seconds
        self._pid = os.getpid()
        self._lock = threading.RLock()  # reentrant: a signal handler or destructor of the user may call `ping`
        self._state = _State.NEW  # written under the lock
        self._pause = _Pause()
        self._auto = time.monotonic()
        self._manual: float | None = None
        self._held = False
        self._sending_fails = False
        self._probe: MainThreadProbe | None = None
        self._thread = JoinableThread(self._run, f"progress-watchdog-{rank}")

    def start(self) -> None:
        """Start the thread; the first timestamp follows at once. RuntimeError if it was started before."""
        with self._lock:
            if self._state is not _State.NEW:
                raise RuntimeError("a progress watchdog can be started only once")
            self._probe = MainThreadProbe()
            self._auto = time.monotonic()
            self._state = _State.RUNNING
            self._thread.start()

    def ping(self) -> None:
        """Stamp manual progress, and send. Any thread."""
        if os.getpid() == self._pid:
            with self._lock:
                self._manual = time.monotonic()
                self._send()

    def reset(self) -> None:
        """Stamp automatic progress, forget the pings, and send. Ends `hold`. Any thread."""
        if os.getpid() == self._pid:
            with self._lock:
                self._held = False
                self._auto, self._manual = time.monotonic(), None
                self._send()

    def hold(self) -> None:
        """Stamp no automatic progress until `reset`, `resume` or a complete pause. Any thread.

        For when the main thread may run, but a hang of something else must still be noticed.
        """
        with self._lock:
            self._held = True

    def pause_and_synchronize(self) -> bool:
        """Stop sending, wait until the main thread has run bytecode again, then `reset`: exactly one send.

        The proof is a call that was scheduled after this method was entered. Waits as long as that takes, on any thread
        including the main one. Returns True if paused, also if it was paused before (then nothing is sent); False if
        `resume` or `shutdown` came in between. RuntimeError if the watchdog does not run.
        """
        if os.getpid() != self._pid:
            return False
        with self._lock:
            probe = self._check_running()
            pause = self._pause
            if self._state is _State.RUNNING:
                self._state = _State.PAUSING
                probe.nudge()
        wait_until_set(pause.over, slice_s=_SLICE_S)
        return pause.synchronized

    def spin_till_paused(self) -> None:
        """On the main thread: execute bytecode until the current or next pause is complete, or ended.

        It checks every 2 ms. Returns at once if the watchdog is paused or does not run.
        """
        if self._thread.is_alive() and os.getpid() == self._pid:
            wait_until_set(self._pause.over, slice_s=_SLICE_S)

    def resume(self) -> None:
        """End a pause, complete or not. Idempotent. RuntimeError if the watchdog does not run."""
        if os.getpid() != self._pid:
            return
        with self._lock:
            probe = self._check_running()
            self._held = False
            if self._state is not _State.RUNNING:
                self._state = _State.RUNNING
                over, self._pause = self._pause.over, _Pause()
                over.set()
                probe.nudge()

    def shutdown(self) -> None:
        """End the thread, wait for it, and send once more. Idempotent; before `start` nothing is sent."""
        if os.getpid() != self._pid:
            return
        with self._lock:
            if self._state in (_State.NEW, _State.STOPPED):
                self._state = _State.STOPPED
                return
            self._state = _State.STOPPING
            self._pause.over.set()
            if self._probe is not None:
                self._probe.nudge()
        while self._thread.is_alive():  # in slices: the thread waits for its last call on the main thread
            self._thread.join(_SLICE_S if threading.current_thread() is threading.main_thread() else None)
        with self._lock:
            if self._state is _State.STOPPING:
                self._state = _State.STOPPED
                self._send()

    def _check_running(self) -> MainThreadProbe:
        if self._probe is None or self._state in (_State.STOPPING, _State.STOPPED) or not self._thread.is_alive():
            raise RuntimeError("the progress watchdog does not run")
        return self._probe

    def _send(self) -> None:
        """Send the stamps, under the lock: an old timestamp must not arrive after a newer one."""
        try:
            self._monitor_process.send_timestamp(Timestamp(self._auto, self._manual))
            self._sending_fails = False
        except Exception:
            level = logging.DEBUG if self._sending_fails else logging.WARNING
            _log.log(level, "cannot send a timestamp to the monitor process", exc_info=True)
            self._sending_fails = True

    # -- the thread ----------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        probe = self._probe
        assert probe is not None
        try:
            while self._state is not _State.STOPPING:
                if self._state is _State.RUNNING:
                    self._watch_one_interval(probe)
                elif self._state is _State.PAUSING:
                    self._synchronize(probe)
                else:
                    probe.wait(None)
        except Exception:
            _log.exception("the progress watchdog failed; this rank will be treated as hanging")
        finally:
            self._pause.over.set()
            probe.close(_LAST_CALL_GRACE_S)

    def _watch_one_interval(self, probe: MainThreadProbe) -> None:
        """Send once: when the main thread has run bytecode, or at the end of the interval."""
        end = time.monotonic() + self._interval_s
        probe.schedule()  # if the queue is full: again in the next interval
        ran = self._wait_for_call(probe, end, _State.RUNNING)
        with self._lock:
            if ran and not self._held:
                self._auto = time.monotonic()
            if self._state is _State.RUNNING:
                self._send()
        while self._state is _State.RUNNING and time.monotonic() < end:
            probe.wait(end)

    def _synchronize(self, probe: MainThreadProbe) -> None:
        pause = self._pause
        # A call that was scheduled before the pause proves nothing; one more is needed then.
        for _ in range(2 if probe.outstanding else 1):
            while True:
                probe.schedule()
                end = time.monotonic() + self._interval_s
                if self._wait_for_call(probe, end, _State.PAUSING):
                    break
                if self._state is not _State.PAUSING:
                    return
                if not probe.outstanding:  # the queue is full
                    probe.wait(end)
        with self._lock:
            if self._state is _State.PAUSING and self._pause is pause:
                self._state = _State.PAUSED
                self.reset()
                pause.synchronized = True
                pause.over.set()

    def _wait_for_call(self, probe: MainThreadProbe, end: float, state: _State) -> bool:
        """Return True when the outstanding call has run; False at `end`, in another state, or without such a call."""
        while probe.outstanding and self._state is state and time.monotonic() < end:
            if probe.wait(end):
                return True
        return False
