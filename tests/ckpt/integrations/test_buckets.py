"""The adapters of frameworks with a root in a bucket: what they have saved there, a new job continues.

These tests are beside others of the same frameworks, so that a process imports each of these once.
"""

from pathlib import Path
from typing import Any

import pytest
import torch

import ckpt
from ckpt.storage.roots import open_root
from tests.ckpt.objects.conftest import bucket, s3_server
from tests.support import run_ranks
from tests.support.frameworks import LIGHTNING, TORCHTITAN, TRANSFORMERS
from tests.support.object_server import Bucket
from tests.support.selection import full_only

__all__ = ["bucket", "s3_server"]  # the fixtures

pytestmark = [
    pytest.mark.timeout(150),
    pytest.mark.filterwarnings("ignore:'set_vital' is deprecated:UserWarning:torchdata"),
]


def _torchtitan(rank: int, world_size: int, url: str, local: str) -> None:
    from tests.ckpt.integrations.programs.torchtitan_job import Job

    first = Job(url, keep_latest_k=2)
    assert not first.manager.load()
    first.train(3)
    assert first.steps() == [2, 3]
    content = first.content()
    first.manager.close()
    second = Job(url, seed=2)
    assert second.manager.load()
    second.loader.state_dict()
    assert second.content() == content
    second.manager.close()
    third = Job(local, seed=3, initial_load_path=f"{url}/checkpoint/step_00000002", initial_load_model_only=False)
    assert third.manager.load()
    assert third.step == 2
    third.manager.close()


@full_only
def test_torchtitan(bucket: Bucket, tmp_path: Path) -> None:
    pytest.importorskip("torchtitan.components.checkpointer", exc_type=ImportError)
    run_ranks(_torchtitan, 2, bucket.url, str(tmp_path), env=bucket.env, timeout=120, imports=TORCHTITAN)
    assert ckpt.load(f"{bucket.url}/checkpoint")["train_state"] == {"step": 3}


def _dcp(rank: int, world_size: int, url: str) -> None:
    import torch.distributed.checkpoint as dcp
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    from ckpt.integrations.dcp import Reader, Writer, latest_step

    def state(factor: float) -> dict[str, Any]:
        full = torch.arange(64.0).reshape(16, 4) * factor
        return {"w": distribute_tensor(full, init_device_mesh("cpu", (world_size,)), [Shard(0)]), "n": int(factor)}

    with Writer(url) as writer:
        for step in (5, 6):
            dcp.save(state(step), checkpoint_id=f"{url}/step_{step}", storage_writer=writer)
            assert writer.checkpoint_id == f"{url}/step_{step:08d}"
    assert latest_step(url) == 6
    for where, expected in ((url, 6), (f"{url}/step_5", 5), (f"{url}/5/", 5)):
        loaded = state(0.0)
        dcp.load(loaded, checkpoint_id=where, storage_reader=Reader())
        assert torch.equal(loaded["w"].full_tensor(), state(expected)["w"].full_tensor())
        assert loaded["n"] == expected
    assert not Reader.validate_checkpoint_id(f"{url}/step_7")
    assert not Reader.validate_checkpoint_id(f"{url}/there-is-nothing")


@pytest.mark.filterwarnings("ignore:torch.distributed is (disabled|unavailable)")
def test_dcp(bucket: Bucket) -> None:
    run_ranks(_dcp, 2, bucket.url, env=bucket.env, timeout=120)
    assert ckpt.load(bucket.url)["n"] == 6


def _accelerate(rank: int, world_size: int, url: str) -> None:
    from accelerate import Accelerator

    from ckpt.integrations.accelerate import Checkpoints

    accelerator = Accelerator(cpu=True)
    model = torch.nn.Linear(8, 8)
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters()))
    with Checkpoints(accelerator, url) as checkpoints:
        assert checkpoints.load_state() is None
        for step in (1, 2):
            accelerator.backward(model(torch.ones(2, 8)).sum())
            optimizer.step()
            checkpoints.save_state(step)
        saved = {name: tensor.clone() for name, tensor in accelerator.unwrap_model(model).state_dict().items()}
        checkpoints.maybe_finalize(blocking=True)
        torch.nn.init.zeros_(accelerator.unwrap_model(model).weight)
        assert checkpoints.load_state() == 2
        assert torch.equal(accelerator.unwrap_model(model).weight, saved["weight"])
        assert checkpoints.checkpointer.all_steps() == [1, 2]


