"""After `RestartBridge.recover_from_fault`: every save decided, the state back, nothing lost."""

import json
import logging
import os
import signal
import time
from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import ckpt
from ckpt import events
from ckpt.async_calls.writer import WriterProcess
from ckpt.ranks.collectives import Ranks
from ckpt.restart import CheckpointFinalize
from ckpt.saving import stage as stage_module
from ckpt.storage import directories, files
from ckpt.storage.commit import Abandoned, PendingSave
from ckpt.storage.documents import encode_document
from ckpt.storage.root import CheckpointRoot
from inprocess.attribution import Interruption, InterruptionRecord
from inprocess.fault_classes import FaultClass
from inprocess.state import FrozenState
from tests.ckpt.crash.killers import KillingWriter, wait_until, with_writer
from tests.support import LeakCheck, launch_ranks, run_ranks
from tests.support.selection import FULL, full_only

_DRAIN = timedelta(seconds=30)
_FLOATS = 40_000
_FAULTS = 100 if FULL else 30


def _state(step: int, rank: int = 0) -> dict[str, Any]:
    weights = {f"layer{i}": torch.arange(_FLOATS, dtype=torch.float32) * step + i for i in range(4)}
    return {
        "weights": weights,
        "small": torch.tensor([step, 2]),
        "numbers": {"step": step},
        "own": ckpt.PerRank(f"{step}.{rank}"),
    }


def _fill(state: dict[str, Any], step: int, rank: int = 0) -> None:
    """Train: make `state` that of this step, in place."""
    new = _state(step, rank)
    for name, tensor in new["weights"].items():
        state["weights"][name].copy_(tensor)
    state["small"].copy_(new["small"])
    state["numbers"]["step"], state["own"].value = step, f"{step}.{rank}"


def _is(state: dict[str, Any], step: int, rank: int = 0) -> bool:
    expected = _state(step, rank)
    same = all(state["weights"][name].equal(tensor) for name, tensor in expected["weights"].items())
    same = same and state["numbers"] == expected["numbers"]
    return same and state["small"].equal(expected["small"]) and state["own"].value == f"{step}.{rank}"


def _registered(root: Path, rank: int = 0, **options: Any) -> tuple[ckpt.Checkpointer, dict[str, Any]]:
    checkpointer = ckpt.Checkpointer(root, **options)
    state = _state(0, rank)
    checkpointer.register(**state)
    return checkpointer, state


def _held_request(checkpointer: ckpt.Checkpointer, state: Any, step: int, hold: Path) -> ckpt.AsyncRequest:
    """A save that is complete, and not published before `hold` exists."""
    request = checkpointer.save_request(state, step)
    return with_writer(request, _Waiting, hold=str(hold))


class _Waiting(KillingWriter):
    """Says that its part is there by a file beside `hold`, and decides nothing before `hold` exists."""

    def _decide(self, part: Any) -> Any:
        hold = self.at.hold
        open(f"{hold}.{self.task.rank}", "w").close()
        wait_until(lambda: os.path.exists(hold) or self.pending.outcome() is not None, "the signal to go on")
        self.at = replace(self.at, hold="")
        return super()._decide(part)


class _Returning(KillingWriter):
    """Begins a save that was given up meanwhile, as a writer may that has just looked whether it was."""

    def run(self) -> None:
        pending = self.pending
        wait_until(lambda: isinstance(pending.outcome(), Abandoned), "the save to be given up")
        directories.make_directories(pending.root.pending_path, f"{self.task.save.name}/parts")
        files.create_exclusive(os.path.join(pending.path, "intent.json"), encode_document({}))
        time.sleep(600)


# -- one rank ----------------------------------------------------------------------------------------------------------


def test_drain_publishes_what_was_staged_and_runs_its_finalize_functions(tmp_path: Path, leak_check: LeakCheck) -> None:
    checkpointer, state = _registered(tmp_path / "root")
    finalized: list[int] = []
    _fill(state, 1)
    request = checkpointer.save_request(state, 1)
    request.add_finalize_fn(lambda: finalized.append(1))
    index = checkpointer.queue.schedule_async_request(request)
    _fill(state, 2)
    checkpointer.bridge.recover_from_fault(_DRAIN)
    assert finalized == [1]
    assert checkpointer.all_steps() == [1]
    assert checkpointer.resume_step == 1
    assert _is(state, 1)
    assert checkpointer.async_save(state, 5) > index
    assert checkpointer.maybe_finalize(blocking=True) == [1, 5]
    checkpointer.close()


