"""Exports beside a training job: they appear whole, follow the newest step, and never fail or delay training."""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from safetensors.torch import load_file

import ckpt
from ckpt import AsyncCallsQueue, Checkpointer, ExportOptions
from ckpt.events import ExportDone
from ckpt.keeper.trainer_side import Keeper
from ckpt.storage.step_source import HeldStep
from tests.support import LeakCheck, is_gone, run_ranks
from tests.support.quick_keepers import descendants
from tests.support.template import quick_python

pytestmark = pytest.mark.timeout(120)


@pytest.fixture(scope="module")
def queue(tmp_path_factory: pytest.TempPathFactory) -> Iterator[AsyncCallsQueue]:
    with AsyncCallsQueue() as queue:
        with Checkpointer(tmp_path_factory.mktemp("first"), queue=queue) as checkpointer:
            checkpointer.save(state(0), 0)  # starts the writer, which stays
        yield queue


def state(step: int) -> dict[str, Any]:
    return {"model": {"w": torch.full((1000,), float(step))}, "step": step}


def exported(directory: Path) -> dict[str, float]:
    """Return one element of each export by its name. Other names in the directory are hidden."""
    names = [name for name in os.listdir(directory) if not name.startswith(".")] if directory.is_dir() else []
    return {name: load_file(directory / name / "model.safetensors")["w"][0].item() for name in sorted(names)}


def exporters() -> list[psutil.Process]:
    found = []
    for child in descendants():
        with contextlib.suppress(psutil.NoSuchProcess):  # also of one that has ended
            if child.name() == "ckpt-export":
                found.append(child)
    return found


def wait_until(condition: Callable[[], object], poll: Callable[[], object] = lambda: None) -> None:
    deadline = time.monotonic() + 40
    while not condition():
        assert time.monotonic() < deadline
        poll()
        time.sleep(0.02)


def exporter() -> psutil.Process:
    """Return the one worker that exports, as soon as it has been forked."""
    wait_until(exporters)
    (process,) = exporters()
    return process


def gate(monkeypatch: pytest.MonkeyPatch, folder: Path, module: str, process: str) -> Path:
    """Have processes of this name wait before they import a module, and return the file that lets them go on.

    As soon as one waits, there is a file `waits` beside it.
    """
    (folder / "hook").mkdir()
    go = folder / "go"
    code = f"""
import os, sys, time
class Gate:
    def find_spec(self, name, path=None, target=None):
        if name == {module!r} and open("/proc/self/comm").read().strip() == {process!r}:
            open({str(folder / "waits")!r}, "w").close()
            while not os.path.exists({str(go)!r}):
                time.sleep(0.02)
sys.meta_path.insert(0, Gate())
"""
    (folder / "hook" / "sitecustomize.py").write_text(code)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(folder / "hook"), os.environ.get("PYTHONPATH", "")]))
    return go


