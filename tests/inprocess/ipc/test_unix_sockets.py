"""Where sockets are, and who can get at them."""

import os
import stat
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from inprocess.ipc import unix_sockets


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The temporary folder of the processes of a test."""
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(tempfile, "tempdir", None)
    return tmp_path


@pytest.fixture(params=[0, 0o022, 0o377])
def umask(request: pytest.FixtureRequest) -> Iterator[None]:
    earlier = os.umask(request.param)
    yield
    os.umask(earlier)


def usual(folder: Path) -> Path:
    return folder / f"inprocess-{os.geteuid()}"


def mode(path: str | Path) -> int:
    return stat.S_IMODE(os.lstat(path).st_mode)


def test_the_usual_directory_is_used_again(folder: Path, umask: None) -> None:
    assert unix_sockets.private_directory() == str(usual(folder))
    assert mode(usual(folder)) == 0o700
    assert unix_sockets.private_directory() == str(usual(folder))
    assert len(list(folder.iterdir())) == 1


def squat_with_a_link(path: Path) -> None:
    (path.parent / "elsewhere").mkdir(mode=0o700)
    path.symlink_to(path.parent / "elsewhere")


def squat_with_a_file(path: Path) -> None:
    path.write_text("")


def squat_with_an_open_directory(path: Path) -> None:
    path.mkdir()
    path.chmod(0o777)


def squat_as_another_user(path: Path) -> None:
    path.mkdir(mode=0o700)
    os.chown(path, 12345, 12345)


SQUATTERS = [
    squat_with_a_link,
    squat_with_a_file,
    squat_with_an_open_directory,
    pytest.param(
        squat_as_another_user, marks=pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files away")
    ),
]


@pytest.mark.parametrize("squat", SQUATTERS)
def test_a_directory_of_others_is_left_alone(squat: object, folder: Path) -> None:
    assert callable(squat)
    squat(usual(folder))
    before = os.lstat(usual(folder))
    found = Path(unix_sockets.private_directory())
    assert found.parent == folder
    assert found != usual(folder)
    assert mode(found) == 0o700
    assert os.lstat(found).st_uid == os.geteuid()
    assert Path(unix_sockets.private_directory()) == found, "not one for each process"
    after = os.lstat(usual(folder))
    assert (after.st_mode, after.st_uid) == (before.st_mode, before.st_uid)


def test_without_a_place_the_error_says_what_to_do(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(folder / "gone"))
    with pytest.raises(OSError, match="set TMPDIR to a folder of your own") as error:
        unix_sockets.private_directory()
    assert str(folder / "gone") in str(error.value)


_OTHER_USER = """
import os, socket, sys
os.setgroups([])
os.setgid(65534)
os.setuid(65534)
try:
    socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET).connect(sys.argv[1])
except PermissionError:
    sys.exit(7)
"""


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can be another user")
def test_another_user_cannot_connect_where_it_can_see_the_socket() -> None:
    """So no connection of a stranger is ever accepted, even where the directory is open to all."""
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:
        os.chmod(folder, 0o755)
        path = os.path.join(folder, "socket")
        with unix_sockets.listen(path) as listener:
            assert subprocess.run([sys.executable, "-c", _OTHER_USER, path], cwd="/", check=False).returncode == 7
            with pytest.raises(BlockingIOError):
                listener.accept()
            unix_sockets.connect(path, 10).close()


@pytest.mark.parametrize("length", [50, 107, 108, 200, 2000])
def test_paths_may_have_any_length(tmp_path: Path, length: int) -> None:
    folder = tmp_path
    while len(str(folder)) < length - 10:
        folder /= "a" * min(100, length - 10 - len(str(folder)))
    folder.mkdir(parents=True, exist_ok=True)
    path = str(folder / "rank.sock")
    before = len(os.listdir("/proc/self/fd"))
    with unix_sockets.listen(path) as listener, unix_sockets.connect(path, 10.0) as end:
        assert mode(path) == 0o600
        other, _ = listener.accept()
        with other:
            other.send(b"word")
            assert end.recv(10) == b"word"
            assert unix_sockets.peer_pid(other) == os.getpid()
    assert len(os.listdir("/proc/self/fd")) == before
    with unix_sockets.listen(path):  # in place of the earlier one
        pass
    unix_sockets.remove_socket(path)
    assert not os.path.lexists(path)


def test_a_name_that_is_too_long_is_in_the_error(tmp_path: Path) -> None:
    path = str(tmp_path / ("n" * 120))
    with pytest.raises(OSError, match=r"n{120}"):
        unix_sockets.listen(path)
    with pytest.raises(OSError, match=r"n{120}"):
        unix_sockets.connect(path, 1.0)
