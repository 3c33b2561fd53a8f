import ctypes
import itertools
import logging
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import pytest

from inprocess.progress_watchdog import ProgressWatchdog, Timestamp
from tests.support import LeakCheck

_LONG_S = 600.0


class Recorder:
    """Stands in for the monitor process."""

    def __init__(self) -> None:
        self.sent: list[tuple[float, Timestamp]] = []

    def send_timestamp(self, timestamp: Timestamp) -> None:
        self.sent.append((time.monotonic(), timestamp))

    @property
    def last(self) -> Timestamp:
        return self.sent[-1][1]


def run_bytecode_until(condition: Callable[[], object], timeout_s: float = 20.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline


def in_thread(function: Callable[[], object]) -> tuple[threading.Thread, list[object]]:
    results: list[object] = []

    def run() -> None:
        try:
            results.append(function())
        except BaseException as error:
            results.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    return thread, results


def while_main_blocks(action: Callable[[], Any]) -> Any:
    """Run `action` on another thread while this one, the main one, stays in one C call."""
    lock = threading.Lock()
    lock.acquire()
    entered = threading.Event()

    def act() -> object:
        entered.wait()
        deadline = time.monotonic() + 20
        while _state_of_main_thread() != "S" and time.monotonic() < deadline:
            time.sleep(0.001)
        try:
            return action()
        finally:
            lock.release()

    thread, results = in_thread(act)
    entered.set()
    lock.acquire()
    thread.join(20)
    if isinstance(results[0], BaseException):
        raise results[0]
    return results[0]


def _state_of_main_thread() -> str:
    with open("/proc/self/stat") as file:
        return file.read().rsplit(")", 1)[1].split()[0]


@pytest.fixture
def recorder() -> Recorder:
    return Recorder()


@pytest.fixture
def watchdog(recorder: Recorder) -> Iterator[ProgressWatchdog]:
    """Runs, and sends nothing by itself after the first timestamp."""
    dog = ProgressWatchdog(0, recorder, _LONG_S)
    dog.start()
    run_bytecode_until(lambda: recorder.sent)
    yield dog
    dog.shutdown()
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("progress-watchdog")]


@pytest.fixture
def quick(recorder: Recorder) -> Iterator[ProgressWatchdog]:
    """Sends every 5 ms."""
    dog = ProgressWatchdog(0, recorder, timedelta(milliseconds=5))
    dog.start()
    run_bytecode_until(lambda: recorder.sent)
    yield dog
    dog.shutdown()
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("progress-watchdog")]


@pytest.mark.parametrize(
    ("auto", "manual", "late"),
    [
        (90.0, None, False),
        (89.9, None, True),
        (99.0, 89.0, True),
        (89.0, 99.0, True),
        (99.0, 91.0, False),
        (None, None, False),
        (None, 80.0, True),
    ],
)
def test_timed_out_if_either_stamp_is_too_old(auto: float | None, manual: float | None, late: bool) -> None:
    assert Timestamp(auto, manual).timed_out(10.0, now=100.0) is late


def test_timed_out_compares_with_the_present() -> None:
    assert not Timestamp(time.monotonic()).timed_out(5.0)
    assert Timestamp(time.monotonic() - 6).timed_out(5.0)


@pytest.mark.parametrize("interval", [0, -1.0, timedelta(0), float("inf"), float("nan")])
def test_interval_must_be_positive(interval: float, recorder: Recorder) -> None:
    with pytest.raises(ValueError, match="interval"):
        ProgressWatchdog(0, recorder, interval)


