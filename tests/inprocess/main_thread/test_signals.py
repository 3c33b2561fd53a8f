import asyncio
import concurrent.futures
import ctypes
import fcntl
import logging
import multiprocessing
import os
import queue
import select
import signal
import socket
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from inprocess.main_thread.async_raise import async_raise
from inprocess.main_thread.signals import MainThreadInterrupter, find_free_signal, read_signal_sets
from tests.support import LeakCheck


class Thrown(BaseException):
    pass


@pytest.fixture
def interrupter() -> Iterator[MainThreadInterrupter]:
    with MainThreadInterrupter() as interrupter:
        assert interrupter.enabled
        yield interrupter


def wait_until_main_thread_sleeps(timeout_s: float = 20.0) -> None:
    """Return when the main thread has been found asleep several times in a row."""
    deadline, asleep = time.monotonic() + timeout_s, 0
    while asleep < 5 and time.monotonic() < deadline:
        time.sleep(0.002)
        with open("/proc/self/stat") as file:
            asleep = asleep + 1 if file.read().rsplit(")", 1)[1].split()[0] == "S" else 0


def throw_into_main_thread_asleep_in(call: Callable[[], object], interrupter: MainThreadInterrupter) -> None:
    """Run `call` on this, the main thread; throw and wake until it comes back."""
    main_thread, entered, done = threading.get_ident(), threading.Event(), threading.Event()

    def throw() -> None:
        entered.wait()
        wait_until_main_thread_sleeps()
        async_raise(main_thread, Thrown)
        while not done.is_set():
            interrupter.wake()
            done.wait(0.005)

    thread = threading.Thread(target=throw)
    thread.start()
    try:
        entered.set()
        call()
    finally:
        done.set()
        thread.join()


class BlockingCalls:
    """Calls that never return by themselves."""

    def __init__(self, stack: ExitStack, folder: Path) -> None:
        self._stack = stack
        self._folder = folder

    def time_sleep(self) -> Callable[[], object]:
        return lambda: time.sleep(1e6)

    def lock(self) -> Callable[[], object]:
        lock = threading.Lock()
        lock.acquire()
        return lock.acquire

    def lock_with_timeout(self) -> Callable[[], object]:
        lock = threading.Lock()
        lock.acquire()
        return lambda: lock.acquire(timeout=1e6)

    def rlock(self) -> Callable[[], object]:
        lock = threading.RLock()
        thread = threading.Thread(target=lock.acquire)
        thread.start()
        thread.join()
        return lock.acquire

    def event(self) -> Callable[[], object]:
        return threading.Event().wait

    def condition(self) -> Callable[[], object]:
        condition = threading.Condition()

        def wait() -> None:
            with condition:
                condition.wait()

        return wait

    def thread_join(self) -> Callable[[], object]:
        end = threading.Event()
        thread = threading.Thread(target=end.wait)
        thread.start()
        self._stack.callback(thread.join)
        self._stack.callback(end.set)
        return thread.join

    def queue(self) -> Callable[[], object]:
        return queue.Queue().get

    def simple_queue(self) -> Callable[[], object]:
        return queue.SimpleQueue().get

    def future(self) -> Callable[[], object]:
        return concurrent.futures.Future().result

    def multiprocessing_lock(self) -> Callable[[], object]:
        lock = multiprocessing.get_context("spawn").Lock()
        lock.acquire()
        return lock.acquire

    def multiprocessing_pipe(self) -> Callable[[], object]:
        ours, theirs = multiprocessing.Pipe()
        self._stack.enter_context(ours)
        self._stack.enter_context(theirs)
        return ours.recv

    def _pipe(self) -> tuple[int, int]:
        pipe = os.pipe()
        for fd in pipe:
            self._stack.callback(os.close, fd)
        return pipe

    def read_pipe(self) -> Callable[[], object]:
        fd, _ = self._pipe()
        return lambda: os.read(fd, 1)

    def write_pipe(self) -> Callable[[], object]:
        _, fd = self._pipe()
        os.set_blocking(fd, False)
        while True:
            try:
                os.write(fd, bytes(4096))
            except BlockingIOError:
                break
        os.set_blocking(fd, True)
        return lambda: os.write(fd, bytes(4096))

    def open_fifo(self) -> Callable[[], object]:
        path = self._folder / "fifo"
        os.mkfifo(path)
        return path.open

    def flock(self) -> Callable[[], object]:
        path = self._folder / "lock"
        files = [self._stack.enter_context(path.open("w")) for _ in range(2)]
        fcntl.flock(files[0], fcntl.LOCK_EX)
        return lambda: fcntl.flock(files[1], fcntl.LOCK_EX)

    def _sockets(self) -> tuple[socket.socket, socket.socket]:
        pair = socket.socketpair()
        for each in pair:
            self._stack.enter_context(each)
        return pair

    def socket_recv(self) -> Callable[[], object]:
        ours, _ = self._sockets()
        return lambda: ours.recv(1)

    def socket_recv_with_timeout(self) -> Callable[[], object]:
        ours, _ = self._sockets()
        ours.settimeout(1e6)
        return lambda: ours.recv(1)

    def socket_sendall(self) -> Callable[[], object]:
        ours, _ = self._sockets()
        return lambda: ours.sendall(bytes(1 << 24))

    def socket_accept(self) -> Callable[[], object]:
        server = self._stack.enter_context(socket.create_server(("127.0.0.1", 0)))
        return server.accept

    def select(self) -> Callable[[], object]:
        fd, _ = self._pipe()
        return lambda: select.select([fd], [], [])

    def poll(self) -> Callable[[], object]:
        poll = select.poll()
        poll.register(self._pipe()[0])
        return poll.poll

    def epoll(self) -> Callable[[], object]:
        return self._stack.enter_context(select.epoll()).poll

    def asyncio_run(self) -> Callable[[], object]:
        return lambda: asyncio.run(asyncio.sleep(1e5))

    def _child(self) -> "subprocess.Popen[bytes]":
        child = subprocess.Popen(["sleep", "1000"])
        self._stack.callback(child.wait)
        self._stack.callback(child.kill)
        return child

    def waitpid(self) -> Callable[[], object]:
        child = self._child()
        return lambda: os.waitpid(child.pid, 0)

    def popen_wait(self) -> Callable[[], object]:
        return self._child().wait

    def popen_communicate(self) -> Callable[[], object]:
        return self._child().communicate

    def sigtimedwait(self) -> Callable[[], object]:
        return lambda: signal.sigtimedwait([signal.SIGUSR1], 1e6)

    def pause(self) -> Callable[[], object]:
        return signal.pause


