"""A rank that alone fails before its writer has its share: all ranks learn the same, and none waits for it."""

from __future__ import annotations

import errno
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import ckpt
from ckpt.planning.known_state import KnownStates
from ckpt.saving import plan_cache, stage
from ckpt.staging import neighbors
from ckpt.staging.arena import Arena
from tests.support import run_ranks

_TIMEOUT_S = 40.0


def _raises(error: Exception) -> Callable[..., Any]:
    def fail(*given: Any, **named: Any) -> Any:
        raise error

    return fail


_PLACES: dict[str, tuple[Any, str, Exception]] = {
    "the copy": (stage, "stage", RuntimeError("CUDA error: an illegal memory access was encountered")),
    "new memory": (Arena, "resize", OSError(errno.ENOMEM, os.strerror(errno.ENOMEM))),
    "the plan": (plan_cache, "make_save_plan", MemoryError("no memory for a plan")),
    "the names": (KnownStates, "flatten", MemoryError("no memory for a copy of a value")),
    "the queue": (ckpt.AsyncCallsQueue, "_submit", OSError(errno.EMFILE, os.strerror(errno.EMFILE))),
}


def _one_rank_fails(rank: int, world_size: int, root: Path, place: str, victim: int, allowed: Any) -> list[Any]:
    """Two steps fail on one rank. Step 4 has another structure, so that the ranks plan it together."""
    where, name, error = _PLACES[place]
    failing = (1, 3) if place == "the names" else (2, 4)
    answers: list[Any] = []
    neighbors._TIMEOUT_S = _TIMEOUT_S  # to wait for the slots of the other rank is too long, too
    with ckpt.Checkpointer(root, timeout=_TIMEOUT_S, on_failed_save=allowed) as checkpointer:
        for step, count in ((1, 10), (2, 10), (3, 10), (4, 100_000), (5, 100_000)):
            begin = time.monotonic()
            with pytest.MonkeyPatch.context() as patch:
                if rank == victim and step in failing:
                    patch.setattr(where, name, _raises(error))
                try:
                    answer: Any = checkpointer.save({"w": torch.ones(count), "step": step}, step)
                except ckpt.CheckpointError as failure:
                    answer = type(failure).__name__, str(failure)
            assert time.monotonic() - begin < _TIMEOUT_S - 5, "the time limit was waited for"
            answers.append(answer)
            torch.distributed.barrier()
        return [*answers, checkpointer.all_steps()]


@pytest.mark.parametrize("place", _PLACES)
def test_ranks_go_on_together_after_the_failure_of_one(place: str, tmp_path: Path) -> None:
    expected: list[Any] = [True, False, True, False, True, [1, 3, 5]]
    if place in ("new memory", "the plan"):  # only a new structure needs them
        expected = [True, True, True, False, True, [1, 2, 3, 5]]
    if place == "the names":  # without a plan, the ranks agree that the state cannot be stored
        text = "the state of rank 1 cannot be stored, nothing was written: MemoryError: no memory for a copy of a value"
        expected = [("StateError", text), True, False, True, True, [2, 4, 5]]
    for result in run_ranks(_one_rank_fails, 2, tmp_path / "root", place, 1, "warn"):
        assert result.value == expected


def _one_rank_cannot_plan(rank: int, world_size: int, root: Path) -> list[Any]:
    """Each step has another structure; rank 1 cannot plan that of step 2."""
    neighbors._TIMEOUT_S = _TIMEOUT_S
    answers = []
    with ckpt.Checkpointer(root, timeout=_TIMEOUT_S, on_failed_save="warn") as checkpointer:
        for step in (1, 2, 3):
            begin = time.monotonic()
            with pytest.MonkeyPatch.context() as patch:
                if (rank, step) == (1, 2):
                    patch.setattr(plan_cache, "make_save_plan", _raises(MemoryError()))
                answers.append(checkpointer.save({"w": torch.ones(10 * step)}, step))
            assert time.monotonic() - begin < _TIMEOUT_S - 5, "the time limit was waited for"
        return [*answers, checkpointer.all_steps()]


def test_the_ranks_meet_again_for_the_structure_after_one_that_a_rank_cannot_plan(tmp_path: Path) -> None:
    for result in run_ranks(_one_rank_cannot_plan, 2, tmp_path / "root"):
        assert result.value == [True, False, True, [1, 3]]


