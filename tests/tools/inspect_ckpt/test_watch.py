"""`watch`: what one look shows, that it only reads and stays cheap, and the live view beside a job."""

from __future__ import annotations

import os
import pty
import re
import select
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from ckpt import Checkpointer
from ckpt.ranks.failure import Failure
from ckpt.storage.commit import PendingSave
from ckpt.storage.names import SaveId, pack_file
from ckpt.storage.root import CheckpointRoot
from tests.support import launch_ranks
from tests.support.saves import save_here
from tests.tools.inspect_ckpt import states
from tests.tools.inspect_ckpt.commands import REPOSITORY, Commands
from tools.inspect_ckpt.live import RootWatch


@pytest.fixture
def root(saved: dict[str, Path], tmp_path: Path) -> Path:
    """A copy of the root that two ranks saved to."""
    return Path(shutil.copytree(saved["two"], tmp_path / "root"))


def begun(root: Path, step: int, world_size: int, plan: str = "other") -> PendingSave:
    """Begin a save as the owner of the root, of which nothing is written."""
    checkpoints = CheckpointRoot(str(root))
    pending = PendingSave(checkpoints, SaveId(step, checkpoints.ownership.newest(), "0123456789abcdef"))
    pending.begin(world_size, plan)
    return pending


def write_pack(pending: PendingSave, rank: int, nbytes: int) -> None:
    file = Path(pending.path) / pack_file(rank, 0)
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_bytes(bytes(nbytes))


def tree(root: Path) -> dict[str, tuple[int, int]]:
    """Return the time of change of every file and directory, and its size."""
    paths = [root, *root.rglob("*")]
    return {str(path): (path.lstat().st_mtime_ns, path.lstat().st_size) for path in paths}


def test_once_shows_steps_space_and_owner(run: Commands, root: Path) -> None:
    run("pin", root, "3")
    text = run("watch", root, "--once")
    assert "owner: job has ended" in text
    assert re.search(r"free, room for [\d,]+ more steps", text)
    assert "published: 2 steps" in text
    assert text.index("\n   4 ") < text.index("\n   3 ")
    assert "pinned" in text
    assert "no save in flight" in text
    document = run.json("watch", root, "--once")
    assert [line["step"] for line in document["newest"]] == [4, 3]
    assert document["newest"][0]["ranks"] == 2
    assert document["owner"]["state"] == "ended"


def test_a_root_that_is_not_there(run: Commands, tmp_path: Path) -> None:
    assert "does not exist yet" in run.refused("watch", tmp_path / "later", "--once")
    assert "no step and no save" in run.refused("watch", tmp_path, "--once")
    (tmp_path / "file").touch()
    assert "is a file" in run.refused("watch", tmp_path / "file", "--once")
    assert "--once" in run.refused("watch", tmp_path)
    assert "seconds" in run.refused("watch", tmp_path, "--interval", "0")


def test_a_save_in_flight(run: Commands, root: Path) -> None:
    pending = begun(root, 5, 2)
    write_pack(pending, 0, 3000)
    document = run.json("watch", root, "--once")
    (save,) = document["pending"]
    assert (save["step"], save["ranks"], save["parts"], save["about"]) == (5, 2, 0, True)
    assert [rank["rank"] for rank in save["slowest"]] == [1, 0]
    assert save["written"] == 3000
    pending.write_part(0, {})
    text = run("watch", root, "--once")
    assert "1 of 2 ranks done" in text
    assert re.findall(r"^  rank (\d+)", text, re.MULTILINE) == ["1"]


