"""The first step of a new run that saves nothing prepares the first save, beside training."""

from datetime import timedelta
from pathlib import Path

import pytest
import torch

import ckpt
from tests.support import LeakCheck, run_ranks


def _prepared(checkpointer: ckpt.Checkpointer) -> int:
    """Return how many slots there are, when what was begun is done."""
    return len(checkpointer._parts.saver.memory.kept)


def test_the_first_step_prepares_and_later_ones_do_not(tmp_path: Path, leak_check: LeakCheck) -> None:
    with ckpt.Checkpointer(tmp_path, save_every=3) as checkpointer:
        state = {"w": torch.arange(10_000.0)}
        assert checkpointer.step(state, 1) == []
        assert _prepared(checkpointer) == 2
        assert checkpointer.step({"w": object()}, 2) == []  # is not looked at
        checkpointer.step(state, 3)
        checkpointer.maybe_finalize(blocking=True)
        assert checkpointer.all_steps() == [3]


def test_a_step_after_a_save_prepares_nothing(tmp_path: Path) -> None:
    """The save may be in flight, and then the ranks would have to wait for its slot, in a step that saves nothing."""
    with ckpt.Checkpointer(tmp_path, save_every=30) as checkpointer:
        checkpointer.async_save({"w": torch.arange(10_000.0)}, 1)
        checkpointer.step({"w": object()}, 2)  # is not looked at
        checkpointer.maybe_finalize(blocking=True)
        assert checkpointer.all_steps() == [1]


def test_a_state_that_cannot_be_saved_is_an_error_at_the_first_step(tmp_path: Path) -> None:
    with (
        ckpt.Checkpointer(tmp_path, save_every=3) as checkpointer,
        pytest.raises(ckpt.errors.StateError, match="w"),
    ):
        checkpointer.step({"w": object()}, 1)


def test_nothing_is_claimed(tmp_path: Path) -> None:
    """A root that is used is refused when something is to be saved, as without this."""
    with ckpt.Checkpointer(tmp_path) as checkpointer:
        checkpointer.save({"w": torch.ones(2)}, 9)
    with ckpt.Checkpointer(tmp_path, save_every=3) as checkpointer:
        checkpointer.step({"w": torch.ones(2)}, 4)
        with pytest.raises(ckpt.errors.CheckpointExistsError):
            checkpointer.step({"w": torch.ones(2)}, 6)


def test_a_reader_prepares_nothing(tmp_path: Path) -> None:
    with ckpt.Checkpointer(tmp_path, save_every=3, read_only=True) as checkpointer:
        checkpointer.step({"w": torch.ones(2)}, 1)
        assert _prepared(checkpointer) == 0


def _train(rank: int, world_size: int, root: Path) -> tuple[int, list[int], list[int]]:
    timeout = timedelta(seconds=30)
    with ckpt.Checkpointer(root, save_every=2, timeout=timeout) as checkpointer:
        state = {"w": torch.full((1000,), float(rank)), "step": 0}
        found: list[int] = []
        for step in (1, 2, 3, 4):
            found += checkpointer.step(state, step)
            if step == 1:
                slots = _prepared(checkpointer)
        found += checkpointer.maybe_finalize(blocking=True)
        return slots, found, checkpointer.all_steps()


def test_all_ranks_prepare_together(tmp_path: Path) -> None:
    for result in run_ranks(_train, 2, tmp_path, timeout=100):
        assert result.value == (2, [2, 4], [2, 4])
