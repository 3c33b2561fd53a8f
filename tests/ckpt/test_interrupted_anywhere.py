"""An exception thrown into any bytecode of a save, and then a restart: nothing is lost, and the next save works.

TESTS=full throws into hundreds of places; else into some, spread over the whole save.
"""

import sys
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch

import ckpt
from ckpt.storage.root import CheckpointRoot
from inprocess.modes import Modes
from tests.support import LeakCheck
from tests.support.selection import FULL

_LIBRARY = str(Path(ckpt.__file__).parent)
_PLACES = 600 if FULL else 8


class _Restart(BaseException):
    """As a restart throws it."""


class _Thrower:
    """Raises `_Restart` at the n-th bytecode of the library in this thread, and counts them."""

    def __init__(self, place: int | None) -> None:
        self.count = 0
        self._place = place

    def _trace(self, frame: FrameType, event: str, argument: Any) -> Callable[..., Any] | None:
        if not frame.f_code.co_filename.startswith(_LIBRARY):
            return None
        frame.f_trace_opcodes = True
        if event == "opcode":
            self.count += 1
            if self.count == self._place:
                sys.settrace(None)
                raise _Restart
        return self._trace

    def __enter__(self) -> "_Thrower":
        sys.settrace(self._trace)
        return self

    def __exit__(self, *exception: object) -> None:
        sys.settrace(None)


def _state() -> dict[str, torch.Tensor]:
    return {"a": torch.ones(5000), "b": torch.ones(7)}


def _save(checkpointer: ckpt.Checkpointer, state: Any, step: int, finalized: list[int]) -> None:
    request = checkpointer.save_request(state, step)
    request.add_finalize_fn(lambda: finalized.append(step))
    checkpointer.queue.schedule_async_request(request)
    while checkpointer.queue.get_num_unfinalized_calls():
        checkpointer.maybe_finalize()
        time.sleep(0.001)


@pytest.mark.timeout(1200)
@pytest.mark.parametrize("drain", [timedelta(seconds=30), None], ids=["drain", "abort"])
def test_nothing_is_lost(tmp_path: Path, drain: timedelta | None, leak_check: LeakCheck) -> None:
    state = _state()
    finalized: list[int] = []
    checkpointer = ckpt.Checkpointer(tmp_path, keep=2)
    checkpointer.register(**state)
    checkpointer.save(state, 0)
    with _Thrower(None) as whole:
        _save(checkpointer, state, 1, finalized)
    holdings = LeakCheck()
    modes = Modes()  # thrown between the end of a `with` and its exit, as no restart is, it leaves gradients off
    modes.record()
    lost_descriptors = 0
    indices = [checkpointer.async_save(state, 2)]
    checkpointer.maybe_finalize(blocking=True)
    for number in range(_PLACES):
        step = 10 * (number + 1)
        place = 1 + number * whole.count // _PLACES
        try:
            with _Thrower(place):
                _save(checkpointer, state, step, finalized)
        except _Restart:
            pass
        modes.restore()  # as the wrapper does after a restart
        state["a"].fill_(-1.0)
        checkpointer.bridge.recover_from_fault(drain)
        where = f"place {place} of {whole.count}"
        assert state["a"].eq(1.0).all(), where
        assert checkpointer.queue.get_num_unfinalized_calls() == 0, where
        assert CheckpointRoot(str(tmp_path)).pending() == [], where
        published = step in checkpointer.all_steps()
        assert finalized.count(step) <= published, where
        indices.append(checkpointer.async_save(state, step + 1))
        assert indices[-1] > indices[-2], where
        assert checkpointer.async_save(state, step + 2) == indices[-1] + 1, f"{where}: both slots"
        assert checkpointer.maybe_finalize(blocking=True)[-2:] == [step + 1, step + 2], where
        left = _left(holdings)
        lost_descriptors += len(left)
        if left:
            print(where, left)
            holdings = LeakCheck()
    print(f"{_PLACES} places of {whole.count}; {lost_descriptors} descriptors lost")
    checkpointer.close()
    # A descriptor that a system call has just returned belongs to nobody for the time of one bytecode, and so does what
    # a writer and its trainer share before it is stored.
    left = [line for line in leak_check.difference() if line.startswith("file descriptor") or "ckpt-control" in line]
    lost_descriptors += sum(line.startswith("file descriptor") for line in left)
    if left:
        print(left)
        leak_check.rebase()
    assert lost_descriptors <= _PLACES // 20 + 3


def _left(holdings: LeakCheck) -> list[str]:
    """Descriptors that are lost for good; anything else that is left fails the test."""
    deadline = time.monotonic() + 30
    while (left := [line for line in holdings.difference() if not _changes(line)]) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert all(line.startswith("file descriptor") for line in left), left
    return left


def _changes(line: str) -> bool:
    """What a new writer has instead of that of the old one; and named semaphores, which are of other programs."""
    return any(kind in line for kind in ("ckpt-control", "socket:", "pidfd", "child process", "eventfd", "/dev/shm/"))