class TestProgress:
    def test_advances_while_bytecode_runs(self, quick: ProgressWatchdog, recorder: Recorder) -> None:
        run_bytecode_until(lambda: len({timestamp.auto for _, timestamp in recorder.sent}) > 10)
        autos = [timestamp.auto or 0.0 for _, timestamp in recorder.sent]
        assert autos == sorted(autos)
        assert all(timestamp.manual is None for _, timestamp in recorder.sent)

    @pytest.mark.parametrize("call", ["sleep", "acquire", "C releasing the GIL"])
    def test_stands_still_in_a_call_that_releases_the_gil(
        self, call: str, quick: ProgressWatchdog, recorder: Recorder
    ) -> None:
        lock = threading.Lock()
        lock.acquire()
        usleep = ctypes.CDLL(None).usleep
        calls: dict[str, Callable[[], object]] = {
            "sleep": lambda: time.sleep(0.2),
            "acquire": lambda: lock.acquire(timeout=0.2),
            "C releasing the GIL": lambda: usleep(200_000),
        }
        begin = time.monotonic()
        calls[call]()
        end = time.monotonic()
        during = [timestamp for at, timestamp in list(recorder.sent) if begin + 0.1 < at < end - 0.02]
        assert len(during) > 3  # it goes on saying so
        assert len({timestamp.auto for timestamp in during}) == 1
        assert during[0].auto is not None
        assert during[0].auto < begin + 0.1
        run_bytecode_until(lambda: recorder.last.auto is not None and recorder.last.auto >= end)

    def test_nothing_is_sent_while_c_holds_the_gil(self, quick: ProgressWatchdog, recorder: Recorder) -> None:
        usleep = ctypes.PyDLL(None).usleep
        begin = time.monotonic()
        usleep(200_000)
        end = time.monotonic()
        assert not [at for at, _ in recorder.sent if begin + 0.05 < at < begin + 0.2]
        run_bytecode_until(lambda: recorder.last.auto is not None and recorder.last.auto >= end)

    def test_other_threads_do_not_count(self, quick: ProgressWatchdog, recorder: Recorder) -> None:
        def other_thread_computes() -> int:
            end = time.monotonic() + 0.15
            middle = time.monotonic() + 0.05
            while time.monotonic() < end:
                pass
            return len({timestamp.auto for at, timestamp in list(recorder.sent) if at > middle})

        assert while_main_blocks(other_thread_computes) == 1

    def test_full_queue_is_tried_again(self, quick: ProgressWatchdog, recorder: Recorder) -> None:
        fill = _QueueFiller()

        def full_for_some_intervals() -> float | None:
            fill()
            count = len(recorder.sent)
            deadline = time.monotonic() + 20
            while len(recorder.sent) < count + 5 and time.monotonic() < deadline:
                time.sleep(0.001)
            return recorder.last.auto

        stuck = while_main_blocks(full_for_some_intervals)
        run_bytecode_until(lambda: recorder.last.auto is not None and recorder.last.auto > stuck)

    def test_one_call_is_outstanding_however_long_the_main_thread_is_stuck(
        self, quick: ProgressWatchdog, recorder: Recorder
    ) -> None:
        def free_slots_after_fifty_intervals() -> int:
            count = len(recorder.sent)
            deadline = time.monotonic() + 20
            while len(recorder.sent) < count + 50 and time.monotonic() < deadline:
                time.sleep(0.001)
            return _QueueFiller()()

        free_slots = while_main_blocks(free_slots_after_fifty_intervals)
        assert free_slots >= 30  # of 31 or 32

    def test_two_watchdogs_in_one_process(self, quick: ProgressWatchdog, recorder: Recorder) -> None:
        others = Recorder()
        other = ProgressWatchdog(1, others, 0.005)
        other.start()
        run_bytecode_until(lambda: len({t.auto for _, t in others.sent}) > 3)
        other.shutdown()
        count = len({timestamp.auto for _, timestamp in recorder.sent})
        run_bytecode_until(lambda: len({t.auto for _, t in recorder.sent}) > count + 3)


class _QueueFiller:
    """Fills the queue of pending calls; a call returns how many there was room for."""

    def __init__(self) -> None:
        self._python = ctypes.PyDLL(None)
        self._nothing = ctypes.cast(self._python.getppid, ctypes.c_void_p)

    def __call__(self) -> int:
        semaphore = ctypes.create_string_buffer(128)
        self._python.Py_IncRef(ctypes.py_object(semaphore))  # outlives the calls
        post = ctypes.cast(self._python.sem_post, ctypes.c_void_p)
        return next(n for n in itertools.count() if self._python.Py_AddPendingCall(post, semaphore) != 0)


