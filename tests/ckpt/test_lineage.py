"""A step records where it comes from: restart index, metrics of the user, versions; and readers check them."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

import ckpt
import inprocess
from ckpt import CheckpointCorruptError, StateError
from ckpt.storage.documents import encode_root
from tests.support import run_ranks
from tests.support.saves import save_here
from tools.inspect_ckpt.__main__ import main as inspect_ckpt

_METRICS: dict[str, Any] = {"loss": 0.25, "tokens": 10**12, "best": True, "eval": {"name": "é", "by": [1, None]}}


def _summary(root: Path, step: int) -> Any:
    with ckpt.open(root / f"step_{step:08d}") as opened:
        return opened.summary


def test_metrics_and_versions(tmp_path: Path) -> None:
    metrics = json.loads(json.dumps(_METRICS))
    with ckpt.Checkpointer(tmp_path) as checkpointer:
        save_here(checkpointer, {"a": torch.ones(3)}, 1)
        request = checkpointer.save_request({"a": torch.ones(3)}, 2, metrics=metrics)
        metrics["eval"]["by"].append("later")
        checkpointer.queue.schedule_async_request(request)
        checkpointer.async_save({"a": torch.ones(3)}, 3, metrics={"loss": 0.5})
        checkpointer.maybe_finalize(blocking=True)
    assert [_summary(tmp_path, step)["metrics"] for step in (1, 2, 3)] == [{}, _METRICS, {"loss": 0.5}]
    summary = _summary(tmp_path, 2)
    assert summary["versions"]["torch"] == torch.__version__
    assert summary["versions"].keys() == {"ckpt", "torch"}
    assert summary["restart"] is None


def test_saves_in_flight_continue_each_other_after_a_restore(tmp_path: Path) -> None:
    """The trainer finalizes none of them before all are scheduled."""
    state = {"a": torch.ones(3)}
    with ckpt.Checkpointer(tmp_path) as checkpointer:
        save_here(checkpointer, state, 10)
        save_here(checkpointer, state, 40)
    with ckpt.Checkpointer(tmp_path, staging=ckpt.Staging(slots=3)) as checkpointer:
        checkpointer.restore(state, 10)
        for step in (20, 30, 35):
            checkpointer.async_save(state, step)
        checkpointer.maybe_finalize(blocking=True)
        assert checkpointer.all_steps() == [10, 20, 30, 35]
    continued = {step: (_summary(tmp_path, step)["continues"] or {}).get("step") for step in (10, 20, 30, 35)}
    assert continued == {10: None, 20: 10, 30: 20, 35: 30}


def test_show_prints_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with ckpt.Checkpointer(tmp_path) as checkpointer:
        save_here(checkpointer, {"a": torch.ones(3)}, 1, metrics=_METRICS)
    assert inspect_ckpt(["show", str(tmp_path / "step_00000001")]) == 0
    shown = capsys.readouterr().out
    assert "loss = 0.25" in shown
    assert f"torch {torch.__version__}" in shown


def test_those_of_rank_0_count(tmp_path: Path) -> None:
    def main(rank: int, world_size: int) -> Any:
        with ckpt.Checkpointer(tmp_path) as checkpointer:
            save_here(checkpointer, {"a": torch.ones(3)}, 1, metrics={"rank": rank})

    run_ranks(main, 2)
    assert _summary(tmp_path, 1)["metrics"] == {"rank": 0}


def _itself() -> dict[str, Any]:
    metrics: dict[str, Any] = {}
    metrics["again"] = metrics
    return metrics


@pytest.mark.parametrize(
    ("metrics", "says"),
    [
        ([1], "metrics must be a dict, not a list"),
        ({"loss": torch.ones(1)}, r"metrics\['loss'\] is a Tensor"),
        ({"loss": np.ones(2)}, r"metrics\['loss'\] is a ndarray"),
        ({"loss": torch.ones((), dtype=torch.complex64)}, r"metrics\['loss'\] is a Tensor"),
        ({"loss": torch.ones((), device="meta")}, r"metrics\['loss'\] is a Tensor without a value"),
        ({"a": [b""]}, r"metrics\['a'\]\[0\] is a bytes"),
        ({1: 2}, "the key 1 is a int"),
        ({"a": (1, 2)}, "is a tuple"),
        ({"a": 1 << 64}, "more than 64 bits"),
        ({"a": "\ud800"}, "is not valid Unicode"),
        ({"a": "x" * 65536}, "and may have 65535"),
        (_itself(), "nested deeper than 32"),
    ],
)
def test_metrics_that_are_not_json(tmp_path: Path, metrics: Any, says: str) -> None:
    with ckpt.Checkpointer(tmp_path) as checkpointer:
        with pytest.raises(StateError, match=says):
            save_here(checkpointer, {"a": torch.ones(3)}, 1, metrics=metrics)
        save_here(checkpointer, {"a": torch.ones(3)}, 1, metrics={"fine": 1})
        assert checkpointer.all_steps() == [1]


def test_scalars_of_torch_and_numpy_are_numbers(tmp_path: Path) -> None:
    """A loss is mostly one of these, and the save that refused it ended the training."""
    metrics = {
        "loss": torch.tensor(0.5, requires_grad=True),
        "seen": torch.tensor(7),
        "best": np.bool_(True),
        "by": [np.float32(0.25), np.float64(0.125), np.int64(3), np.array(2.0), {"x": torch.tensor(math.nan)}],
    }
    with ckpt.Checkpointer(tmp_path, keep=ckpt.Best("loss")) as checkpointer:
        save_here(checkpointer, {"a": torch.ones(3)}, 1, metrics=metrics)
        for step, loss in ((2, torch.tensor(math.nan)), (3, np.float32(2.0))):
            save_here(checkpointer, {"a": torch.ones(3)}, step, metrics={"loss": loss})
        assert checkpointer.all_steps() == [1, 3]
    recorded = _summary(tmp_path, 1)["metrics"]
    assert recorded == {"loss": 0.5, "seen": 7, "best": True, "by": [0.25, 0.125, 3, 2.0, {"x": "NaN"}]}
    assert isinstance(metrics["loss"], torch.Tensor)


def test_numbers_that_json_does_not_have_are_recorded_as_strings(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Training that diverges is saved on, and said to do so once; by such a number no step is the best one."""
    nan, infinity = float("nan"), float("inf")
    with ckpt.Checkpointer(tmp_path, keep=ckpt.Best("loss", 1)) as checkpointer:
        for step, loss in ((1, 2.0), (2, nan), (3, -infinity), (4, infinity), (5, 3.0)):
            save_here(checkpointer, {"a": torch.ones(3)}, step, metrics={"loss": loss, "all": {"x": [loss, None]}})
        assert checkpointer.all_steps() == [1, 5]
        metrics = {"loss": nan, "other": [-infinity]}
        save_here(checkpointer, {"a": torch.ones(3)}, 6, metrics=metrics)
    assert metrics["other"] == [-infinity]
    assert _summary(tmp_path, 6)["metrics"] == {"loss": "NaN", "other": ["-Infinity"]}
    said = [record.message for record in caplog.records if "not finite" in record.message]
    assert [sum(f"{name!r}" in text for text in said) for name in ("loss", "all", "other")] == [1, 1, 1]


