"""What a queue promises when nothing dies."""

import functools
import os
import threading
import time
import weakref
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import psutil
import pytest

from ckpt.async_calls import (
    AsyncCallsQueue,
    AsyncRequest,
    DistributedAsyncCaller,
    WriterConfig,
    abort_nvrx_checkpoint,
)
from ckpt.errors import CheckpointTimeoutError, RemoteTraceback, WriterError
from inprocess.ipc.shared_memory import SharedMemory
from tests.ckpt.async_calls import functions
from tests.ckpt.async_calls.functions import Call, Gate, ask
from tests.support import LeakCheck


@pytest.fixture
def queue(leak_check: LeakCheck) -> Iterator[AsyncCallsQueue]:
    queue = AsyncCallsQueue(timeout_s=30)
    yield queue
    queue.close(abort=True)


def test_calls_run_in_order_and_finalize_in_order(queue: AsyncCallsQueue, tmp_path: Path) -> None:
    log, seen = tmp_path / "log", []
    for i in range(5):
        request = AsyncRequest(functions.append, (log,), [lambda i=i: seen.append(i)], {"text": str(i)})
        assert queue.schedule_async_request(request) == i
    assert queue.get_num_unfinalized_calls() == 5
    assert queue.maybe_finalize_async_calls(blocking=True) == seen == [0, 1, 2, 3, 4]
    assert log.read_text() == "01234"
    assert queue.get_num_unfinalized_calls() == 0
    assert queue.maybe_finalize_async_calls(blocking=True) == []


def test_nothing_is_finalized_while_the_call_runs(queue: AsyncCallsQueue, tmp_path: Path) -> None:
    gate, seen = Gate.create(tmp_path), []
    queue.schedule_async_request(AsyncRequest(functions.stop_at, (gate,), [lambda: seen.append(0)]))
    queue.schedule_async_request(AsyncRequest(None, (), [lambda: seen.append(1)]))
    gate.wait_entered()
    assert queue.maybe_finalize_async_calls() == []
    gate.open()
    while not (finalized := queue.maybe_finalize_async_calls()):
        assert not seen
        queue.wait_for_events(30)
    assert finalized == seen == [0, 1]


def test_call_without_function_needs_no_process(leak_check: LeakCheck) -> None:
    with AsyncCallsQueue() as queue:
        queue.schedule_async_request(AsyncRequest(None, (), []))
        assert queue.maybe_finalize_async_calls() == [0]
        assert not [left for left in leak_check.difference() if "eventfd" not in left]


def test_writers_work_in_parallel_and_finalize_in_order(tmp_path: Path, leak_check: LeakCheck) -> None:
    gates = [Gate.create(tmp_path, str(i)) for i in range(2)]
    with AsyncCallsQueue(num_writers=2, timeout_s=30) as queue:
        queue.start()
        for gate in gates:
            queue.schedule_async_request(AsyncRequest(functions.stop_at, (gate,), []))
        for gate in gates:
            gate.wait_entered()
        gates[1].open()
        queue.wait_for_events(30)
        assert queue.maybe_finalize_async_calls() == []
        gates[0].open()
        assert queue.maybe_finalize_async_calls(blocking=True) == [0, 1]


def test_exception_carries_the_remote_traceback_and_earlier_calls_finalize(queue: AsyncCallsQueue) -> None:
    before = ask(queue, functions.report_identity)
    seen: list[str] = []
    queue.schedule_async_request(AsyncRequest(functions.nothing, (), []))
    queue.schedule_async_request(AsyncRequest(functions.fail, ("disk on fire",), [lambda: seen.append("never")]))
    queue.schedule_async_request(AsyncRequest(functions.nothing, (), []))
    with pytest.raises(WriterError, match=r"call 2 \(fail\) raised ValueError: disk on fire") as caught:
        queue.maybe_finalize_async_calls(blocking=True)
    assert caught.value.finalized == [1]
    assert isinstance(caught.value.__cause__, RemoteTraceback)
    assert "raise ValueError(message)" in str(caught.value.__cause__)
    assert queue.maybe_finalize_async_calls(blocking=True) == [3]
    assert not seen
    assert ask(queue, functions.report_identity) == before