_CALLS = sorted(name for name in vars(BlockingCalls) if not name.startswith("_"))


class TestFreed:
    @pytest.mark.parametrize("name", _CALLS)
    def test_exception_comes_out_of_the_call(
        self, name: str, interrupter: MainThreadInterrupter, tmp_path: Path
    ) -> None:
        with ExitStack() as stack:
            call = getattr(BlockingCalls(stack, tmp_path), name)()
            with pytest.raises(Thrown):
                throw_into_main_thread_asleep_in(call, interrupter)

    def test_call_of_c_ends_early(self, interrupter: MainThreadInterrupter) -> None:
        usleep = ctypes.CDLL(None).usleep
        begin = time.monotonic()
        with pytest.raises(Thrown):
            throw_into_main_thread_asleep_in(lambda: usleep(15_000_000), interrupter)
        assert time.monotonic() - begin < 10


class TestNotFreed:
    def test_without_a_signal(self, interrupter: MainThreadInterrupter) -> None:
        """What all this is for."""
        lock, main_thread, late = threading.Lock(), threading.get_ident(), []
        lock.acquire()

        def throw() -> None:
            wait_until_main_thread_sleeps()
            async_raise(main_thread, Thrown)
            time.sleep(0.1)
            late.append(True)
            lock.release()

        thread = threading.Thread(target=throw)
        with pytest.raises(Thrown):
            _start_and_call(thread, lock.acquire)
        thread.join()
        assert late

    @pytest.mark.parametrize("name", ["sigwait", "mutex"])
    def test_c_code_that_goes_on_after_eintr(self, name: str, interrupter: MainThreadInterrupter) -> None:
        """Woken all the time, it comes back only when what it waits for is there."""
        libc, mutex = ctypes.CDLL(None), ctypes.create_string_buffer(128)
        libc.pthread_mutex_lock(mutex)
        main_thread, come = threading.get_ident(), []

        def throw() -> None:
            wait_until_main_thread_sleeps()
            async_raise(main_thread, Thrown)
            for _ in range(10):
                interrupter.wake()
                time.sleep(0.01)
            come.append(True)
            if name == "sigwait":
                signal.pthread_kill(main_thread, signal.SIGUSR1)
            else:
                libc.pthread_mutex_unlock(mutex)

        calls: dict[str, Callable[[], object]] = {
            "sigwait": lambda: signal.sigwait([signal.SIGUSR1]),
            "mutex": lambda: libc.pthread_mutex_lock(mutex),
        }
        signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGUSR1])
        thread = threading.Thread(target=throw)
        try:
            with pytest.raises(Thrown):
                _start_and_call(thread, calls[name])
        finally:
            signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGUSR1])
        thread.join()
        assert come


def _start_and_call(thread: threading.Thread, call: Callable[[], object]) -> None:
    thread.start()
    call()


