"""The monitor thread: it waits for the outcome of an iteration and brings the main thread out of an interrupted one.

One per iteration, in the rank's process:

    wait          for the outcome of the iteration, in the store; if that is "completed", the thread ends
    last call     until every process has reported its faults
    abort         the user's hook, under the atomic lock: it frees a main thread that is stuck in a collective
    synchronize   until the main thread executes bytecode again
    throw         RankShouldRestart into the main thread, where it does no harm (see `main_thread.thrower`); again, with
                  growing pauses, if it was swallowed

The thread ends when the main thread acknowledges the exception. Nothing is thrown afterwards.
"""

from __future__ import annotations

import logging
import sys
import threading
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from types import TracebackType

from inprocess.agreement import Agreement, IterationOutcome
from inprocess.attribution import DETAIL_CHARS, InterruptionRecord, cause_of, format_interruptions, logged_by
from inprocess.blame import position_of
from inprocess.exception import RankShouldRestart, StaleViewError, StoreError, TimeoutError
from inprocess.ipc.threads import JoinableThread
from inprocess.main_thread.async_raise import async_raise, reraise_if_unraisable
from inprocess.main_thread.atomic import AtomicLock
from inprocess.main_thread.stacks import own_stacks
from inprocess.main_thread.thrower import MainThreadThrower
from inprocess.progress_watchdog import ProgressWatchdog
from inprocess.state import FrozenState

__all__ = ["MonitorThread", "async_raise", "reraise_if_unraisable"]

_log = logging.getLogger(__name__)
_FIRST_WAKE_S, _LONGEST_WAKE_S = 0.002, 0.25
_FIRST_SIGNAL_S, _LONGEST_SIGNAL_S = 0.0005, 0.005
_THROWN_CHECK_S = 0.05
_FIRST_RETHROW_S, _LONGEST_RETHROW_S = 1.0, 30.0
_LOCK_WARNING_S = 1.0
_LONGEST_WAIT = 10  # intervals, until it notices that an iteration ended without an outcome
_MOST_LATE_THROWS = 3


@dataclass
class Times:
    """When the phases of the thread ended, in monotonic seconds; None if one has not."""

    outcome: float | None = None
    last_call: float | None = None
    aborted: float | None = None
    thrown: float | None = None
    acknowledged: float | None = None