class TestCounts:
    def test_reset_and_ping_send_once_each(self, watchdog: ProgressWatchdog, recorder: Recorder) -> None:
        assert len(recorder.sent) == 1
        begin = time.monotonic()
        watchdog.ping()
        assert len(recorder.sent) == 2
        first = recorder.last
        assert first.manual is not None
        assert first.manual >= begin
        assert first.auto is not None
        assert first.auto <= begin
        watchdog.reset()
        assert len(recorder.sent) == 3
        assert recorder.last.manual is None
        assert recorder.last.auto is not None
        assert recorder.last.auto >= first.manual

    def test_pause_sends_exactly_once_and_nothing_follows(self, quick: ProgressWatchdog, recorder: Recorder) -> None:
        def pause_while_nothing_is_sent() -> None:
            quick.pause_and_synchronize()

        thread, _ = in_thread(pause_while_nothing_is_sent)
        quick.spin_till_paused()
        thread.join(20)
        count = len(recorder.sent)
        assert quick.pause_and_synchronize()  # is paused
        time.sleep(0.05)  # ten intervals
        assert len(recorder.sent) == count
        quick.resume()
        run_bytecode_until(lambda: len(recorder.sent) > count + 2)

    def test_the_one_send_of_a_pause_is_a_reset(self, watchdog: ProgressWatchdog, recorder: Recorder) -> None:
        watchdog.ping()
        count, begin = len(recorder.sent), time.monotonic()
        assert watchdog.pause_and_synchronize()  # the main thread may do it, too
        assert len(recorder.sent) == count + 1
        assert recorder.last.manual is None
        assert recorder.last.auto is not None
        assert recorder.last.auto >= begin

    def test_shutdown_sends_once(self, watchdog: ProgressWatchdog, recorder: Recorder) -> None:
        watchdog.shutdown()
        watchdog.shutdown()
        assert len(recorder.sent) == 2

    @pytest.mark.parametrize("started", [True, False])
    def test_methods_without_a_thread(self, started: bool, recorder: Recorder) -> None:
        dog = ProgressWatchdog(0, recorder, _LONG_S)
        if started:
            dog.start()
            with pytest.raises(RuntimeError, match="only once"):
                dog.start()
            dog.shutdown()
        else:
            dog.shutdown()
            assert not recorder.sent
        for method in (dog.resume, dog.pause_and_synchronize):
            with pytest.raises(RuntimeError, match="does not run"):
                method()
        dog.spin_till_paused()
        with pytest.raises(RuntimeError, match="only once"):
            dog.start()


class TestPause:
    def test_waits_until_the_main_thread_is_back_in_bytecode(
        self, watchdog: ProgressWatchdog, recorder: Recorder
    ) -> None:
        count = len(recorder.sent)

        def pause() -> tuple[threading.Thread, list[object]]:
            thread, results = in_thread(watchdog.pause_and_synchronize)
            thread.join(0.1)
            assert thread.is_alive()
            assert len(recorder.sent) == count
            return thread, results

        thread, results = while_main_blocks(pause)
        watchdog.spin_till_paused()
        thread.join(20)
        assert results == [True]
        assert len(recorder.sent) == count + 1

    def test_call_of_before_the_pause_proves_nothing(self, quick: ProgressWatchdog, recorder: Recorder) -> None:
        """One call is outstanding when the main thread is stuck; the pause needs another one."""

        def pause() -> tuple[threading.Thread, list[object]]:
            time.sleep(0.02)
            return in_thread(quick.pause_and_synchronize)

        thread, results = while_main_blocks(pause)
        quick.spin_till_paused()
        thread.join(20)
        assert results == [True]

    @pytest.mark.parametrize("method", ["resume", "shutdown"])
    def test_is_given_up(self, method: str, watchdog: ProgressWatchdog, recorder: Recorder) -> None:
        def pause_and_give_up() -> list[object]:
            thread, results = in_thread(watchdog.pause_and_synchronize)
            thread.join(0.05)
            assert thread.is_alive()
            getattr(watchdog, method)()
            thread.join(20)
            return results

        assert while_main_blocks(pause_and_give_up) == [False]

    def test_resume_is_idempotent(self, watchdog: ProgressWatchdog, recorder: Recorder) -> None:
        watchdog.resume()
        for _ in range(20):
            assert watchdog.pause_and_synchronize()
            watchdog.resume()
            watchdog.resume()

    def test_full_queue_delays_it(self, watchdog: ProgressWatchdog, recorder: Recorder) -> None:
        watchdog.shutdown()
        dog = ProgressWatchdog(0, recorder, 0.01)
        dog.start()

        def pause() -> tuple[threading.Thread, list[object]]:
            _QueueFiller()()
            return in_thread(dog.pause_and_synchronize)

        thread, results = while_main_blocks(pause)
        dog.spin_till_paused()
        thread.join(20)
        assert results == [True]
        dog.shutdown()


