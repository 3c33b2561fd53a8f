"""A restore while saves of this job are in flight: it finalizes them first, as a restart after a fault does."""

import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

import ckpt
from ckpt.errors import CheckpointError, SaveAbandonedError, WriterError
from ckpt.storage.names import SaveId
from ckpt.storage.root import CheckpointRoot
from tests.ckpt.async_calls import functions
from tests.ckpt.async_calls.functions import Gate
from tests.ckpt.crash.killers import wait_until, with_writer
from tests.support import LeakCheck, launch_ranks, run_ranks
from tests.support.loads import newest_writer, when_a_load_waits

_SOON = timedelta(seconds=1)  # a time that passes in every run of the test


def _state(value: float) -> dict[str, Any]:
    return {"w": torch.full((1000,), float(value)), "value": value}


def _held_save(checkpointer: ckpt.Checkpointer, gate: Gate, step: int) -> None:
    """Schedule a save that the writer begins when the gate is opened."""
    checkpointer.queue.schedule_async_request(ckpt.AsyncRequest(functions.stop_at, (gate,), []))
    checkpointer.async_save(_state(step), step)
    gate.wait_entered()


def _once(action: Callable[[], None]) -> Callable[[], float]:
    """A listener of the queue: it acts when something waits for the queue."""
    left = [action]

    def listener() -> float:
        if left:
            left.pop()()
        return 60.0

    return listener


def _left_in(checkpointer: ckpt.Checkpointer) -> tuple[list[SaveId], list[str]]:
    root = CheckpointRoot(checkpointer.root)
    return root.pending(), root.superseded()


@pytest.mark.parametrize("how", ["restore", "restore of the step", "recover"])
def test_a_restore_waits_for_the_saves_in_flight(tmp_path: Path, leak_check: LeakCheck, how: str) -> None:
    gate = Gate.create(tmp_path)
    with ckpt.Checkpointer(tmp_path / "root") as checkpointer:
        checkpointer.save(_state(1), 1)
        _held_save(checkpointer, gate, 2)
        checkpointer.queue.listen(_once(gate.open))
        state = _state(0)
        if how == "recover":
            assert checkpointer.recover() == [1, 2]
        assert checkpointer.restore(state, 2 if how == "restore of the step" else None) == 2
        assert state["value"] == 2
        assert state["w"].equal(torch.full((1000,), 2.0))
        assert checkpointer.current_step == 2
        checkpointer.save(_state(3), 3)
        assert checkpointer.all_steps() == [1, 2, 3]
        assert _left_in(checkpointer) == ([], [])


def test_what_a_restore_has_finalized_is_told_by_the_next_call(tmp_path: Path) -> None:
    finalized: list[str] = []
    with ckpt.Checkpointer(tmp_path) as checkpointer:
        request = checkpointer.save_request(_state(1), 1)
        request.add_finalize_fn(lambda: finalized.append("the function"))
        request.add_finalize_fn(lambda: functions.fail("in a finalize function"))
        checkpointer.queue.schedule_async_request(request)
        assert checkpointer.restore(_state(0)) == 1
        assert finalized == ["the function"]
        with pytest.raises(ValueError, match="in a finalize function"):
            checkpointer.maybe_finalize()
        assert checkpointer.maybe_finalize() == [1]


def test_an_older_step_begins_another_branch_also_while_a_save_is_in_flight(tmp_path: Path) -> None:
    gate = Gate.create(tmp_path)
    with ckpt.Checkpointer(tmp_path / "root") as checkpointer:
        checkpointer.save(_state(1), 1)
        _held_save(checkpointer, gate, 2)
        checkpointer.queue.listen(_once(gate.open))
        assert checkpointer.restore(_state(0), 1) == 1
        assert checkpointer.current_step == 1
        checkpointer.save(_state(3), 3)
        assert checkpointer.all_steps() == [1, 3]
        assert [name.partition("-")[0] for name in _left_in(checkpointer)[1]] == ["step_00000002"]


def test_a_save_that_fails_does_not_stop_the_restore_and_is_still_reported(tmp_path: Path) -> None:
    with ckpt.Checkpointer(tmp_path) as checkpointer:
        checkpointer.save(_state(1), 1)
        checkpointer.async_save(_state(2), 1)  # which is published
        checkpointer.async_save(_state(3), 3)
        assert checkpointer.restore(_state(0)) == 3
        with pytest.raises(CheckpointError, match="step 1 is already published"):
            checkpointer.maybe_finalize()
        assert checkpointer.maybe_finalize() == [3]
        checkpointer.save(_state(4), 4)
        assert checkpointer.all_steps() == [1, 3, 4]


