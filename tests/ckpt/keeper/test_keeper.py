"""Keepers, as trainers and those that take over use them: what they keep, for whom, and how they end."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from ckpt.keeper import takeover
from ckpt.keeper.lingering import LingeringMemory
from ckpt.keeper.messages import PUBLIC, Greeting, greeting
from ckpt.keeper.takeover import Job, KeeperAddress, Taken, release, take
from ckpt.keeper.trainer_side import Keeper
from inprocess.ipc.deadline import Deadline
from inprocess.ipc.packets import receive, send
from inprocess.ipc.shared_memory import SharedMemory
from inprocess.ipc.unix_sockets import connect
from tests.ckpt.keeper.support import files_of, held_memory, keepers_of, no_keepers_are_left
from tests.ckpt.keeper.trainer import RECORD, SIZE
from tests.inprocess.coordination.helpers import eventually
from tests.support import LeakCheck
from tests.support.template import REPOSITORY

JOB = Job("a job", "/root", "a node")


class Trainer:
    """A `trainer` in a process of its own."""

    def __init__(self, runtime: Path, *arguments: str, name: str = JOB.name, linger_s: float = 60.0) -> None:
        command = [sys.executable, "-m", "tests.ckpt.keeper.trainer", name, str(linger_s), *arguments]
        env = {**os.environ, "TMPDIR": str(runtime)}
        self.process = subprocess.Popen(
            command, cwd=REPOSITORY, env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        self.keeper = self._answer()

    def tell(self, line: str) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(line + "\n")
        self.process.stdin.flush()
        self.keeper = self._answer() or self.keeper

    def _answer(self) -> int:
        assert self.process.stdout is not None
        text = self.process.stdout.readline().strip()
        return int(text) if text.isdigit() else 0

    def kill(self) -> None:
        self.process.kill()
        self.close()

    def close(self) -> None:
        for pipe in (self.process.stdin, self.process.stdout):
            assert pipe is not None
            with contextlib.suppress(OSError):
                pipe.close()
        self.process.wait()


@pytest.fixture(autouse=True)
def _here(runtime: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(runtime))


@pytest.fixture
def trainer(runtime: Path, leak_check: LeakCheck) -> Iterator[Callable[..., Trainer]]:
    made: list[Trainer] = []

    def make(*arguments: str, **options: Any) -> Trainer:
        made.append(Trainer(runtime, *arguments, **options))
        return made[-1]

    yield make
    for each in made:
        each.kill()


def taken(job: Job = JOB) -> list[Taken]:
    """Take what there is, as soon as it is there; the memory is closed."""
    found: list[Taken] = []
    eventually(lambda: bool(found.extend(take(job)) or found))
    for each in found:
        each.close()
    return found


def contents(job: Job = JOB) -> list[int]:
    found = take(job)
    numbers = [int.from_bytes(region.buffer[:4], "little") for each in found for region in each.regions]
    for each in found:
        assert all(region.size == SIZE for region in each.regions)
        each.close()
    return sorted(numbers)


def test_memory_is_taken_when_the_trainer_is_dead_and_kept_until_it_is_released(
    runtime: Path, trainer: Callable[..., Trainer]
) -> None:
    first = trainer()
    assert take(JOB) == []  # it is alive
    first.tell("hold")
    first.tell("hold")
    first.tell("drop")
    first.kill()
    assert contents() == contents() == [1, 2]
    (found,) = taken()
    assert found.record == RECORD
    release(found.address, JOB)
    no_keepers_are_left(runtime)
    assert take(JOB) == []


def test_a_taker_that_is_late_gets_nothing_that_was_given_up(trainer: Callable[..., Trainer]) -> None:
    """One that is being answered when another one gives up the memory."""
    trainer().kill()
    (found,) = taken()
    secret, ours = found.address.read_key(), "0" * 32
    with connect(found.address.socket, 20.0) as late:
        challenge = receive(late, PUBLIC).message
        assert isinstance(challenge, Greeting)
        release(found.address, JOB)
        with contextlib.suppress(OSError):
            send(late, PUBLIC, Greeting(ours, greeting(secret, b"taker", JOB.digest, challenge.nonce, ours)))
        with pytest.raises((EOFError, ConnectionResetError)):
            receive(late, PUBLIC)


def test_a_clean_end_leaves_nothing(runtime: Path, trainer: Callable[..., Trainer]) -> None:
    first = trainer()
    first.tell("close")
    no_keepers_are_left(runtime)


def test_a_trainer_that_leaves_it_to_the_next_ones(runtime: Path, trainer: Callable[..., Trainer]) -> None:
    first = trainer()
    first.tell("leave")
    assert len(taken()) == 1
    assert first.process.poll() is None
    release(taken()[0].address, JOB)
    no_keepers_are_left(runtime)


def test_a_trainer_that_leaves_it_while_a_child_has_the_connection(trainer: Callable[..., Trainer]) -> None:
    first = trainer()
    first.tell("fork in foreign code")
    first.tell("leave")
    assert len(taken()) == 1
    assert first.process.poll() is None


def test_a_trainer_that_forgets_its_keeper(runtime: Path, trainer: Callable[..., Trainer]) -> None:
    """Nothing can be said to that any more: the memory is kept as after the death of the trainer, and no longer."""
    first = trainer()
    first.tell("drop the keeper")
    (found,) = taken()
    assert first.process.poll() is None
    release(found.address, JOB)
    no_keepers_are_left(runtime)
    trainer(linger_s=0.1).tell("drop the keeper")
    no_keepers_are_left(runtime)


def test_an_interrupt_while_the_keeper_is_told_loses_nothing(runtime: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    keeper = Keeper()
    lingering = LingeringMemory(keeper, JOB, 60.0)
    region = SharedMemory.create("ckpt-slot-0", SIZE)
    tell = keeper.tell

    def interrupted(message: Any, *fds: int) -> None:
        tell(message, *fds)
        raise KeyboardInterrupt

    try:
        for _ in range(2):
            monkeypatch.setattr(keeper, "tell", interrupted)
            with pytest.raises(KeyboardInterrupt):
                lingering.settle(1, RECORD, [region], [])
        monkeypatch.setattr(keeper, "tell", tell)
        lingering.settle(1, RECORD, [region], [])
        assert len(files_of(runtime)) == 2
        lingering.leave()
        keeper.release()
        (found,) = taken()
        assert len(found.regions) == 1
        release(found.address, JOB)
    finally:
        region.close()
        lingering.close()
        keeper.close(Deadline(20.0))
    no_keepers_are_left(runtime)


def test_the_deadline(runtime: Path, trainer: Callable[..., Trainer]) -> None:
    trainer(linger_s=0.1).kill()
    no_keepers_are_left(runtime)


def test_a_child_of_the_trainer_does_not_keep_it_alive(runtime: Path, trainer: Callable[..., Trainer]) -> None:
    """One that was forked has all of its descriptors."""
    first = trainer()
    first.tell("fork")
    first.process.kill()
    assert len(taken()) == 1


def test_what_was_told_last_is_done(runtime: Path, trainer: Callable[..., Trainer]) -> None:
    first = trainer()
    psutil.Process(first.keeper).suspend()
    for _ in range(5):
        first.tell("hold")
    first.kill()
    psutil.Process(first.keeper).resume()
    assert len(taken()[0].regions) == 6


def test_a_newer_holder_ends_the_older_ones_also_if_its_trainer_is_dead(
    runtime: Path, trainer: Callable[..., Trainer]
) -> None:
    trainer().kill()
    (old,) = taken()
    second = trainer(old.address.base)
    keeper = psutil.Process(second.keeper)
    second.kill()
    eventually(lambda: keepers_of(runtime) == [keeper])
    assert [each.address.base for each in taken()] != [old.address.base]
    assert len(files_of(runtime)) == 2


def test_a_keeper_that_is_killed(runtime: Path, trainer: Callable[..., Trainer]) -> None:
    """The next message starts another one, which has everything. Files that are left are removed."""
    first = trainer()
    psutil.Process(first.keeper).kill()
    eventually(lambda: not keepers_of(runtime))
    assert len(files_of(runtime)) == 2
    first.tell("hold")
    first.kill()
    assert len(taken()[0].regions) == 2
    assert len(held_memory(runtime)) == 2
    assert len(files_of(runtime)) == 2


def test_nothing_to_keep(runtime: Path, trainer: Callable[..., Trainer]) -> None:
    first = trainer()
    first.tell("drop")
    first.kill()
    no_keepers_are_left(runtime)


# -- trust -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "job", [Job("another", "/root", "a node"), Job("a job", "/", "a node"), Job("a job", "/root", "b")]
)
def test_another_job(trainer: Callable[..., Trainer], job: Job) -> None:
    trainer().kill()
    (found,) = taken()
    assert take(job) == []
    with pytest.raises(EOFError):  # also if it knows where to look
        release(found.address, job)
    assert len(taken()) == 1


def test_another_secret(trainer: Callable[..., Trainer], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("INPROCESS_SECRET", "one")
    trainer().kill()
    assert len(taken()) == 1
    for other in ("two", ""):
        monkeypatch.setenv("INPROCESS_SECRET", other)
        assert take(JOB) == []
    monkeypatch.setenv("INPROCESS_SECRET", "one")
    assert contents() == [0]


@pytest.mark.parametrize("damage", ["mode", "link", "short", "other"])
def test_a_key_that_is_not_what_it_should_be(runtime: Path, trainer: Callable[..., Trainer], damage: str) -> None:
    trainer().kill()
    (found,) = taken()
    key = Path(f"{found.address.base}.key")
    text = key.read_text()
    if damage == "mode":
        key.chmod(0o644)
    elif damage == "link":
        key.rename(runtime / "elsewhere")
        key.symlink_to(runtime / "elsewhere")
    elif damage == "short":
        key.write_text(text[:10])
    else:
        key.write_text("0" * len(text))
    assert take(JOB) == []
    key.unlink()
    fd = os.open(key, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    os.write(fd, text.encode())
    os.close(fd)
    assert contents() == [0]


@pytest.mark.parametrize("said", [b"", b"x", b"[" * 100_000, b'["GiveUp", {}]', b'["Greeting", {}]'])
def test_who_proves_nothing_gets_nothing(trainer: Callable[..., Trainer], said: bytes) -> None:
    trainer().kill()
    (found,) = taken()
    with connect(found.address.socket, 20.0) as connection:
        assert receive(connection, PUBLIC).fds == ()
        connection.sendmsg([said])
        assert connection.recvmsg(1 << 16, 1 << 10)[:2] == (b"", [])
    assert contents() == [0]


def test_a_false_proof(trainer: Callable[..., Trainer]) -> None:
    trainer().kill()
    (found,) = taken()
    with connect(found.address.socket, 20.0) as connection:
        receive(connection, PUBLIC)
        send(connection, PUBLIC, Greeting("n" * 32, "é" * 64))
        assert connection.recvmsg(1 << 16, 1 << 10)[:2] == (b"", [])
    assert contents() == [0]


def test_a_stranger_at_the_address_of_a_keeper(runtime: Path) -> None:
    """It does not know the key: nothing that it sends is taken."""
    address = JOB.new_address()
    address.write_key()
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        listener.bind(address.socket)
        listener.listen()
        stranger = subprocess.Popen(
            [sys.executable, "-c", _STRANGER, str(listener.fileno())], pass_fds=[listener.fileno()]
        )
        try:
            assert take(JOB) == []
        finally:
            stranger.wait(20)
    assert take(JOB) == []  # and its files are removed
    assert files_of(runtime) == []


_STRANGER = """
import socket, sys
connection, _ = socket.socket(fileno=int(sys.argv[1])).accept()
connection.send(b'["Greeting", {"nonce": "00", "proof": ""}]')
connection.recv(1 << 16)
connection.send(b'["Greeting", {"nonce": "", "proof": "00"}]')
connection.recv(1 << 16)
"""


def test_files_without_a_keeper(runtime: Path) -> None:
    address = JOB.new_address()
    address.write_key()
    assert take(JOB) == []
    assert isinstance(address, KeeperAddress)


def test_keepers_that_hang_are_waited_for_together(
    runtime: Path, trainer: Callable[..., Trainer], monkeypatch: pytest.MonkeyPatch
) -> None:
    keepers = []
    for _ in range(3):
        each = trainer()
        keepers.append(psutil.Process(each.keeper))
        each.kill()
    waits: list[float] = []

    def counted(path: str, timeout_s: float) -> socket.socket:
        waits.append(timeout_s)
        return connect(path, timeout_s)

    monkeypatch.setattr(takeover, "connect", counted)
    monkeypatch.setattr(takeover, "_TIMEOUT_S", 0.5)
    for keeper in keepers:
        keeper.suspend()
    assert take(JOB) == []
    assert waits[0] > 0.3
    assert waits[1:] == 2 * [takeover._LEAST_S]
    for keeper in keepers:
        keeper.kill()
    eventually(lambda: take(JOB) == [] and files_of(runtime) == [])  # it removes what the dead ones have left
