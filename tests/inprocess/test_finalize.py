"""A finalizer in a thread: done, failed, or too slow."""

import sys
import threading
import types
from datetime import timedelta

import pytest

from inprocess.exception import TimeoutError
from inprocess.finalize import Finalize, ThreadedFinalize
from inprocess.state import FrozenState
from tests.support import LeakCheck

STATE = FrozenState(rank=0, world_size=1)


def test_it_runs_in_another_thread_with_its_arguments(leak_check: LeakCheck) -> None:
    seen: list[object] = []

    def clean_up(*args: object, **kwargs: object) -> None:
        seen.extend([args, kwargs, threading.current_thread() is not threading.main_thread()])

    finalize = ThreadedFinalize(timedelta(seconds=10), clean_up, (1, 2), {"three": 3})
    assert isinstance(finalize, Finalize)
    assert finalize(STATE) is STATE
    assert seen == [(1, 2), {"three": 3}, True]


def test_what_it_raises_is_raised() -> None:
    def fail() -> None:
        raise LookupError("lost")

    with pytest.raises(LookupError, match="lost"):
        ThreadedFinalize(10.0, fail)(STATE)


def test_one_that_hangs_is_given_up() -> None:
    release = threading.Event()
    with pytest.raises(TimeoutError, match=r"finalize .*wait has not ended within 0\.05 s"):
        ThreadedFinalize(timedelta(milliseconds=50), release.wait)(STATE)
    release.set()


@pytest.mark.parametrize("initialized", [False, True])
def test_the_device_of_the_caller_is_used_if_cuda_is(initialized: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    devices: list[int] = []
    cuda = types.SimpleNamespace(
        is_initialized=lambda: initialized, current_device=lambda: 3, set_device=devices.append
    )
    monkeypatch.setitem(sys.modules, "torch", types.SimpleNamespace(cuda=cuda))  # type: ignore[arg-type]
    ThreadedFinalize(10.0, lambda: None)(STATE)
    assert devices == ([3] if initialized else [])