class TestWake:
    def test_harmless_when_nothing_was_thrown(self, interrupter: MainThreadInterrupter) -> None:
        stop, wakes = threading.Event(), []

        def wake() -> None:
            while not stop.wait(0.001):
                interrupter.wake()
                wakes.append(1)

        thread = threading.Thread(target=wake)
        thread.start()
        begin = time.monotonic()
        time.sleep(0.2)  # goes on sleeping after each
        assert time.monotonic() - begin >= 0.2
        assert threading.Event().wait(0.05) is False
        reader, writer = os.pipe()
        threading.Timer(0.05, os.write, (writer, b"x")).start()
        assert os.read(reader, 1) == b"x"
        sum(range(1_000_000))
        stop.set()
        thread.join()
        os.close(reader)
        os.close(writer)
        assert len(wakes) > 20

    def test_on_the_main_thread_itself(self, interrupter: MainThreadInterrupter) -> None:
        interrupter.wake()

    def test_before_and_after(self) -> None:
        interrupter = MainThreadInterrupter()
        interrupter.wake()
        with interrupter:
            interrupter.wake()
        interrupter.wake()
        assert not interrupter.enabled

    def test_handler_removed_by_somebody(
        self, interrupter: MainThreadInterrupter, caplog: pytest.LogCaptureFixture
    ) -> None:
        assert interrupter.signal_number is not None
        signal.signal(interrupter.signal_number, signal.SIG_DFL)
        for _ in range(2):
            interrupter.wake()  # would be deadly
        assert not interrupter.enabled
        assert len(caplog.records) == 1


class TestInstall:
    def test_signal_is_free_before_and_after(self, leak_check: LeakCheck) -> None:
        numbers = set()
        for _ in range(1000):
            with MainThreadInterrupter() as interrupter:
                number = interrupter.signal_number
                assert number is not None
                assert signal.SIGRTMIN < number < signal.SIGRTMAX
                numbers.add(number)
                sets = read_signal_sets(os.getpid())
                assert sets is not None
                assert sets.is_caught(number)
            interrupter.uninstall()
            sets = read_signal_sets(os.getpid())
            assert sets is not None
            assert sets.is_free(number)
            assert signal.getsignal(number) is signal.SIG_DFL
        assert len(numbers) == 1

    def test_two_take_different_signals(self, interrupter: MainThreadInterrupter) -> None:
        with MainThreadInterrupter() as other:
            assert other.signal_number != interrupter.signal_number
            interrupter.install()  # again: nothing happens
            other.wake()
            interrupter.wake()

    def test_disabled_off_the_main_thread(self, caplog: pytest.LogCaptureFixture) -> None:
        found: list[MainThreadInterrupter] = []

        def run() -> None:
            with MainThreadInterrupter() as interrupter:
                interrupter.wake()
                found.append(interrupter)

        with caplog.at_level(logging.WARNING, logger="inprocess"):
            thread = threading.Thread(target=run)
            thread.start()
            thread.join()
        assert not found[0].enabled
        assert "main thread" in str(found[0].why_disabled)
        assert len(caplog.records) == 1

    def test_handler_of_somebody_else_stays(self) -> None:
        def theirs(number: int, frame: object) -> None:
            pass

        with MainThreadInterrupter() as interrupter:
            assert interrupter.signal_number is not None
            signal.signal(interrupter.signal_number, theirs)
        assert signal.getsignal(interrupter.signal_number) is theirs
        signal.signal(interrupter.signal_number, signal.SIG_DFL)

    def test_signals_in_use_are_not_taken(self) -> None:
        first = find_free_signal()
        signal.pthread_sigmask(signal.SIG_BLOCK, [first])
        try:
            second = find_free_signal()
            signal.signal(second, signal.SIG_IGN)
            try:
                assert len({first, second, find_free_signal()}) == 3
            finally:
                signal.signal(second, signal.SIG_DFL)
        finally:
            signal.pthread_sigmask(signal.SIG_UNBLOCK, [first])

    def test_none_is_free(self, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
        monkeypatch.setattr("inprocess.main_thread.signals._MARGIN", 100)
        with MainThreadInterrupter() as interrupter:
            assert not interrupter.enabled
        assert "all real-time signals" in caplog.text

    def test_signal_under_way_does_not_kill(self) -> None:
        _run_script(
            """
            with MainThreadInterrupter() as interrupter:
                number = interrupter.signal_number
                signal.pthread_sigmask(signal.SIG_BLOCK, [number])
                interrupter.wake()
                assert number in signal.sigpending()
            signal.pthread_sigmask(signal.SIG_UNBLOCK, [number])
            """
        )

    def test_wakes_race_with_uninstalling(self) -> None:
        _run_script(
            """
            current = [MainThreadInterrupter()]
            stop = threading.Event()
            def wake():
                while not stop.is_set():
                    current[0].wake()
            threads = [threading.Thread(target=wake) for _ in range(2)]
            for thread in threads:
                thread.start()
            for _ in range(500):
                with MainThreadInterrupter() as current[0]:
                    pass
            stop.set()
            for thread in threads:
                thread.join()
            """
        )

    def test_children(self) -> None:
        """A forked one wakes nobody; a program that it starts has the default disposition."""
        _run_script(
            """
            with MainThreadInterrupter() as interrupter:
                number = interrupter.signal_number
                child = os.fork()
                if child == 0:
                    interrupter.wake()
                    interrupter.uninstall()
                    os._exit(0)
                assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
                child = subprocess.Popen(["sleep", "1000"])
                child.send_signal(number)
                assert child.wait() == -number
            """
        )


def _run_script(text: str) -> None:
    prelude = (
        "import os, signal, subprocess, threading\nfrom inprocess.main_thread.signals import MainThreadInterrupter\n"
    )
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", prelude + textwrap.dedent(text)],
        capture_output=True,
        text=True,
        timeout=30,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")
