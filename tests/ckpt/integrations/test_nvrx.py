"""`TorchAsyncCheckpoint`: files of torch.save, written beside training. What else there is of its package says so."""

from __future__ import annotations

import os
import resource
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

import ckpt
from ckpt.integrations import nvrx
from ckpt.integrations.nvrx import TorchAsyncCheckpoint
from tests.support import LeakCheck, run_ranks
from tests.support.quick_keepers import descendants

pytestmark = pytest.mark.timeout(120)


def _state(value: float) -> dict[str, Any]:
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.BatchNorm1d(4))
    torch.nn.init.constant_(model[0].weight, value)
    tied = torch.full((64, 64), value)
    return {"model": model.state_dict(), "tied": [tied, (tied, "text")], "step": int(value)}


def _limit_files(processes: set[psutil.Process], limit_bytes: int) -> None:
    """Limit the size of files that these processes write."""
    for process in processes:
        hard = resource.prlimit(process.pid, resource.RLIMIT_FSIZE)[1]
        resource.prlimit(process.pid, resource.RLIMIT_FSIZE, (limit_bytes, hard))


def test_the_file_is_that_of_torch_save(tmp_path: Path, leak_check: LeakCheck) -> None:
    state = _state(3.0)
    with TorchAsyncCheckpoint(timeout_s=60) as saver:
        saver.save(state, tmp_path / "now.pt")
        saver.async_save(state, os.fspath(tmp_path / "later.pt"), _use_new_zipfile_serialization=False)
        for tensor in (*state["model"].values(), state["tied"][0]):
            tensor.zero_()  # the state was copied
        saver.finalize_async_save(blocking=True)
        now, later = (torch.load(tmp_path / name) for name in ("now.pt", "later.pt"))
    assert later["model"].keys() == now["model"].keys()
    assert all(torch.equal(later["model"][name], tensor) for name, tensor in now["model"].items())
    assert later["model"]._metadata == now["model"]._metadata != {}
    first, (second, text) = later["tied"]
    assert (first.unique().tolist(), text, later["step"]) == ([3.0], "text", 3)
    assert first.data_ptr() == second.data_ptr()


def test_a_file_stays_until_the_new_one_is_whole(tmp_path: Path, leak_check: LeakCheck) -> None:
    file, earlier = tmp_path / "x.pt", set(descendants())
    with TorchAsyncCheckpoint(timeout_s=60) as saver:
        saver.async_save(_state(1.0), file)
        saver.finalize_async_save(blocking=True)
        writers = set(descendants()) - earlier
        _limit_files(writers, 1000)
        saver.async_save(_state(2.0), file)
        with pytest.raises(ckpt.WriterError, match="File too large"):
            saver.finalize_async_save(blocking=True)
        assert (os.listdir(tmp_path), torch.load(file)["step"]) == (["x.pt"], 1)
        _limit_files(writers, resource.RLIM_INFINITY)
        saver.async_save(_state(3.0), file)
        saver.async_save(_state(4.0), file)
        saver.finalize_async_save(blocking=True)
        assert (os.listdir(tmp_path), torch.load(file)["step"]) == (["x.pt"], 4)


def test_it_can_be_used_again_after_each_end(tmp_path: Path, leak_check: LeakCheck) -> None:
    saver = TorchAsyncCheckpoint(persistent_queue=False, timeout_s=60)
    ends = [
        lambda: saver.finalize_async_save(blocking=True, terminate=True),
        saver.close,
        lambda: saver.close(abort=True),
        ckpt.abort_nvrx_checkpoint,
    ]
    for step, end in enumerate(ends):
        saver.async_save(_state(step), tmp_path / f"{step}.pt")
        end()
    saver.async_save(_state(9.0), tmp_path / "9.pt")
    saver.close()
    saver.close()
    assert [torch.load(tmp_path / f"{step}.pt")["step"] for step in (0, 1, 9)] == [0, 1, 9]


def _fail_on_rank_1(rank: int, world_size: int, root: Path) -> list[Any]:
    root.joinpath("0").mkdir(exist_ok=True)
    with TorchAsyncCheckpoint(timeout_s=60) as saver:
        saver.async_save(_state(rank), root / str(rank) / "x.pt")
        with pytest.raises(ckpt.WriterError, match=r"rank 1.*No such file or directory"):
            saver.finalize_async_save(blocking=True, no_dist=False)
        saver.async_save(_state(rank), root / f"{rank}.pt")
        saver.finalize_async_save(blocking=rank == 1)  # each rank by itself
    return [torch.load(root / f"{rank}.pt")["step"], sorted(os.listdir(root / "0"))]


def test_a_failure_on_one_rank_is_raised_on_all_that_finalize_together(tmp_path: Path) -> None:
    results = [result.value for result in run_ranks(_fail_on_rank_1, 2, tmp_path, timeout=100)]
    assert results == [[0, ["x.pt"]], [1, ["x.pt"]]]


@pytest.mark.parametrize("target", ["file object", "s3://bucket/x.pt"])
def test_what_is_no_path_of_a_file_is_refused(target: str, tmp_path: Path) -> None:
    with TorchAsyncCheckpoint() as saver, open(tmp_path / "x.pt", "wb") as file:
        given: Any = file if target == "file object" else target
        with pytest.raises(TypeError, match=r"the path of a file; ckpt.Checkpointer\(root\) saves to object stores"):
            saver.async_save({}, given)
        saver.save({"x": 1}, file)


@pytest.mark.parametrize(
    ("name", "instead"),
    [
        ("FileSystemWriterAsync", "schedule its request on a ckpt.AsyncCallsQueue"),
        ("save_state_dict_async_plan", "schedule its request on a ckpt.AsyncCallsQueue"),
        ("save_state_dict_async_finalize", "schedule its request on a ckpt.AsyncCallsQueue"),
        ("CachedMetadataFileSystemReader", "ckpt.integrations.dcp.Reader"),
        ("LocalCheckpointManager", "ckpt.Snapshots(replicas=1)"),
        ("BasicTensorAwareStateDict", "ckpt.Snapshots(replicas=1)"),
        ("CliqueReplicationStrategy", "ckpt.Snapshots(replicas=1)"),
    ],
)
def test_a_name_that_is_not_here_says_what_to_use(name: str, instead: str) -> None:
    with pytest.raises(ImportError) as error:
        exec(f"from ckpt.integrations.nvrx import {name}")
    assert str(error.value).startswith(f"{name} is not in ckpt.integrations.nvrx: ")
    assert instead in str(error.value)
    assert not hasattr(nvrx, "no_name_of_theirs")


@pytest.mark.gpu
def test_tensors_of_a_gpu_are_stored_as_those_of_the_cpu(tmp_path: Path) -> None:
    weight = torch.full((1000,), 7.0, device="cuda")
    state = {"w": weight, "list": [weight, (weight.to(torch.bfloat16), "text")]}
    with TorchAsyncCheckpoint(timeout_s=60) as saver:
        saver.async_save(state, tmp_path / "x.pt")
        weight.zero_()
        saver.finalize_async_save(blocking=True)
    loaded = torch.load(tmp_path / "x.pt")
    found = [loaded["w"], loaded["list"][0], loaded["list"][1][0]]
    assert [(each.device.type, each.unique().tolist()) for each in found] == [("cpu", [7.0])] * 3
    assert found[0].data_ptr() == found[1].data_ptr()
    assert state["w"].is_cuda
