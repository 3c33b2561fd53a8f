"""Every wait of a trainer has one deadline: the clock alone ends it, whatever writers and storage do."""

import os
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

import ckpt
from ckpt.errors import CheckpointTimeoutError
from ckpt.storage.root import CheckpointRoot
from tests.ckpt.async_calls import functions
from tests.ckpt.async_calls.functions import Gate, ask
from tests.ckpt.crash.killers import wait_until
from tests.support import LeakCheck, launch_ranks
from tests.support.leaks import is_gone


def _state(count: int) -> dict[str, Any]:
    return {"w": torch.arange(count, dtype=torch.float32)}


# -- a state that grows while a save is in flight ----------------------------------------------------------------------


def test_state_that_grows_waits_for_the_writer_and_not_longer_than_the_timeout(
    tmp_path: Path, leak_check: LeakCheck
) -> None:
    gate = Gate.create(tmp_path)
    with ckpt.Checkpointer(tmp_path / "root", timeout=timedelta(seconds=5)) as checkpointer:
        checkpointer.save(_state(1000), 1)
        checkpointer.queue.schedule_async_request(ckpt.AsyncRequest(functions.stop_at, (gate,), []))
        gate.wait_entered()
        checkpointer.async_save(_state(1000), 2)
        begin = time.process_time()
        with pytest.raises(CheckpointTimeoutError, match=r"rank 0: .* in 5 s; the saves of steps \[2\]"):
            checkpointer.async_save(_state(100_000), 3)
        assert time.process_time() - begin < 3.5  # of 5 s: it did not look all the time
        gate.open()
        checkpointer.save(_state(100_000), 4)
        assert checkpointer.all_steps() == [1, 2, 4]


def test_state_that_grows_notices_that_the_save_in_flight_is_done(tmp_path: Path, leak_check: LeakCheck) -> None:
    with ckpt.Checkpointer(tmp_path / "root") as checkpointer:
        checkpointer.save(_state(1000), 1)
        checkpointer.async_save(_state(1000), 2)
        wait_until(lambda: CheckpointRoot(checkpointer.root).steps() == [1, 2], "the step")
        checkpointer.save(_state(100_000), 3)  # the answer of the writer was not read before
        assert checkpointer.all_steps() == [1, 2, 3]


# -- closing beside a writer or storage that does not answer -----------------------------------------------------------

_TIMEOUT_S = 5.0
_BUSY_S = 20.0  # more than the timeout, on a busy machine


def _stop(pid: int) -> None:
    os.kill(pid, signal.SIGSTOP)
    wait_until(lambda: psutil.Process(pid).status() == psutil.STATUS_STOPPED, "the process to stop")


def _with_stopped_writer(root: Path, timeout_s: float = _TIMEOUT_S, **options: Any) -> tuple[ckpt.Checkpointer, int]:
    """Return a Checkpointer with two saves in flight, and the id of its writer, which is stopped."""
    checkpointer = ckpt.Checkpointer(root, timeout=timedelta(seconds=timeout_s), **options)
    checkpointer.save(_state(1000), 1)
    pid = ask(checkpointer.queue, functions.report_identity)["pid"]
    _stop(pid)
    checkpointer.async_save(_state(1000), 2)
    checkpointer.async_save(_state(1000), 3)
    return checkpointer, pid


def test_close_beside_a_stopped_writer(tmp_path: Path, leak_check: LeakCheck) -> None:
    checkpointer, pid = _with_stopped_writer(tmp_path / "root")
    begin = time.monotonic()
    with pytest.raises(
        CheckpointTimeoutError, match=r"steps \[2, 3\] were not finalized in 5 s.* writers killed"
    ) as caught:
        checkpointer.close()
    assert time.monotonic() - begin < _BUSY_S
    assert caught.value.step == 2
    assert is_gone(pid)
    checkpointer.close()
    root = CheckpointRoot(str(tmp_path / "root"))
    assert (root.steps(), root.pending()) == ([1], [])  # abandoned, so that no process waits for them
    with ckpt.Checkpointer(root.path) as after:
        assert after.restore(_state(1000)) == 1
        after.save(_state(1000), 2)


def test_close_beside_a_stopped_writer_of_a_shared_queue(tmp_path: Path, leak_check: LeakCheck) -> None:
    with ckpt.AsyncCallsQueue() as queue:
        checkpointer, pid = _with_stopped_writer(tmp_path / "root", queue=queue)
        with pytest.raises(CheckpointTimeoutError, match=r"steps \[2, 3\] .* They stay queued"):
            checkpointer.close()
        os.kill(pid, signal.SIGCONT)
        assert queue.maybe_finalize_async_calls(blocking=True) == [2, 3]
    assert CheckpointRoot(str(tmp_path / "root")).steps() == [1, 2, 3]


