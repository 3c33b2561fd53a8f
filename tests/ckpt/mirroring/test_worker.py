"""The worker of a mirror: what reaches it, how its end is told, and what it keeps after that of the trainer."""

from __future__ import annotations

import importlib
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import psutil
import pytest

import ckpt
from ckpt.mirroring import step_copy
from ckpt.saving.retention import PublishedStep
from ckpt.storage.roots import open_root
from tests.ckpt.mirroring.support import job, mirror_of, mirror_process, mirror_processes, state_of
from tests.support import LeakCheck, is_gone
from tests.support.quick_keepers import descendants
from tests.support.template import quick_python

pytestmark = pytest.mark.timeout(120)

_TRAINER = """
import os, signal, sys, torch
import ckpt
from tests.ckpt.mirroring.support import STALLED, mirror_process
root, mirror = sys.argv[1:]
checkpointer = ckpt.Checkpointer(root, mirror=ckpt.Mirror(mirror, bandwidth=STALLED, close_timeout=60))
checkpointer.save({"w": torch.zeros(10)}, 1)
print(mirror_process().pid, flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""


class _Clock:
    """Time that passes by waiting only: an event that is never set."""

    def __init__(self) -> None:
        self.now = 100.0

    def monotonic(self) -> float:
        return self.now

    def wait(self, seconds: float) -> bool:
        self.now += seconds
        return False


def test_no_more_is_read_than_the_bandwidth_allows(monkeypatch: pytest.MonkeyPatch) -> None:
    """As a mean; and a rank that has read little before does not read more for that."""
    clock = _Clock()
    monkeypatch.setattr(step_copy.time, "monotonic", clock.monotonic)
    throttle = step_copy.Throttle(1000.0, clock)  # type: ignore[arg-type]
    begins = []
    for _ in range(4):
        throttle.take(500)
        begins.append(clock.now)
    clock.now += 3600.0
    for _ in range(3):
        throttle.take(2000)
        begins.append(clock.now)
    assert begins == [100.0, 100.5, 101.0, 101.5, 3701.5, 3703.5, 3705.5]


class OddSteps(ckpt.Keep):
    """A policy of a user."""

    def kept(self, steps: Sequence[PublishedStep]) -> set[int]:
        return {each.step for each in steps if each.step % 2}


class Broken(ckpt.Keep):
    """A policy with a bug."""

    def kept(self, steps: Sequence[PublishedStep]) -> set[int]:
        raise ZeroDivisionError(f"of {len(steps)} steps")


def test_a_policy_of_the_user(tmp_path: Path, leak_check: LeakCheck) -> None:
    with job(tmp_path / "nvme", mirror_of(tmp_path / "mirror", keep=OddSteps())) as run:
        run.copy(1, 2, 3, 4)
        run.wait(lambda: open_root(tmp_path / "mirror").steps() == [1, 3, 4])
        assert run.failures == []


def test_a_policy_is_imported_by_the_path_of_the_trainer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As it is when the worker is ordered: the keeper was started with another one."""
    code = "import ckpt\nclass Newest(ckpt.Keep):\n    def kept(self, steps):\n        return set()\n"
    (tmp_path / "late_policy.py").write_text(code)
    monkeypatch.syspath_prepend(tmp_path)
    keep = importlib.import_module("late_policy").Newest()
    with job(tmp_path / "nvme", mirror_of(tmp_path / "mirror", keep=keep)) as run:
        monkeypatch.undo()
        run.checkpointer.warmup(state_of(1))
        run.wait(lambda: "ckpt-keeper" in [child.name() for child in descendants()])
        monkeypatch.syspath_prepend(tmp_path)
        run.copy(1, 2)
        run.wait(lambda: open_root(tmp_path / "mirror").steps() == [2])
        assert run.failures == []
    del sys.modules["late_policy"]


def test_the_last_words_of_a_worker_are_told(tmp_path: Path) -> None:
    with job(tmp_path / "nvme", mirror_of(tmp_path / "mirror", keep=Broken(), every=100)) as run:
        run.copy(1)
        run.wait(lambda: run.failures)
        (failed,) = run.failures
        assert "exited with status 1" in failed.cause
        assert "ZeroDivisionError: of 1 steps" in failed.cause
        assert failed.again


def test_a_worker_outlives_the_keeper(tmp_path: Path, leak_check: LeakCheck) -> None:
    """It goes on, and its death is noticed; the next worker is forked by another keeper."""
    with job(tmp_path / "nvme", mirror_of(tmp_path / "mirror")) as run:
        run.copy(1)
        process = mirror_process()
        keeper = process.parent()
        assert keeper is not None
        keeper.kill()
        run.copy(2)
        assert process.is_running()
        assert run.failures == []
        process.send_signal(signal.SIGKILL)
        run.copy(3)
        assert ["exit status unknown" in failed.cause for failed in run.failures] == [True]
        assert mirror_process().pid != process.pid
    assert run.copied == [1, 2, 3]
    assert mirror_processes() == []


def test_the_output_of_a_trainer_ends_with_it(tmp_path: Path) -> None:
    """What reads it, as `tee` or a launcher, does not wait for the worker, which goes on with its copy."""
    command = [quick_python(), "-c", _TRAINER, str(tmp_path / "nvme"), str(tmp_path / "mirror")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT) as trainer:
        output, _ = trainer.communicate(timeout=40)  # until all have closed it
    worker = psutil.Process(int(output.split()[-1]))
    assert worker.name() == "ckpt-mirror"
    assert os.readlink(f"/proc/{worker.pid}/cwd") == "/"
    worker.kill()
    worker.wait(20)
    assert is_gone(worker.pid)