def test_abort_publishes_nothing_and_waits_for_nobody(tmp_path: Path, leak_check: LeakCheck) -> None:
    checkpointer, state = _registered(tmp_path / "root")
    _fill(state, 1)
    checkpointer.save(state, 1)
    _fill(state, 2)
    request = _held_request(checkpointer, state, 2, tmp_path / "go")
    finalized: list[int] = []
    request.add_finalize_fn(lambda: finalized.append(2))
    index = checkpointer.queue.schedule_async_request(request)
    wait_until(lambda: (tmp_path / "go.0").exists(), "the writer to have written")
    begin = time.monotonic()
    checkpointer.bridge.recover_from_fault(None)
    print(f"abort and restore: {1000 * (time.monotonic() - begin):.0f} ms")
    (tmp_path / "go").touch()
    assert (checkpointer.all_steps(), finalized, checkpointer.resume_step) == ([1], [], 1)
    assert _is(state, 1)
    root = CheckpointRoot(str(tmp_path / "root"))
    assert root.pending() == []
    (save,) = root.abandoned()
    outcome = PendingSave(root, save).outcome()
    assert isinstance(outcome, Abandoned)
    assert "fault" in outcome.reason.message
    # The slots are free at once: two saves are staged without a wait for any writer.
    assert checkpointer.async_save(state, 2) == index + 1
    assert checkpointer.async_save(state, 3) == index + 2
    assert checkpointer.maybe_finalize(blocking=True)[-2:] == [2, 3]
    checkpointer.close()


class _Interrupt(BaseException):
    pass


def test_a_writer_that_begins_a_save_too_late_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, leak_check: LeakCheck
) -> None:
    """The trainer was interrupted when the writer had the call, and the queue had not noted it yet."""
    checkpointer, state = _registered(tmp_path / "root")
    _fill(state, 1)
    checkpointer.save(state, 1)
    request = checkpointer.save_request(state, 2)
    request = with_writer(request, _Returning)
    submit = WriterProcess.submit

    def submit_and_stop(*args: Any) -> None:
        submit(*args)
        raise _Interrupt

    with monkeypatch.context() as patch:
        patch.setattr(WriterProcess, "submit", submit_and_stop)
        with pytest.raises(_Interrupt):
            checkpointer.queue.schedule_async_request(request)
    root, recover = CheckpointRoot(str(tmp_path / "root")), checkpointer.queue.recover

    def recover_late(timeout_s: float) -> list[int]:
        (save,) = root.abandoned()
        wait_until(lambda: PendingSave(root, save).intent() is not None, "the writer to begin again")
        return recover(timeout_s)

    monkeypatch.setattr(checkpointer.queue, "recover", recover_late)
    checkpointer.bridge.recover_from_fault(_DRAIN)
    assert (root.steps(), root.pending()) == ([1], [])
    checkpointer.save(state, 2)
    checkpointer.close()


def test_a_save_that_is_published_survives_an_abort(tmp_path: Path, leak_check: LeakCheck) -> None:
    checkpointer, state = _registered(tmp_path / "root")
    _fill(state, 1)
    checkpointer.async_save(state, 1)
    wait_until(lambda: checkpointer.all_steps() == [1], "the step to be published")
    checkpointer.bridge.recover_from_fault(None)
    assert checkpointer.maybe_finalize() == [1]
    assert checkpointer.resume_step == 1
    checkpointer.close()


def test_a_request_that_was_never_scheduled_is_given_up(tmp_path: Path, leak_check: LeakCheck) -> None:
    checkpointer, state = _registered(tmp_path / "root")
    _fill(state, 1)
    checkpointer.save(state, 1)
    for step in (2, 3):
        checkpointer.save_request(state, step)  # both slots
    checkpointer.bridge.recover_from_fault(_DRAIN)
    assert checkpointer.all_steps() == [1]
    checkpointer.save(state, 4)
    assert checkpointer.all_steps() == [1, 4]
    checkpointer.close()


def test_at_the_deadline_a_save_is_given_up(tmp_path: Path, leak_check: LeakCheck) -> None:
    checkpointer, state = _registered(tmp_path / "root")
    checkpointer.queue.schedule_async_request(_held_request(checkpointer, state, 1, tmp_path / "go"))
    wait_until(lambda: (tmp_path / "go.0").exists(), "the writer to have written")
    checkpointer.bridge.recover_from_fault(timedelta(milliseconds=50))
    assert checkpointer.all_steps() == []
    assert checkpointer.resume_step is None
    checkpointer.save(state, 1)
    assert checkpointer.all_steps() == [1]
    checkpointer.close()