def test_invalid_metrics_on_one_rank_give_up_that_save_alone(tmp_path: Path) -> None:
    def main(rank: int, world_size: int) -> Any:
        with ckpt.Checkpointer(tmp_path) as checkpointer:
            with pytest.raises(ckpt.CheckpointError, match=r"metrics\['loss'\] is a bytes"):
                checkpointer.save({"a": torch.ones(3)}, 1, metrics={"loss": b"" if rank else 1.0})
            dist.barrier()
            checkpointer.save({"a": torch.ones(3)}, 1, metrics={"loss": 1.0})
            return checkpointer.all_steps()

    assert [result.value for result in run_ranks(main, 2)] == [[1], [1]]


def test_the_restart_index(tmp_path: Path) -> None:
    def main(rank: int, world_size: int) -> Any:
        def train(call: inprocess.CallWrapper | None = None) -> None:
            assert call is not None
            with ckpt.Checkpointer(tmp_path) as checkpointer:
                save_here(checkpointer, {"a": torch.ones(3)}, call.iteration)
            if call.iteration < 2:
                raise RuntimeError("again")

        inprocess.Wrapper(store_kwargs={"timeout": timedelta(seconds=30)})(train)()
        with ckpt.Checkpointer(tmp_path) as checkpointer:
            save_here(checkpointer, {"a": torch.ones(3)}, 3)

    run_ranks(main, 1, init_process_group=False)
    assert [_summary(tmp_path, step)["restart"] for step in range(4)] == [0, 1, 2, None]


@pytest.mark.parametrize(
    "forge",
    [
        lambda summary: summary.pop("restart"),
        lambda summary: summary.update(restart=-1),
        lambda summary: summary.update(restart="1"),
        lambda summary: summary.update(metrics=[1]),
        lambda summary: summary.update(metrics=None),
        lambda summary: summary.update(versions={"torch": 2}),
        lambda summary: summary.update(versions=["torch"]),
    ],
)
def test_readers_check_it(tmp_path: Path, forge: Callable[[dict[str, Any]], object]) -> None:
    with ckpt.Checkpointer(tmp_path) as checkpointer:
        save_here(checkpointer, {"a": torch.ones(3)}, 1)
    root = tmp_path / "step_00000001" / "zarr.json"
    document = json.loads(root.read_bytes())
    del document["attributes"]["ckpt"]["crc32c"]
    forge(document["attributes"]["ckpt"])
    root.write_bytes(encode_root(document))
    with pytest.raises(CheckpointCorruptError, match=r"zarr\.json does not describe a checkpoint"):
        ckpt.open(root.parent)