@pytest.mark.parametrize("fn", [functions.exit_quietly, functions.fail_without_text])
def test_no_exception_ends_the_writer(queue: AsyncCallsQueue, fn: object) -> None:
    before = ask(queue, functions.report_identity)
    queue.schedule_async_request(AsyncRequest(fn, (), []))  # type: ignore[arg-type]
    with pytest.raises(WriterError, match=r"SystemExit|NoText"):
        queue.maybe_finalize_async_calls(blocking=True)
    assert ask(queue, functions.report_identity) == before


def test_what_cannot_be_pickled_is_refused_at_once(queue: AsyncCallsQueue) -> None:
    with pytest.raises(TypeError, match="pickle"):
        queue.schedule_async_request(AsyncRequest(functions.nothing, (threading.Lock(),), []))
    with SharedMemory.create("closed", 1) as region:
        pass
    with pytest.raises(ValueError, match="closed"):
        queue.schedule_async_request(AsyncRequest(functions.fill, (region, 1), []))
    assert queue.get_num_unfinalized_calls() == 0
    assert queue.schedule_async_request(AsyncRequest(None, (), [])) == 0


def test_finalize_exception_propagates_after_the_others_ran(queue: AsyncCallsQueue) -> None:
    seen: list[int] = []
    queue.schedule_async_request(AsyncRequest(None, (), [lambda: functions.fail("mine"), lambda: seen.append(0)]))
    queue.schedule_async_request(AsyncRequest(None, (), [lambda: seen.append(1)]))
    with pytest.raises(ValueError, match="mine") as caught:
        queue.maybe_finalize_async_calls()
    assert seen == [0, 1]
    assert "[0, 1]" in caught.value.__notes__[0]
    assert queue.get_num_unfinalized_calls() == 0


def test_shared_memory_is_the_same_pages_until_closed(queue: AsyncCallsQueue) -> None:
    region = SharedMemory.create("test-region", 1 << 16)
    for value in (1, 2):
        queue.schedule_async_request(AsyncRequest(functions.fill, (region, value), []))
        queue.maybe_finalize_async_calls(blocking=True)
        assert (np.frombuffer(region.buffer, np.uint8) == value).all()
    assert ask(queue, functions.report_mappings, "test-region") == {"mappings": 1}
    queue.schedule_async_request(AsyncRequest(functions.fill, (region, 3), []))
    region.close()  # while the call is pending: it has the region already
    assert queue.maybe_finalize_async_calls(blocking=True) == [3]
    assert ask(queue, functions.report_mappings, "test-region") == {"mappings": 0}


def test_events_reach_the_call_in_order_before_it_is_finalized(queue: AsyncCallsQueue, tmp_path: Path) -> None:
    gate = Gate.create(tmp_path)

    def fn() -> None:
        for i in range(3):
            functions.report({"i": i})
        gate.pass_through()

    call = Call(fn)
    queue.schedule_async_request(AsyncRequest(call, (), []))
    gate.wait_entered()
    queue.wait_for_events(30)
    queue.pump()
    assert call.events == [{"i": 0}, {"i": 1}, {"i": 2}]
    gate.open()
    assert queue.maybe_finalize_async_calls(blocking=True) == [0]


def test_events_from_threads_all_arrive(queue: AsyncCallsQueue) -> None:
    call = Call(functions.report_from_thread)
    events = [{"i": i} for i in range(50)]
    queue.schedule_async_request(AsyncRequest(call, (events,), []))
    queue.maybe_finalize_async_calls(blocking=True)
    assert sorted(event["i"] for event in call.events) == list(range(50))


def test_a_flood_of_events_does_not_stop_the_writer(queue: AsyncCallsQueue, tmp_path: Path) -> None:
    """The trainer looks at nothing until the function is done."""
    gate = Gate.create(tmp_path)

    def fn() -> None:
        for i in range(5000):
            functions.report({"i": i, "padding": "x" * 100})
        gate.pass_through()

    call = Call(fn)
    queue.schedule_async_request(AsyncRequest(call, (), []))
    gate.wait_entered()
    gate.open()
    queue.maybe_finalize_async_calls(blocking=True)
    assert [event["i"] for event in call.events] == list(range(5000))


