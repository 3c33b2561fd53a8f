import pytest

from ckpt.async_calls import AsyncRequest, RecoverableCall, current
from tests.async_calls.functions import Call, fail


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


def test_frozen_request_cannot_change() -> None:
    request = AsyncRequest(None, (), [])
    frozen = request.freeze()
    request.add_finalize_fn(print)
    assert request.finalize_fns == [print]
    assert frozen.finalize_fns == []
    with pytest.raises(RuntimeError, match="frozen"):
        frozen.add_finalize_fn(print)


def test_recoverable_call_is_recognized_by_its_methods() -> None:
    assert isinstance(Call(print), RecoverableCall)
    assert not isinstance(print, RecoverableCall)
