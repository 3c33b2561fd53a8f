import ctypes
import gc
import itertools
import random
import sys
import threading
import time
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

import pytest

from inprocess.main_thread.async_raise import async_raise
from inprocess.main_thread.atomic import AtomicLock


class Thrown(BaseException):
    pass


def is_held_by_this_thread(lock: AtomicLock) -> bool:
    try:
        lock.release()
    except RuntimeError:
        return False
    lock.acquire()
    return True


def is_free(lock: AtomicLock) -> bool:
    """Ask on another thread."""
    results: list[bool] = []

    def run() -> None:
        results.append(lock.acquire(blocking=False))
        if results[0]:
            lock.release()

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    return results[0]


class Holder:
    """A thread that holds the lock until it is told to let go."""

    def __init__(self, lock: AtomicLock, notice_after_s: float = 60.0) -> None:
        self._lock = lock
        self._notice_after_s = notice_after_s
        self.has_it, self.noticed, self.may_go = threading.Event(), threading.Event(), threading.Event()
        self.thread = threading.Thread(target=self._run, daemon=True)

    def _run(self) -> None:
        with self._lock.hold(self._notice_after_s, self.noticed.set):
            self.has_it.set()
            self.may_go.wait(20)

    def __enter__(self) -> "Holder":
        self.thread.start()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.may_go.set()
        self.thread.join(20)