def test_the_failure_of_a_save_that_a_restore_has_waited_for_is_raised_by_close(tmp_path: Path) -> None:
    for queue in (None, ckpt.AsyncCallsQueue()):
        checkpointer = ckpt.Checkpointer(tmp_path / str(queue is None), queue=queue)
        checkpointer.save(_state(1), 1)
        checkpointer.async_save(_state(2), 1)
        assert checkpointer.restore(_state(0)) == 1
        with pytest.raises(CheckpointError, match="step 1 is already published"):
            checkpointer.close()
        if queue is not None:
            queue.close()


def test_after_a_fault_a_failure_that_was_logged_is_not_raised(tmp_path: Path) -> None:
    with ckpt.Checkpointer(tmp_path) as checkpointer:
        checkpointer.save(_state(1), 1)
        checkpointer.async_save(_state(2), 1)
        assert checkpointer.restore(_state(0)) == 1
        checkpointer.bridge.recover_from_fault(timedelta(seconds=30))
        assert checkpointer.maybe_finalize() == []


def test_a_writer_that_is_stuck_delays_a_restore_by_the_timeout_and_its_save_is_given_up(
    tmp_path: Path, leak_check: LeakCheck, caplog: pytest.LogCaptureFixture
) -> None:
    gate = Gate.create(tmp_path)
    with ckpt.Checkpointer(tmp_path / "root", timeout=_SOON) as checkpointer:
        checkpointer.save(_state(1), 1)
        _held_save(checkpointer, gate, 2)
        checkpointer.async_save(_state(3), 3)
        begin = time.monotonic()
        assert checkpointer.restore(_state(0)) == 1
        assert time.monotonic() - begin >= _SOON.total_seconds()
        assert "step 2 was given up" in caplog.text
        assert checkpointer.restore(_state(0)) == 1  # which waits for none of them again
        gate.open()
        for step in (2, 3):
            with pytest.raises(SaveAbandonedError, match=f"step {step}.*when a restore began"):
                checkpointer.maybe_finalize(blocking=True)
        checkpointer.save(_state(4), 4)
        assert checkpointer.all_steps() == [1, 4]
        assert _left_in(checkpointer) == ([], [])


def test_other_calls_of_a_shared_queue_are_left_to_the_program(tmp_path: Path, leak_check: LeakCheck) -> None:
    gate = Gate.create(tmp_path)
    called: list[str] = []
    with ckpt.AsyncCallsQueue(num_writers=2, timeout_s=30) as queue:
        checkpointer = ckpt.Checkpointer(tmp_path / "root", queue=queue)
        held = ckpt.AsyncRequest(functions.stop_at, (gate,), [lambda: called.append("held")])
        queue.schedule_async_request(held)
        gate.wait_entered()
        checkpointer.async_save(_state(1), 1)
        assert checkpointer.restore(_state(0)) == 1
        assert checkpointer.current_step == 1
        queue.schedule_async_request(ckpt.AsyncRequest(functions.fail, ("of the program",), []))
        assert checkpointer.restore(_state(0)) == 1
        assert called == []
        gate.open()
        with pytest.raises(WriterError, match="of the program"):
            queue.maybe_finalize_async_calls(blocking=True)
        assert called == ["held"]
        assert checkpointer.maybe_finalize() == [1]
        checkpointer.close()


def _save_and_restore(rank: int, world_size: int, root: Path, savers: list[int]) -> list[Any]:
    """Save step 2 on some ranks only, restore, and go on with step 3."""
    with ckpt.Checkpointer(root) as checkpointer:
        checkpointer.save(_state(1), 1)
        if rank in savers:
            checkpointer.async_save(_state(2), 2)
        state = _state(0)
        restored = checkpointer.restore(state)
        failed = None
        try:
            checkpointer.maybe_finalize(blocking=True)
        except SaveAbandonedError as error:
            failed = error.step
        checkpointer.save(_state(3), 3)
        return [restored, state["value"], failed, checkpointer.all_steps(), _left_in(checkpointer)]


@pytest.mark.parametrize("savers", [[0, 1], [0], [1]])
def test_all_ranks_restore_the_same_whichever_of_them_have_saved(tmp_path: Path, savers: list[int]) -> None:
    """A save that one rank takes no part in is given up at once, not after a timeout."""
    whole = savers == [0, 1]
    step, steps = (2, [1, 2, 3]) if whole else (1, [1, 3])
    for rank, result in enumerate(run_ranks(_save_and_restore, 2, tmp_path / "root", savers)):
        failed = 2 if rank in savers and not whole else None
        assert result.value == [step, step, failed, steps, ([], [])]


