"""Locks of the standard library that an interrupted function has left locked."""

from __future__ import annotations

import _imp
import importlib
import logging
import multiprocessing
import os
import queue
import subprocess
import threading
import time
import weakref
from collections.abc import Iterator
from typing import Any

import pytest

from inprocess import CallWrapper, Wrapper, torn_locks
from inprocess.torn_locks import release_torn_locks, used_locks
from tests.inprocess.restarting import PATIENT, logged
from tests.support import LeakCheck, rank_values

ITEMS: queue.Queue[int] = queue.Queue()


def taken_elsewhere(lock: Any, timeout_s: float = 0.01) -> bool:
    """Whether another thread can acquire the lock."""
    taken: list[bool] = []

    def take() -> None:
        taken.append(lock.acquire(timeout=timeout_s))
        if taken[0]:
            lock.release()

    thread = threading.Thread(target=take)
    thread.start()
    thread.join()
    return taken[0]


def test_the_next_iteration_can_use_a_queue_that_the_last_one_has_left_locked() -> None:
    """As a function leaves it that is interrupted in `put`, before the `try` that releases the lock."""

    def main(rank: int, world_size: int) -> Any:
        items: queue.Queue[int] = queue.Queue()

        @Wrapper(**PATIENT)
        def train(call: CallWrapper | None = None) -> int:
            assert call is not None
            if call.iteration == 0:
                items.mutex.acquire()
                raise ValueError("fault")
            items.put(call.iteration)
            return items.get()

        with logged() as lines:
            result = train()
        return result, [line for line in lines if "held locks" in line]

    (result, lines) = rank_values(main, 1)[0]
    assert result == 1
    assert len(lines) == 1
    assert "queue.Queue" in lines[0]


class _Holder:
    def __init__(self) -> None:
        self.items: queue.Queue[int] = queue.Queue()

    def fails(self) -> None:
        self.items.mutex.acquire()
        raise ValueError("fault")


def _of_a_global() -> Any:
    def function() -> None:
        ITEMS.mutex.acquire()
        raise ValueError("fault")

    return function, ITEMS.mutex


def _of_an_attribute() -> Any:
    holder = _Holder()
    return holder.fails, holder.items.mutex


def _of_the_variable_of_a_function_around() -> Any:
    items: queue.PriorityQueue[int] = queue.PriorityQueue()

    def function() -> None:
        items.not_full.acquire()
        raise ValueError("fault")

    return function, items.mutex


def _of_a_cause() -> Any:
    event = threading.Event()

    def acquires() -> None:
        event._cond.acquire()  # type: ignore[attr-defined]
        raise ValueError("fault")

    def function() -> None:
        try:
            acquires()
        except ValueError as error:
            raise RuntimeError("of the cleaning up") from error

    return function, event._cond  # type: ignore[attr-defined]


def _reentrant() -> Any:
    condition = threading.Condition()

    def function() -> None:
        condition.acquire()
        condition.acquire()
        raise ValueError("fault")

    return function, condition


def _of_processes() -> Any:
    lock = multiprocessing.get_context("spawn").Lock()

    def function() -> None:
        lock.acquire()
        raise ValueError("fault")

    return function, lock


def _semaphore() -> Any:
    semaphore = threading.Semaphore()

    def function() -> None:
        semaphore._cond.acquire()  # type: ignore[attr-defined]
        raise ValueError("fault")

    return function, semaphore._cond  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    "make",
    [
        _of_a_global,
        _of_an_attribute,
        _of_the_variable_of_a_function_around,
        _of_a_cause,
        _reentrant,
        _of_processes,
        _semaphore,
    ],
    ids=lambda make: make.__name__.strip("_"),
)
def test_it_is_found_and_released(make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torn_locks, "_PATIENCE_S", 0.1)  # no other thread holds it
    function, lock = make()
    with pytest.raises((ValueError, RuntimeError)) as raised:
        function()
    assert len(release_torn_locks(used_locks(raised.value))) == 1
    assert taken_elsewhere(lock, 20)


def test_locks_that_the_caller_holds_stay_so() -> None:
    """Also where the function refers to them, and has acquired one once more."""

    def main(rank: int, world_size: int) -> Any:
        once, again, torn = threading.RLock(), threading.Condition(), threading.RLock()
        of_processes = multiprocessing.get_context("spawn").RLock()
        handler = logging.Handler()
        assert handler.lock is not None

        @Wrapper(**PATIENT)
        def train(call: CallWrapper | None = None) -> list[bool]:
            assert call is not None
            if call.iteration == 0:
                again.acquire()
                torn.acquire()
                raise ValueError("fault", once, of_processes)
            return [taken_elsewhere(lock) for lock in (once, again, of_processes, handler.lock, torn)]

        with once, once, again, of_processes, handler.lock:
            inside = train()
        return inside, [taken_elsewhere(lock) for lock in (once, again, of_processes, handler.lock, torn)]

    assert rank_values(main, 1) == [([False] * 4 + [True], [True] * 5)]


