"""What ranks promise each other when they finalize together."""

from pathlib import Path

import pytest
import torch.distributed as dist

from ckpt.async_calls import AsyncCallsQueue, AsyncRequest, DistributedAsyncCaller
from ckpt.errors import CheckpointError, CheckpointTimeoutError, RemoteTraceback, WriterError
from inprocess.ipc.deadline import Deadline
from tests.ckpt.async_calls import functions
from tests.ckpt.async_calls.functions import Call, Gate
from tests.support import run_ranks


def _lockstep(rank: int, world_size: int, gate: Gate) -> list[list[int]]:
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


def _scheduled_by_one(rank: int, world_size: int) -> list[object]:
    """A rank that asks more often, or closes, makes no collective while no rank has scheduled a call."""
    with AsyncCallsQueue(timeout_s=30) as queue:
        for _ in range(3 * rank):
            queue.maybe_finalize_async_calls(blocking=True)
        queue.schedule_async_request(AsyncRequest(functions.nothing, (), []))
        answers = [queue.maybe_finalize_async_calls(blocking=True)]
        for _ in range(3 * (1 - rank)):
            queue.maybe_finalize_async_calls(blocking=True)
    if rank == 0:
        alone = AsyncCallsQueue(no_dist=True)
        alone.schedule_async_request(AsyncRequest(functions.nothing, (), []))
        answers.append(alone.maybe_finalize_async_calls(blocking=True))
        alone.schedule_async_request(AsyncRequest(functions.nothing, (), []))
        alone.close()
    dist.barrier()
    return [*answers, queue.get_num_unfinalized_calls()]


def test_no_collective_while_nothing_is_scheduled_and_none_by_a_queue_of_one_rank() -> None:
    assert [result.value for result in run_ranks(_scheduled_by_one, 2)] == [[[0], [0], 0], [[0], 0]]


def _partly_alone(rank: int, world_size: int, gate: Gate) -> list[object]:
    """Rank 0 has finalized three calls alone when all ranks finalize together; rank 1 runs the first."""
    seen: list[int] = []
    queue = AsyncCallsQueue(timeout_s=30)
    for index in range(3):
        fn, args = (functions.stop_at, (gate,)) if rank == 1 and index == 0 else (functions.nothing, ())
        if rank == 1 and index == 1:
            fn, args = functions.fail, ("disk full",)
        queue.schedule_async_request(AsyncRequest(fn, args, [lambda index=index: seen.append(index)]))
    if rank == 1:
        gate.wait_entered()
    answers: list[object] = [queue.maybe_finalize_async_calls(blocking=rank == 0, no_dist=True)]
    answers.append(queue.maybe_finalize_async_calls())
    if rank == 1:
        gate.open()
    with pytest.raises(WriterError, match=r"call 1.* on rank 1.*ValueError: disk full") as caught:
        queue.maybe_finalize_async_calls(blocking=True)
    answers += [caught.value.finalized, queue.maybe_finalize_async_calls(blocking=True)]
    queue.close()
    return [*answers, seen]


def test_ranks_that_have_finalized_alone_take_part_in_what_all_do(tmp_path: Path) -> None:
    results = run_ranks(_partly_alone, 2, Gate.create(tmp_path))
    assert [result.value for result in results] == [
        [[0, 1, 2], [], [], [], [0, 1, 2]],
        [[], [], [0], [2], [0, 2]],
    ]


def _one_was_replaced(rank: int, world_size: int) -> list[object]:
    """After a fault rank 0 has an emptied queue, and rank 1 is a new process."""
    queue = AsyncCallsQueue(timeout_s=30)
    if rank == 0:
        for _ in range(5):
            queue.schedule_async_request(AsyncRequest(functions.nothing, (), []))
        queue.recover(timeout_s=30)
    seen: list[int] = []
    queue.schedule_async_request(AsyncRequest(functions.nothing, (), [dist.barrier, lambda: seen.append(1)]))
    answers: list[object] = [queue.maybe_finalize_async_calls(blocking=True)]
    queue.schedule_async_request(AsyncRequest(functions.nothing, (), [dist.barrier, lambda: seen.append(2)]))
    queue.close()
    return [*answers, seen]