# -- saves of other Checkpointers --------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["restore", "restore of the step", "recover", "read only", "another thread"])
def test_another_checkpointer_of_the_program_waits_also_for_a_save_that_has_not_begun(
    tmp_path: Path, leak_check: LeakCheck, how: str
) -> None:
    gate = Gate.create(tmp_path)
    state = _state(0)
    with ckpt.Checkpointer(tmp_path / "root") as checkpointer:
        checkpointer.save(_state(1), 1)
        _held_save(checkpointer, gate, 2)
        with (
            when_a_load_waits(gate.open),
            ckpt.Checkpointer(tmp_path / "root", read_only=how == "read only") as other,
            ThreadPoolExecutor() as threads,
        ):
            if how == "recover":
                assert other.recover() == [1, 2]
            elif how == "another thread":
                assert threads.submit(other.restore, state).result() == 2
            assert other.restore(state, 2 if how == "restore of the step" else None) == 2
        assert state["value"] == 2
        assert checkpointer.maybe_finalize(blocking=True) == [2]
        checkpointer.save(_state(3), 3)


def test_another_checkpointer_that_saves_does_not_lose_what_is_in_flight(tmp_path: Path) -> None:
    gate = Gate.create(tmp_path)
    with ckpt.Checkpointer(tmp_path / "root") as checkpointer:
        _held_save(checkpointer, gate, 1)
        with when_a_load_waits(gate.open), ckpt.Checkpointer(tmp_path / "root") as other:
            other.save(_state(2), 2)
        assert checkpointer.maybe_finalize(blocking=True) == [1]
        assert checkpointer.all_steps() == [1, 2]


def _begun_save(checkpointer: ckpt.Checkpointer, step: int, hold: Path) -> psutil.Process:
    """Schedule a save whose writer has written its part and waits for the file `hold`; return the writer."""
    request = with_writer(checkpointer.save_request(_state(step), step), hold=str(hold))
    checkpointer.queue.schedule_async_request(request)
    root = CheckpointRoot(checkpointer.root)
    wait_until(lambda: [root.pending_save(save).parts_present() for save in root.pending()] == [{0}], "the part")
    return newest_writer()


def test_a_writer_that_is_stuck_or_dies_delays_the_restore_of_another_checkpointer_only_so_long(tmp_path: Path) -> None:
    checkpointer = ckpt.Checkpointer(tmp_path / "root")
    checkpointer.save(_state(1), 1)
    writer = _begun_save(checkpointer, 2, tmp_path / "never")
    with ckpt.Checkpointer(tmp_path / "root", timeout=_SOON) as other, when_a_load_waits(lambda: None):
        assert other.restore(_state(0)) == 1
    with ckpt.Checkpointer(tmp_path / "root") as other, when_a_load_waits(writer.kill):
        assert other.restore(_state(0)) == 1
    with pytest.raises(CheckpointError, match="step 2"):
        checkpointer.close()


_OTHER_PROGRAM = """
import logging, sys
import torch
import ckpt

logging.basicConfig(level=logging.INFO, stream=sys.stdout, format="%(message)s")
state = {"w": torch.zeros(1000), "value": 0.0}
with ckpt.Checkpointer(sys.argv[1]) as checkpointer:
    print("restored", checkpointer.restore(state, int(sys.argv[2])), state["value"], flush=True)
"""


@pytest.mark.parametrize("end", ["published", "killed"])
def test_another_program_waits_for_the_step_that_it_names(tmp_path: Path, end: str) -> None:
    script, hold = tmp_path / "script.py", tmp_path / "hold"
    script.write_text(_OTHER_PROGRAM)
    checkpointer = ckpt.Checkpointer(tmp_path / "root")
    checkpointer.save(_state(1), 1)
    writer = _begun_save(checkpointer, 2, hold)
    with launch_ranks(script, 1, checkpointer.root, 2, imports=()) as group:
        group.wait_for_output(0, "^waiting for step 2")
        if end == "published":
            hold.touch()
            group.wait_for_output(0, "^restored 2 2")
            group.wait()
            assert checkpointer.maybe_finalize(blocking=True) == [2]
        else:
            writer.kill()
            (result,) = group.wait(returncodes={0: 1})
            assert "has no published step 2; it has [1]" in result.stderr
            with pytest.raises(CheckpointError, match="step 2"):
                checkpointer.maybe_finalize(blocking=True)
    checkpointer.close()


@pytest.mark.parametrize("step", [None, 2])
def test_a_program_waits_until_a_step_is_written(tmp_path: Path, step: int | None) -> None:
    gate = Gate.create(tmp_path)
    with ckpt.Checkpointer(tmp_path / "root") as checkpointer:
        _held_save(checkpointer, gate, 2)
        ckpt.wait_until_written(tmp_path / "root", step, timeout=0.2)
        assert checkpointer.all_steps() == []
        ckpt.wait_until_written(tmp_path / "other", step)  # nothing is written there
        gate.open()
        ckpt.wait_until_written(tmp_path / "root", step, timeout=60)
        assert checkpointer.all_steps() == [2]
        assert checkpointer.maybe_finalize() == [2]
