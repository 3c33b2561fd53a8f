"""The thread that brings the main thread out of an iteration: here the main thread is the one of the tests."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import pytest

from inprocess.agreement import Agreement, IterationOutcome
from inprocess.attribution import Interruption, InterruptionRecord
from inprocess.blame import Position
from inprocess.coordination import Access, CoordinationStore, Namespace, StoreServer
from inprocess.exception import RankShouldRestart, StoreError
from inprocess.main_thread.atomic import AtomicLock
from inprocess.main_thread.thrower import MainThreadThrower
from inprocess.monitor_thread import MonitorThread
from inprocess.progress_watchdog import ProgressWatchdog, Timestamp
from inprocess.state import FrozenState
from tests.ckpt.crash.killers import wait_until
from tests.support import LeakCheck

LONG_S = 20.0
RECORD = InterruptionRecord(1, Interruption.EXCEPTION, "ValueError: over there")


class _Takes:
    def send_timestamp(self, timestamp: Timestamp) -> None:
        pass


@dataclass
class Iteration:
    """What a monitor thread needs, and another rank to make trouble."""

    server: StoreServer
    agreement: Agreement
    watchdog: ProgressWatchdog
    lock: AtomicLock
    thrower: MainThreadThrower

    def monitor(self, abort: Callable[[FrozenState], Any] = lambda state: state, **options: Any) -> MonitorThread:
        times: dict[str, float] = {"interval_s": 0.1, "soft_timeout_s": LONG_S, "last_call_wait_s": 0.0}
        monitor = MonitorThread(
            agreement=self.agreement,
            state=FrozenState(rank=0, world_size=2, initial_rank=0, iteration=3),
            abort=abort,
            watchdog=self.watchdog,
            atomic_lock=self.lock,
            thrower=self.thrower,
            wake=self.thrower.interrupter.wake,
            **(times | options),
        )
        monitor.start()
        return monitor

    def interrupt(self) -> None:
        assert self.agreement.interrupt(RECORD)


@pytest.fixture
def iteration(leak_check: LeakCheck) -> Iterator[Iteration]:
    server = StoreServer(Access("127.0.0.1", 0))
    access = server.start()
    with contextlib.ExitStack() as stack:
        stack.callback(server.close)
        client = stack.enter_context(CoordinationStore(access, patience=timedelta(seconds=0.5)))
        lock = AtomicLock()
        thrower = stack.enter_context(MainThreadThrower(lock.is_held_here))
        watchdog = ProgressWatchdog(0, _Takes(), 0.1)
        watchdog.start()
        stack.callback(watchdog.shutdown)
        client.set("restart_index", "3")
        agreement = Agreement(Namespace(3, client), 3, 2)
        agreement.publish_rank(0, 0)
        yield Iteration(server, agreement, watchdog, lock, thrower)


def spin() -> None:
    """Where a wrapped function that does not end is."""
    deadline = time.monotonic() + LONG_S
    while time.monotonic() < deadline:
        time.sleep(0.001)
    raise AssertionError("nothing was thrown")


def test_first_abort_then_the_exception_which_says_why(iteration: Iteration) -> None:
    aborted = []

    def abort(state: FrozenState) -> None:
        aborted.append((state.iteration, state.interruptions, threading.current_thread() is threading.main_thread()))

    monitor = iteration.monitor(abort)
    iteration.interrupt()
    with pytest.raises(RankShouldRestart, match=r"iteration 3 is interrupted: EXCEPTION on rank 1 \(ValueError: over"):
        spin()
    assert aborted == [(3, (RECORD,), False)]
    assert monitor.records == (RECORD,)
    monitor.shutdown()
    monitor.shutdown()
    times = monitor.times
    assert times.outcome is not None
    assert times.last_call is not None
    assert times.aborted is not None
    assert times.thrown is not None
    assert times.acknowledged is not None
    assert times.outcome <= times.last_call <= times.aborted <= times.thrown <= times.acknowledged


def test_a_main_thread_that_sleeps_is_woken(iteration: Iteration) -> None:
    monitor = iteration.monitor()
    iteration.interrupt()
    began = time.monotonic()
    with pytest.raises(RankShouldRestart):
        time.sleep(LONG_S)
    assert time.monotonic() - began < LONG_S / 2
    monitor.shutdown()


def test_completion_throws_nothing(iteration: Iteration) -> None:
    monitor = iteration.monitor(lambda state: pytest.fail("there is nothing to abort"))
    iteration.agreement.store.arrive("completion", "1")
    assert iteration.agreement.complete(0, LONG_S, 0.1) is IterationOutcome.COMPLETED
    monitor.wait_thrown()  # returns: nothing will come
    monitor.shutdown()
    assert (monitor.times.thrown, monitor.records) == (None, ())


def test_after_shutdown_nothing_is_thrown(iteration: Iteration) -> None:
    monitor = iteration.monitor(lambda state: pytest.fail("there is nothing to abort"))
    monitor.shutdown()
    iteration.interrupt()
    end = time.monotonic() + 0.3
    while time.monotonic() < end:
        pass
    assert monitor.times.thrown is None


def test_a_rank_that_failed_itself_waits_for_its_exception(iteration: Iteration) -> None:
    monitor = iteration.monitor()
    with pytest.raises(RankShouldRestart):  # noqa: PT012
        try:
            raise KeyError("own")
        except KeyError:
            iteration.interrupt()
            monitor.wait_thrown()
    monitor.shutdown()


def test_an_abort_that_raises_is_logged(iteration: Iteration, caplog: pytest.LogCaptureFixture) -> None:
    def abort(state: FrozenState) -> None:
        raise OSError("cannot abort")

    monitor = iteration.monitor(abort)
    iteration.interrupt()
    with pytest.raises(RankShouldRestart):
        spin()
    monitor.shutdown()
    assert "the abort hook fails" in caplog.text
    assert "cannot abort" in caplog.text


def test_the_abort_waits_for_an_atomic_section(iteration: Iteration) -> None:
    aborted = threading.Event()
    waiting = threading.Event()
    monitor = iteration.monitor(lambda state: aborted.set(), last_call_wait_s=0.0)
    inside = []
    with pytest.raises(RankShouldRestart):  # noqa: PT012
        with iteration.lock.atomic(), iteration.lock.atomic():
            iteration.interrupt()
            waiting.wait(0.3)
            inside.append(aborted.is_set())
        spin()
    assert inside == [False]
    assert aborted.is_set()
    monitor.shutdown()


def test_a_hang_that_is_reported_after_the_answer_stays_with_its_rank(iteration: Iteration) -> None:
    """This rank answers the last call because of another fault, and did not look where it is; then it is late."""
    monitor = iteration.monitor(last_call_wait_s=LONG_S)
    iteration.interrupt()
    agreement, late = iteration.agreement, InterruptionRecord(0, Interruption.SOFT_TIMEOUT)
    with pytest.raises(RankShouldRestart):  # noqa: PT012
        wait_until(lambda: "0" in agreement.store.members("last_call"), "the answer of this rank")
        agreement.interrupt(late)
        agreement.report_position(1, Position(1, waits=False, function="a.py in f", line="a.py:7 in f"), "")
        Agreement(agreement.store, 3, 2).last_call(1, LONG_S)
        spin()
    monitor.shutdown()
    assert monitor.records == (RECORD, late)


def test_what_was_swallowed_is_thrown_again(iteration: Iteration, caplog: pytest.LogCaptureFixture) -> None:
    monitor = iteration.monitor(soft_timeout_s=0.1)
    iteration.interrupt()
    thrown = 0
    for _ in range(2):
        try:
            spin()
        except RankShouldRestart:
            thrown += 1
    monitor.shutdown()
    assert thrown == 2
    assert "was swallowed; throwing it again" in caplog.text
    assert "in spin" in caplog.text


def test_without_the_store_the_iteration_cannot_go_on(iteration: Iteration) -> None:
    monitor = iteration.monitor()
    iteration.server.close()
    with pytest.raises(RankShouldRestart, match="store"):
        spin()
    monitor.shutdown()
    assert monitor.failure is not None


def test_a_rank_that_cannot_report_its_fault_leaves(iteration: Iteration) -> None:
    """The others wait for the report, and no outcome would ever come; the store answers reads."""
    monitor = iteration.monitor()
    monitor.give_up(StoreError("no permission to write"))
    with pytest.raises(RankShouldRestart, match="no permission to write"):
        spin()
    monitor.shutdown()
    assert isinstance(monitor.failure, StoreError)


def test_the_watchdog_runs_again_afterwards(iteration: Iteration) -> None:
    monitor = iteration.monitor()
    iteration.interrupt()
    with pytest.raises(RankShouldRestart):
        spin()
    monitor.shutdown()
    assert iteration.watchdog.pause_and_synchronize() is True  # it can be paused, so it was not
    iteration.watchdog.resume()