def test_accelerate(bucket: Bucket) -> None:
    pytest.importorskip("accelerate")
    run_ranks(_accelerate, 1, bucket.url, env=bucket.env, timeout=120, imports=TRANSFORMERS)


def _transformers(rank: int, world_size: int, url: str, folder: str) -> None:
    from transformers import TrainingArguments

    from ckpt.integrations.transformers import CkptTrainer
    from tests.ckpt.integrations.programs.accelerate_train import digest, tiny_llama, tokens

    def train(resume: Any, number: int) -> str:
        arguments = TrainingArguments(
            output_dir=f"{folder}/{number}",
            max_steps=6,
            per_device_train_batch_size=4,
            learning_rate=1e-2,
            save_steps=2,
            use_cpu=True,
            report_to=[],
            disable_tqdm=True,
            dataloader_pin_memory=False,
            seed=7,
        )
        torch.manual_seed(7)
        model = tiny_llama()
        with ckpt.Checkpointer(f"{url}/{number}") as checkpointer:
            trainer = CkptTrainer(model, arguments, train_dataset=tokens(40), checkpointer=checkpointer)
            trainer.train(resume)
            assert trainer.checkpoint_root == f"{url}/{number}"
        return digest(model)

    whole = train(None, 1)
    assert train(f"{url}/1/step_00000002", 1) == whole
    assert train(4, 1) == whole


@full_only
def test_transformers(bucket: Bucket, tmp_path: Path) -> None:
    pytest.importorskip("peft")
    pytest.importorskip("transformers")
    run_ranks(_transformers, 1, bucket.url, str(tmp_path), env=bucket.env, timeout=140, imports=TRANSFORMERS)
    with ckpt.open(f"{bucket.url}/1") as checkpoint:
        assert checkpoint.summary["step"] == 6


def _lightning(rank: int, world_size: int, folder: str, ckpt_path: str | None, kill: Any) -> tuple[str, int]:
    import obstore.fsspec

    from tests.ckpt.integrations.programs.lightning_jobs import train

    obstore.fsspec.register("s3")  # ModelCheckpoint itself looks whether names exist
    return train(rank, world_size, "all ranks" if world_size > 1 else "single", folder, ckpt_path, kill)


@pytest.mark.parametrize("world_size", [1, pytest.param(2, marks=full_only)])
def test_lightning(bucket: Bucket, world_size: int) -> None:
    pytest.importorskip("lightning")
    from ckpt.integrations.lightning import read_checkpoint
    from ckpt.integrations.lightning_names import names_in

    env = {**bucket.env, "AWS_ALLOW_HTTP": "true"}

    def run(folder: str, ckpt_path: str | None = None, kill: Any = None) -> Any:
        ended = dict.fromkeys(range(world_size)) if kill else None
        options = {"env": env, "timeout": 140, "returncodes": ended, "imports": LIGHTNING}
        ranks = run_ranks(_lightning, world_size, f"{bucket.url}/{folder}", ckpt_path, kill, **options)
        return ranks[0].value

    whole, epochs = run("whole")
    assert epochs == 4
    names = [each.rpartition("/")[2] for each in names_in(f"{bucket.url}/whole")]
    assert names[-1] == "last.ckpt"
    assert len(names) == 3
    assert len(open_root(f"{bucket.url}/whole").steps()) == 3, "the steps of names that are gone are removed"
    run("killed", kill=(0, 2, "staged"))
    resumed, epochs = run("killed", f"{bucket.url}/killed/last.ckpt")
    assert (resumed, epochs < 4) == (whole, True)
    assert read_checkpoint(f"{bucket.url}/killed/last.ckpt")["epoch"] == 3
    with pytest.raises(ckpt.CheckpointNotFoundError):
        read_checkpoint(f"{bucket.url}/killed/other.ckpt")
