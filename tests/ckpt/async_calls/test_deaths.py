"""What a queue promises when a writer, the server or the trainer dies, or hangs."""

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Self

import psutil
import pytest

from ckpt.async_calls import AsyncCallsQueue, AsyncRequest, WriterConfig, call, writer
from ckpt.errors import WriterError
from inprocess.ipc.shared_memory import SharedMemory
from tests.ckpt.async_calls import functions
from tests.ckpt.async_calls.functions import Call, Gate, ask
from tests.support import LeakCheck, is_gone
from tests.support.selection import full_only


@pytest.fixture
def queue(leak_check: LeakCheck) -> Iterator[AsyncCallsQueue]:
    queue = AsyncCallsQueue(timeout_s=30)
    yield queue
    queue.close(abort=True)


def test_killed_writer_fails_its_call_at_once_and_is_replaced(queue: AsyncCallsQueue, tmp_path: Path) -> None:
    gate = Gate.create(tmp_path)
    pid = ask(queue, functions.report_identity)["pid"]
    call = Call(functions.hang)
    queue.schedule_async_request(AsyncRequest(call, (gate,), []))
    gate.wait_entered()
    os.kill(pid, signal.SIGKILL)
    started = time.monotonic()
    with pytest.raises(WriterError, match=rf"call 1 \(Call\) failed: .*pid {pid}\) was killed by signal 9 \(SIGKILL"):
        queue.maybe_finalize_async_calls(blocking=True)
    assert time.monotonic() - started < 15, "the timeout of the queue is 30 s"
    assert len(call.abandoned_with) == 1
    assert ask(queue, functions.report_identity)["pid"] != pid


@pytest.mark.parametrize("how", [signal.SIGSEGV, signal.SIGABRT])
def test_the_error_tells_the_signal(queue: AsyncCallsQueue, how: signal.Signals, capfd: object) -> None:
    queue.schedule_async_request(AsyncRequest(functions.die, (how,), []))
    with pytest.raises(WriterError, match=how.name):
        queue.maybe_finalize_async_calls(blocking=True)


def test_the_error_tells_the_exit_status(queue: AsyncCallsQueue) -> None:
    queue.schedule_async_request(AsyncRequest(os._exit, (3,), []))
    with pytest.raises(WriterError, match="exited with status 3"):
        queue.maybe_finalize_async_calls(blocking=True)


def test_calls_behind_a_killed_one_run_once_in_the_next_writer(queue: AsyncCallsQueue, tmp_path: Path) -> None:
    gate, log = Gate.create(tmp_path), tmp_path / "log"
    with SharedMemory.create("region", 4096) as region:
        pid = ask(queue, functions.report_identity)["pid"]
        queue.schedule_async_request(AsyncRequest(functions.append, (log, "a"), []))
        queue.schedule_async_request(AsyncRequest(functions.hang, (gate,), []))
        queue.schedule_async_request(AsyncRequest(functions.append, (log, "b"), []))
        queue.schedule_async_request(AsyncRequest(functions.fill, (region, 5), []))
        gate.wait_entered()
        os.kill(pid, signal.SIGKILL)
        with pytest.raises(WriterError, match="call 2 ") as caught:
            queue.maybe_finalize_async_calls(blocking=True)
        assert caught.value.finalized == [1]
        assert queue.maybe_finalize_async_calls(blocking=True) == [3, 4]
        assert log.read_text() == "ab"
        assert region.buffer[17] == 5


def test_a_writer_that_dies_idle_costs_no_call(queue: AsyncCallsQueue) -> None:
    pid = ask(queue, functions.report_identity)["pid"]
    process = psutil.Process(pid)
    os.kill(pid, signal.SIGKILL)
    process.wait(30)
    assert ask(queue, functions.report_identity)["pid"] != pid


def test_a_call_that_kills_every_writer_fails_once(queue: AsyncCallsQueue) -> None:
    for _ in range(3):
        queue.schedule_async_request(AsyncRequest(functions.die, (signal.SIGKILL,), []))
    for index in range(3):
        with pytest.raises(WriterError, match=f"call {index} "):
            queue.maybe_finalize_async_calls(blocking=True)
    assert queue.get_num_unfinalized_calls() == 0


def test_a_killed_server_takes_no_call_with_it(queue: AsyncCallsQueue, tmp_path: Path) -> None:
    gate = Gate.create(tmp_path)
    before = ask(queue, functions.report_identity)
    queue.schedule_async_request(AsyncRequest(functions.stop_at, (gate,), []))
    gate.wait_entered()
    os.kill(before["server"], signal.SIGKILL)
    queue.wait_for_events(10)
    gate.open()
    assert queue.maybe_finalize_async_calls(blocking=True) == [1]
    queue.schedule_async_request(AsyncRequest(os._exit, (0,), []))
    with pytest.raises(WriterError, match="exit status unknown"):
        queue.maybe_finalize_async_calls(blocking=True)
    after = ask(queue, functions.report_identity)
    assert after["server"] != before["server"]


