"""Every wait of a trainer has one deadline: the clock alone ends it, whatever writers and storage do."""

import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch

import ckpt
from ckpt.errors import CheckpointTimeoutError
from ckpt.storage.root import CheckpointRoot
from tests.ckpt.async_calls import functions
from tests.ckpt.async_calls.functions import Gate
from tests.ckpt.crash.killers import wait_until
from tests.support import LeakCheck


def _state(count: int) -> dict[str, Any]:
    return {"w": torch.arange(count, dtype=torch.float32)}


# -- a state that grows while a save is in flight ----------------------------------------------------------------------


def test_state_that_grows_waits_for_the_writer_and_not_longer_than_the_timeout(
    tmp_path: Path, leak_check: LeakCheck
) -> None:
    gate = Gate.create(tmp_path)
    with ckpt.Checkpointer(tmp_path / "root", timeout=timedelta(seconds=2)) as checkpointer:
        checkpointer.save(_state(1000), 1)
        checkpointer.queue.schedule_async_request(ckpt.AsyncRequest(functions.stop_at, (gate,), []))
        gate.wait_entered()
        checkpointer.async_save(_state(1000), 2)
        begin = time.process_time()
        with pytest.raises(CheckpointTimeoutError, match=r"rank 0: .* in 2 s; the saves of steps \[2\]"):
            checkpointer.async_save(_state(100_000), 3)
        assert time.process_time() - begin < 1.5  # of 2 s: it did not look all the time
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