def test_queue_closes_in_time_whatever_is_stopped(tmp_path: Path, leak_check: LeakCheck) -> None:
    for who, abort in (("pid", False), ("server", False), ("pid", True), ("server", True)):
        queue = ckpt.AsyncCallsQueue()
        call = functions.Call(functions.nothing)
        identity = ask(queue, functions.report_identity)
        _stop(identity["pid"])
        if who == "server":
            _stop(identity["server"])
        for _ in range(3):  # one deadline for all of them
            queue.schedule_async_request(ckpt.AsyncRequest(call, (), []))
        begin = time.monotonic()
        if abort:
            queue.close(abort=True, timeout_s=1.0)
        else:
            with pytest.raises(
                CheckpointTimeoutError, match="calls 1 to 3 are not done after 1 s, the time for closing"
            ):
                queue.close(timeout_s=1.0)
        assert time.monotonic() - begin < _BUSY_S
        assert len(call.abandoned_with) == 3
        wait_until(lambda gone=identity: all(is_gone(pid) for pid in gone.values()), "the end of the processes")


def test_leaving_with_an_exception_beside_a_stopped_writer_does_not_wait(tmp_path: Path) -> None:
    checkpointer, pid = _with_stopped_writer(tmp_path / "root", timeout_s=50.0)
    begin = time.monotonic()
    with pytest.raises(ZeroDivisionError), checkpointer:
        raise ZeroDivisionError
    assert time.monotonic() - begin < _BUSY_S
    os.kill(pid, signal.SIGCONT)  # the writer finishes what it has
    wait_until(lambda: CheckpointRoot(str(tmp_path / "root")).steps() == [1, 2, 3], "the steps")
    wait_until(lambda: is_gone(pid), "the writer to end")


_LEAVES = """
import os, signal, sys, torch, ckpt
from tests.ckpt.async_calls import functions
from tests.ckpt.async_calls.functions import ask

checkpointer = ckpt.Checkpointer(sys.argv[1])
state = {"w": torch.ones(1000)}
checkpointer.save(state, 1)
pid = ask(checkpointer.queue, functions.report_identity)["pid"]
os.kill(pid, signal.SIGSTOP)
checkpointer.async_save(state, 2)
print(pid, flush=True)
"""


def test_interpreter_ends_beside_a_stopped_writer(tmp_path: Path) -> None:
    """It does not wait, and the writer finishes when it is continued."""
    script = tmp_path / "script.py"
    script.write_text(_LEAVES)
    with launch_ranks(script, 1, tmp_path / "root") as group:
        (result,) = group.wait(30)
        os.kill(int(result.stdout), signal.SIGCONT)
        group.wait_for_no_survivors(30)
    assert CheckpointRoot(str(tmp_path / "root")).steps() == [1, 2]


@pytest.fixture
def hung_disk(tmp_path: Path) -> Iterator[tuple[Path, Callable[[], None]]]:
    """A file system, and the function that makes it answer no more: a FUSE mount whose process is stopped."""
    if shutil.which("bindfs") is None:
        pytest.skip("bindfs is not installed")
    below, path = tmp_path / "below", tmp_path / "mounted"
    below.mkdir()
    path.mkdir()
    process = subprocess.Popen(["bindfs", "-f", below, path], stderr=subprocess.DEVNULL)
    wait_until(lambda: os.path.ismount(path) or process.poll() is not None, "the mount")
    if process.poll() is not None:
        pytest.skip("not allowed to mount a file system")
    yield path, lambda: _stop(process.pid)
    process.kill()
    process.wait()
    subprocess.run(["umount", "-l", path], check=False)


def test_close_beside_storage_that_does_not_answer(hung_disk: tuple[Path, Callable[[], None]]) -> None:
    path, hang = hung_disk
    checkpointer = ckpt.Checkpointer(path / "root", timeout=timedelta(seconds=_TIMEOUT_S), keep=1)
    for step in range(1, 4):
        checkpointer.save(_state(1000), step)
    hang()
    checkpointer.async_save(_state(1000), 4)
    begin = time.monotonic()
    with pytest.raises(CheckpointTimeoutError, match=r"steps \[4\] were not finalized in 5 s"):
        checkpointer.close()
    assert time.monotonic() - begin < _BUSY_S