def test_finalize_functions_that_were_interrupted_go_on_where_they_stopped(
    tmp_path: Path, leak_check: LeakCheck
) -> None:
    class Restart(BaseException):
        pass

    def interrupted() -> None:
        calls.append("first")
        raise Restart

    calls: list[str] = []
    checkpointer, state = _registered(tmp_path / "root")
    request = checkpointer.save_request(state, 1)
    request.add_finalize_fn(interrupted)
    request.add_finalize_fn(lambda: calls.append("second"))
    checkpointer.queue.schedule_async_request(request)
    with pytest.raises(Restart):
        checkpointer.maybe_finalize(blocking=True)
    checkpointer.bridge.recover_from_fault(_DRAIN)
    assert calls == ["first", "second"]
    assert checkpointer.queue.get_num_unfinalized_calls() == 0
    checkpointer.close()


def test_faults_of_saves_do_not_pile_up(tmp_path: Path, leak_check: LeakCheck) -> None:
    """A save that failed is over: after a fault nobody asks for it again."""
    checkpointer, state = _registered(tmp_path / "root")
    checkpointer.save(state, 1)
    (tmp_path / "root").rename(tmp_path / "elsewhere")
    (tmp_path / "root").write_text("no directory")
    checkpointer.async_save(state, 2)
    with pytest.raises(ckpt.errors.CheckpointError):
        checkpointer.maybe_finalize(blocking=True)
    (tmp_path / "root").unlink()
    (tmp_path / "elsewhere").rename(tmp_path / "root")
    checkpointer.bridge.recover_from_fault(_DRAIN)
    assert CheckpointRoot(str(tmp_path / "root")).abandoned() == []  # nobody had reason to record anything
    assert checkpointer.resume_step == 1
    checkpointer.close()


@pytest.mark.timeout(120)
def test_many_faults_leave_nothing(tmp_path: Path, leak_check: LeakCheck) -> None:
    checkpointer, state = _registered(tmp_path / "root", keep=1)
    for epoch in range(1, _FAULTS + 1):
        _fill(state, epoch)
        checkpointer.async_save(state, epoch)
        checkpointer.bridge.recover_from_fault(_DRAIN if epoch % 10 else None)
        if epoch == 10:
            leak_check_here = LeakCheck()
    leak_check_here.check()
    assert checkpointer.resume_step in (_FAULTS - 1, _FAULTS)
    assert _is(state, checkpointer.resume_step or 0)
    assert CheckpointRoot(str(tmp_path / "root")).pending() == []
    checkpointer.close()


def test_a_spare_decides_nothing_and_restores_nothing(tmp_path: Path, leak_check: LeakCheck) -> None:
    checkpointer, state = _registered(tmp_path / "root")
    _fill(state, 1)
    checkpointer.queue.schedule_async_request(_held_request(checkpointer, state, 1, tmp_path / "go"))
    wait_until(lambda: (tmp_path / "go.0").exists(), "the writer to have written")
    spare, of_spare = _registered(tmp_path / "root")
    spare.bridge.recover_from_fault(_DRAIN, rank=None)
    assert (spare.resume_step, spare.last_restore) == (None, None)
    assert _is(of_spare, 0)
    (tmp_path / "go").touch()
    checkpointer.bridge.recover_from_fault(_DRAIN)
    assert spare.restore(of_spare) == 1
    assert _is(of_spare, 1)
    spare.close()
    checkpointer.close()


def test_an_event_names_the_cause(tmp_path: Path, leak_check: LeakCheck) -> None:
    failed = InterruptionRecord(2, Interruption.EXCEPTION, "RuntimeError: Connection closed by peer")
    evidence = ("host gpu-07", "memory was short")
    died = InterruptionRecord(
        1, Interruption.TERMINATED, "died: SIGKILL", fault_class=FaultClass.OUT_OF_MEMORY, evidence=evidence
    )
    joined = InterruptionRecord(4, Interruption.NEWCOMER, "is ready")
    seen: list[events.Event] = []
    with ckpt.observe(seen.append), ckpt.Checkpointer(tmp_path) as checkpointer:
        finalize = CheckpointFinalize(checkpointer)
        for records in ((failed, died), (joined,), ()):
            finalize(FrozenState(0, 2, active_rank=0, active_world_size=2, interruptions=records))
    first, second, third = (event for event in seen if isinstance(event, events.Restarted))
    assert (first.cause, first.fault_class, first.evidence) == ("rank 1: died: SIGKILL", "out of memory", evidence)
    assert first.advice.startswith("reduce")
    assert (second.cause, second.fault_class, second.advice) == ("NEWCOMER: is ready", "unknown", "")
    assert third.cause == ""
    assert events.from_document(json.loads(json.dumps(events.to_document(first)))) == first


