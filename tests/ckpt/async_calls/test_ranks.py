"""What ranks promise each other with ``no_dist=False``."""

from pathlib import Path

import pytest

from ckpt.async_calls import AsyncCallsQueue, AsyncRequest
from ckpt.errors import CheckpointError, CheckpointTimeoutError, RemoteTraceback, WriterError
from tests.ckpt.async_calls import functions
from tests.ckpt.async_calls.functions import Call, Gate
from tests.support import run_ranks


def _lockstep(rank: int, world_size: int, gate: Gate) -> list[list[int]]:
    import torch.distributed as dist

    answers = []
    with AsyncCallsQueue(timeout_s=30) as queue:
        if rank == 0:
            second = Call(functions.report_identity)
            queue.schedule_async_request(AsyncRequest(functions.nothing, (), []))
            queue.schedule_async_request(AsyncRequest(second, (), []))
            while not second.events:  # then the first call is done here, and yet not finalized
                queue.wait_for_events(30)
        else:
            queue.schedule_async_request(AsyncRequest(functions.stop_at, (gate,), []))
            queue.schedule_async_request(AsyncRequest(functions.nothing, (), []))
            gate.wait_entered()
        answers.append(queue.maybe_finalize_async_calls(no_dist=False))
        if rank == 1:
            gate.open()
        answers.append(queue.maybe_finalize_async_calls(blocking=True, no_dist=False))
        answers.append(queue.maybe_finalize_async_calls(no_dist=False))
        dist.barrier()
    return answers


def test_all_ranks_finalize_the_same_calls_at_the_same_time(tmp_path: Path) -> None:
    results = run_ranks(_lockstep, 2, Gate.create(tmp_path))
    assert [result.value for result in results] == [[[], [0, 1], []]] * 2


def _one_fails(rank: int, world_size: int, failing: tuple[int, ...]) -> list[object]:
    call = Call(functions.fail if rank in failing else functions.ignore)
    seen: list[int] = []
    with AsyncCallsQueue(timeout_s=30) as queue:
        queue.schedule_async_request(AsyncRequest(functions.nothing, (), [lambda: seen.append(0)]))
        queue.schedule_async_request(AsyncRequest(call, (f"disk of rank {rank}",), [lambda: seen.append(1)]))
        queue.schedule_async_request(AsyncRequest(functions.nothing, (), [lambda: seen.append(2)]))
        with pytest.raises(WriterError) as caught:
            queue.maybe_finalize_async_calls(blocking=True, no_dist=False)
        error: CheckpointError = caught.value
        assert isinstance(error.__cause__, RemoteTraceback)
        assert "raise ValueError(message)" in str(error.__cause__)
        assert len(call.abandoned_with) == 1
        rest = queue.maybe_finalize_async_calls(blocking=True, no_dist=False)
    return [str(error), error.rank, error.finalized, rest, seen]


@pytest.mark.parametrize("failing", [(1,), (0, 1)])
def test_a_failure_on_one_rank_is_an_error_on_all(failing: tuple[int, ...]) -> None:
    for rank, result in enumerate(run_ranks(_one_fails, 2, failing)):
        culprit = rank if rank in failing else failing[0]
        text, error_rank, finalized, rest, seen = result.value
        assert f"on rank {culprit}" in text
        assert f"ValueError: disk of rank {culprit}" in text
        assert (error_rank, finalized, rest, seen) == (culprit, [0], [2], [0, 2])


def _one_is_late(rank: int, world_size: int, gate: Gate) -> list[object]:
    with AsyncCallsQueue(timeout_s=0.2 if rank == 1 else 30) as queue:
        if rank == 0:
            queue.schedule_async_request(AsyncRequest(functions.nothing, (), []))
        else:
            queue.schedule_async_request(AsyncRequest(functions.stop_at, (gate,), []))
            gate.wait_entered()
        with pytest.raises(CheckpointTimeoutError) as caught:
            queue.maybe_finalize_async_calls(blocking=True, no_dist=False)
        if rank == 1:
            gate.open()
        answer: list[int] = []
        while not answer:
            answer = queue.maybe_finalize_async_calls(no_dist=False)
    return [str(caught.value), answer]


def test_a_rank_that_waits_too_long_leaves_no_rank_waiting(tmp_path: Path) -> None:
    for result in run_ranks(_one_is_late, 2, Gate.create(tmp_path)):
        text, answer = result.value
        assert "on another rank" in text
        assert answer == [0]


def test_no_process_group_is_a_world_of_one() -> None:
    with AsyncCallsQueue(timeout_s=30) as queue:
        queue.schedule_async_request(AsyncRequest(functions.nothing, (), []))
        assert queue.maybe_finalize_async_calls(blocking=True, no_dist=False) == [0]
