"""A call may have a time limit of its own: whoever is late is killed, and nobody else."""

import select
from collections.abc import Iterator
from pathlib import Path

import pytest

from ckpt.async_calls import AsyncCallsQueue, AsyncRequest
from ckpt.errors import WriterError
from tests.ckpt.async_calls import functions
from tests.ckpt.async_calls.functions import Gate, TimedCall, ask
from tests.support import LeakCheck, is_gone


@pytest.fixture
def queue(leak_check: LeakCheck) -> Iterator[AsyncCallsQueue]:
    queue = AsyncCallsQueue(timeout_s=30)
    yield queue
    queue.close(abort=True)
    leak_check.check()


def test_a_call_over_its_limit_is_killed_and_the_next_one_runs(queue: AsyncCallsQueue, tmp_path: Path) -> None:
    gate = Gate.create(tmp_path)
    pid = ask(queue, functions.report_identity)["pid"]
    late, behind = TimedCall(functions.hang), TimedCall(functions.nothing)
    queue.schedule_async_request(AsyncRequest(late, (gate,), []))
    queue.schedule_async_request(AsyncRequest(behind, (), []))
    gate.wait_entered()
    assert queue.maybe_finalize_async_calls() == []
    assert (len(late.begun_ns), behind.begun_ns) == (1, [])  # its turn has not come
    late.left = 0.0
    with pytest.raises(WriterError, match=rf"pid {pid}\) is late"):
        queue.maybe_finalize_async_calls(blocking=True)
    assert is_gone(pid)
    assert late.late_pids == [pid]
    assert late.ended == [None]
    assert queue.maybe_finalize_async_calls(blocking=True) == [2]
    assert len(behind.begun_ns) == 1
    assert behind.ended[0] is not None


def test_a_wait_ends_with_the_limit(queue: AsyncCallsQueue, tmp_path: Path) -> None:
    gate = Gate.create(tmp_path)
    queue.start()
    ask(queue, functions.report_identity)
    call = TimedCall(functions.hang, left=0.05, counts=True)
    queue.schedule_async_request(AsyncRequest(call, (gate,), []))
    with pytest.raises(WriterError, match="is late"):
        queue.maybe_finalize_async_calls(blocking=True)  # gives up after 30 s by itself, with another error


def test_what_took_long_to_be_noticed_is_not_late(queue: AsyncCallsQueue) -> None:
    """The trainer has not looked since: the outcome counts, and the time the writer took."""
    ask(queue, functions.report_identity)
    call = TimedCall(functions.nothing)
    queue.schedule_async_request(AsyncRequest(call, (), []))
    process = queue._writers[0]._process
    assert process is not None
    assert select.select([process.channel], [], [], 20.0)[0]  # the outcome is there
    call.left = -1.0
    assert queue.maybe_finalize_async_calls() == [1]
    assert call.ended[0] is not None
    assert 0 <= call.ended[0] < 20


def test_calls_that_are_dropped_end_their_clocks(tmp_path: Path, leak_check: LeakCheck) -> None:
    gate = Gate.create(tmp_path)
    queue = AsyncCallsQueue(timeout_s=30)
    ask(queue, functions.report_identity)
    call = TimedCall(functions.hang)
    queue.schedule_async_request(AsyncRequest(call, (gate,), []))
    gate.wait_entered()
    queue.recover(0.0)
    assert call.ended == [None]
    queue.close()
    leak_check.check()