# -- several ranks -----------------------------------------------------------------------------------------------------


def _after_fault(rank: int, world_size: int, folder: Path, scene: Callable[..., None], *more: Any) -> dict[str, Any]:
    """Step 1 is saved, `scene` plays on every rank, then all that live recover."""
    import torch.distributed as dist

    checkpointer, state = _registered(folder / "root", rank)
    _fill(state, 1, rank)
    checkpointer.save(state, 1)
    _fill(state, 2, rank)
    scene(checkpointer, state, rank, folder)
    dist.destroy_process_group()
    checkpointer.bridge.recover_from_fault(*(more or (_DRAIN,)))
    step = checkpointer.resume_step
    assert step is not None
    answer = {"step": step, "right": _is(state, step, rank), "report": checkpointer.last_restore}
    print("recovered", flush=True)
    signal.pause()  # until all have recovered: then the test ends them
    return answer


def _survivors_of(folder: Path, scene: Callable[..., None], victims: tuple[int, ...], world: int = 2) -> CheckpointRoot:
    with launch_ranks(_after_fault, world, folder, scene) as group:
        for rank in set(range(world)) - set(victims):
            group.wait_for_output(rank, "^recovered")
        for rank in set(range(world)) - set(victims):
            group.kill(rank)
        group.wait(30, dict.fromkeys(range(world), -signal.SIGKILL))
        group.wait_for_no_survivors()
    return CheckpointRoot(str(folder / "root"))


def _all_staged_then_one_dies(victim: int) -> Callable[..., None]:
    def scene(checkpointer: ckpt.Checkpointer, state: Any, rank: int, folder: Path) -> None:
        request = _held_request(checkpointer, state, 2, folder / "go")
        checkpointer.queue.schedule_async_request(request)
        wait_until(lambda: all((folder / f"go.{r}").exists() for r in range(2)), "all parts")
        if rank == victim:
            (folder / "go").touch()
            os.kill(os.getpid(), signal.SIGKILL)

    return scene


@pytest.mark.parametrize("victim", [0, pytest.param(1, marks=full_only)])
def test_the_death_of_any_trainer_loses_no_staged_save(tmp_path: Path, victim: int) -> None:
    root = _survivors_of(tmp_path, _all_staged_then_one_dies(victim), (victim,))
    assert (root.steps(), root.pending()) == ([1, 2], [])


def _one_dies_before_staging(victim: int) -> Callable[..., None]:
    def scene(checkpointer: ckpt.Checkpointer, state: Any, rank: int, folder: Path) -> None:
        if rank == victim:
            os.kill(os.getpid(), signal.SIGKILL)
        checkpointer.async_save(state, 2)

    return scene


@pytest.mark.parametrize("victim", [0, pytest.param(1, marks=full_only)])
def test_without_the_part_of_a_dead_rank_the_save_is_given_up(tmp_path: Path, victim: int) -> None:
    root = _survivors_of(tmp_path, _one_dies_before_staging(victim), (victim,))
    assert (root.steps(), root.pending()) == ([1], [])


def _interrupted_before_scheduling(interrupted: int, staged: bool) -> Callable[..., None]:
    def scene(checkpointer: ckpt.Checkpointer, state: Any, rank: int, folder: Path) -> None:
        if rank != interrupted:
            checkpointer.async_save(state, 2)
        elif staged:
            checkpointer.save_request(state, 2)

    return scene


def _recover(rank: int, world_size: int, folder: Path, scene: Callable[..., None]) -> dict[str, Any]:
    import torch.distributed as dist

    checkpointer, state = _registered(folder / "root", rank)
    _fill(state, 1, rank)
    checkpointer.save(state, 1)
    _fill(state, 2, rank)
    scene(checkpointer, state, rank, folder)
    dist.barrier()  # nobody closes a socket others still need; recovering needs no group
    checkpointer.bridge.recover_from_fault(_DRAIN)
    step = checkpointer.resume_step
    assert step is not None
    answer = {"step": step, "right": _is(state, step, rank), "report": checkpointer.last_restore}
    dist.barrier()
    checkpointer.save(state, 3)
    checkpointer.close()
    return answer


