"""`CkptIO` as the plugin that Lightning calls: names, what they stand for, what is removed when, what is refused."""

from __future__ import annotations

import enum
import logging
import os
import threading
from collections import OrderedDict
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch

import ckpt
from ckpt.storage import roots
from ckpt.storage.root import CheckpointRoot
from tests.ckpt.crash.killers import wait_until
from tests.ckpt.storage.small_saves import SCENARIOS
from tests.support import LeakCheck, run_ranks
from tests.support.loads import newest_writer, stopped_until_a_load_waits
from tests.support.selection import needs

needs("lightning")


@pytest.fixture(scope="module", autouse=True)
def _imported() -> None:
    """Imports Lightning for these tests, and not in every process that collects them."""
    global CkptIO, load_from_checkpoint, read_checkpoint
    from ckpt.integrations.lightning import CkptIO, load_from_checkpoint, read_checkpoint


class Color(enum.Enum):
    RED = 1


class Unencodable:
    pass


@pytest.fixture
def plugin(leak_check: LeakCheck) -> Iterator[CkptIO]:
    plugin = CkptIO()
    yield plugin
    plugin.teardown()


def checkpoint(number: int, **more: Any) -> dict[str, Any]:
    return {
        "epoch": number // 10,
        "global_step": number,
        "state_dict": OrderedDict(weight=torch.full((3, 2), float(number)), half=torch.ones(2, dtype=torch.bfloat16)),
        "optimizer_states": [{"state": {0: {"step": torch.tensor(1.0)}}, "param_groups": [{"betas": (0.9, 0.99)}]}],
        "lr_schedulers": [],
        "callbacks": {"ModelCheckpoint{'monitor': 'val/loss'}": {"best_k_models": {"a/b.ckpt": torch.tensor(0.5)}}},
        **more,
    }


def steps(folder: Path) -> list[int]:
    return sorted(int(path.name[5:]) for path in folder.glob("step_*"))


def number_of(loaded: dict[str, Any]) -> float:
    return float(loaded["state_dict"]["weight"][0, 0])


def test_what_is_loaded_is_what_was_saved(plugin: CkptIO, tmp_path: Path) -> None:
    saved = checkpoint(7, hyper_parameters={"width": 3, "rates": (1, 2.5), "nothing": None, "color": None})
    plugin.save_checkpoint(saved, tmp_path / "a.ckpt")
    saved["state_dict"]["weight"].zero_()  # staged already
    loaded = plugin.load_checkpoint(tmp_path / "a.ckpt")
    assert loaded.keys() == saved.keys()
    assert number_of(loaded) == 7
    assert type(loaded["state_dict"]) is OrderedDict
    assert torch.equal(loaded["state_dict"]["half"], saved["state_dict"]["half"])
    assert loaded["optimizer_states"] == saved["optimizer_states"]
    assert loaded["callbacks"] == saved["callbacks"]
    assert loaded["hyper_parameters"] == saved["hyper_parameters"]
    with ckpt.open(tmp_path) as opened:
        assert opened.step == 7
        assert opened.summary["metrics"] == {"lightning": {"name": "a.ckpt", "epoch": 0, "global_step": 7}}


def test_a_load_is_a_restore_for_those_that_observe(plugin: CkptIO, tmp_path: Path) -> None:
    plugin.save_checkpoint(checkpoint(7), tmp_path / "a.ckpt")
    plugin.teardown()
    seen: list[Any] = []
    with ckpt.observe(seen.append):
        read_checkpoint(tmp_path / "a.ckpt")  # any program may look
        plugin.load_checkpoint(tmp_path / "a.ckpt")
    (restored,) = (each for each in seen if isinstance(each, ckpt.events.Restored))
    assert (restored.step, restored.storage_bytes) == (7, 24 + 4 + 4 + 4)


def test_saves_of_one_global_step_get_numbers_of_their_own(plugin: CkptIO, tmp_path: Path) -> None:
    for name in ("a.ckpt", "last.ckpt"):
        plugin.save_checkpoint(checkpoint(7), tmp_path / name)
    plugin.save_checkpoint(checkpoint(8), tmp_path / "b.ckpt")
    plugin.teardown()
    assert steps(tmp_path) == [7, 8, 9]
    assert [number_of(read_checkpoint(tmp_path / name)) for name in ("a.ckpt", "last.ckpt", "b.ckpt")] == [7, 7, 8]


