"""Each fault in a process of its own, and who is chosen."""

import contextlib
import os
import select
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator

import pytest

from inprocess.tools.inject_fault import Fault, InjectedException, inject_fault, plan_faults, trigger

HANGS = {Fault.LOCK_GIL, Fault.SIGSTOP}
ENDS = {
    Fault.OS_ABORT: -signal.SIGABRT,
    Fault.OS_EXIT: 1,
    Fault.SEGFAULT: -signal.SIGSEGV,
    Fault.SIGKILL: -signal.SIGKILL,
    Fault.SIGTERM: -signal.SIGTERM,
}
RAISES = {
    Fault.WORKLOAD_EXC: "InjectedException",
    Fault.ASYNC_EXC: "InjectedException",
    Fault.SIGNAL_EXC: "InjectedException",
    Fault.SIGINT: "KeyboardInterrupt",
}
GPU = {Fault.GPU_ERROR, Fault.GPU_SLEEP}

# The main thread waits in slices, so that what is thrown into it comes up.
PROGRAM = """
import sys, threading
from inprocess.tools.inject_fault import Fault, inject_fault

def tell(line):
    sys.stdout.write(line)  # at once, so that lines of two threads do not mix
    sys.stdout.flush()

def report(fault):
    tell(f"injects {fault.name}\\n")

try:
    injection = inject_fault([Fault[sys.argv[1]]], delay=0.0, keep_alive=0, callback=report)
    never = threading.Event()
    while True:
        injection.check()
        if sys.argv[2]:
            tell(sys.argv[2] + "\\n")
        never.wait(0.01)
except BaseException as error:
    tell(f"raised {type(error).__name__}\\n")
"""


@contextlib.contextmanager
def start(fault: Fault, tick: str = "") -> "Iterator[subprocess.Popen[str]]":
    env = {**os.environ, "RANK": "0", "WORLD_SIZE": "1", "PYTHONFAULTHANDLER": ""}
    command = [sys.executable, "-c", PROGRAM, fault.name, tick]
    with subprocess.Popen(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as process:
        try:
            yield process
        finally:
            process.kill()


def test_every_fault_is_tested() -> None:
    assert {*HANGS, *ENDS, *RAISES, *GPU} == set(Fault)


@pytest.mark.parametrize("fault", ENDS, ids=lambda fault: fault.name)
def test_a_fault_that_ends_the_process(fault: Fault) -> None:
    with start(fault) as process:
        assert process.communicate(timeout=30)[0] == f"injects {fault.name}\n"
        assert process.returncode == ENDS[fault]


@pytest.mark.parametrize("fault", RAISES, ids=lambda fault: fault.name)
def test_a_fault_that_raises_on_the_main_thread(fault: Fault) -> None:
    with start(fault) as process:
        assert process.communicate(timeout=30)[0] == f"injects {fault.name}\nraised {RAISES[fault]}\n"
        assert process.returncode == 0


def test_a_stopped_process() -> None:
    with start(Fault.SIGSTOP) as process:
        _, status = os.waitpid(process.pid, os.WUNTRACED)
        assert os.WIFSTOPPED(status)


def test_a_locked_interpreter() -> None:
    with start(Fault.LOCK_GIL, "tick") as process:
        assert process.stdout is not None
        seen = b""
        while select.select([process.stdout], [], [], 20 if b"injects" not in seen else 1)[0]:
            seen += os.read(process.stdout.fileno(), 1000)
        assert b"injects LOCK_GIL\n" in seen
        # A signal handler of Python needs the lock that is never released.
        process.send_signal(signal.SIGINT)
        with pytest.raises(subprocess.TimeoutExpired):
            process.wait(0.3)


def test_gpu_faults_need_a_gpu() -> None:
    import torch

    if torch.cuda.is_available():
        pytest.skip("there is one")
    for fault in GPU:
        with pytest.raises(RuntimeError, match="needs a GPU"):
            trigger(fault)


def test_triggering_here_and_now() -> None:
    with pytest.raises(InjectedException):
        trigger(Fault.WORKLOAD_EXC)


def test_the_plan_depends_on_nothing_but_the_arguments() -> None:
    faults = list(Fault)
    plan = plan_faults(16, faults, (2, 5), 4, (1.0, 3.0), seed=7)
    assert plan == plan_faults(16, faults, (2, 5), 4, (1.0, 3.0), seed=7)
    assert plan != plan_faults(16, faults, (2, 5), 4, (1.0, 3.0), seed=8)
    assert 2 <= len({one.rank for one in plan}) == len(plan) <= 5
    assert all(4 <= one.rank < 16 and 1.0 <= one.delay <= 3.0 for one in plan)


def test_there_must_be_enough_ranks() -> None:
    with pytest.raises(ValueError, match="2 ranks cannot fail when 3 of 4 are kept alive"):
        plan_faults(4, [Fault.SIGKILL], 2, 3, 0.0, seed=0)
    with pytest.raises(ValueError, match="no fault to choose"):
        plan_faults(4, [], 1, 0, 0.0, seed=0)


def test_a_cancelled_injection_does_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "1")
    injection = inject_fault([Fault.WORKLOAD_EXC], keep_alive=0, delay=1000.0)
    injection.cancel()
    injection.check()
    assert threading.active_count() == len(threading.enumerate())
    assert not [thread for thread in threading.enumerate() if isinstance(thread, threading.Timer)]
