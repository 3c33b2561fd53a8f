import contextlib
import fcntl
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import pytest

from inprocess.main_thread.signals import read_signal_sets
from inprocess.main_thread.stacks import StackReporter, own_stacks, read_stacks
from tests.support import LeakCheck

_TIMEOUT_S = 20.0
_PRELUDE = """
import ctypes, os, signal, sys, threading, time
from inprocess.main_thread.stacks import StackReporter
reporter = StackReporter()
reporter.install()
def wait_for_mutex(libc):
    mutex = ctypes.create_string_buffer(128)
    libc.pthread_mutex_lock(mutex)
    libc.pthread_mutex_lock(mutex)
def ready():
    print(reporter.signal_number, reporter.fd, flush=True)
"""


@dataclass(frozen=True)
class Rank:
    """A process with a `StackReporter`, and our own descriptor of its file."""

    process: "subprocess.Popen[str]"
    signal_number: int
    fd: int

    def stacks(self, timeout_s: float = _TIMEOUT_S) -> str:
        return read_stacks(self.process.pid, self.signal_number, self.fd, timeout_s)

    def line(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline().strip()

    def say(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write("\n")
        self.process.stdin.flush()


@contextmanager
def rank(text: str) -> Iterator[Rank]:
    script = _PRELUDE + textwrap.dedent(text)
    process = subprocess.Popen([sys.executable, "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        number, fd = map(int, process.stdout.readline().split())
        ours = os.open(f"/proc/{process.pid}/fd/{fd}", os.O_RDWR)
        try:
            yield Rank(process, number, ours)
        finally:
            os.close(ours)
    finally:
        process.kill()
        with process:
            pass


class TestRead:
    @pytest.mark.parametrize(
        "stuck",
        [
            "while True: pass",
            "time.sleep(1000)",
            "wait_for_mutex(ctypes.CDLL(None))",
            "wait_for_mutex(ctypes.PyDLL(None))",  # holds the GIL
            "threading.Lock().acquire() and threading.Event().wait()",
        ],
    )
    def test_wherever_the_process_is(self, stuck: str) -> None:
        with rank(
            f"""
            def innermost():
                ready()
                {stuck}
            def outer():
                innermost()
            outer()
            """
        ) as process:
            for _ in range(10):
                text = process.stacks()
                assert "Current thread 0x" in text
                assert text.index("in innermost") < text.index("in outer") < text.index("in <module>")
                assert text.endswith("\n")
                assert text.count("Current thread") == 1

    def test_all_threads(self) -> None:
        with rank(
            """
            def sleeper():
                time.sleep(1000)
            for _ in range(5):
                threading.Thread(target=sleeper).start()
            ready()
            wait_for_mutex(ctypes.PyDLL(None))
            """
        ) as process:
            text = process.stacks()
            assert text.count("in sleeper") == 5
            assert text.count("hread 0x") == 6

    def test_more_threads_than_faulthandler_writes(self) -> None:
        with rank(
            """
            def sleeper():
                time.sleep(1000)
            for _ in range(150):
                threading.Thread(target=sleeper, daemon=True).start()
            ready()
            time.sleep(1000)
            """
        ) as process:
            for _ in range(5):
                text = process.stacks()
                assert text.count("hread 0x") == 100
                assert text.endswith("...\n")

    def test_blocking_call_goes_on(self) -> None:
        with rank(
            """
            ready()
            line = sys.stdin.readline()
            print("read", repr(line), flush=True)
            """
        ) as process:
            assert process.stacks()
            process.say()
            assert process.line() == r"read '\n'"

    def test_another_thread_answers_for_one_that_does_not(self) -> None:
        with rank(
            """
            def helper():
                time.sleep(1000)
            threading.Thread(target=helper, daemon=True).start()
            time.sleep(0.05)
            signal.pthread_sigmask(signal.SIG_BLOCK, [reporter.signal_number])
            ready()
            time.sleep(1000)
            """
        ) as process:
            text = process.stacks(0.5)
            assert "in helper" in text
            assert "in <module>" in text

    def test_own_process(self, leak_check: LeakCheck) -> None:
        with StackReporter() as reporter:
            assert reporter.signal_number is not None
            assert reporter.fd is not None
            results = []

            def run() -> None:
                assert reporter.signal_number is not None
                assert reporter.fd is not None
                results.append(read_stacks(os.getpid(), reporter.signal_number, reporter.fd, _TIMEOUT_S))

            thread = threading.Thread(target=run)
            thread.start()
            thread.join()
            run()
        assert all("test_own_process" in text for text in results)


class TestNoAnswer:
    def test_stopped_process_and_again_when_it_goes_on(self) -> None:
        with rank("ready()\ntime.sleep(1000)") as process:
            process.process.send_signal(signal.SIGSTOP)
            _wait_stopped(process.process.pid)
            assert process.stacks(0.2) == ""
            process.process.send_signal(signal.SIGCONT)
            assert process.stacks().count("Current thread") == 1

    def test_stopped_after_the_signal_was_sent(self) -> None:
        with rank("ready()\ntime.sleep(1000)") as process:
            process.process.send_signal(signal.SIGSTOP)
            _wait_stopped(process.process.pid)
            process.process.send_signal(process.signal_number)
            process.process.send_signal(signal.SIGCONT)
            assert process.stacks().count("Current thread") in (1, 2)

    def test_dead_process(self) -> None:
        with rank("ready()\ntime.sleep(1000)") as process:
            process.process.kill()
            os.waitid(os.P_PID, process.process.pid, os.WEXITED | os.WNOWAIT)
            assert process.stacks(0.2) == ""  # a zombie
            process.process.wait()
            assert process.stacks(0.2) == ""

    def test_process_that_never_or_no_longer_has_a_handler_lives(self) -> None:
        with rank(
            """
            ready()
            sys.stdin.readline()
            reporter.uninstall()
            print("uninstalled", flush=True)
            sys.stdin.readline()
            """
        ) as process:
            assert process.stacks()
            process.say()
            assert process.line() == "uninstalled"
            assert process.stacks(0.2) == ""
            process.say()
            assert process.process.wait(_TIMEOUT_S) == 0

    def test_file_in_use_by_another_reader(self) -> None:
        with rank("ready()\ntime.sleep(1000)") as process, _reader(process.fd):
            assert process.stacks(0.1) == ""

    def test_too_little_time(self) -> None:
        with rank("ready()\ntime.sleep(1000)") as process:
            process.stacks(0.0)
            assert process.stacks()


class TestInstall:
    def test_leaves_nothing(self, leak_check: LeakCheck) -> None:
        for _ in range(300):
            with StackReporter() as reporter:
                reporter.install()  # again: nothing happens
                number = reporter.signal_number
                assert number is not None
            reporter.uninstall()
            assert (reporter.signal_number, reporter.fd) == (None, None)
            sets = read_signal_sets(os.getpid())
            assert sets is not None
            assert sets.is_free(number)
        leak_check.check()

    def test_two_take_different_signals(self) -> None:
        with StackReporter() as first, StackReporter() as second:
            assert first.signal_number != second.signal_number

    def test_disabled_off_the_main_thread(self, caplog: pytest.LogCaptureFixture) -> None:
        found: list[StackReporter] = []

        def run() -> None:
            with StackReporter() as reporter:
                found.append(reporter)

        thread = threading.Thread(target=run)
        thread.start()
        thread.join()
        assert (found[0].signal_number, found[0].fd) == (None, None)
        assert "main thread" in caplog.text

    def test_uninstall_waits_for_a_reader(self) -> None:
        with rank(
            """
            ready()
            sys.stdin.readline()
            reporter.uninstall()
            print("uninstalled", flush=True)
            sys.stdin.readline()
            """
        ) as process:
            with _reader(process.fd):
                process.say()
                time.sleep(0.1)
                process.process.send_signal(process.signal_number)  # still has a handler
                time.sleep(0.1)
            assert process.line() == "uninstalled"
            process.say()
            assert process.process.wait(_TIMEOUT_S) == 0

    def test_uninstall_does_not_wait_for_a_stopped_reader_forever(self) -> None:
        with rank(
            """
            ready()
            sys.stdin.readline()
            reporter.uninstall()
            print("uninstalled", flush=True)
            sys.stdin.readline()
            """
        ) as process:
            with _reader(process.fd):
                process.say()
                assert process.line() == "uninstalled"
            process.process.send_signal(process.signal_number)  # too late, and ignored
            process.say()
            assert process.process.wait(_TIMEOUT_S) == 0


@contextmanager
def _reader(fd: int) -> Iterator[None]:
    """Another process holds the file, as a reader does that was stopped in the middle."""
    script = """
        import fcntl, os, sys
        fcntl.lockf(int(sys.argv[1]), fcntl.LOCK_EX)
        print(flush=True)
        sys.stdin.readline()
    """
    arguments = [sys.executable, "-c", textwrap.dedent(script), str(fd)]
    with subprocess.Popen(arguments, stdin=subprocess.PIPE, stdout=subprocess.PIPE, pass_fds=[fd]) as process:
        try:
            assert process.stdout is not None
            process.stdout.readline()
            with contextlib.suppress(OSError):
                fcntl.lockf(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                pytest.fail("not locked")
            yield
        finally:
            process.kill()


def _wait_stopped(pid: int) -> None:
    deadline = time.monotonic() + _TIMEOUT_S
    while (sets := read_signal_sets(pid)) is None or not sets.stopped:
        assert time.monotonic() < deadline
        time.sleep(0.002)


def test_own_stacks_can_be_written_whatever_threads_are_called() -> None:
    """The thread that reports them must not fail: it is the one that brings the main thread out of a hang."""
    over = threading.Event()
    thread = threading.Thread(target=over.wait, args=(_TIMEOUT_S,), name="reader of caf\udce9.bin")
    thread.start()
    try:
        assert b"reader of caf\\udce9.bin" in own_stacks().encode()
    finally:
        over.set()
        thread.join()