def test_failing_on_event_fails_its_call_only(queue: AsyncCallsQueue) -> None:
    call = Call(functions.report_identity)
    call.on_event = lambda event: functions.fail("cannot take it")  # type: ignore[method-assign]
    queue.schedule_async_request(AsyncRequest(call, (), []))
    queue.schedule_async_request(AsyncRequest(functions.nothing, (), []))
    with pytest.raises(WriterError, match="cannot take it"):
        queue.maybe_finalize_async_calls(blocking=True)
    assert len(call.abandoned_with) == 1
    assert queue.maybe_finalize_async_calls(blocking=True) == [1]


def test_abandoned_chooses_the_error(queue: AsyncCallsQueue) -> None:
    chosen = WriterError("the save of step 7 was given up")
    call = Call(functions.fail, replacement=chosen)
    queue.schedule_async_request(AsyncRequest(call, ("no space",), []))
    with pytest.raises(WriterError, match="step 7") as caught:
        queue.maybe_finalize_async_calls(blocking=True)
    assert caught.value is chosen
    assert isinstance(chosen.__cause__, RemoteTraceback)
    assert "no space" in str(call.abandoned_with[0])
    queue.close(abort=True)
    assert len(call.abandoned_with) == 1


def test_hundreds_of_calls_can_wait_behind_one(queue: AsyncCallsQueue, tmp_path: Path) -> None:
    gate, log = Gate.create(tmp_path), tmp_path / "log"
    queue.schedule_async_request(AsyncRequest(functions.stop_at, (gate,), []))
    for i in range(400):
        queue.schedule_async_request(AsyncRequest(functions.append, (log, f"{i} "), []))
    gate.wait_entered()
    gate.open()
    assert queue.maybe_finalize_async_calls(blocking=True) == list(range(401))
    assert log.read_text().split() == [str(i) for i in range(400)]


def test_blocking_has_a_deadline_and_the_calls_stay_queued(tmp_path: Path, leak_check: LeakCheck) -> None:
    gate = Gate.create(tmp_path)
    with AsyncCallsQueue(timeout_s=0.1) as queue:
        queue.schedule_async_request(AsyncRequest(None, (), []))
        queue.schedule_async_request(AsyncRequest(functions.stop_at, (gate,), []))
        with pytest.raises(CheckpointTimeoutError, match="calls 1 to 1 are not done") as caught:
            queue.maybe_finalize_async_calls(blocking=True)
        assert caught.value.finalized == [0]
        gate.wait_entered()
        gate.open()
        while not (finalized := queue.maybe_finalize_async_calls()):
            queue.wait_for_events(30)
        assert finalized == [1]


def test_two_hundred_calls_leave_nothing(queue: AsyncCallsQueue, leak_check: LeakCheck) -> None:
    def burst(count: int) -> dict[str, int]:
        for i in range(count):
            with SharedMemory.create("burst", 1 << 20) as region:
                queue.schedule_async_request(AsyncRequest(functions.fill, (region, i % 256), []))
                queue.maybe_finalize_async_calls(blocking=True)
        return ask(queue, functions.report_state)

    before = burst(10)
    leak_check.rebase()
    after = burst(200)
    leak_check.check()
    assert after["fds"] == before["fds"]
    assert after["rss_kb"] - before["rss_kb"] < 4000
    queue.close()
    leak_check.rebase()


def test_an_idle_writer_is_small_quiet_and_on_its_own(queue: AsyncCallsQueue) -> None:
    state = ask(queue, functions.report_state)
    assert state["rss_kb"] < 150_000
    assert not state["torch"]
    assert state["name"] == "ckpt-writer"
    assert state["sigint_ignored"]
    assert state["sigterm_ignored"]
    assert state["session"] != os.getsid(0)
    assert state["nice"] == min(19, os.getpriority(os.PRIO_PROCESS, 0) + WriterConfig().nice)  # 19 is the most there is
    assert state["cwd"] == os.getcwd()


def test_close_finalizes_what_is_left_and_raises_the_first_failure(leak_check: LeakCheck) -> None:
    seen: list[int] = []
    queue = AsyncCallsQueue(timeout_s=30)
    for i in range(3):
        fn, args = (functions.fail, ("one",)) if i == 1 else (functions.nothing, ())
        queue.schedule_async_request(AsyncRequest(fn, args, [lambda i=i: seen.append(i)]))
    with pytest.raises(WriterError, match="one"):
        queue.close()
    assert seen == [0, 2]
    leak_check.check()
    queue.close()
    assert queue.maybe_finalize_async_calls(blocking=True) == []
    leak_check.check()