@pytest.mark.parametrize(
    ("interrupted", "staged"),
    [
        (0, True),
        (1, False),
        pytest.param(0, False, marks=full_only),
        pytest.param(1, True, marks=full_only),
    ],
)
def test_a_living_rank_without_a_part_refuses_the_save(tmp_path: Path, interrupted: int, staged: bool) -> None:
    for result in run_ranks(_recover, 2, tmp_path, _interrupted_before_scheduling(interrupted, staged)):
        assert (result.value["step"], result.value["right"]) == (1, True)
    root = CheckpointRoot(str(tmp_path / "root"))
    assert (root.steps(), root.pending()) == ([1, 3], [])


def _coordinator_dies_with_its_writer(checkpointer: ckpt.Checkpointer, state: Any, rank: int, folder: Path) -> None:
    request = checkpointer.save_request(state, 2)
    victims = ("trainer", "writer") if rank == 0 else ()
    request = with_writer(
        request,
        point="before publish",
        victims=victims,
        trainer_pid=os.getpid(),
    )
    checkpointer.queue.schedule_async_request(request)
    if rank == 0:
        signal.pause()


def test_a_survivor_publishes_in_place_of_the_coordinator(tmp_path: Path) -> None:
    with launch_ranks(_after_fault, 3, tmp_path, _coordinator_dies_with_its_writer) as group:
        for rank in (1, 2):
            group.wait_for_output(rank, "^recovered")
        published = [line for rank in (1, 2) for line in group.stderr(rank).splitlines() if "publishes step 2" in line]
        for rank in (1, 2):
            group.kill(rank)
        group.wait(30, dict.fromkeys(range(3), -signal.SIGKILL))
        group.wait_for_no_survivors()
    assert len(published) == 1, published
    root = CheckpointRoot(str(tmp_path / "root"))
    assert (root.steps(), root.pending(), root.abandoned()) == ([1, 2], [], [])
    with ckpt.Checkpointer(root.path) as checkpointer:
        state = _state(0)
        assert checkpointer.restore(state) == 2
        assert _is(state, 2)


@pytest.fixture(autouse=True)
def _quiet() -> None:
    logging.getLogger("ckpt").setLevel(logging.WARNING)


# -- the process group goes at any moment ------------------------------------------------------------------------------


def _lose_the_group(rank: int, world_size: int, root: Path, at: str) -> dict[str, Any]:
    """The abort destroys the process group while a save is staged, or just before it."""
    checkpointer, state = _registered(root, rank)
    _fill(state, 1, rank)
    checkpointer.save(state, 1)
    dist.barrier()
    _fill(state, 2, rank)
    if at == "before":
        dist.destroy_process_group()
        request = checkpointer.save_request(state, 2)
    else:
        stage = stage_module.stage

        def stage_and_lose(*args: Any) -> Any:
            dist.destroy_process_group()
            return stage(*args)

        stage_module.stage = stage_and_lose
        request = checkpointer.save_request(state, 2)
    of_writer = request.async_fn.task.rank  # type: ignore[union-attr]
    _fill(state, 9, rank)
    checkpointer.bridge.recover_from_fault(None)
    answer = {"writer": of_writer, "step": checkpointer.resume_step, "right": _is(state, 1, rank)}
    checkpointer.close()
    return answer


@pytest.mark.parametrize("at", ["before", "during"])
def test_a_rank_stays_itself_when_its_group_is_gone(tmp_path: Path, at: str) -> None:
    answers = [result.value for result in run_ranks(_lose_the_group, 2, tmp_path / "root", at)]
    assert answers == [{"writer": rank, "step": 1, "right": True} for rank in range(2)]


def _ask_ranks(rank: int, world_size: int) -> None:
    ranks = Ranks()
    assert (ranks.last_rank, ranks.world_size) == (rank, world_size)
    assert ranks(b"%d" % rank) == [b"0", b"1"]
    dist.destroy_process_group()
    assert (ranks.rank, ranks.last_rank, ranks.world_size) == (rank, rank, world_size)
    with pytest.raises(ckpt.errors.CheckpointError, match=f"rank {rank} of 2 has no process group any more"):
        ranks(b"")
    ranks.forget()
    assert (ranks.last_rank, ranks.world_size, ranks(b"x")) == (None, 1, [b"x"])
    assert (ranks.rank, ranks.last_rank) == (0, 0)


def test_ranks_without_their_group() -> None:
    run_ranks(_ask_ranks, 2)