class TestEnd:
    def test_thousand_cycles_leave_nothing(self, recorder: Recorder, leak_check: LeakCheck) -> None:
        for _ in range(1000):
            dog = ProgressWatchdog(0, recorder, _LONG_S)
            dog.start()
            dog.shutdown()
        leak_check.check()

    def test_another_thread_may_end_it_while_the_main_thread_hangs(
        self, watchdog: ProgressWatchdog, recorder: Recorder
    ) -> None:
        watchdog.shutdown()
        dog = ProgressWatchdog(0, recorder, 0.005)

        def start_and_shut_down() -> float:
            dog.start()
            time.sleep(0.02)
            begin = time.monotonic()
            dog.shutdown()
            return time.monotonic() - begin

        took = while_main_blocks(start_and_shut_down)
        assert took < 10
        run_bytecode_until(lambda: True)  # the call that was left runs now, into memory that is still there

    def test_failing_monitor_is_logged_once(self, caplog: pytest.LogCaptureFixture) -> None:
        class Failing:
            calls = 0

            def send_timestamp(self, timestamp: Timestamp) -> None:
                self.calls += 1
                raise BrokenPipeError("gone")

        monitor = Failing()
        dog = ProgressWatchdog(0, monitor, 0.002)
        with caplog.at_level(logging.WARNING, logger="inprocess"):
            dog.start()
            dog.ping()
            run_bytecode_until(lambda: monitor.calls > 5)
            dog.shutdown()
        assert len(caplog.records) == 1

    def test_send_may_ping(self) -> None:
        class Pinging(Recorder):
            def send_timestamp(self, timestamp: Timestamp) -> None:
                super().send_timestamp(timestamp)
                if timestamp.manual is None:
                    dog.ping()

        pinging = Pinging()
        dog = ProgressWatchdog(0, pinging, _LONG_S)
        dog.reset()
        assert len(pinging.sent) == 2
        dog.shutdown()

    @pytest.mark.parametrize("end", ["falls off the end", "exits in a blocking call's thread", "raises"])
    def test_interpreter_ends_without_shutdown(self, end: str) -> None:
        last = {
            "falls off the end": "",
            "exits in a blocking call's thread": "time.sleep(0.05); sys.exit(0)",
            "raises": "raise SystemExit(0)",
        }[end]
        _run_script(f"dogs[0].start()\n{last}")

    def test_forked_child_is_not_harmed(self) -> None:
        _run_script(
            """
            dog = dogs[0]
            dog.start()
            for _ in range(20):
                child = os.fork()
                if child == 0:
                    before = len(sent)
                    for method in (dog.ping, dog.reset, dog.pause_and_synchronize, dog.spin_till_paused, dog.resume,
                                   dog.shutdown):
                        method()
                    for _ in range(10_000):
                        pass
                    os._exit(0 if len(sent) == before else 3)
                assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
            dog.shutdown()
            """
        )


def _run_script(text: str) -> None:
    prelude = """
        import os, sys, time
        from inprocess.progress_watchdog import ProgressWatchdog
        sent = []
        class Monitor:
            send_timestamp = sent.append
        dogs = [ProgressWatchdog(0, Monitor(), 0.001)]
    """
    script = textwrap.dedent(prelude) + textwrap.dedent(text)
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", script], capture_output=True, text=True, timeout=30, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")