def test_the_plan_says_what_each_rank_will_write(run: Commands, root: Path) -> None:
    step = root / "step_00000004"
    pending = begun(root, 5, 2, plan_of(step))
    before = os.path.getsize(step / pack_file(1, 0))
    write_pack(pending, 1, before // 2)
    (save,) = run.json("watch", root, "--once")["pending"]
    assert not save["about"]
    ranks = {each["rank"]: each for each in save["slowest"]}
    total = sum(path.stat().st_size for path in (step / "packs").rglob("rank_*"))
    assert save["bytes"] == total
    assert 0 < ranks[1]["written"] <= ranks[1]["bytes"]
    assert ranks[0]["written"] == 0


def test_files_of_an_earlier_save_do_not_count(run: Commands, root: Path) -> None:
    pending = begun(root, 5, 2)
    write_pack(pending, 0, 3000)
    os.utime(Path(pending.path) / pack_file(0, 0), (1e9, 1e9))  # recycled
    assert run.json("watch", root, "--once")["pending"][0]["written"] == 0


def test_what_was_abandoned_says_why(run: Commands, root: Path) -> None:
    for step in range(5, 10):
        checkpoints = CheckpointRoot(str(root))
        save = SaveId(step, checkpoints.ownership.newest(), f"{step:016d}")
        PendingSave(checkpoints, save).abandon(Failure(1, "StorageError", f"disk {step} is full" + "x" * 1000))
    text = run("watch", root, "--once")
    assert text.count("StorageError") == 3
    assert "rank 1: StorageError: disk" in text
    assert all(len(line) < 400 for line in text.splitlines())


def test_a_look_changes_nothing(run: Commands, root: Path) -> None:
    write_pack(begun(root, 5, 2), 0, 3000)
    before = tree(root)
    run("watch", root, "--once")
    assert tree(root) == before


def test_thousands_of_ranks_are_cheap(run: Commands, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pending = begun(root, 5, 5000)
    for rank in range(2000):
        path = Path(pending.path) / f"parts/{rank // 512:03d}/rank_{rank:05d}.json"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
    watch = RootWatch(str(root))
    watch.look()
    calls = 0

    def counted(function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **options: Any) -> Any:
            nonlocal calls
            calls += 1
            return function(*arguments, **options)

        return call

    with monkeypatch.context() as patched:
        for name in ("stat", "lstat", "open", "listdir", "scandir"):
            patched.setattr(os, name, counted(getattr(os, name)))
        (save,) = watch.look().pending
    assert calls < 1500
    assert (save.parts, save.looked_at, len(save.slowest)) == (2000, 1000, 8)
    assert len(run("watch", root, "--once").splitlines()) < 30
    assert "of 1,000 ranks looked at; 3,000 in all" in run.out


def test_steps_and_saves_that_vanish(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    watch = RootWatch(str(root))
    assert len(watch.look().newest) == 2
    shutil.rmtree(root / "step_00000003")
    gone = SaveId(9, 1, "0" * 16)
    monkeypatch.setattr(CheckpointRoot, "steps", lambda self: [3, 4])
    monkeypatch.setattr(CheckpointRoot, "pending", lambda self: [gone])
    monkeypatch.setattr(CheckpointRoot, "abandoned", lambda self: [gone])
    found = watch.look()
    assert [line.step for line in found.newest] == [4]
    assert found.abandoned == ()
    assert found.pending == ()
    (root / "step_00000004" / "zarr.json").write_text("{")
    assert "damaged" in watch.look().newest[0].note
    shutil.rmtree(root)
    monkeypatch.undo()
    assert "not exist" in watch.look().problem


def test_an_owner_that_is_alive(run: Commands, tmp_path: Path) -> None:
    with Checkpointer(tmp_path) as checkpointer:
        save_here(checkpointer, {"w": torch.ones(3)}, 1)
        owner = run.json("watch", tmp_path, "--once")["owner"]
        assert (owner["state"], owner["writers"]) == ("running", 1)
    assert run.json("watch", tmp_path, "--once")["owner"]["state"] == "ended"


def plan_of(step: Path) -> str:
    from tools.inspect_ckpt.step import summary_of

    return str(summary_of(str(step))["plan"])


# -- beside a job ------------------------------------------------------------------------------------------------------


class Terminal:
    """A command on a terminal of its own."""

    def __init__(self, *arguments: str | Path) -> None:
        self.text = ""
        self._master, slave = pty.openpty()
        line = [sys.executable, "-m", "tools.inspect_ckpt", *map(str, arguments)]
        environment = {**os.environ, "TERM": "xterm-256color", "COLUMNS": "120", "LINES": "40"}
        self.process = subprocess.Popen(
            line, cwd=REPOSITORY, stdin=slave, stdout=slave, stderr=slave, env=environment, start_new_session=True
        )
        os.close(slave)

    def __enter__(self) -> Terminal:
        return self

    def __exit__(self, *exception: object) -> None:
        self.process.kill()
        self.process.wait()
        os.close(self._master)

    def wait_for(self, pattern: str, timeout_s: float = 40.0) -> None:
        """Wait until what was shown since the last call matches."""
        deadline = time.monotonic() + timeout_s
        while not (match := re.search(pattern, self.text)):
            assert select.select([self._master], [], [], deadline - time.monotonic())[0], (pattern, self.text[-3000:])
            self.text += os.read(self._master, 65536).decode(errors="replace")
        self.text = self.text[match.end() :]

    def interrupt(self) -> int:
        """Send Ctrl-C, and return the exit code."""
        self.process.send_signal(signal.SIGINT)
        deadline = time.monotonic() + 20
        while self.process.poll() is None and time.monotonic() < deadline:
            if select.select([self._master], [], [], 0.1)[0]:
                try:
                    self.text += os.read(self._master, 65536).decode(errors="replace")
                except OSError:
                    break
        return self.process.wait(20)


def _save_when_told(rank: int, world_size: int, root: Path) -> None:
    with Checkpointer(root) as checkpointer:
        for step in (1, 2):
            _wait_for(root.parent / f"save_{step}")
            checkpointer.save(states.state(step, 0), step)
        _wait_for(root.parent / "end")


def _wait_for(file: Path) -> None:
    deadline = time.monotonic() + 60
    while not file.exists():
        assert time.monotonic() < deadline
        time.sleep(0.02)


@pytest.mark.timeout(150)
def test_a_live_job_of_two_ranks(tmp_path: Path) -> None:
    pytest.importorskip("rich")
    root = tmp_path / "root"
    with Terminal("watch", root, "--interval", "0.1") as screen, launch_ranks(_save_when_told, 2, root) as job:
        screen.wait_for("does not exist yet; waiting")
        (tmp_path / "save_1").touch()
        screen.wait_for("job is running, writers of 2 ranks alive")
        screen.wait_for("published: 1 step")
        (tmp_path / "save_2").touch()
        screen.wait_for("published: 2 steps")
        (tmp_path / "end").touch()
        job.wait()
        screen.wait_for("job has ended")
        shutil.rmtree(root)
        screen.wait_for("does not exist yet")
        assert screen.interrupt() == 0
        assert "Traceback" not in screen.text