def test_a_queue_that_was_closed_starts_again_when_it_is_used(tmp_path: Path, leak_check: LeakCheck) -> None:
    queue, gate = AsyncCallsQueue(timeout_s=30), Gate.create(tmp_path)
    seen: list[int] = []
    for end in (queue.close, lambda: queue.close(abort=True), lambda: queue.__exit__(OSError, OSError(), None)):
        pid = ask(queue, functions.report_identity)["pid"]
        assert queue.schedule_async_request(AsyncRequest(functions.nothing, (), [])) == 1
        end()
        assert queue.get_num_unfinalized_calls() == 0
        assert psutil.wait_procs([psutil.Process(pid)] if psutil.pid_exists(pid) else [], 30)[1] == []
        leak_check.check()
        queue.start()
        assert (
            queue.schedule_async_request(AsyncRequest(functions.nothing, (), [functools.partial(seen.append, 1)])) == 0
        )
        assert queue.maybe_finalize_async_calls(blocking=True) == [0]
        queue.close()
    assert seen == [1, 1, 1]
    queue.schedule_async_request(AsyncRequest(functions.stop_at, (gate,), []))
    gate.wait_entered()
    abort_nvrx_checkpoint()
    assert queue.maybe_finalize_async_calls() == []
    queue.close()


def test_functions_that_are_added_before_the_call_is_finalized_run_once(queue: AsyncCallsQueue) -> None:
    seen: list[int] = []
    request = AsyncRequest(functions.nothing, (), [lambda: seen.append(0)])
    request.add_finalize_fn(lambda: request.add_finalize_fn(lambda: seen.append(3)))
    queue.schedule_async_request(request)
    request.add_finalize_fn(lambda: seen.append(1))
    request.freeze()
    request.add_finalize_fn(lambda: seen.append(2))
    queue.maybe_finalize_async_calls(blocking=True)
    assert seen == [0, 1, 2, 3]
    queue.schedule_async_request(request)  # once more: another call
    queue.maybe_finalize_async_calls(blocking=True)
    assert seen == [0, 1, 2, 3, 0, 1, 2, 3, 3]


def test_arguments_are_freed_when_the_request_is_scheduled(queue: AsyncCallsQueue, tmp_path: Path) -> None:
    gate, tensor = Gate.create(tmp_path), np.zeros(10)
    alive = weakref.ref(tensor)
    queue.schedule_async_request(AsyncRequest(functions.stop_at, (gate,), []))
    preload = functools.partial(np.copy, tensor)
    queue.schedule_async_request(AsyncRequest(functions.ignore_two, (1, tensor), [], preload_fn=preload))
    gate.wait_entered()
    del tensor, preload
    assert alive() is None
    gate.open()
    assert queue.maybe_finalize_async_calls(blocking=True) == [0, 1]


def test_caller_runs_one_call_at_a_time(tmp_path: Path, leak_check: LeakCheck) -> None:
    gate = Gate.create(tmp_path)
    caller = DistributedAsyncCaller()
    assert caller.is_current_async_call_done()
    caller.schedule_async_call(functions.stop_at, (gate,))
    gate.wait_entered()
    assert not caller.is_current_async_call_done()
    with pytest.raises(RuntimeError, match="still running"):
        caller.schedule_async_call(functions.nothing, ())
    gate.open()
    assert caller.is_current_async_call_done(blocking=True)
    caller.schedule_async_call(functions.fail, (), {"message": "oops"})
    with pytest.raises(WriterError, match="oops"):
        caller.is_current_async_call_done(blocking=True)
    assert caller.is_current_async_call_done()
    caller.close()


def test_what_preload_returns_replaces_the_data_and_is_made_in_the_trainer(
    queue: AsyncCallsQueue, tmp_path: Path
) -> None:
    log, data = tmp_path / "log", [1, 2]
    request = AsyncRequest(
        async_fn=functions.write_pid_and,
        async_fn_args=(log, None),
        finalize_fns=[],
        async_fn_kwargs={"end": "."},
        preload_fn=functools.partial(functions.pid_and, data),
    )
    assert queue.schedule_async_request(async_request=request) == 0
    data.append(3)  # too late: it was copied
    assert queue.maybe_finalize_async_calls(blocking=True, no_dist=True) == [0]
    writer, preloaded_in, values = log.read_text().split(" ", 2)
    assert writer != preloaded_in == str(os.getpid())
    assert values == "[1, 2]."