def _newest_child() -> psutil.Process:
    return max(psutil.Process().children(), key=psutil.Process.create_time)


def test_a_server_killed_at_its_start_is_replaced(queue: AsyncCallsQueue, leak_check: LeakCheck) -> None:
    queue.start()
    server = _newest_child()
    server.kill()
    assert ask(queue, functions.report_identity)["server"] != server.pid


def test_a_server_that_hangs_at_its_start_is_given_up(leak_check: LeakCheck) -> None:
    with AsyncCallsQueue(
        timeout_s=30, config=WriterConfig(start_timeout_s=8.0)
    ) as queue:  # the next one starts in time
        queue.start()
        server = _newest_child()
        server.suspend()
        queue.schedule_async_request(AsyncRequest(functions.nothing, (), []))
        assert queue.maybe_finalize_async_calls(blocking=True) == [0]
        server.wait(20)  # killed: another one serves
    leak_check.check()


def test_a_hanging_call_is_killed(tmp_path: Path, leak_check: LeakCheck) -> None:
    gate = Gate.create(tmp_path)
    with AsyncCallsQueue(timeout_s=30, config=WriterConfig(writer_timeout_s=2.5)) as queue:
        pid = ask(queue, functions.report_identity)["pid"]
        queue.schedule_async_request(AsyncRequest(functions.hang, (gate,), []))
        gate.wait_entered()
        with pytest.raises(WriterError, match=r"made no progress for 2\.5 s and was killed"):
            queue.maybe_finalize_async_calls(blocking=True)
        assert is_gone(pid)
        assert ask(queue, functions.report_identity)["pid"] != pid


def test_a_call_that_makes_progress_is_left_alone(tmp_path: Path, leak_check: LeakCheck) -> None:
    with AsyncCallsQueue(timeout_s=4.0, config=WriterConfig(writer_timeout_s=2.5)) as queue:
        queue.schedule_async_request(AsyncRequest(functions.advance_until_killed, (), []))
        with pytest.raises(Exception, match="not done after 4 s"):
            queue.maybe_finalize_async_calls(blocking=True)
        queue.close(abort=True)


def test_abort_kills_tells_every_call_and_finalizes_none(tmp_path: Path, leak_check: LeakCheck) -> None:
    gate, log, seen = Gate.create(tmp_path), tmp_path / "log", []
    running, behind = Call(functions.hang), Call(functions.append)
    queue = AsyncCallsQueue()
    queue.schedule_async_request(AsyncRequest(None, (), [lambda: seen.append(0)]))
    queue.schedule_async_request(AsyncRequest(running, (gate,), [lambda: seen.append(1)]))
    queue.schedule_async_request(AsyncRequest(behind, (log, "x"), [lambda: seen.append(2)]))
    gate.wait_entered()
    queue.close(abort=True)
    queue.close(abort=True)
    assert [len(call.abandoned_with) for call in (running, behind)] == [1, 1]
    assert "aborted" in str(running.abandoned_with[0])
    assert not seen
    assert not log.exists()
    leak_check.check()


