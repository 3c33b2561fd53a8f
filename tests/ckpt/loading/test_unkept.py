"""What is restored into dicts and lists that were made for the call is lost, and a restore says so."""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import ckpt
from tests.support.saves import save_here

counted = pytest.mark.skipif(sys.version_info >= (3, 14), reason="references are borrowed, and not counted")


class Job:
    def __init__(self) -> None:
        self.model = torch.nn.Linear(2, 2)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1, momentum=0.9)
        self.scheduler = torch.optim.lr_scheduler.StepLR(self.optimizer, 1)
        self.history: list[int] = []
        self.epoch = 0

    def state(self) -> dict[str, Any]:
        scheduler = self.scheduler.state_dict()
        return {"model": self.model, "sched": scheduler, "epoch": self.epoch, "history": self.history}


@pytest.fixture
def reader(tmp_path: Path) -> Any:
    job = Job()
    job.optimizer.step()
    job.scheduler.step()
    job.epoch, job.history = 3, [1, 2]
    with ckpt.Checkpointer(tmp_path) as checkpointer:
        save_here(checkpointer, job.state(), 20)
    with ckpt.Checkpointer(tmp_path, read_only=True) as reader:
        yield reader


@counted
@pytest.mark.parametrize(
    "restore",
    [
        lambda reader, job: reader.restore(
            {
                "model": job.model,
                "sched": job.scheduler.state_dict(),
                "epoch": job.epoch,
                "history": job.history,
            }
        ),
        lambda reader, job: reader.restore(state=job.state()),
    ],
    ids=["inline", "returned by a function"],
)
def test_what_nothing_keeps_is_named(
    reader: Any, caplog: pytest.LogCaptureFixture, restore: Callable[[Any, Job], Any]
) -> None:
    job = Job()
    restore(reader, job)
    assert (job.epoch, job.scheduler.last_epoch, job.history) == (0, 0, [])
    (said,) = [record.message for record in caplog.records]
    assert said.startswith(
        "restored from step 20, and lost: epoch, history, sched/_last_lr, sched/_step_count, sched/last_epoch. "
    )
    assert "epoch = state['epoch']" in said


def _variable(reader: Any, job: Job) -> None:
    state = job.state()
    assert reader.restore(state) == 20
    assert (state["epoch"], state["sched"]["last_epoch"]) == (3, 1)


def _kept_inside(reader: Any, job: Job) -> None:
    """The outer dict is gone, and the inner ones are not."""
    scheduler, values = job.scheduler.state_dict(), {"epoch": 0}
    reader.restore({"model": job.model, "sched": scheduler}, only=["model", "sched"])
    assert scheduler["last_epoch"] == 1
    del values


def _objects(reader: Any, job: Job) -> None:
    reader.restore({"model": job.model, "sched": job.scheduler}, only=["model", "sched"])
    assert job.scheduler.last_epoch == 1


def _equal(reader: Any, job: Job) -> None:
    """Nothing is lost that is there already."""
    reader.restore({"model": job.model, "epoch": 3, "history": [1, 2]}, only=["model", "epoch", "history"])


def _attribute(reader: Any, job: Job) -> None:
    job.kept = job.state()  # type: ignore[attr-defined]
    reader.restore(job.kept)  # type: ignore[attr-defined]


def _arguments(reader: Any, job: Job) -> None:
    arguments = (job.state(),)
    reader.restore(*arguments)
    assert arguments[0]["epoch"] == 3


def _own_class(reader: Any, job: Job) -> None:
    class State(dict[str, Any]):
        pass

    state = State(job.state())
    held = weakref.ref(state)
    reader.restore(state)
    assert held() is state


def _tensors(reader: Any, job: Job) -> None:
    """They are those of the module, whichever dict has them."""
    reader.restore({"model": job.model.state_dict()}, only=["model"])


@pytest.mark.parametrize(
    "restore",
    [_variable, _kept_inside, _objects, _equal, _attribute, _arguments, _own_class, _tensors],
)
def test_nothing_is_said_of_what_is_kept(
    reader: Any, caplog: pytest.LogCaptureFixture, restore: Callable[[Any, Job], None]
) -> None:
    restore(reader, Job())
    assert "lost" not in caplog.text


@counted
def test_new_items_are_named_too(reader: Any, caplog: pytest.LogCaptureFixture) -> None:
    reader.restore({"sched": {}}, only=["sched"])
    assert "lost: sched" in caplog.text
