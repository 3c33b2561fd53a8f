"""A suspension of this process is not the silence of others."""

import math
import os
import signal
import subprocess
import sys

import pytest

from inprocess.ipc import suspension
from inprocess.ipc.suspension import Silence, Suspension, starts_again


class _Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> _Clock:
    clock = _Clock()
    monkeypatch.setattr(suspension, "time", clock)
    return clock


def test_what_is_much_later_than_announced_was_missed(clock: _Clock) -> None:
    own = Suspension()
    clock.now += 100
    assert own.missed_s() == 0  # nothing was announced
    own.expect(2.0)
    clock.now += 2.2
    assert own.missed_s() == 0  # a busy machine
    own.expect(2.0)
    clock.now += 12.25
    assert own.missed_s() == pytest.approx(10)
    assert own.missed_s() == 0
    own.expect(None)
    clock.now += 1e6
    assert own.missed_s() == 0
    own.expect(math.inf)
    assert own.missed_s() == 0


def test_a_suspension_during_work_is_missed_but_not_a_wait(clock: _Clock) -> None:
    own = Suspension()
    own.expect(2.0)
    clock.now += 2.0
    assert own.missed_s() == 0
    clock.now += 6.25  # before the next sleep, which is short then: a limit seems to be over
    own.expect(0.0)
    assert own.missed_s() == pytest.approx(6)
    assert own.checked_s == clock.now
    clock.now += 6.25  # just before the look
    assert own.missed_s() == pytest.approx(6)
    clock.now += 5.0
    own.blocked()
    own.expect(2.0)
    assert own.missed_s() == 0


def test_a_limit_starts_again_after_half_of_it_or_some_seconds() -> None:
    assert [starts_again(missed_s, 4.0) for missed_s in (1.9, 2.1)] == [False, True]
    assert [starts_again(missed_s, 60.0) for missed_s in (4.9, 5.0)] == [False, True]
    assert [starts_again(missed_s, 0.1) for missed_s in (0.9, 1.1)] == [False, True]  # not on a busy machine


def test_a_short_suspension_does_not_count_as_silence(clock: _Clock) -> None:
    silence = Silence(30.0)
    for _ in range(4):
        silence.expect(1.0)
        clock.now += 4.0
    assert silence.seconds() == pytest.approx(5.0)
    silence.expect(20.0)
    clock.now += 20.0
    assert silence.seconds() == pytest.approx(25.0)
    silence.end()
    assert silence.seconds() == 0


def test_after_a_long_suspension_the_silence_starts_again(clock: _Clock) -> None:
    silence = Silence(30.0)
    silence.expect(29.0)
    clock.now += 29.0
    assert silence.seconds() == pytest.approx(29.0)
    silence.expect(1.0)
    clock.now += 20.0
    assert silence.seconds() == 0


_JOIN = """
import time
from inprocess.ipc.threads import JoinableThread

def work():
    for _ in range(10):
        time.sleep(0.1)

thread = JoinableThread(work, "works")
print("joining", flush=True)
thread.start()
thread.join(3.0)
print("gave up" if thread.is_alive() else "ended", flush=True)
"""


def test_a_thread_is_not_given_up_because_the_process_was_stopped() -> None:
    """It was stopped, too."""
    with subprocess.Popen([sys.executable, "-c", _JOIN], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "joining\n"
        os.kill(process.pid, signal.SIGSTOP)
        try:
            with pytest.raises(subprocess.TimeoutExpired):
                process.wait(3.5)
        finally:
            os.kill(process.pid, signal.SIGCONT)
        assert process.stdout.read() == "ended\n"
