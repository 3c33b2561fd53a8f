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

import ckpt.threads
import inprocess.main_thread.joinable
from ckpt.threads import join_all

KINDS = pytest.mark.parametrize("kind", [ckpt.threads.JoinableThread, inprocess.main_thread.joinable.JoinableThread])


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


@KINDS
def test_a_thread_is_alive_after_an_interrupted_join(kind: Any) -> None:
    main, go, done = threading.get_ident(), threading.Event(), threading.Event()

    def work() -> None:
        interrupt_when_joined(main)
        go.wait()
        done.set()

    thread = kind(work, "worker")
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


@KINDS
def test_a_thread_that_fails_has_ended(kind: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    failures: list[Any] = []
    monkeypatch.setattr(threading, "excepthook", failures.append)
    thread = kind(lambda: 1 / 0, "worker")
    thread.start()
    thread.join()
    assert not thread.is_alive()
    assert [failure.exc_type for failure in failures] == [ZeroDivisionError]


@KINDS
def test_a_forked_child_does_not_wait_for_threads_of_its_parent(kind: Any) -> None:
    go = threading.Event()
    thread = kind(go.wait, "worker")
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

    threads = [ckpt.threads.JoinableThread(work, "worker", (number,)) for number in range(3)]
    for thread in threads[:2]:
        thread.start()
    with pytest.raises(Interrupt):
        join_all(threads)  # one was never started
    assert sorted(ended) == [0, 1]