def test_the_lock_of_the_import_system_is_released() -> None:
    """Else no other thread can import anything any more."""

    def main(rank: int, world_size: int) -> Any:
        @Wrapper(**PATIENT)
        def train(call: CallWrapper | None = None) -> bool:
            assert call is not None
            if call.iteration == 0:
                _imp.acquire_lock()
                _imp.acquire_lock()
                raise ValueError("fault")
            thread = threading.Thread(target=importlib.import_module, args=("this",), daemon=True)
            thread.start()
            thread.join(20)
            return not thread.is_alive()

        return train()

    assert rank_values(main, 1) == [True]


@pytest.fixture
def held() -> Iterator[threading.Condition]:
    """A condition with a plain lock, which another thread holds as long as the test runs."""
    condition, entered, over = threading.Condition(threading.Lock()), threading.Event(), threading.Event()

    def hold() -> None:
        with condition:
            entered.set()
            over.wait(60)

    thread = threading.Thread(target=hold)
    thread.start()
    entered.wait(60)
    yield condition
    over.set()
    thread.join()


def test_locks_that_another_thread_holds_are_left_alone(held: threading.Condition, leak_check: LeakCheck) -> None:
    reentrant, entered, over = threading.RLock(), threading.Event(), threading.Event()
    items: queue.Queue[int] = queue.Queue()

    def hold() -> None:
        with reentrant:
            entered.set()
            over.wait(60)

    def hold_briefly() -> None:
        with items.mutex:
            entered.set()
            over.wait(0.2)

    threads = [threading.Thread(target=hold), threading.Thread(target=hold_briefly)]
    for thread in threads:
        entered.clear()
        thread.start()
        entered.wait(60)

    def function() -> None:
        _ = held, reentrant, items
        raise ValueError("fault")

    try:
        with pytest.raises(ValueError, match="fault") as raised:
            function()
        assert release_torn_locks(used_locks(raised.value)) == []
    finally:
        over.set()
        for thread in threads:
            thread.join()


class _Background(threading.Thread):
    """A thread of the program, with a lock of its own that it holds for long."""

    def __init__(self) -> None:
        super().__init__()
        self._lock = threading.Lock()
        self.entered, self.over = threading.Event(), threading.Event()

    def run(self) -> None:
        with self._lock:
            self.entered.set()
            self.over.wait(60)


def test_the_lock_that_a_thread_object_of_the_program_holds_is_left_alone() -> None:
    background = _Background()
    background.start()
    background.entered.wait(60)

    def function() -> None:
        _ = background
        raise ValueError("fault")

    try:
        with pytest.raises(ValueError, match="fault") as raised:
            function()
        assert release_torn_locks(used_locks(raised.value)) == []
        assert background._lock.locked()
    finally:
        background.over.set()
        background.join()


def test_a_lock_that_another_thread_holds_during_a_suspension_is_left_alone() -> None:
    def main(rank: int, world_size: int) -> Any:
        items: queue.Queue[int] = queue.Queue()
        entered, errors = threading.Event(), []

        def hold() -> None:
            try:
                with items.mutex:
                    entered.set()
                    last = time.monotonic()
                    while time.monotonic() - last < 1.0:  # until the process has been suspended
                        last = time.monotonic()
                        time.sleep(0.01)
                    time.sleep(0.2)
            except RuntimeError as error:
                errors.append(str(error))

        def function() -> None:
            _ = items
            raise ValueError("fault")

        thread = threading.Thread(target=hold)
        thread.start()
        entered.wait(60)
        with pytest.raises(ValueError, match="fault") as raised:
            function()
        locks = used_locks(raised.value)
        pid = os.getpid()
        suspends = subprocess.Popen(["sh", "-c", f"sleep 0.1; kill -STOP {pid}; sleep 3; kill -CONT {pid}"])
        released = release_torn_locks(locks)
        thread.join()
        suspends.wait(60)
        return released, errors

    assert rank_values(main, 1) == [([], [])]


class _Unbound:
    """As proxies of web frameworks are, outside of a request."""

    @property
    def __dict__(self) -> Any:  # type: ignore[override]
        raise RuntimeError("there is no object behind this proxy")


def test_proxies_without_an_object_behind_them_do_no_harm() -> None:
    def function() -> None:
        items: queue.Queue[int] = queue.Queue()
        dead, unbound = weakref.proxy(_Holder()), _Unbound()
        items.mutex.acquire()
        raise ValueError("fault", type(dead), unbound)

    with pytest.raises(ValueError, match="fault") as raised:
        function()
    assert release_torn_locks(used_locks(raised.value)) == ["queue.Queue"]


def test_frames_do_not_keep_what_was_looked_at(caplog: pytest.LogCaptureFixture) -> None:
    import traceback

    class Large:
        pass

    kept: list[Any] = []

    def function() -> None:
        large = Large()
        kept.append(weakref.ref(large))
        raise ValueError("fault")

    with caplog.at_level(logging.DEBUG), pytest.raises(ValueError, match="fault") as raised:
        function()
    used_locks(raised.value)
    traceback.clear_frames(raised.value.__traceback__)
    assert kept[0]() is None