def test_a_rank_that_was_replaced_finalizes_with_the_others() -> None:
    assert [result.value for result in run_ranks(_one_was_replaced, 2)] == [[[5], [1, 2]], [[0], [1, 2]]]


def _close_beside_a_hang(rank: int, world_size: int, gate: Gate) -> list[object]:
    seen: list[int] = []
    queue = AsyncCallsQueue(timeout_s=1.0 if rank == 1 else 60.0)
    queue.schedule_async_request(AsyncRequest(functions.nothing, (), [dist.barrier, lambda: seen.append(0)]))
    fn, args = (functions.hang, (gate,)) if rank == 1 else (functions.nothing, ())
    queue.schedule_async_request(AsyncRequest(fn, args, [lambda: seen.append(1)]))
    if rank == 1:
        gate.wait_entered()
    with pytest.raises(CheckpointTimeoutError, match="calls 1 to 1 are not done after"):
        queue.close()
    dist.barrier()
    return [*seen, queue.get_num_unfinalized_calls()]


def test_close_gives_up_the_same_calls_on_all_ranks(tmp_path: Path) -> None:
    results = run_ranks(_close_beside_a_hang, 2, Gate.create(tmp_path))
    assert [result.value for result in results] == [[0, 0]] * 2


def _unequal(rank: int, world_size: int) -> list[object]:
    """Ranks finalize different numbers of calls alone, as a Checkpointer does when it is closed, then one together."""
    with AsyncCallsQueue(timeout_s=30) as queue:
        for _ in range(3 + rank):
            queue.schedule_async_request(AsyncRequest(functions.nothing, (), []))
        queue.finalize_all(Deadline(30), no_dist=True)
        queue.schedule_async_request(AsyncRequest(functions.nothing, (), [dist.barrier]))
        return queue.maybe_finalize_async_calls(blocking=True)


def test_ranks_that_ended_different_calls_alone_finalize_together() -> None:
    assert [result.value for result in run_ranks(_unequal, 2)] == [[3], [4]]


def _interrupted(rank: int, world_size: int) -> list[object]:
    seen: list[int] = []

    def interrupt() -> None:
        raise KeyboardInterrupt

    queue = AsyncCallsQueue(timeout_s=30)
    fns = [interrupt] if rank == 0 else []
    queue.schedule_async_request(AsyncRequest(functions.nothing, (), [*fns, lambda: seen.append(0)]))
    fn = functions.fail if rank == 1 else functions.ignore
    queue.schedule_async_request(AsyncRequest(fn, ("disk full",), [lambda: seen.append(1)]))
    with pytest.raises(KeyboardInterrupt if rank == 0 else WriterError):
        queue.maybe_finalize_async_calls(blocking=True)
    if rank == 0:
        with pytest.raises(WriterError, match="disk full"):  # alone: this is known on all ranks
            queue.close()
    else:
        queue.close()
    dist.barrier()
    return [seen]


def test_an_interrupt_of_a_finalize_function_makes_no_rank_wait() -> None:
    assert [result.value for result in run_ranks(_interrupted, 2)] == [[[0]], [[0]]]


def _caller(rank: int, world_size: int, gate: Gate) -> list[bool]:
    caller = DistributedAsyncCaller()
    caller.schedule_async_call(functions.stop_at if rank == 1 else functions.ignore, (gate,))
    if rank == 1:
        gate.wait_entered()
    answers = [caller.is_current_async_call_done()]
    if rank == 1:
        gate.open()
    answers.append(caller.is_current_async_call_done(blocking=True))
    caller.close()
    return answers


def test_a_call_without_the_queue_is_done_when_it_is_done_on_all_ranks(tmp_path: Path) -> None:
    results = run_ranks(_caller, 2, Gate.create(tmp_path))
    assert [result.value for result in results] == [[False, True]] * 2