class TestLock:
    def test_excludes_the_monitor_thread(self) -> None:
        lock = AtomicLock()
        with lock.atomic():
            assert not is_free(lock)
        assert is_free(lock)

    def test_nests(self) -> None:
        lock = AtomicLock()
        with lock.atomic(), lock.atomic():
            with lock.atomic():
                pass
            assert not is_free(lock)
        assert is_free(lock)

    def test_released_when_the_body_raises(self) -> None:
        lock = AtomicLock()
        with pytest.raises(ValueError, match="body"), lock.atomic(), lock.atomic():
            raise ValueError("body")
        assert is_free(lock)

    def test_main_thread_enters_when_the_monitor_thread_lets_go(self) -> None:
        lock = AtomicLock()
        with Holder(lock) as holder:
            assert holder.has_it.wait(20)
            threading.Timer(0.02, holder.may_go.set).start()
            with lock.atomic():
                assert holder.may_go.is_set()
                assert is_held_by_this_thread(lock)

    def test_waiting_main_thread_can_be_interrupted(self) -> None:
        lock, main_thread = AtomicLock(), threading.get_ident()
        thrown_at: list[float] = []

        def throw() -> None:
            thrown_at.append(time.monotonic())
            async_raise(main_thread, Thrown)

        with Holder(lock) as holder:
            assert holder.has_it.wait(20)
            threading.Timer(0.03, throw).start()
            with pytest.raises(Thrown), lock.atomic():
                pytest.fail("entered")
            assert time.monotonic() - thrown_at[0] < 20
        assert is_free(lock)

    def test_waiting_costs_next_to_nothing(self) -> None:
        lock = AtomicLock()
        with Holder(lock) as holder:
            assert holder.has_it.wait(20)
            threading.Timer(0.3, holder.may_go.set).start()
            before = time.thread_time()
            with lock.atomic():
                pass
            assert time.thread_time() - before < 0.06

    def test_threads_exclude_each_other(self) -> None:
        lock, inside, most = AtomicLock(), [], []

        def work() -> None:
            for _ in range(300):
                with lock.atomic():
                    inside.append(1)
                    most.append(len(inside))
                    inside.pop()

        threads = [threading.Thread(target=work) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(20)
        assert set(most) == {1}


class TestHold:
    def test_notice_while_it_waits(self) -> None:
        lock = AtomicLock()
        with Holder(lock, notice_after_s=0.01) as holder:
            pass
        assert not holder.noticed.is_set()
        with lock.atomic():
            holder = Holder(lock, notice_after_s=0.01)
            holder.thread.start()
            assert holder.noticed.wait(20)
            assert not holder.has_it.is_set()
        holder.may_go.set()
        holder.thread.join(20)
        assert holder.has_it.is_set()
        assert is_free(lock)

    def test_failing_notice_is_logged(self, caplog: pytest.LogCaptureFixture) -> None:
        lock, waited, done = AtomicLock(), threading.Event(), threading.Event()

        def notice() -> None:
            waited.set()
            raise ValueError("no log today")

        def run() -> None:
            with lock.hold(0.001, notice):
                done.set()

        with lock.atomic():
            thread = threading.Thread(target=run)
            thread.start()
            assert waited.wait(20)
        thread.join(20)
        assert done.is_set()
        assert [record.name for record in caplog.records] == ["inprocess.main_thread.atomic"]
        assert is_free(lock)

    def test_released_when_the_body_raises(self) -> None:
        lock = AtomicLock()
        with pytest.raises(ValueError, match="body"), lock.hold(1.0, lambda: None):
            raise ValueError("body")
        assert is_free(lock)


# -- exceptions at every point -----------------------------------------------------------------------------------------


_AHEAD = 10


class Thrower:
    """Runs a function with an exception thrown in before its n-th bytecode instruction.

    CPython raises it where it would raise one thrown by another thread. The trace function has to throw without calling
    anything from bytecode afterwards, or the exception would be raised in it: looping over `map` calls from C.
    """

    def __init__(self) -> None:
        function = ctypes.PyDLL(None).PyThreadState_SetAsyncExc
        function.argtypes = (ctypes.c_ulong, ctypes.py_object)
        sys._getframe().f_trace_opcodes = True  # 3.12 gives instructions to trace functions set after the first wish
        ident = threading.get_ident()
        self._throw: Iterator[Any] = map(function, itertools.repeat(ident), itertools.repeat(ctypes.py_object(Thrown)))

    def run(
        self, function: Callable[[], object], point: int | None, before: Callable[[], object] = int
    ) -> tuple[int, bool]:
        """Return the number of instructions that ran until then, and whether the exception came out.

        `before()` is called some instructions before the throw.
        """
        index = 0
        throw = self._throw

        def trace(frame: FrameType, event: str, arg: object) -> Any:
            nonlocal index
            frame.f_trace_opcodes = True
            if event == "opcode":
                index += 1
                if point is not None and index == max(point - _AHEAD, 1):
                    before()
                if index == point:
                    sys.settrace(None)  # or it would be raised in the next call of this function
                    for _ in throw:
                        return None
            return trace

        raised = False
        previous = sys.gettrace()
        try:
            sys.settrace(trace)
            function()
        except Thrown:
            raised = True
        try:  # noqa: SIM105  # thrown so late that it comes up here; entering `suppress` would come too late
            sys.settrace(None)
        except Thrown:
            pass
        sys.settrace(previous)
        return index, raised


def sections(lock: AtomicLock, reached: list[str]) -> Callable[[], None]:
    def function() -> None:
        with lock.atomic():
            reached.append("outer")
            with lock.atomic():
                reached.append("inner")
        reached.append("after")

    return function


@pytest.fixture
def no_collection() -> Iterator[None]:
    """Collect no garbage: callbacks, such as that of hypothesis, would be traced, and the exception come up there."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()


@pytest.mark.usefixtures("no_collection")
class TestExceptionsAtEveryPoint:
    def test_entering_and_leaving(self) -> None:
        thrower, lock = Thrower(), AtomicLock()
        count, raised = thrower.run(sections(lock, []), None)
        assert count > 50
        assert not raised
        outcomes = set()
        for point in range(1, count):
            reached: list[str] = []
            thrower.run(sections(lock, reached), point)
            assert not is_held_by_this_thread(lock), f"after instruction {point}"
            outcomes.add(tuple(reached))
        # It did come up outside, in the outer and in the inner section, and afterwards.
        assert outcomes == {(), ("outer",), ("outer", "inner"), ("outer", "inner", "after")}
        assert is_free(lock)

    def test_waiting(self) -> None:
        """The trace function lets the holder go ten instructions before it throws."""
        thrower, lock = Thrower(), AtomicLock()
        outcomes = set()
        for point in range(1, 90):
            with Holder(lock) as holder:
                assert holder.has_it.wait(20)
                reached: list[str] = []
                _, raised = thrower.run(sections(lock, reached), point, holder.may_go.set)
                assert not is_held_by_this_thread(lock), f"after instruction {point}"
                assert raised or "after" in reached
                outcomes.add(tuple(reached))
        assert () in outcomes
        assert ("outer",) in outcomes
        assert is_free(lock)

    def test_from_another_thread_while_the_lock_changes_hands(self) -> None:
        """No chosen points: one exception for each of many attempts, while another thread takes the lock in turn."""
        lock, main_thread = AtomicLock(), threading.get_ident()
        wanted, stop = threading.Semaphore(0), threading.Event()
        delays = random.Random(0)

        def contend() -> None:
            while not stop.is_set():
                with lock.hold(60, lambda: None):
                    pass

        def throw() -> None:
            while wanted.acquire() and not stop.is_set():
                time.sleep(delays.random() * 1e-4)
                async_raise(main_thread, Thrown)

        def attempt() -> int:
            entered = 0
            try:
                wanted.release()
                while True:
                    with lock.atomic():
                        entered += 1
            except Thrown:
                return entered

        threads = [threading.Thread(target=contend), threading.Thread(target=throw)]
        interval = sys.getswitchinterval()
        sys.setswitchinterval(1e-5)
        try:
            for thread in threads:
                thread.start()
            entered = 0
            for _ in range(500):
                entered += attempt()
                assert not is_held_by_this_thread(lock)
            assert entered
        finally:
            sys.setswitchinterval(interval)
            stop.set()
            wanted.release()
            for thread in threads:
                thread.join(20)
        assert is_free(lock)