@pytest.fixture
def stopped(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A file, without which exporters wait before they read anything."""
    return gate(monkeypatch, tmp_path, "ckpt.exporting.export", "ckpt-export")


def test_multiples_are_exported(tmp_path: Path, queue: AsyncCallsQueue, leak_check: LeakCheck) -> None:
    options = ExportOptions(tmp_path / "hf", every=2, format="hf", config={"model_type": "llama"})
    with Checkpointer(tmp_path / "root", queue=queue, export=options) as checkpointer:
        for step in range(1, 6):
            checkpointer.save(state(step), step)
            wait_until(lambda: not exporters(), checkpointer.maybe_finalize)
    assert exported(tmp_path / "hf") == {"step_00000002": 2, "step_00000004": 4}
    assert (tmp_path / "hf" / "step_00000004" / "config.json").exists()
    assert sorted(os.listdir(tmp_path / "hf")) == ["step_00000002", "step_00000004"]


def test_a_newer_step_replaces_the_one_that_waits(
    tmp_path: Path, queue: AsyncCallsQueue, stopped: Path, caplog: pytest.LogCaptureFixture
) -> None:
    options = ExportOptions(tmp_path / "out", every=1, prefix="model")
    with Checkpointer(tmp_path / "root", queue=queue, export=options) as checkpointer:
        for step in range(1, 5):
            checkpointer.save(state(step), step)
        assert exporter().nice() == min(19, psutil.Process().nice() + 15)
        assert not (tmp_path / "out").exists()
        stopped.touch()
    assert exported(tmp_path / "out") == {"step_00000001": 1, "step_00000004": 4}
    assert "step 2 is not exported: step 3 is due" in caplog.text
    assert "step 3 is not exported: step 4 is due" in caplog.text


def test_retention_keeps_a_step_until_it_is_exported(tmp_path: Path, queue: AsyncCallsQueue, stopped: Path) -> None:
    options = ExportOptions(tmp_path / "out", every=2, prefix="model")
    done: list[int] = []

    def sink(event: Any) -> None:
        if isinstance(event, ExportDone):
            done.append(event.step)

    with (
        ckpt.observe(sink),
        Checkpointer(tmp_path / "root", queue=queue, export=options, keep=1) as checkpointer,
    ):
        for step in range(1, 6):
            checkpointer.save(state(step), step)
        assert checkpointer.all_steps() == [2, 4, 5]
        stopped.touch()
        wait_until(lambda: done == [2, 4], checkpointer.maybe_finalize)
        checkpointer.save(state(7), 7)
        assert checkpointer.all_steps() == [7]
    assert exported(tmp_path / "out") == {"step_00000002": 2, "step_00000004": 4}


def test_an_exporter_that_is_killed_leaves_nothing(
    tmp_path: Path, queue: AsyncCallsQueue, stopped: Path, caplog: pytest.LogCaptureFixture
) -> None:
    options = ExportOptions(tmp_path / "out", every=1, prefix="model")
    with Checkpointer(tmp_path / "root", queue=queue, export=options) as checkpointer:
        checkpointer.save(state(1), 1)
        wait_until(stopped.with_name("waits").exists)  # one that has not begun is replaced
        exporter().send_signal(signal.SIGKILL)
        wait_until(lambda: "killed by signal 9" in caplog.text, checkpointer.maybe_finalize)
        stopped.touch()
        checkpointer.save(state(2), 2)
    assert exported(tmp_path / "out") == {"step_00000002": 2}
    assert os.listdir(tmp_path / "out") == ["step_00000002"]


def test_errors_are_logged(tmp_path: Path, queue: AsyncCallsQueue, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "file").write_text("")
    options = ExportOptions(tmp_path / "file" / "out", every=1)
    with Checkpointer(tmp_path / "root", queue=queue, export=options) as checkpointer:
        checkpointer.save(state(1), 1)
    assert "the export of step 1" in caplog.text
    assert "NotADirectoryError" in caplog.text
    assert "Traceback (most recent call last)" in caplog.text
    assert [record.levelno for record in caplog.records if "export" in record.message] == [logging.ERROR]


@pytest.mark.parametrize("how", ["close", "exception", "timeout"])
def test_an_exporter_that_hangs_ends_with_the_checkpointer(
    tmp_path: Path, queue: AsyncCallsQueue, stopped: Path, leak_check: LeakCheck, how: str
) -> None:
    seconds = 1 if how == "timeout" else 3600
    options = ExportOptions(tmp_path / "out", every=1, timeout=timedelta(seconds=seconds))
    checkpointer = Checkpointer(tmp_path / "root", queue=queue, export=options, timeout=timedelta(seconds=5))
    checkpointer.save(state(1), 1)
    if how == "timeout":
        wait_until(lambda: not exporters(), checkpointer.maybe_finalize)
    if how == "exception":
        with pytest.raises(KeyError), checkpointer:
            raise KeyError
    begin = time.monotonic()
    checkpointer.close()
    assert time.monotonic() - begin < 30
    assert not exporters()
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("how", ["close", "exception"])
def test_storage_that_does_not_answer_at_the_end(
    tmp_path: Path,
    queue: AsyncCallsQueue,
    stopped: Path,
    leak_check: LeakCheck,
    monkeypatch: pytest.MonkeyPatch,
    how: str,
) -> None:
    """The processes end nevertheless. The thread that waits for the storage, and is given up, uses no keeper."""
    release, waiting, answers = HeldStep.close, threading.Event(), threading.Event()
    pump, users = Keeper.pump, set[threading.Thread]()

    def close(step: HeldStep) -> None:
        waiting.set()
        answers.wait(60)
        release(step)

    def noted(keeper: Keeper) -> None:
        users.add(threading.current_thread())
        pump(keeper)

    options = ExportOptions(tmp_path / "out", every=1)
    checkpointer = Checkpointer(tmp_path / "root", queue=queue, export=options, timeout=timedelta(seconds=5))
    checkpointer.save(state(1), 1)
    worker = exporter()
    keeper = worker.parent()
    assert keeper is not None
    monkeypatch.setattr(HeldStep, "close", close)
    monkeypatch.setattr(Keeper, "pump", noted)
    begin = time.monotonic()
    if how == "close":
        checkpointer.close()
    else:
        with pytest.raises(KeyError), checkpointer:
            raise KeyError
    assert time.monotonic() - begin < 30
    assert waiting.is_set()
    assert is_gone(worker.pid)
    wait_until(lambda: is_gone(keeper.pid))
    answers.set()
    assert users == {threading.current_thread()}


_TRAINER = """
import os, signal, sys, torch
import ckpt
from tests.ckpt.exporting.test_background import exporters, wait_until
root, out = sys.argv[1:]
checkpointer = ckpt.Checkpointer(root, export=ckpt.ExportOptions(out, every=1, format="torch"))
checkpointer.save({"w": torch.zeros(10)}, 1)
wait_until(exporters)
print(exporters()[0].pid, flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_the_output_of_a_trainer_ends_with_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What reads it, as `tee` or a launcher, does not wait for the export, which ends by itself."""
    go = gate(monkeypatch, tmp_path, "ckpt.formats.torch_file", "ckpt-export")
    command = [quick_python(), "-c", _TRAINER, str(tmp_path / "root"), str(tmp_path / "out")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT) as trainer:
        try:
            output, _ = trainer.communicate(timeout=40)  # until all have closed it
            worker = psutil.Process(int(output.split()[-1]))
            assert worker.name() == "ckpt-export"
        finally:
            go.touch()
    wait_until(lambda: is_gone(worker.pid))
    assert os.listdir(tmp_path / "out") == ["step_00000001.pt"]


def test_an_export_that_is_there_is_replaced(tmp_path: Path, queue: AsyncCallsQueue) -> None:
    with Checkpointer(tmp_path / "before", queue=queue) as checkpointer:
        checkpointer.save(state(1), 3)
    for form, name in (("safetensors", "step_00000003"), ("torch", "step_00000003.pt")):
        (tmp_path / form).mkdir()
        ckpt.export(tmp_path / "before", tmp_path / form / name, form, prefix="model")  # type: ignore[arg-type]
        options = ExportOptions(tmp_path / form, every=1, format=form, prefix="model")  # type: ignore[arg-type]
        with Checkpointer(tmp_path / f"after_{form}", queue=queue, export=options) as checkpointer:
            checkpointer.save(state(2), 3)
        assert os.listdir(tmp_path / form) == [name]
    assert exported(tmp_path / "safetensors") == {"step_00000003": 2}
    assert torch.load(tmp_path / "torch" / "step_00000003.pt", weights_only=True)["w"][0] == 2


def test_a_checkpoint_is_never_replaced_by_an_export(
    tmp_path: Path, queue: AsyncCallsQueue, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "link").symlink_to(tmp_path / "own")
    for directory in ("own", "link"):
        with pytest.raises(ValueError, match="another directory"):
            Checkpointer(tmp_path / "own", queue=queue, export=ExportOptions(tmp_path / directory, every=1))
    with Checkpointer(tmp_path / "other", queue=queue) as other:
        other.save(state(5), 3)
    options = ExportOptions(tmp_path / "other", every=1)
    with Checkpointer(tmp_path / "own", queue=queue, export=options) as checkpointer:
        checkpointer.save(state(1), 3)
    assert "is a checkpoint, which no export replaces" in caplog.text
    assert ckpt.load(tmp_path / "other")["step"] == 5


@pytest.mark.parametrize(
    ("arguments", "says"),
    [({"every": 0}, "every"), ({"every": 1, "timeout": timedelta(0)}, "timeout"), ({"every": 1, "format": "x"}, "hf")],
)
def test_invalid_options(tmp_path: Path, arguments: dict[str, Any], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        ExportOptions(tmp_path, **arguments)


def on_ranks(rank: int, world_size: int, folder: Path) -> int:
    options = ExportOptions(folder / "out", every=1, prefix="model")
    seen: list[Any] = []
    with ckpt.observe(seen.append), Checkpointer(folder / "root", export=options) as checkpointer:
        checkpointer.save(state(1), 1)
        checkpointer.close()
    return sum(isinstance(event, ExportDone) for event in seen)


def test_only_rank_0_exports(tmp_path: Path) -> None:
    assert [result.value for result in run_ranks(on_ranks, 2, tmp_path)] == [1, 0]
    assert exported(tmp_path / "out") == {"step_00000001": 1}
