"""Byte locks say who works on a save; they are gone with the process."""

import os
import select
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from ckpt.errors import StorageError
from ckpt.storage.locks import locked_bytes, try_lock_byte
from tests.support import LeakCheck

_HOLD = """
import sys
from ckpt.storage.locks import try_lock_byte
lock = try_lock_byte(sys.argv[1], int(sys.argv[2]))
print(lock is not None, flush=True)
sys.stdin.read()
"""


@pytest.fixture
def file(tmp_path: Path) -> str:
    path = tmp_path / "file"
    path.write_text("x")  # the bytes that are locked need not exist
    return str(path)


def test_one_holder_for_each_byte(file: str, leak_check: LeakCheck) -> None:
    first, second = try_lock_byte(file, 3), try_lock_byte(file, 70_000)
    assert first is not None
    assert second is not None
    assert try_lock_byte(file, 3) is None  # also within one process
    assert locked_bytes(file, range(5)) == {3}
    assert locked_bytes(file, {3, 4, 70_000}) == {3, 70_000}
    first.close()
    first.close()
    assert locked_bytes(file, {3, 70_000}) == {70_000}
    again = try_lock_byte(file, 3)
    assert again is not None
    again.close()
    second.close()


def test_asking_takes_no_lock_and_closing_another_descriptor_loses_none(file: str, leak_check: LeakCheck) -> None:
    lock = try_lock_byte(file, 0)
    assert lock is not None
    with open(file, "rb+"):  # closing any descriptor would end a classic POSIX lock of the process
        pass
    for _ in range(3):
        assert locked_bytes(file, {0, 1}) == {0}
    lock.close()
    assert locked_bytes(file, {0, 1}) == set()


def test_a_lock_ends_with_its_process(file: str, leak_check: LeakCheck) -> None:
    holder = subprocess.Popen(
        [sys.executable, "-c", _HOLD, file, "5"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert holder.stdin is not None
    assert holder.stdout is not None
    with holder.stdin, holder.stdout:
        assert holder.stdout.readline() == "True\n"
        assert locked_bytes(file, {5}) == {5}
        assert try_lock_byte(file, 5) is None
        pidfd = os.pidfd_open(holder.pid)
        holder.send_signal(signal.SIGKILL)
        assert select.select([pidfd], [], [], 20)[0]
        os.close(pidfd)
        holder.wait()
    assert locked_bytes(file, {5}) == set()


def test_a_directory_that_moves_takes_its_locks_along(tmp_path: Path, leak_check: LeakCheck) -> None:
    (tmp_path / "pending").mkdir()
    (tmp_path / "pending" / "file").touch()
    lock = try_lock_byte(str(tmp_path / "pending" / "file"), 1)
    assert lock is not None
    (tmp_path / "pending").rename(tmp_path / "published")
    assert locked_bytes(str(tmp_path / "pending" / "file"), {1}) is None
    assert locked_bytes(str(tmp_path / "published" / "file"), {1}) == {1}
    lock.close()


def test_a_file_that_is_gone(tmp_path: Path, leak_check: LeakCheck) -> None:
    with pytest.raises(StorageError):
        try_lock_byte(str(tmp_path / "nothing"), 0)
    assert locked_bytes(str(tmp_path / "nothing"), {0}) is None
