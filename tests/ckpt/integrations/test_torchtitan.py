"""The checkpoint manager for torchtitan, with its containers and data loader, on two FSDP2 ranks."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import ckpt
from tests.support import run_ranks
from tests.support.frameworks import TORCHTITAN
from tests.support.template import quick_python

pytest.importorskip("torchtitan.components.checkpointer", exc_type=ImportError)

from torchtitan.config.override import OverrideConfig, apply_overrides

from tests.ckpt.integrations.programs.torchtitan_job import HfNames, Job, OwnLoader, PicklingLoader

pytestmark = [
    pytest.mark.timeout(150),
    pytest.mark.filterwarnings("ignore:'set_vital' is deprecated:UserWarning:torchdata"),
]


def _values(function: Callable[..., Any], *args: Any, world_size: int = 2) -> list[Any]:
    return [result.value for result in run_ranks(function, world_size, *args, timeout=120, imports=TORCHTITAN)]


def _assert_equal(one: dict[str, Any], other: dict[str, Any]) -> None:
    assert one.keys() == other.keys()
    for key in one:
        assert one[key] == other[key], key


def _resumed(rank: int, world_size: int, folder: str) -> None:
    without = Job(folder, enable=False)
    without.train(9)
    whole = Job(f"{folder}/whole", keep_latest_k=3, last_save_model_only=False)
    assert not whole.manager.load()
    assert whole.train(9, ends=True) == [*range(1, 10)]
    assert whole.steps() == [7, 8, 9]
    whole.manager.close()
    _assert_equal(whole.content(), without.content())

    first = Job(folder, keep_latest_k=3)
    first.train(5)
    content = first.content()
    first.manager.close()
    second = Job(folder, keep_latest_k=3, seed=2)
    assert second.content() != content
    assert second.manager.load()
    dist.barrier()
    second.loader.state_dict()  # the position is set when iteration begins
    assert second.content() == content
    second.train(9)
    _assert_equal(second.content(), without.content())
    second.manager.close()


def test_a_resumed_job_continues_like_one_that_was_not_stopped(tmp_path: Path) -> None:
    run_ranks(_resumed, 2, str(tmp_path), timeout=120, imports=TORCHTITAN)
    with ckpt.open(tmp_path / "checkpoint") as step:
        assert {name.split("/")[0] for name in (*step, *step.values_by_name)} == {
            "model",
            "optimizer",
            "lr_scheduler",
            "dataloader",
            "train_state",
        }
        assert step.values_by_name["dataloader/dp_rank_1"][0]["dataset_state"]["next"] == 18
    for file in (tmp_path / "checkpoint").rglob("*"):
        assert not file.is_file() or b"\x80\x04\x95" not in file.read_bytes(), "no pickle"


def _chosen(rank: int, world_size: int, folder: str) -> None:
    first = Job(folder, interval=2, enable_first_step_checkpoint=True)
    assert first.train(5) == [1, 2, 4]
    first.manager.close()

    reader = Job(folder, load_only=True, seed=2, interval=2, enable_first_step_checkpoint=True)
    assert reader.manager.load(2)
    assert reader.step == 2
    assert reader.train(6, ends=True) == []
    assert reader.steps() == [1, 2, 4]
    with pytest.raises(
        ckpt.CheckpointNotFoundError,
        match=r"--checkpoint\.load_step=3 not found: .*has no published step 3; it has \[1, 2, 4\]",
    ):
        reader.manager.load(3)
    reader.manager.close()

    some = Job(folder, seed=2, exclude_from_loading=["lr_scheduler", "dataloader", "optimizer"])
    before = some.content()
    assert some.manager.load()
    after = some.content()
    assert {key for key in before if before[key] != after[key]} == {"model", "train_state"}
    some.manager.close()
    wrong = Job(folder, exclude_from_loading=["lr_schedulers"])
    with pytest.raises(ValueError, match="names lr_schedulers; the states are train_state, model, optimizer, lr_sch"):
        wrong.manager.load()
    wrong.manager.close()

    off = Job(folder, enable=False)
    assert not off.manager.load()
    assert off.train(1, ends=True) == []
    off.manager.maybe_wait_for_saving()
    off.manager.close()

    branch = Job(folder, interval=3)
    assert branch.manager.load(2)
    assert branch.train(4) == [3]
    assert branch.steps() == [1, 2, 3]
    branch.manager.close()
    branch.manager.close()


def test_steps_and_states_are_chosen(tmp_path: Path) -> None:
    run_ranks(_chosen, 2, str(tmp_path), timeout=120, imports=TORCHTITAN)
    assert sorted(path.name for path in (tmp_path / "checkpoint" / ".superseded").iterdir()) != []


def _save_and_load(rank: int, world_size: int, folder: str) -> None:
    job, other = Job(folder), Job(folder, seed=2)
    for step in (1, 2):
        job.train(step)
        saved = job.weights()
        with torch.no_grad():
            for parameter in job.model.parameters():
                parameter.zero_()
        assert job.manager.load(step)
        assert job.weights() == saved
    job.train(3)
    assert other.manager.load()
    assert other.weights() == job.weights()
    other.manager.close()
    job.manager.close()


def test_what_was_just_saved_is_loaded(tmp_path: Path) -> None:
    run_ranks(_save_and_load, 2, str(tmp_path), timeout=120, imports=TORCHTITAN)
    assert not (tmp_path / "checkpoint" / ".superseded").exists()


def _in_background(rank: int, world_size: int, folder: str) -> None:
    job = Job(folder)
    assert job.manager.save_future is None
    job.train(1)
    future = job.manager.save_future
    assert future is not None
    job.manager.maybe_wait_for_saving()
    assert future.done()
    assert job.manager.save_future is None
    assert job.manager._checkpointer.latest_step() == 1
    job.train(3, ends=True)
    assert job.manager.save_future is None, "the last step is published when `save` returns"
    job.manager.states["train_state"] = object()
    with pytest.raises(ckpt.StateError, match="train_state"):
        job.manager.save(4)
    job.manager.states["train_state"] = job
    try:
        job.manager.save(5)
        raise RuntimeError("the trainer fails")
    except RuntimeError:
        job.manager.close()


def test_saves_run_in_the_background(tmp_path: Path) -> None:
    run_ranks(_in_background, 2, str(tmp_path), timeout=120, imports=TORCHTITAN)
    with ckpt.open(tmp_path / "checkpoint", 5) as step:
        assert "lr_scheduler/last_epoch" in step.values_by_name, "the writers have finished it"


def _last_step(rank: int, world_size: int, folder: str) -> list[float]:
    job = Job(folder, interval=2, export_dtype="bfloat16")
    assert job.train(3, ends=True) == [2, 3]
    job.manager.close()
    again = Job(folder, seed=2)
    with pytest.raises(ckpt.StateMismatchError) as caught:
        again.manager.load()
    assert "of the state do not fit step 3" in str(caught.value)
    assert "checkpoint.load_step" in caught.value.__notes__[-1]
    assert again.manager.load(2)
    again.manager.close()
    return job.weights()


def test_the_last_step_has_the_model_alone(tmp_path: Path) -> None:
    weights = torch.tensor(_values(_last_step, str(tmp_path))[0]).bfloat16()
    with ckpt.open(tmp_path / "checkpoint") as step:
        assert all(name.startswith("model/") and step[name].dtype == "bfloat16" for name in step)
        assert not step.values_by_name
        saved = {name: torch.from_numpy(step[name].read().astype("float32")) for name in step}
    names = ["0.weight", "0.bias", "2.weight", "2.bias"]
    assert torch.equal(torch.cat([saved[f"model/{name}"].flatten() for name in names]).bfloat16(), weights)


def _seed(rank: int, world_size: int, folder: str) -> list[float]:
    job = Job(folder, seed=3)
    assert job.manager.save(0, last_step=True)
    job.manager.close()
    return job.weights()


def _from_seed(rank: int, world_size: int, folder: str) -> list[float]:
    job = Job(folder, load_only=True)
    assert job.manager.load()
    again = Job(folder, seed=2, load_only=True)
    assert again.manager.load(0)
    without = Job(folder, seed=3, enable=False)
    weights = without.weights()
    assert job.weights() == again.weights() == weights
    for each in (job, again, without):
        each.train(2)
        each.manager.close()
    _assert_equal(job.content(), without.content())
    _assert_equal(again.content(), without.content())
    return weights


def test_a_seed_checkpoint_of_one_rank_starts_a_job_of_two(tmp_path: Path) -> None:
    [weights] = _values(_seed, str(tmp_path), world_size=1)
    assert _values(_from_seed, str(tmp_path)) == [weights, weights]


def _initial(rank: int, world_size: int, folder: str) -> None:
    source = Job(f"{folder}/source", seed=2)
    source.train(2)
    at_two = source.weights()
    source.train(3)
    source.manager.close()
    root, path = f"{folder}/source/checkpoint", f"{folder}/target"

    model = Job(path, initial_load_path=root)
    before = model.content()
    assert model.manager.load()
    after = model.content()
    assert after["model"] == source.weights()
    assert {key for key in before if before[key] != after[key]} == {"model"}
    model.train(1)
    model.manager.close()
    resumed = Job(path, initial_load_path=root)
    assert resumed.manager.load()
    assert resumed.step == 1, "its own steps come first"
    resumed.manager.close()

    step = Job(f"{folder}/other", initial_load_path=f"{root}/step_00000002/")
    assert step.manager.load()
    assert step.weights() == at_two
    step.manager.close()

    everything = Job(f"{folder}/other", initial_load_path=root, initial_load_model_only=False)
    assert everything.manager.load()
    assert everything.step == 3
    everything.manager.close()

    wrong = Job(f"{folder}/other", initial_load_path=folder)
    with pytest.raises(ckpt.CheckpointNotFoundError, match="which is neither a folder of steps of ckpt nor one of its"):
        wrong.manager.load()
    wrong.manager.close()


def test_initial_load(tmp_path: Path) -> None:
    run_ranks(_initial, 2, str(tmp_path), timeout=120, imports=TORCHTITAN)


def _initial_hf(rank: int, world_size: int, folder: str, hub: str) -> list[float]:
    job = Job(folder, adapter=HfNames(), initial_load_path=hub, initial_load_in_hf=True)
    assert job.manager.load()
    job.manager.close()
    assets = Job(folder, adapter=HfNames(hub), initial_load_in_hf=True)
    assert assets.manager.load()
    assert assets.weights() == job.weights()
    assets.manager.close()
    for adapter in (HfNames(), None):
        wrong = Job(folder, adapter=adapter, initial_load_in_hf=True)
        with pytest.raises(ValueError, match="needs a directory with safetensors, not None, in"):
            wrong.manager.load()
        wrong.manager.close()
    return job.weights()


def test_initial_load_from_safetensors(tmp_path: Path) -> None:
    save_file = pytest.importorskip("safetensors.torch").save_file
    shapes = {"0.weight": (12, 8), "0.bias": (12,), "2.weight": (8, 12), "2.bias": (8,)}
    tensors = {f"hub.{name}": torch.rand(shape) for name, shape in shapes.items()}
    (tmp_path / "hub").mkdir()
    save_file(tensors, tmp_path / "hub" / "model.safetensors")
    expected = torch.cat([tensor.flatten() for tensor in tensors.values()]).tolist()
    assert _values(_initial_hf, str(tmp_path), str(tmp_path / "hub")) == [expected, expected]


def _train_and_die(rank: int, world_size: int, folder: str, staged: bool) -> None:
    dies = rank == 1 and not staged
    job = Job(folder, interval=2, killed_at=4 if dies else 99)
    assert not job.manager.load()
    job.train(4)
    dist.barrier()
    if staged:
        os.kill(os.getpid(), 9)


def _go_on(rank: int, world_size: int, folder: str) -> tuple[int, dict[str, Any]]:
    job = Job(folder, seed=2, interval=2, killed_at=99)
    job.manager.load()
    begin = job.step
    job.train(6)
    job.manager.close()
    whole = Job(folder, enable=False)
    whole.train(6)
    _assert_equal(job.content(), whole.content())
    return begin, job.content()


@pytest.mark.parametrize("staged", [False, True])
def test_a_kill_during_a_save(tmp_path: Path, staged: bool) -> None:
    """A step that only one rank has staged is not there after a kill; what both have staged is."""
    codes = {0: -9, 1: -9} if staged else {0: None, 1: -9}
    run_ranks(
        _train_and_die,
        2,
        str(tmp_path),
        staged,
        timeout=120,
        imports=TORCHTITAN,
        returncodes=codes,
        survivors_timeout=30,
    )
    for begin, content in _values(_go_on, str(tmp_path)):
        assert begin == (4 if staged else 2)
        assert content["train_state"] == 6


def _own_loader(rank: int, world_size: int, folder: str) -> None:
    job = Job(folder, loader=OwnLoader(rank))
    job.train(2)
    job.manager.close()
    again = Job(folder, loader=OwnLoader(rank))
    assert again.manager.load()
    assert again.loader.numbers.next == 2
    again.manager.close()
    with pytest.raises(TypeError, match="PicklingLoader overrides state_dict of ParallelAwareDataloader"):
        Job(folder, loader=PicklingLoader(rank))


def test_other_data_loaders(tmp_path: Path) -> None:
    run_ranks(_own_loader, 2, str(tmp_path), timeout=120, imports=TORCHTITAN)
    with ckpt.open(tmp_path / "checkpoint") as step:
        own = [step.values_by_name[f"dataloader/rank@rank{rank}"][0] for rank in range(2)]
    assert [state["buffers"]["tokens"] for state in own] == [[0, 0], [1, 1]]


def _other_degree(rank: int, world_size: int, folder: str) -> None:
    job = Job(folder)
    job.train(1)
    job.manager.close()
    smaller = Job(folder, dp=(0, 1))
    with pytest.raises(ckpt.StateMismatchError, match="unexpected: dataloader/dp_rank_1") as caught:
        smaller.manager.load()
    assert "dataloader if the data-parallel degree has changed" in caught.value.__notes__[-1]
    smaller.manager.close()
    smaller = Job(folder, dp=(0, 1), exclude_from_loading=["dataloader"])
    assert smaller.manager.load()
    smaller.manager.close()


def test_another_data_parallel_degree(tmp_path: Path) -> None:
    run_ranks(_other_degree, 2, str(tmp_path), timeout=120, imports=TORCHTITAN)


class _OwnOptimizers:
    """A container that is no torch optimizer, and cannot be iterated over."""

    def __init__(self) -> None:
        self.momentum = torch.ones(2)

    def state_dict(self) -> dict[str, Any]:
        return {"momentum": self.momentum}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.momentum = state_dict["momentum"]


def test_optimizers_need_only_a_state_dict(tmp_path: Path) -> None:
    from ckpt.integrations.torchtitan import CheckpointManager

    optimizers = _OwnOptimizers()
    manager = CheckpointManager(
        CheckpointManager.Config(enable=True, interval=1, last_save_model_only=False),
        dataloader=None,
        model_parts=[torch.nn.Linear(2, 2)],
        optimizers=optimizers,
        lr_schedulers=_OwnOptimizers(),
        states={},
        sd_adapter=None,
        base_folder=str(tmp_path),
    )
    assert manager.save(1, last_step=True)
    optimizers.momentum = torch.zeros(2)
    assert manager.load(1)
    assert optimizers.momentum.tolist() == [1, 1]
    manager.close()


def test_what_is_not_supported_is_refused() -> None:
    from ckpt.integrations.torchtitan import CheckpointManager

    with pytest.raises(ValueError, match="last_save_in_hf is not supported by ckpt: the last save is a step like"):
        CheckpointManager.Config(last_save_in_hf=True)


def test_an_override_replaces_the_manager() -> None:
    from torchtitan.components.checkpointer import CheckpointManager as Dcp
    from torchtitan.config import Configurable

    from ckpt.integrations.torchtitan import CheckpointManager

    @dataclass(kw_only=True, slots=True)
    class JobConfig(Configurable.Config):
        checkpoint: Any

    config = JobConfig(checkpoint=Dcp.Config(enable=True, interval=7, async_mode="async", keep_latest_k=4))
    apply_overrides(OverrideConfig(imports=["ckpt.integrations.torchtitan.use_ckpt"]), config)
    assert type(config.checkpoint) is CheckpointManager.Config
    assert (config.checkpoint.enable, config.checkpoint.interval, config.checkpoint.keep_latest_k) == (True, 7, 4)


def test_without_torchtitan_the_extra_is_named() -> None:
    code = "import sys; sys.modules['torchtitan'] = None; import ckpt.integrations.torchtitan"
    done = subprocess.run([quick_python(), "-c", code], capture_output=True, text=True, timeout=60)
    assert "needs torchtitan 0.3 or newer: pip install 'ckpt-inprocess[torchtitan]'" in done.stderr
