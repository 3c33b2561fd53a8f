"""Waiting for the end of a thread while exceptions are thrown into the one that waits."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest

from inprocess.ipc.threads import JoinableThread, join_all


class Interrupt(BaseException):
    pass


@pytest.fixture(autouse=True)
def interrupts() -> Iterator[None]:
    def handler(number: int, frame: Any) -> None:
        raise Interrupt

    before = signal.signal(signal.SIGUSR1, handler)
    yield
    signal.signal(signal.SIGUSR1, before)


def interrupt_when_joined(main: int) -> None:
    """Send the main thread the signal once it waits in `join`."""
    while sys._current_frames()[main].f_code.co_name != "join":
        time.sleep(0.001)
    signal.pthread_kill(main, signal.SIGUSR1)


def test_a_thread_is_alive_after_an_interrupted_join() -> None:
    main, go, done = threading.get_ident(), threading.Event(), threading.Event()

    def work() -> None:
        interrupt_when_joined(main)
        go.wait()
        done.set()

    thread = JoinableThread(work, "worker")
    assert not thread.is_alive()
    thread.start()
    with pytest.raises(Interrupt):
        thread.join()
    assert thread.is_alive()
    thread.join(0.01)
    assert thread.is_alive()
    go.set()
    thread.join()
    assert not thread.is_alive()
    assert done.is_set()


def test_a_thread_that_fails_has_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    failures: list[Any] = []
    monkeypatch.setattr(threading, "excepthook", failures.append)
    thread = JoinableThread(lambda: 1 / 0, "worker")
    thread.start()
    thread.join()
    assert not thread.is_alive()
    assert [failure.exc_type for failure in failures] == [ZeroDivisionError]


def test_a_forked_child_does_not_wait_for_threads_of_its_parent() -> None:
    go = threading.Event()
    thread = JoinableThread(go.wait, "worker")
    thread.start()
    pid = os.fork()
    if pid == 0:
        thread.join()
        os._exit(7 if thread.is_alive() else 0)
    go.set()
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    thread.join()


def test_join_all_waits_for_all_although_it_is_interrupted() -> None:
    main, ended = threading.get_ident(), []

    def work(number: int) -> None:
        if number == 0:
            interrupt_when_joined(main)
            time.sleep(0.05)
        ended.append(number)

    threads = [JoinableThread(work, "worker", (number,)) for number in range(3)]
    for thread in threads[:2]:
        thread.start()
    with pytest.raises(Interrupt):
        join_all(threads)  # one was never started
    assert sorted(ended) == [0, 1]
