"""`memory`: which processes of this user hold checkpoint memory, and which steps."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
import tempfile
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch

import ckpt
from ckpt.native import crc32c
from ckpt.saving.share import HEADER_BYTES, Share
from inprocess.ipc.shared_memory import SharedMemory
from tests.ckpt.keeper.support import end_keepers, keepers_of
from tests.inprocess.coordination.helpers import eventually
from tests.support import launch_ranks
from tests.tools.inspect_ckpt.commands import Commands


def _found(run: Commands, *pids: int) -> dict[int, dict[str, Any]]:
    return {each["pid"]: each for each in run.json("memory")["processes"] if each["pid"] in pids}


def _steps(process: dict[str, Any]) -> list[int]:
    return [share["step"] for share in process["shares"] if share["whole"]]


def test_a_trainer_and_its_snapshots(run: Commands, tmp_path: Path) -> None:
    with ckpt.Checkpointer(tmp_path / "root", snapshots=1) as checkpointer:
        for step in (1, 2, 3):
            checkpointer.snapshot({"w": torch.ones(100_000)}, step)
        process = _found(run, os.getpid())[os.getpid()]
        assert (process["kind"], _steps(process), process["expires_in_s"]) == ("trainer", [2, 3], None)
        assert {(share["rank"], share["world_size"]) for share in process["shares"]} == {(0, 1)}
        assert 800_000 <= process["bytes"] <= 900_000  # in two slots: a third is made when one is written
        lines = [line.split() for line in run("memory").splitlines()]
        (line,) = [line for line in lines if line[0] == str(os.getpid())]
        assert line[1:5] == ["trainer", "3,", "2", "819"]
    assert _found(run, os.getpid()) == {}


def _snapshots(rank: int, world_size: int, root: Path) -> None:
    tempfile.tempdir = None  # TMPDIR is another one than in the process that this one was forked from
    checkpointer = ckpt.Checkpointer(
        root, snapshots=ckpt.Snapshots(every=1, linger=timedelta(minutes=5), linger_id="run \x1b[31m7")
    )
    checkpointer.restore({"w": torch.ones(100_000)})
    for step in (4, 5):
        checkpointer.snapshot({"w": torch.ones(100_000)}, step)
    print(f"holder {checkpointer._parts.keeper.pid}", flush=True)  # type: ignore[union-attr]
    sys.stdin.read() if rank else signal.pause()


@pytest.fixture
def runtime() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="lg") as name:
        yield Path(name)
        end_keepers(Path(name))


def test_the_memory_of_a_trainer_that_was_killed(run: Commands, tmp_path: Path, runtime: Path) -> None:
    root = tmp_path / "root"
    with launch_ranks(_snapshots, 1, root, env={"TMPDIR": str(runtime)}, init_process_group=False) as ranks:
        holder = int(ranks.wait_for_output(0, r"holder (\d+)")[1])
        trainer = ranks.pid(0)
        eventually(lambda: _steps(_found(run, holder).get(holder, {"shares": []})) == [4, 5])
        found = _found(run, holder, trainer)
        assert (found[trainer]["kind"], found[holder]["kind"]) == ("trainer", "keeper")
        assert (found[holder]["expires_in_s"], found[holder]["trainer"]) == (None, trainer)
        (line,) = [line for line in run("memory").splitlines() if line.split()[0] == str(holder)]
        assert "run \\x1b[31m7" in line
        assert line.endswith("with its trainer")
        ranks.kill(0)
        eventually(lambda: _found(run, holder)[holder]["expires_in_s"] is not None)
        process = _found(run, holder, trainer)[holder]
        assert 200 < process["expires_in_s"] <= 300
        assert (process["job"], process["root"], process["rank"]) == ("run \x1b[31m7", str(root), 0)
        assert _steps(process) == [4, 5]
        assert [process.pid for process in keepers_of(runtime)] == [holder]


# -- what other programs may have in memory of that name ---------------------------------------------------------------


@contextlib.contextmanager
def _memory(name: str, data: bytes, size: int | None = None) -> Iterator[None]:
    fd = os.memfd_create(name)
    try:
        os.pwrite(fd, data, 0)
        os.ftruncate(fd, len(data) if size is None else size)
        yield
    finally:
        os.close(fd)


def _slot(name: str = "step_00000007-o0-0123456789abcdef", documents: bytes = b"", part: int = 0) -> bytes:
    with SharedMemory.create("ckpt-of-a-test", 2 * HEADER_BYTES) as region:
        Share(region).label(name, 1)
        region.buffer[HEADER_BYTES : HEADER_BYTES + 8] = (1).to_bytes(8, "little")
        region.buffer[HEADER_BYTES + 16 : HEADER_BYTES + 40] = b"".join(
            number.to_bytes(8, "little") for number in (max(0, len(documents) - part), 0, part)
        )
        return bytes(region.buffer) + documents


def _document(value: Any) -> bytes:
    data = json.dumps(value).encode()
    return data + f"\ncrc32c:{crc32c(data):08x}\n".encode()


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\xff" * 5000,
        _slot("not a save"),
        _slot("step_1-o0-\x1b[31m"),
        _slot(documents=b"garbage" * 1000, part=6000),
        _slot(documents=b"x", part=2**62)[: 2 * HEADER_BYTES],
        _slot(documents=_document({"rank": "x"}) + _document([]), part=len(_document([]))),
    ],
    ids=["empty", "ones", "no save", "escape codes", "garbage", "huge", "other documents"],
)
def test_memory_that_holds_something_else(run: Commands, data: bytes) -> None:
    with _memory("ckpt-slot-0", data):
        process = _found(run, os.getpid())[os.getpid()]
    assert _steps(process) == []


def test_a_large_hole(run: Commands) -> None:
    with _memory("ckpt-replica", b"x", 1 << 42):
        process = _found(run, os.getpid())[os.getpid()]
    assert (process["bytes"], process["shares"]) == (4096, [])


def test_a_step_that_is_being_staged(run: Commands) -> None:
    with _memory("ckpt-slot-1", _slot()):
        process = _found(run, os.getpid())[os.getpid()]
    assert [(share["step"], share["whole"], share["rank"]) for share in process["shares"]] == [(7, False, None)]
    assert _steps(process) == []


@pytest.mark.parametrize(
    "status",
    [
        b"",
        b"[" * 60_000,
        b"[]",
        b'{"rank": 1e400, "job": 5, "until": "x"}',
        b'{"job": "' + b"x" * 100_000 + b'"}',
        b'{"rank": true, "until": NaN, "job": "\\u001b[31m"}',
        b'{"rank": ' + b"9" * 10_000 + b"}",
    ],
)
def test_a_status_that_is_none(run: Commands, status: bytes) -> None:
    with _memory("ckpt-linger", status), _memory("ckpt-slot-0", _slot()):
        assert os.getpid() in _found(run, os.getpid())
        run("memory")


def test_memory_of_other_names_is_not_shown(run: Commands) -> None:
    with _memory("of another library", _slot()):
        assert _found(run, os.getpid()) == {}
