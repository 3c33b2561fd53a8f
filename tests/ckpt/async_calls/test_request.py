import pytest
import torch.distributed as dist

from ckpt.async_calls import AsyncRequest, RecoverableCall, current
from ckpt.errors import CheckpointError
from tests.ckpt.async_calls.functions import Call, fail
from tests.support import run_ranks


def test_execute_sync_runs_everything_here_in_order() -> None:
    seen: list[object] = []

    def fn(value: int, *, key: str) -> None:
        seen.append((value, key, current()))

    AsyncRequest(fn, (1,), [lambda: seen.append("a"), lambda: seen.append("b")], {"key": "k"}).execute_sync()
    assert seen == [(1, "k", None), "a", "b"]


def test_execute_sync_finalizes_nothing_after_a_failure() -> None:
    seen: list[int] = []
    with pytest.raises(ValueError, match="no"):
        AsyncRequest(fail, ("no",), [lambda: seen.append(1)]).execute_sync()
    assert not seen


def test_all_finalize_functions_run_and_the_first_exception_counts() -> None:
    seen: list[int] = []
    fns = [lambda: fail("first"), lambda: seen.append(1), lambda: fail("second")]
    with pytest.raises(ValueError, match="first"):
        AsyncRequest(None, (), fns).execute_sync()
    assert seen == [1]


def test_frozen_request_takes_no_function() -> None:
    request = AsyncRequest(None, (), [])
    frozen = request.freeze()
    with pytest.raises(RuntimeError, match="frozen"):
        frozen.add_finalize_fn(print)
    request.add_finalize_fn(print)
    assert request.finalize_fns == frozen.finalize_fns == [print]


def test_recoverable_call_is_recognized_by_its_methods() -> None:
    assert isinstance(Call(print), RecoverableCall)
    assert not isinstance(print, RecoverableCall)


def test_execute_sync_preloads_the_data() -> None:
    seen: list[object] = []
    request = AsyncRequest(lambda *args: seen.append(args), (1, "old", 3), [], preload_fn=lambda: "new")
    request.execute_sync()
    assert seen == [(1, "new", 3)]
    with pytest.raises(ValueError, match="only 1"):
        AsyncRequest(print, (1,), [], preload_fn=lambda: "new").execute_sync()


def _fail_on_rank_1(rank: int) -> None:
    if rank == 1:
        raise OSError("disk full")


def _execute(rank: int, world_size: int) -> list[object]:
    seen: list[object] = []
    kind = CheckpointError if rank == 0 else OSError
    with pytest.raises(kind, match="disk full"):
        AsyncRequest(_fail_on_rank_1, (rank,), [lambda: seen.append("never")]).execute_sync()
    AsyncRequest(seen.append, ("all",), [dist.barrier, lambda: seen.append("finalized")]).execute_sync()
    if rank == 0:
        AsyncRequest(seen.append, ("alone",), []).execute_sync(no_dist=True)
    return seen


def test_execute_sync_finalizes_when_all_ranks_have_done_so() -> None:
    both = ["all", "finalized"]
    assert [result.value for result in run_ranks(_execute, 2)] == [[*both, "alone"], both]


def test_finalize_functions_run_by_themselves_and_tell_the_call() -> None:
    seen: list[int] = []
    request = AsyncRequest(None, (), [lambda: seen.append(1)], call_idx=7)
    assert request.execute_finalize_fns(validate_matching_call_idx=True) == 7  # there are no other ranks
    assert seen == [1]


def _finalize(rank: int, world_size: int, call_idx: list[int]) -> list[int]:
    seen: list[int] = []
    request = AsyncRequest(None, (), [lambda: seen.append(rank)], call_idx=call_idx[rank])
    if len(set(call_idx)) > 1:
        with pytest.raises(RuntimeError, match="their indices are 1 to 2"):
            request.execute_finalize_fns()
        request.execute_finalize_fns(validate_matching_call_idx=False)
    else:
        request.execute_finalize_fns()
    return seen


@pytest.mark.parametrize("call_idx", [[1, 1], [1, 2]])
def test_ranks_must_finalize_the_same_call(call_idx: list[int]) -> None:
    assert [result.value for result in run_ranks(_finalize, 2, call_idx)] == [[0], [1]]
