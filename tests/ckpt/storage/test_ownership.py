"""Tokens grow, the later start wins, and live processes are known without locks."""

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from ckpt.errors import FencedError, StorageError
from ckpt.storage.leases import EXPIRY_S, Leases
from ckpt.storage.ownership import ClaimLease, Ownership, OwnerState
from inprocess.ipc.process import Process
from tests.support.template import REPOSITORY

_REGISTER = """
import sys
from inprocess.ipc.process import Process
from ckpt.storage.leases import Leases
directory, rank, *trainer = sys.argv[1:]
here = Process.here()
of_trainer = Process(here.host, *map(int, trainer)) if trainer else here
lease = Leases(directory).register(int(rank), of_trainer, lambda: False)
print("registered", flush=True)
sys.stdin.read()
"""


def _never() -> bool:
    return False


@pytest.fixture
def ownership(tmp_path: Path) -> Ownership:
    return Ownership(str(tmp_path))


def test_tokens_grow_and_the_newest_owns(ownership: Ownership) -> None:
    assert ownership.newest() == 0
    first = ownership.claim(0)
    ownership.check(first)
    second = ownership.claim(first)
    assert 0 < first < second
    ownership.check(second)
    with pytest.raises(FencedError, match=rf"started later: this process.*This job \(token {first}\)"):
        ownership.check(first)


def test_an_earlier_start_cannot_take_the_root_back(ownership: Ownership) -> None:
    """It restored when the token was 1; since then another job, which is alive, has claimed the root."""
    earlier = ownership.claim(0)
    later = ownership.claim(earlier)
    with pytest.raises(FencedError):
        ownership.claim(earlier)
    ownership.release(later)
    assert ownership.claim(earlier) > later


def test_a_token_is_larger_than_those_of_a_root_that_was_removed(ownership: Ownership, tmp_path: Path) -> None:
    earlier = ownership.claim(0)
    os.rename(tmp_path / ".owner", tmp_path / "removed")
    assert Ownership(str(tmp_path)).claim(0) > earlier
    with pytest.raises(FencedError):
        ownership.check(earlier)


def test_a_temporary_claim_is_waited_for(ownership: Ownership) -> None:
    """A restore decides about pending saves; a job that started before it saves afterwards."""
    seen = ownership.claim(0)
    temporary = ownership.claim(seen, temporary=True)
    timer = threading.Timer(0.2, ownership.release, (temporary,))
    timer.start()
    assert ownership.claim(seen) > temporary
    timer.join(30)


def test_many_claims_at_once_are_all_different(tmp_path: Path) -> None:
    tokens: list[int] = []
    start = threading.Barrier(8)

    def claim() -> None:
        start.wait()
        own = Ownership(str(tmp_path))
        tokens.append(own.claim(10**17))  # all claims were seen

    threads = [threading.Thread(target=claim) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert len(tokens) == len(set(tokens)) == 8
    assert Ownership(str(tmp_path)).newest() == max(tokens)


def test_claims_that_were_removed_are_made_again(ownership: Ownership, tmp_path: Path) -> None:
    token = ownership.claim(0)
    os.rename(tmp_path / ".owner", tmp_path / "elsewhere")
    ownership.check(token)
    assert ownership.newest() == token


def test_what_cannot_be_a_claim_is_none(ownership: Ownership, tmp_path: Path) -> None:
    token = ownership.claim(0)
    for name in ("99999999999999999999999.json", f"{token + 5}", "x.json", f"-{token + 5}.json"):
        (tmp_path / ".owner" / name).write_text("")
    assert ownership.newest() == token
    (tmp_path / ".owner" / f"{token + 2}.json").write_text("nonsense")
    with pytest.raises(FencedError, match=rf"unknown process.*This job \(token {token}\)"):
        ownership.check(token)
    assert ownership.state(token + 2) is OwnerState.ACTIVE, "it is not known whose it is: alive while it is renewed"
    os.utime(tmp_path / ".owner" / f"{token + 2}.json", (1.0, 1.0))
    assert ownership.state(token + 2) is OwnerState.GONE


# -- live processes ---------------------------------------------------------------------------------------------------


@pytest.fixture
def processes() -> Iterator[list[subprocess.Popen[str]]]:
    running: list[subprocess.Popen[str]] = []
    yield running
    for process in running:
        process.kill()
        process.communicate()


def _register(
    processes: list[subprocess.Popen[str]], leases: Leases, rank: int, *trainer: int
) -> subprocess.Popen[str]:
    """Have another process register as a writer, of itself or of `trainer`."""
    command = [sys.executable, "-c", _REGISTER, leases.path, str(rank), *map(str, trainer)]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=REPOSITORY)
    processes.append(process)
    assert process.stdout is not None
    assert process.stdout.readline() == "registered\n"
    return process