def _one_rank_cannot_name_its_leaves(rank: int, world_size: int, root: Path, error: Exception) -> list[Any]:
    """The structure changes with step 2 on rank 1, for which rank 0 fails; then it is the same for all ranks."""
    answers: list[Any] = []
    with ckpt.Checkpointer(root, timeout=_TIMEOUT_S, on_failed_save="warn") as checkpointer:
        for step, names in ((1, "w"), (2, "wv"), (3, "wv"), (4, "w")):
            begin = time.monotonic()
            with pytest.MonkeyPatch.context() as patch:
                if rank == 0 and step == 2:
                    patch.setattr(KnownStates, "flatten", _raises(error))
                try:
                    answer: Any = checkpointer.save({name: torch.ones(10) for name in names}, step)
                except ckpt.CheckpointError as failure:
                    answer = str(failure)
            assert time.monotonic() - begin < _TIMEOUT_S - 5, "the time limit was waited for"
            answers.append(answer)
        return [*answers, checkpointer.all_steps()]


def test_a_rank_that_cannot_name_its_leaves_is_not_waited_for(tmp_path: Path) -> None:
    """Nothing is between the saves that keeps the ranks together: rank 0 is in the next one while rank 1 waits."""
    error = MemoryError("no memory for a copy of a value")
    for result in run_ranks(_one_rank_cannot_name_its_leaves, 2, tmp_path / "root", error):
        assert result.value == [True, False, True, True, [1, 3, 4]]


def test_a_state_that_one_rank_cannot_store_is_an_error_on_the_ranks_that_wait_for_it(tmp_path: Path) -> None:
    error = ckpt.StateError("v: a lambda cannot be stored")
    first, second = run_ranks(_one_rank_cannot_name_its_leaves, 2, tmp_path / "root", error)
    assert first.value == [True, "v: a lambda cannot be stored", True, True, [1, 3, 4]]
    assert "abandoned on all ranks: rank 0: StateError: v: a lambda cannot be stored" in second.value[1]
    assert [*second.value[:1], *second.value[2:]] == [True, True, True, [1, 3, 4]]


def _one_rank_cannot_plan_in_the_background(rank: int, world_size: int, root: Path) -> list[int]:
    """A restore begins to plan the next save, in vain on rank 1. Rank 0 begins that save before rank 1 does."""
    neighbors._TIMEOUT_S = _TIMEOUT_S
    state = {"w": torch.ones(10), "new": torch.ones(100_000)}
    with ckpt.Checkpointer(root, timeout=_TIMEOUT_S) as checkpointer:
        checkpointer.save({"w": torch.ones(10)}, 1)
        with pytest.MonkeyPatch.context() as patch:
            if rank == 1:
                patch.setattr(plan_cache, "make_save_plan", _raises(MemoryError()))
            checkpointer.restore(state, strict=False)
            if rank == 0:
                begin = time.monotonic()
                checkpointer.async_save(state, 2)
                assert time.monotonic() - begin < _TIMEOUT_S - 5, "the slots of rank 1 were waited for"
            torch.distributed.barrier()
        if rank == 1:
            checkpointer.async_save(state, 2)
        checkpointer.maybe_finalize(blocking=True)
        return checkpointer.all_steps()


def test_a_rank_that_cannot_plan_in_the_background_is_not_waited_for(tmp_path: Path) -> None:
    for result in run_ranks(_one_rank_cannot_plan_in_the_background, 2, tmp_path / "root"):
        assert result.value == [1, 2]


@pytest.mark.parametrize("victim", [0, 1])
def test_without_the_option_all_ranks_raise_the_same_error(victim: int, tmp_path: Path) -> None:
    one, other = (r.value for r in run_ranks(_one_rank_fails, 2, tmp_path / "root", "the copy", victim, "raise"))
    assert one == other
    kind, text = one[1]
    assert kind == "SaveAbandonedError"
    assert f"the save of step 2 was abandoned on all ranks: rank {victim}: RuntimeError: CUDA error" in text
    assert one[2] is True


def test_the_cause_is_the_error_that_was_raised(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    error = RuntimeError("no copy")
    with ckpt.Checkpointer(tmp_path) as checkpointer:
        monkeypatch.setattr(stage, "stage", _raises(error))
        with pytest.raises(ckpt.SaveAbandonedError, match=r"step 1 .*RuntimeError: no copy") as caught:
            checkpointer.async_save({"w": torch.ones(3)}, 1)
        monkeypatch.undo()
        assert caught.value.__cause__ is error
        assert (caught.value.rank, caught.value.step) == (0, 1)
        assert checkpointer.save({"w": torch.ones(3)}, 2)