def test_a_save_that_an_ended_job_left_has_its_number_also_without_its_name(plugin: CkptIO, tmp_path: Path) -> None:
    """Whoever saves next publishes it, as it is complete."""
    SCENARIOS["adoption"].prepare(tmp_path)
    (left,) = CheckpointRoot(str(tmp_path)).pending()
    plugin.save_checkpoint(checkpoint(left.step), tmp_path / "a.ckpt")
    plugin.teardown()
    assert steps(tmp_path) == [1, left.step, left.step + 1]
    assert number_of(read_checkpoint(tmp_path / "a.ckpt")) == left.step


def test_trainings_may_share_a_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Names tell their checkpoints apart, so another training there is not refused, as it is with a Checkpointer."""
    for name in ("a.ckpt", "b.ckpt"):
        monkeypatch.setattr(roots, "_seen", set())  # as in another process
        plugin = CkptIO()
        plugin.save_checkpoint(checkpoint(7), tmp_path / name)
        plugin.teardown()
    assert steps(tmp_path) == [7, 8]


def test_a_name_that_is_saved_again_loses_its_old_step_when_the_new_one_is_published(
    plugin: CkptIO, tmp_path: Path
) -> None:
    plugin.save_checkpoint(checkpoint(1), tmp_path / "last.ckpt")
    plugin.save_checkpoint(checkpoint(2), tmp_path / "last.ckpt")
    plugin.teardown()
    assert steps(tmp_path) == [2]
    assert number_of(read_checkpoint(tmp_path / "last.ckpt")) == 2


def test_a_save_that_fails_removes_nothing(plugin: CkptIO, tmp_path: Path) -> None:
    plugin.save_checkpoint(checkpoint(1), tmp_path / "best.ckpt")
    plugin.save_checkpoint(checkpoint(1), tmp_path / "last.ckpt")
    with pytest.raises(ckpt.StateError, match=r"hyper_parameters/it: a .*Unencodable cannot be stored"):
        plugin.save_checkpoint(checkpoint(3, hyper_parameters={"it": Unencodable()}), tmp_path / "new.ckpt")
    plugin.remove_checkpoint(tmp_path / "best.ckpt")
    with pytest.raises(ckpt.StateError):
        plugin.save_checkpoint(checkpoint(4, hyper_parameters={"it": Unencodable()}), tmp_path / "last.ckpt")
    plugin.teardown()
    assert number_of(plugin.load_checkpoint(tmp_path / "best.ckpt")) == 1
    assert number_of(plugin.load_checkpoint(tmp_path / "last.ckpt")) == 1
    with pytest.raises(
        ckpt.CheckpointNotFoundError, match=r"CkptIO\.teardown\(\).*never completed.*/best\.ckpt, .*/last\.ckpt"
    ):
        plugin.load_checkpoint(tmp_path / "new.ckpt")


def test_a_removal_waits_for_the_next_save(plugin: CkptIO, tmp_path: Path) -> None:
    plugin.save_checkpoint(checkpoint(1), tmp_path / "a.ckpt")
    plugin.save_checkpoint(checkpoint(2), tmp_path / "b.ckpt")
    plugin.remove_checkpoint(tmp_path / "a.ckpt")
    assert (tmp_path / "a.ckpt").exists()
    plugin.teardown()
    assert steps(tmp_path) == [2]
    assert not (tmp_path / "a.ckpt").exists()
    plugin.remove_checkpoint(tmp_path / "b.ckpt")  # no save is scheduled: now
    plugin.remove_checkpoint(tmp_path / "b.ckpt")
    assert steps(tmp_path) == []


def test_a_name_that_is_removed_and_saved_again_stays(plugin: CkptIO, tmp_path: Path) -> None:
    plugin.save_checkpoint(checkpoint(1), tmp_path / "a.ckpt")
    plugin.remove_checkpoint(tmp_path / "a.ckpt")
    plugin.save_checkpoint(checkpoint(2), tmp_path / "a.ckpt")
    plugin.teardown()
    assert steps(tmp_path) == [2]
    assert number_of(read_checkpoint(tmp_path / "a.ckpt")) == 2


def test_what_is_saved_before_slurm_ends_the_job_is_published_on_return(plugin: CkptIO, tmp_path: Path) -> None:
    plugin.save_checkpoint(checkpoint(1), tmp_path / "hpc_ckpt_1.ckpt")
    assert steps(tmp_path) == [1]


def test_another_plugin_waits_for_the_newest_save_of_a_name(plugin: CkptIO, tmp_path: Path) -> None:
    plugin.save_checkpoint(checkpoint(1), tmp_path / "twice.ckpt")
    wait_until(lambda: steps(tmp_path) == [1], "the step")
    with stopped_until_a_load_waits():
        plugin.save_checkpoint(checkpoint(2), tmp_path / "twice.ckpt")
        assert number_of(CkptIO().load_checkpoint(tmp_path / "twice.ckpt")) == 2
    with stopped_until_a_load_waits():
        plugin.save_checkpoint(checkpoint(3), tmp_path / "once.ckpt")
        assert number_of(read_checkpoint(tmp_path / "once.ckpt")) == 3
    with stopped_until_a_load_waits():
        plugin.save_checkpoint(checkpoint(4), tmp_path / "own.ckpt")
        assert number_of(plugin.load_checkpoint(tmp_path / "own.ckpt")) == 4


def test_a_save_that_takes_longer_than_the_timeout_is_not_waited_for(plugin: CkptIO, tmp_path: Path) -> None:
    plugin.save_checkpoint(checkpoint(1), tmp_path / "twice.ckpt")
    wait_until(lambda: steps(tmp_path) == [1], "the step")
    other, writer = CkptIO(timeout=timedelta(seconds=1)), newest_writer()
    writer.suspend()
    try:
        for name in ("twice", "once"):
            plugin.save_checkpoint(checkpoint(2), tmp_path / f"{name}.ckpt")
        assert number_of(other.load_checkpoint(tmp_path / "twice.ckpt")) == 1
        with pytest.raises(ckpt.CheckpointNotFoundError, match="takes longer than the timeout"):
            other.load_checkpoint(tmp_path / "once.ckpt")
    finally:
        writer.resume()


def test_no_name_gets_the_step_that_another_one_lists(plugin: CkptIO, tmp_path: Path) -> None:
    """A save that was never completed leaves its name, which must not stand for a later checkpoint."""
    (tmp_path / "lost.ckpt").write_text('{"ckpt_steps": [7]}')
    plugin.save_checkpoint(checkpoint(7), tmp_path / "a.ckpt")
    plugin.teardown()
    assert steps(tmp_path) == [8]
    with pytest.raises(ckpt.CheckpointNotFoundError, match="its save is not complete"):
        plugin.load_checkpoint(tmp_path / "lost.ckpt")


def test_other_urls_are_refused(plugin: CkptIO) -> None:
    for method in (plugin.load_checkpoint, lambda path: plugin.save_checkpoint(checkpoint(2), path)):
        with pytest.raises(ckpt.StorageError, match=r"a root is a local path, or a file://, s3://"):
            method("https://host/a.ckpt")


def test_last_without_a_complete_save_loads_nothing(
    plugin: CkptIO, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with pytest.raises(ckpt.StateError):
        plugin.save_checkpoint(checkpoint(1, it=Unencodable()), tmp_path / "last.ckpt")
    with caplog.at_level(logging.WARNING, "ckpt"):
        assert not plugin.load_checkpoint(tmp_path / "last.ckpt")
    assert "nothing is loaded" in caplog.text


def test_a_link_to_an_incomplete_checkpoint_stands_for_the_one_before(plugin: CkptIO, tmp_path: Path) -> None:
    plugin.save_checkpoint(checkpoint(1), tmp_path / "a.ckpt")
    with pytest.raises(ckpt.StateError):
        plugin.save_checkpoint(checkpoint(2, it=Unencodable()), tmp_path / "b.ckpt")
    os.symlink("b.ckpt", tmp_path / "last.ckpt")
    assert number_of(plugin.load_checkpoint(tmp_path / "last.ckpt")) == 1
    plugin.save_checkpoint(checkpoint(3), tmp_path / "last.ckpt")  # save_last=True instead of "link"
    plugin.teardown()
    assert not (tmp_path / "last.ckpt").is_symlink()
    assert number_of(read_checkpoint(tmp_path / "last.ckpt")) == 3


def test_after_an_exception_the_writer_finishes_alone(plugin: CkptIO, tmp_path: Path) -> None:
    plugin.save_checkpoint(checkpoint(1), tmp_path / "a.ckpt")
    try:
        raise RuntimeError("in fit")
    except RuntimeError:
        plugin.teardown()
    assert number_of(plugin.load_checkpoint(tmp_path / "a.ckpt")) == 1


def test_after_an_exception_a_save_in_flight_is_waited_for_and_no_thread_stays(plugin: CkptIO, tmp_path: Path) -> None:
    before = set(threading.enumerate())
    plugin.save_checkpoint(checkpoint(1), tmp_path / "a.ckpt")
    wait_until(lambda: steps(tmp_path) == [1], "the step")
    with stopped_until_a_load_waits():
        plugin.save_checkpoint(checkpoint(2), tmp_path / "b.ckpt")
        try:
            raise RuntimeError("in fit")
        except RuntimeError:
            plugin.teardown()
    assert _claims_since(before) == []
    assert steps(tmp_path) == [1, 2]
    assert number_of(plugin.load_checkpoint(tmp_path / "b.ckpt")) == 2


def _claims_since(before: set[threading.Thread]) -> list[str]:
    return [thread.name for thread in set(threading.enumerate()) - before if thread.name == "ckpt-claim"]


def progress(ready: int, completed: int) -> dict[str, Any]:
    return {"fit_loop": {"epoch_progress": {"current": {"ready": ready, "completed": completed}}}}


def test_a_checkpoint_after_the_end_of_training_is_published_on_return(plugin: CkptIO, tmp_path: Path) -> None:
    before = set(threading.enumerate())
    plugin.save_checkpoint(checkpoint(1, loops=progress(1, 0)), tmp_path / "epoch=0.ckpt")
    plugin.teardown()  # the Trainer has ended, and calls it no more
    plugin.save_checkpoint(checkpoint(1, loops=progress(1, 1)), tmp_path / "final.ckpt")
    assert _claims_since(before) == []
    assert steps(tmp_path) == [1, 2]


@pytest.mark.parametrize("loads", [False, True])
def test_a_checkpoint_in_another_training_is_not_waited_for(loads: bool, plugin: CkptIO, tmp_path: Path) -> None:
    plugin.save_checkpoint(checkpoint(1), tmp_path / "a.ckpt")
    plugin.teardown()
    if loads:  # Lightning counts no epoch after some resumptions
        plugin.load_checkpoint(tmp_path / "a.ckpt")
    plugin.save_checkpoint(checkpoint(2), tmp_path / "b.ckpt")
    wait_until(lambda: steps(tmp_path) == [1, 2], "the step")
    writer = newest_writer()
    writer.suspend()
    try:
        plugin.save_checkpoint(checkpoint(3, loops=progress(1, int(loads))), tmp_path / "c.ckpt")
        assert steps(tmp_path) == [1, 2]
    finally:
        writer.resume()


def test_after_an_exception_the_next_save_does_not_fence_off_the_writer(plugin: CkptIO, tmp_path: Path) -> None:
    plugin.save_checkpoint(checkpoint(1), tmp_path / "a.ckpt")
    plugin.save_checkpoint(checkpoint(2), tmp_path / "b.ckpt")
    try:
        raise RuntimeError("in fit")
    except RuntimeError:
        plugin.teardown()
    plugin.save_checkpoint(checkpoint(3), tmp_path / "a.ckpt")
    plugin.teardown()
    assert steps(tmp_path) == [2, 3]
    assert [number_of(read_checkpoint(tmp_path / name)) for name in ("a.ckpt", "b.ckpt")] == [3, 2]


def test_with_the_hooks_of_the_restart_wrapper_a_directory_stays_open(plugin: CkptIO, tmp_path: Path) -> None:
    bridge = plugin.bridge
    plugin.save_checkpoint(checkpoint(1), tmp_path / "a.ckpt")
    ckpt.wait_until_written(tmp_path, 1)
    try:
        raise RuntimeError("in fit")
    except RuntimeError:
        plugin.teardown()
    bridge.interrupt()
    assert bridge.interrupted_at is not None
    bridge.recover_from_fault(None)
    assert number_of(plugin.load_checkpoint(tmp_path / "a.ckpt")) == 1


def _save_with_a_replacement(rank: int, world_size: int, folder: Path, replaced: int) -> None:
    from ckpt.integrations.lightning import CkptIO

    plugin = CkptIO(timeout=30)
    bridge = plugin.bridge
    plugin.save_checkpoint_on_all_ranks(checkpoint(10), folder / "a.ckpt")
    ckpt.wait_until_written(folder, 10)
    bridge.recover_from_fault(None, rank)
    if rank == replaced:  # by a process that has seen and saved nothing
        for directory in plugin._directories.values():
            directory.checkpointer.__exit__(SystemExit, SystemExit(), None)
        roots._seen.clear()
        plugin = CkptIO(timeout=30)
    plugin.save_checkpoint_on_all_ranks(checkpoint(20), folder / "b.ckpt")
    plugin.teardown()


@pytest.mark.parametrize("replaced", [0, 1])
def test_all_ranks_save_on_after_one_was_replaced(replaced: int, tmp_path: Path) -> None:
    run_ranks(_save_with_a_replacement, 2, tmp_path, replaced, imports=("ckpt.integrations.lightning",))
    assert steps(tmp_path) == [10, 20]


def test_files_of_others_are_neither_loaded_nor_overwritten(plugin: CkptIO, tmp_path: Path) -> None:
    torch.save(checkpoint(1), tmp_path / "torch.ckpt")
    for method in (plugin.load_checkpoint, lambda path: plugin.save_checkpoint(checkpoint(2), path)):
        with pytest.raises(ckpt.CheckpointError, match=r"torch\.ckpt is not a checkpoint that CkptIO saved"):
            method(tmp_path / "torch.ckpt")
    with pytest.raises(ckpt.CheckpointNotFoundError, match=r"Checkpoint file not found: .*missing.ckpt"):
        plugin.load_checkpoint(tmp_path / "missing.ckpt")


def test_an_object_with_a_state_dict_is_refused(plugin: CkptIO, tmp_path: Path) -> None:
    with pytest.raises(ckpt.StateError, match=r"hyper_parameters/loss is a MSELoss.*ignore=\['loss'\]"):
        plugin.save_checkpoint(checkpoint(1, hyper_parameters={"loss": torch.nn.MSELoss()}), tmp_path / "a.ckpt")


def test_random_number_generators_can_be_added(plugin: CkptIO, tmp_path: Path) -> None:
    plugin.save_checkpoint(checkpoint(1, rng=ckpt.RngState()), tmp_path / "a.ckpt")
    expected = torch.rand(3)
    ckpt.RngState().load_state_dict(plugin.load_checkpoint(tmp_path / "a.ckpt")["rng"])
    assert torch.equal(torch.rand(3), expected)


def test_a_type_that_is_not_registered_is_named(plugin: CkptIO, tmp_path: Path) -> None:
    plugin.save_checkpoint(checkpoint(1, hyper_parameters={"color": Color.RED}), tmp_path / "a.ckpt")
    with pytest.raises(ckpt.StateError, match=r"hyper_parameters/color .* call ckpt\.register_encoder\(Color\) before"):
        plugin.load_checkpoint(tmp_path / "a.ckpt")


def test_options_that_say_what_is_kept_are_refused() -> None:
    with pytest.raises(TypeError, match=r"takes no keep; .* save_top_k"):
        CkptIO(keep=3)


def test_a_module_is_made_from_a_checkpoint(plugin: CkptIO, tmp_path: Path) -> None:
    from tests.ckpt.integrations.programs.lightning_jobs import Model

    model = Model(width=3)
    arguments = {"pytorch-lightning_version": "2.6.0", "hyper_parameters": dict(model.hparams)}
    plugin.save_checkpoint({"state_dict": model.state_dict(), **arguments}, tmp_path / "a.ckpt")
    plugin.teardown()
    loaded = load_from_checkpoint(Model, tmp_path / "a.ckpt")
    assert torch.equal(loaded.hidden.weight, model.hidden.weight)

    class More(Model):
        def __init__(self, width: int) -> None:
            super().__init__(width)
            self.more = torch.nn.Linear(1, 1)

    with pytest.raises(RuntimeError, match=r"Missing key\(s\) in state_dict: .more\.weight"):
        load_from_checkpoint(More, tmp_path / "a.ckpt")
    with pytest.warns(UserWarning, match="not in the checkpoint: .'more.weight', 'more.bias'"):
        other = load_from_checkpoint(More, tmp_path / "a.ckpt", strict=False)
    assert torch.equal(other.hidden.weight, model.hidden.weight)