def test_states_of_an_owner(ownership: Ownership, processes: list[subprocess.Popen[str]]) -> None:
    token = ownership.claim(0)
    assert ownership.state(token) is OwnerState.ACTIVE  # the claim of this process
    here = Process.here()
    writer = _register(processes, ownership.leases(token), 0, here.pid, here.start)
    assert ownership.state(token) is OwnerState.ACTIVE
    ownership.release(token, done=False)
    assert ownership.state(token) is OwnerState.FINISHING
    writer.kill()
    os.waitid(os.P_PID, writer.pid, os.WEXITED | os.WNOWAIT)  # a zombie counts as dead
    assert ownership.state(token) is OwnerState.GONE
    assert ownership.state(0) is OwnerState.GONE


def test_each_rank_by_itself(ownership: Ownership, processes: list[subprocess.Popen[str]]) -> None:
    leases = ownership.leases(ownership.claim(0))
    writers = [_register(processes, leases, rank) for rank in range(3)]
    assert leases.alive_ranks() == {0, 1, 2}
    writers[1].send_signal(signal.SIGKILL)
    writers[1].wait()
    assert leases.alive_ranks() == {0, 2}
    _register(processes, leases, 1)
    assert leases.alive_ranks() == {0, 1, 2}


def test_lines_that_are_not_whole_are_not_there(ownership: Ownership) -> None:
    leases = ownership.leases(ownership.claim(0))
    lease = leases.register(3, Process.here(), _never)
    (name,) = os.listdir(leases.path)
    with open(os.path.join(leases.path, name), "ab") as file:
        file.write(b'\n{"rank": 1, "writer": [1]}\nnull\n[]\n\xff\n{"left": 3}\n{"rank": 5, "wri')
    assert leases.alive_ranks() == {3}
    lease.close()


def _on_another_host(processes: list[subprocess.Popen[str]], leases: Leases) -> subprocess.Popen[str]:
    """Start a writer in its own pid namespace, of which this process knows only the lease."""
    command = ["unshare", "--pid", "--fork", "--mount-proc", "--kill-child", sys.executable]
    process = subprocess.Popen(
        [*command, "-c", _REGISTER, leases.path, "1"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=REPOSITORY,
    )
    processes.append(process)
    assert process.stdout is not None
    if process.stdout.readline() != "registered\n":
        pytest.skip(f"no pid namespaces here: {process.communicate()[1]}")
    return process


def test_another_host_is_known_by_its_lease(ownership: Ownership, processes: list[subprocess.Popen[str]]) -> None:
    token = ownership.claim(0)
    ownership.release(token)
    leases = ownership.leases(token)
    other = _on_another_host(processes, leases)
    (name,) = (name for name in os.listdir(leases.path) if not name.startswith(Process.here().host))
    lease = os.path.join(leases.path, name)
    assert leases.alive_ranks() == {1}
    assert ownership.state(token) is OwnerState.ACTIVE
    other.kill()
    other.wait()
    assert leases.alive_ranks() == {1}  # not known yet
    old = time.time() - EXPIRY_S - 1
    os.utime(lease, (old, old))
    assert leases.alive_ranks() == set()
    assert ownership.state(token) is OwnerState.GONE


def test_a_writer_renews_the_lease_of_its_host(ownership: Ownership, processes: list[subprocess.Popen[str]]) -> None:
    leases = ownership.leases(ownership.claim(0))
    _on_another_host(processes, leases)
    (name,) = (name for name in os.listdir(leases.path) if not name.startswith(Process.here().host))
    lease = os.path.join(leases.path, name)
    os.utime(lease, (1e9, 1e9))
    assert leases.alive_ranks() == set()
    deadline = time.monotonic() + 30
    while not leases.alive_ranks():
        assert time.monotonic() < deadline, "the lease was not renewed"
        time.sleep(0.05)


def test_who_cannot_register_is_told(ownership: Ownership, tmp_path: Path) -> None:
    with pytest.raises((StorageError, FileNotFoundError)):
        ownership.leases(7).register(0, Process.here(), _never)


def test_a_closed_lease_leaves_no_thread(ownership: Ownership) -> None:
    """Also if the thread is just renewing the claim."""
    ended: list[str] = []
    renewing = threading.Event()

    class Slow(Ownership):
        renew_s = 0.0

        def renew(self, token: int) -> None:
            renewing.set()
            lease._closed.wait(30)
            ended.append("renewal")

    lease = ClaimLease(Slow(ownership.path))
    lease.hold(1)
    assert renewing.wait(30)
    lease.close()
    assert ended == ["renewal"]
    assert lease._thread is not None
    assert not lease._thread.is_alive()