def test_a_call_given_up_is_killed_though_its_start_was_interrupted(
    queue: AsyncCallsQueue, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    original = writer._Process.send_call

    def interrupted(process: writer._Process, call: call.Call) -> None:
        original(process, call)
        raise KeyboardInterrupt

    gate = Gate.create(tmp_path)
    monkeypatch.setattr(writer._Process, "send_call", interrupted)
    with pytest.raises(KeyboardInterrupt):
        queue.schedule_async_request(AsyncRequest(functions.hang, (gate,), []))
    monkeypatch.undo()
    gate.wait_entered()
    (process,) = (each for each in psutil.Process().children(recursive=True) if each.name() == "ckpt-writer")
    assert queue.recover(0.0) == []
    psutil.wait_procs([process], 30)
    assert is_gone(process.pid)


def test_abort_before_the_writer_exists_runs_nothing(tmp_path: Path, leak_check: LeakCheck) -> None:
    log = tmp_path / "log"
    queue = AsyncCallsQueue()
    queue.schedule_async_request(AsyncRequest(functions.append, (log, "x"), []))
    queue.close(abort=True)
    leak_check.check()
    assert not log.exists()


@pytest.mark.parametrize("how", ["exception", "forgotten"])
def test_a_queue_let_go_finishes_in_the_background(how: str, tmp_path: Path, leak_check: LeakCheck) -> None:
    gate, log, seen = Gate.create(tmp_path), tmp_path / "log", []
    queue = AsyncCallsQueue()
    queue.schedule_async_request(AsyncRequest(functions.stop_at, (gate, log, "a"), [lambda: seen.append(0)]))
    queue.schedule_async_request(AsyncRequest(functions.append, (log, "b"), []))
    gate.wait_entered()
    if how == "exception":
        with pytest.raises(KeyboardInterrupt), queue:
            raise KeyboardInterrupt
    else:
        del queue
    gate.open()
    leak_check.check()
    assert log.read_text() == "ab"
    assert not seen


def test_a_forked_process_cannot_use_it_nor_disturb_it(queue: AsyncCallsQueue) -> None:
    before = ask(queue, functions.report_identity)
    child = os.fork()
    if child == 0:
        try:
            for use in (queue.pump, queue.close, queue.start, queue.maybe_finalize_async_calls):
                with pytest.raises(RuntimeError, match="fork"):
                    use()
            os._exit(0)
        finally:
            os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert ask(queue, functions.report_identity) == before


_TRAINER = """
import os, sys
from ckpt.async_calls import AsyncCallsQueue, AsyncRequest, current

def put(path, text):
    with open(path, "a") as file:
        file.write(text + (" worker" if current() else " trainer") + "\\n")

def stop(entered, leave, path):
    open(entered, "w").close()
    open(leave).close()
    put(path, "stopped")

if __name__ == "__main__":
    log, entered, leave, mode = sys.argv[1:]
    if mode == "simple":
        with AsyncCallsQueue() as queue:
            queue.schedule_async_request(AsyncRequest(put, (log, "one"), [lambda: put(log, "final")]))
            print(queue.maybe_finalize_async_calls(blocking=True))
    else:
        queue = AsyncCallsQueue()
        queue.schedule_async_request(AsyncRequest(stop, (entered, leave, log), []))
        queue.schedule_async_request(AsyncRequest(put, (log, "queued"), []))
        if mode == "fork":
            child = os.fork()
            if child == 0:
                sys.stdin.read()  # outlives its parent, as a data loader worker may
                os._exit(0)
            with open(log + ".child", "w") as file:
                file.write(str(child))
        if mode == "exit":
            sys.stdin.read()
            sys.exit()
        queue.maybe_finalize_async_calls(blocking=True)
"""


class _Trainer:
    """A script in a process of its own, with all that it starts."""

    def __init__(self, folder: Path, mode: str) -> None:
        self.gate, self.log = Gate.create(folder), folder / "log"
        script = folder / "train.py"
        script.write_text(_TRAINER)
        self.err, self.child = folder / "err", folder / "log.child"
        os.mkfifo(self.child)
        self._family: list[psutil.Process] = []
        with self.err.open("wb") as err:
            self.process = subprocess.Popen(
                [sys.executable, str(script), str(self.log), str(self.gate.entered), str(self.gate.leave), mode],
                env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[3])},
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                stderr=err,
            )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *error: object) -> None:
        if kind is not None:  # a failed test may leave writers that wait at the gate for ever
            for process in self.family():
                with contextlib.suppress(psutil.Error):
                    process.kill()
        self.process.kill()
        self.process.communicate(timeout=30)

    def family(self) -> list[psutil.Process]:
        if self.process.poll() is None:
            self._family = psutil.Process(self.process.pid).children(recursive=True)
        return self._family


def _assert_gone(processes: list[psutil.Process]) -> None:
    _, alive = psutil.wait_procs([p for p in processes if p.is_running()], timeout=30)
    alive = [process for process in alive if process.status() != psutil.STATUS_ZOMBIE]
    for process in alive:
        process.kill()
    assert not alive


def test_a_function_of_the_main_script(tmp_path: Path) -> None:
    with _Trainer(tmp_path, "simple") as trainer:
        assert trainer.process.wait(30) == 0, trainer.err.read_text()
    assert trainer.log.read_text() == "one worker\nfinal trainer\n"
    assert trainer.err.read_text() == ""


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGTERM, pytest.param(signal.SIGINT, marks=full_only)])
def test_writers_finish_what_a_killed_trainer_had_queued(how: signal.Signals, tmp_path: Path) -> None:
    with _Trainer(tmp_path, "block") as trainer:
        trainer.gate.wait_entered()
        family = trainer.family()
        assert len(family) == 2
        trainer.process.send_signal(how)
        trainer.process.wait(30)
        trainer.gate.open()
        _assert_gone(family)
    assert trainer.log.read_text() == "stopped worker\nqueued worker\n"


def test_a_trainer_that_just_ends_waits_for_nobody(tmp_path: Path) -> None:
    with _Trainer(tmp_path, "exit") as trainer:
        trainer.gate.wait_entered()
        family = trainer.family()
        assert len(family) == 2
        trainer.process.communicate(timeout=30)  # the end of its standard input lets it end
        trainer.gate.open()
        _assert_gone(family)
    assert trainer.log.read_text() == "stopped worker\nqueued worker\n"
    assert trainer.err.read_text() == ""


def test_a_forked_child_of_a_dead_trainer_does_not_keep_the_writers(tmp_path: Path) -> None:
    with _Trainer(tmp_path, "fork") as trainer:
        trainer.gate.wait_entered()
        child = int(trainer.child.read_text())
        family = trainer.family()
        own = [process for process in family if process.pid != child]
        assert (len(own), len(family)) == (2, 3)
        trainer.process.kill()
        trainer.process.wait(30)
        trainer.gate.open()
        _assert_gone(own)
    _assert_gone(family)  # the child ends with its standard input
    assert trainer.log.read_text() == "stopped worker\nqueued worker\n"