@dataclass
class MonitorThread:
    """The monitor thread of one iteration. Create and start it on the main thread, when the iteration begins.

    `abort` gets the state with the interruptions in it. `wake` makes a main thread that is blocked in a call return to
    bytecode, and is called until it does. `failure` is why this rank cannot restart: the store is lost, the others are
    in a later iteration, or the abort hook has raised RestartAbort or SystemExit.
    """

    agreement: Agreement
    state: FrozenState
    abort: Callable[[FrozenState], object]
    watchdog: ProgressWatchdog
    atomic_lock: AtomicLock
    thrower: MainThreadThrower
    wake: Callable[[], None]
    interval_s: float
    soft_timeout_s: float
    last_call_wait_s: float
    records: tuple[InterruptionRecord, ...] = ()
    failure: BaseException | None = None
    times: Times = field(default_factory=Times)

    def __post_init__(self) -> None:
        self._main_thread = threading.get_ident()
        self._acknowledged = threading.Event()
        self._given_up: Exception | None = None
        # RankShouldRestart may be thrown while the main thread waits for it, which `threading.Thread` does not support.
        self._thread = JoinableThread(self._run, f"monitor-{self.state.iteration}")

    def start(self) -> None:
        """Start the thread. From now on RankShouldRestart may appear anywhere in the calling thread."""
        self._thread.start()

    def give_up(self, error: Exception) -> None:
        """Make this rank leave, because the error has kept it from reporting its fault. Main thread."""
        _log.error("the fault cannot be recorded: %s", error)
        self._given_up = error

    def wait_thrown(self) -> None:
        """Wait until RankShouldRestart appears. For the main thread, after a failure of its own.

        Returns if it will not appear: the iteration was completed before, or it was raised already and did not come out
        of the function.
        """
        while self._thread.is_alive() and (self.times.thrown is None or self.thrower.is_pending):
            self._thread.join(_THROWN_CHECK_S)

    def shutdown(self) -> None:
        """End the thread, and let the watchdog run again. Main thread. Idempotent.

        When it returns nothing can be thrown any more. TimeoutError if the thread does not end.
        """
        limit_s = (_LONGEST_WAIT + 5) * self.interval_s + self.last_call_wait_s + 5.0
        for _ in range(_MOST_LATE_THROWS):  # before each throw the thread checks for the acknowledgement
            try:
                if self.times.acknowledged is None:
                    self.times.acknowledged = time.monotonic()
                self._acknowledged.set()
                self._thread.join(limit_s)
                self.thrower.disarm()
                break
            except RankShouldRestart:
                continue
        self.watchdog.resume()
        if self._thread.is_alive():
            raise TimeoutError(f"the monitor thread has not ended within {limit_s:g} s")

    # -- the thread ----------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            if self._wait_interrupted():
                self._interrupt_main_thread()
        except Exception:
            _log.exception("the monitor thread of iteration %d failed", self.state.iteration)

    def _wait_interrupted(self) -> bool:
        try:
            outcome = None
            intervals = 1
            while outcome is None:
                if self._acknowledged.is_set():
                    return False
                if self._given_up is not None:
                    raise self._given_up
                outcome = self.agreement.wait_outcome(intervals * self.interval_s)
                intervals = min(2 * intervals, _LONGEST_WAIT)
            self.times.outcome = time.monotonic()
            if outcome is IterationOutcome.COMPLETED:
                return False
            initial_rank = self.state.initial_rank
            assert initial_rank is not None
            self._report_position()
            self.records = self.agreement.last_call(initial_rank, self.last_call_wait_s)
        except (StoreError, StaleViewError) as error:
            _log.critical("%s", error)
            self.failure = error
        self.times.last_call = time.monotonic()
        return True

    def _report_position(self) -> None:
        """If a hang is reported, report where this rank is, before the last call ends: unless it only waits, as others.

        If it is this rank that hangs, its stacks are reported in any case.
        """
        rank = self.state.rank
        assert rank is not None
        if not self.agreement.has_hang():
            return
        position = position_of(rank, self._main_thread)
        record = self.agreement.reported_hang(rank)
        stacks = own_stacks()[:DETAIL_CHARS]
        if record is not None:
            if position is not None:
                record = replace(record, place=position.function, fault_class=position.fault_class)
            self.agreement.interrupt(record)
            self.agreement.report_stacks(rank, stacks)
        only_waits = position is None or (record is None and position.waits)
        self.agreement.report_position(rank, None if only_waits else position, stacks)

    def _interrupt_main_thread(self) -> None:
        reason = format_interruptions(self.records) if self.failure is None else str(self.failure)
        _log.warning("iteration %d is interrupted: %s", self.state.iteration, reason)
        for record in self.records:
            if record.detail and logged_by(record, self.records) == self.state.rank:
                _log.error("%s on rank %d:\n%s", record.interruption.name, record.rank, record.detail)
        cause = cause_of(self.records)
        if cause is not None and logged_by(cause, self.records) == self.state.rank:
            _log.error("cause of the restart: %s", cause)
        exception_type = _with_message(f"iteration {self.state.iteration} is interrupted: {reason}")
        with self.atomic_lock.hold(_LOCK_WARNING_S, self._warn_about_lock):
            self.watchdog.hold()  # a rank whose abort hangs cannot restart: the hard timeout ends it
            try:
                self.abort(replace(self.state, interruptions=self.records))
            except Exception:
                _log.exception("the abort hook fails; the restart goes on")
            except BaseException as error:
                _log.exception("the abort hook makes this rank leave")
                self.failure = error
            self.times.aborted = time.monotonic()
            with _Waker(self.wake):
                self.watchdog.pause_and_synchronize()
            if self._acknowledged.is_set():
                return
            self.thrower.throw(exception_type, self.soft_timeout_s)
            self.times.thrown = time.monotonic()
            with _Waker(self.wake):  # under the lock: no atomic section begins after the abort
                self._await_raised(self.soft_timeout_s)
        self._throw_until_acknowledged(exception_type)

    def _throw_until_acknowledged(self, exception_type: type[RankShouldRestart]) -> None:
        with _Waker(self.wake) as waker:
            if self._acknowledged.wait(self.soft_timeout_s):
                return
            waker.stop()
            pause_s = _FIRST_RETHROW_S
            while not self._acknowledged.is_set():
                what = "cannot be thrown" if self.thrower.is_pending else "was swallowed; throwing it again"
                _log.error("RankShouldRestart %s. The main thread is at\n%s", what, self._place())
                if not self.thrower.is_pending:
                    self.thrower.throw(exception_type, pause_s)
                self.wake()
                self._await_raised(pause_s)
                self._acknowledged.wait(pause_s)
                pause_s = min(2 * pause_s, _LONGEST_RETHROW_S)

    def _await_raised(self, timeout_s: float) -> None:
        """Send the signal of the exception again and again, until it is raised. At most `timeout_s`."""
        end, pause_s = time.monotonic() + timeout_s, _FIRST_SIGNAL_S
        while self.thrower.is_pending and time.monotonic() < end:
            if self._acknowledged.wait(pause_s):
                return
            self.thrower.again()
            pause_s = min(1.2 * pause_s, _LONGEST_SIGNAL_S)

    def _warn_about_lock(self) -> None:
        _log.warning("the abort waits for an atomic section to end. The main thread is at\n%s", self._place())

    def _place(self) -> str:
        frame = sys._current_frames().get(self._main_thread)
        return "".join(traceback.format_stack(frame)) if frame is not None else "(unknown)\n"


class _Waker:
    """A context within which a thread wakes the main thread again and again."""

    def __init__(self, wake: Callable[[], None]) -> None:
        self._wake = wake
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="monitor-waker", daemon=True)

    def _run(self) -> None:
        pause_s = _FIRST_WAKE_S
        while not self._stopped.wait(pause_s):
            self._wake()
            pause_s = min(2 * pause_s, _LONGEST_WAKE_S)

    def stop(self) -> None:
        self._stopped.set()
        self._thread.join()

    def __enter__(self) -> _Waker:
        self._wake()
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.stop()


def _with_message(message: str) -> type[RankShouldRestart]:
    """Return an exception class with a fixed message: only a class can be thrown into another thread."""

    def __str__(self: BaseException) -> str:  # noqa: N807
        return message

    return type(
        "RankShouldRestart", (RankShouldRestart,), {"__str__": __str__, "__module__": RankShouldRestart.__module__}
    )