def test_a_preload_that_fails_is_raised_at_once(queue: AsyncCallsQueue) -> None:
    preload = functools.partial(functions.fail, "no data")
    with pytest.raises(ValueError, match="no data"):
        queue.schedule_async_request(AsyncRequest(functions.ignore_two, (1, 2), [], preload_fn=preload))
    assert queue.get_num_unfinalized_calls() == 0


def test_a_preload_without_data_to_replace_is_refused(queue: AsyncCallsQueue) -> None:
    with pytest.raises(ValueError, match="only 1"):
        queue.schedule_async_request(AsyncRequest(functions.ignore, ("x",), [], preload_fn=functions.nothing))
    assert queue.get_num_unfinalized_calls() == 0


def test_calls_as_nvidia_resiliency_ext_makes_them(leak_check: LeakCheck) -> None:
    queue = AsyncCallsQueue(
        persistent=True, is_daemon=True, cpu_priority=3, io_priority=3, sigterm_timeout=30.0, cpu_shm_mode=False
    )
    AsyncCallsQueue.warmup_persistent_caller(0, is_daemon=True, cpu_priority=10, io_priority=3, sigterm_timeout=30.0)
    queue.warmup_persistent_caller(0, mp_mode="spawn")
    idle = 3
    priorities = ask(queue, functions.report_priorities)
    assert priorities == {"nice": min(19, os.getpriority(os.PRIO_PROCESS, 0) + 3), "io_class": idle}
    queue.close(abort=False)


def test_an_abort_gives_up_the_calls_of_all_queues_from_any_thread(tmp_path: Path, leak_check: LeakCheck) -> None:
    finalized: list[str] = []
    with AsyncCallsQueue() as queue, AsyncCallsQueue(num_writers=2) as other, ThreadPoolExecutor() as threads:
        queues = queue, other
        for number, each in enumerate(queues):
            gate = Gate.create(tmp_path, f"gate{number}")
            each.schedule_async_request(AsyncRequest(functions.stop_at, (gate,), [lambda: finalized.append("a call")]))
            gate.wait_entered()
        writers = [each for each in psutil.Process().children(recursive=True) if each.name() == "ckpt-writer"]
        assert len(writers) >= 2
        threads.submit(abort_nvrx_checkpoint).result()
        for each in queues:
            assert each.maybe_finalize_async_calls() == []
            assert each.get_num_unfinalized_calls() == 0
            assert ask(each, functions.report_identity)["pid"] not in {writer.pid for writer in writers}
        assert psutil.wait_procs(writers, 30)[1] == []
    assert finalized == []
    abort_nvrx_checkpoint()  # with queues that are closed


@pytest.mark.parametrize("io_priority", [1, 4, -1])
def test_priorities_that_no_writer_can_have(io_priority: int) -> None:
    with pytest.raises(ValueError, match="io_priority"):
        AsyncCallsQueue(io_priority=io_priority)
    with pytest.raises(ValueError, match="negative"):
        AsyncCallsQueue(cpu_priority=-1)


def test_the_caller_takes_its_names(tmp_path: Path, leak_check: LeakCheck) -> None:
    caller = DistributedAsyncCaller()
    caller.schedule_async_call(async_fn=functions.append, save_args=(tmp_path / "log",), save_kwargs={"text": "x"})
    assert caller.is_current_async_call_done(blocking=True, no_dist=True)
    caller.schedule_async_call(functions.nothing, ())
    assert caller.is_current_async_call_done(blocking=True)
    caller.close()
    assert (tmp_path / "log").read_text() == "x"


def test_closing_an_idle_queue_does_not_wait_for_a_writer_that_is_starting(leak_check: LeakCheck) -> None:
    before = {child.pid for child in psutil.Process().children()}
    queue = AsyncCallsQueue()
    queue.start()
    (server,) = (child for child in psutil.Process().children() if child.pid not in before)
    server.suspend()  # it never gets ready
    begin = time.monotonic()
    queue.close()
    assert time.monotonic() - begin < WriterConfig().close_timeout_s / 2
    assert not server.is_running()
    leak_check.check()
