"""Nodes are apart from each other, faults are what they are called, and nothing is left."""

import ctypes
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.inprocess.faults.events import wait_until
from tests.inprocess.nodes import cgroups
from tests.inprocess.nodes.faults import Fault, Kind
from tests.inprocess.nodes.judge import Verdict
from tests.inprocess.nodes.lab import Lab
from tests.inprocess.nodes.names import NETNS_FOLDER, remove_stale
from tests.inprocess.nodes.play import play
from tests.inprocess.nodes.program import Options
from tests.support.seeds import random_bytes

_COUNT = "tests.inprocess.nodes.misbehaving:count"
_REPOSITORY = Path(__file__).resolve().parents[3]
_CLONE_NEWNET = 0x40000000
_PORT = 5000
_ARRIVES_S, _LOST_S = 2.0, 0.3

MakeLab = Callable[[int], Lab]


class Endpoints:
    """A UDP socket on each node, made by a thread that was there for a moment."""

    def __init__(self, lab: Lab) -> None:
        self.lab = lab
        self.sockets = [self.open(node, socket.SOCK_DGRAM) for node in lab.nodes]

    def open(self, node: int, kind: socket.SocketKind) -> socket.socket:
        made: list[socket.socket] = []

        def make() -> None:
            fd = os.open(self.lab.network.namespace(node), os.O_RDONLY)
            assert ctypes.CDLL(None).setns(fd, _CLONE_NEWNET) == 0
            os.close(fd)
            made.append(socket.socket(socket.AF_INET, kind))

        thread = threading.Thread(target=make)
        thread.start()
        thread.join()
        made[0].bind((self.lab.network.addresses[node], _PORT))
        return made[0]

    def send(self, source: int, target: int, data: bytes = b"x") -> None:
        self.sockets[source].sendto(data, (self.lab.network.addresses[target], _PORT))

    def receive(self, target: int, timeout_s: float) -> bool:
        self.sockets[target].settimeout(timeout_s)
        try:
            return bool(self.sockets[target].recv(2000))
        except (TimeoutError, BlockingIOError):
            return False

    def arrives(self, source: int, target: int, timeout_s: float = _ARRIVES_S) -> bool:
        self.send(source, target)
        return self.receive(target, timeout_s)

    def close(self) -> None:
        for endpoint in self.sockets:
            endpoint.close()


@pytest.fixture
def network(make_lab: MakeLab) -> Iterator[Endpoints]:
    endpoints = Endpoints(make_lab(3))
    yield endpoints
    endpoints.close()


def test_cut_and_heal(network: Endpoints) -> None:
    assert network.arrives(0, 2)
    assert network.arrives(2, 0)
    network.lab.cut(2)
    assert not network.arrives(0, 2, _LOST_S)
    assert not network.arrives(2, 1, _LOST_S)
    assert network.arrives(0, 1)
    network.lab.heal(2)
    assert network.arrives(2, 1)


def test_one_way(network: Endpoints) -> None:
    assert network.arrives(0, 2)
    assert network.arrives(1, 2)
    network.lab.network.lose_to(2)
    assert network.arrives(2, 0)
    assert not network.arrives(0, 2, _LOST_S)
    network.lab.heal(2)
    network.lab.network.lose_from(2)
    assert network.arrives(0, 2)
    assert not network.arrives(2, 0, _LOST_S)


def test_cut_between_two(network: Endpoints) -> None:
    network.lab.network.cut_between(1, 2)
    assert not network.arrives(1, 2, _LOST_S)
    assert not network.arrives(2, 1, _LOST_S)
    assert network.arrives(0, 1)
    assert network.arrives(2, 0)


def test_packet_loss(network: Endpoints) -> None:
    assert network.arrives(0, 2)  # addresses are resolved
    network.lab.network.lose(2, 20.0)
    arrived = 0
    for _ in range(1000):
        network.send(0, 2)
        arrived += network.receive(2, 0.001)
    assert 700 < arrived < 900


def test_slow_link(network: Endpoints) -> None:
    """Of 1 MB arrives what 400 kbit/s and the queue let through."""
    network.lab.network.slow(2, 400)
    assert network.arrives(0, 2)
    begin = time.monotonic()
    for _ in range(1000):
        network.send(0, 2, bytes(1000))
    sent_s = time.monotonic() - begin
    count = 0
    while network.receive(2, _LOST_S):
        count += 1
    assert 1 <= count < 100 + 50 * sent_s, "50 of them a second"


def _round_trip_s(network: Endpoints) -> float:
    begin = time.monotonic()
    assert network.arrives(0, 2)
    assert network.arrives(2, 0)
    return time.monotonic() - begin


def test_delay(network: Endpoints) -> None:
    """Packets are late, and whole: also large ones whose checksums the network card would make."""
    assert network.arrives(0, 2)
    network.lab.network.delay(2, 0.1)
    begin = time.monotonic()
    assert network.arrives(0, 2)
    assert network.arrives(2, 0)
    assert 0.2 <= time.monotonic() - begin < 10
    data = random_bytes(1 << 20)
    with network.open(2, socket.SOCK_STREAM) as server, network.open(0, socket.SOCK_STREAM) as client:
        server.listen()
        client.settimeout(20.0)
        client.connect((network.lab.network.addresses[2], _PORT))
        peer = server.accept()[0]
        sender = threading.Thread(target=client.sendall, args=(data,))
        sender.start()
        received = bytearray()
        peer.settimeout(20.0)
        while len(received) < len(data):
            received += peer.recv(1 << 16)
        sender.join()
        peer.close()
    assert received == data
    network.lab.heal(2)
    assert any(_round_trip_s(network) < 0.1 for _ in range(20)), "once is enough: the machine may be busy"


def test_nodes_look_like_different_machines(make_lab: MakeLab) -> None:
    lab = make_lab(2)
    job = lab.start("tests.inprocess.nodes.test_lab:tell_where")
    assert job.wait_exits([0, 1], 40.0), job.describe()
    where = [line.event.split() for line in job.lines() if line.event != "done"]
    assert {(rank, name, address) for rank, name, address, _ in where} == {
        ("0", "node0", "10.77.0.1"),
        ("1", "node1", "10.77.0.2"),
    }
    assert len({boot_id for *_, boot_id in where}) == 2


def tell_where(journal: object) -> None:
    """On a node: who and where it is."""
    boot_id = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    name = socket.gethostname()
    journal.note(f"{os.environ['RANK']} {name} {socket.gethostbyname(name)} {boot_id}")  # type: ignore[attr-defined]


def test_processes_freeze_and_die(make_lab: MakeLab) -> None:
    """A rank, a monitor process, and nodes, with the processes that ranks have started."""
    lab = make_lab(3)
    job = lab.start(_COUNT, ranks_per_node=2)
    job.wait_event("step", range(6), 40.0)

    lab.freeze(1)
    job.freeze_rank(5)
    frozen_at = time.monotonic()
    job.wait_event("step", [0, 1, 4], 10.0, since=frozen_at)
    assert {line.process for line in job.lines() if line.time > frozen_at} == {0, 1, 4}
    lab.thaw(1)
    job.thaw_rank(5)
    job.wait_event("step", range(6), 10.0, since=time.monotonic())

    monitor = int((job.folder / "monitor_0.pid").read_text())
    job.kill_monitor(0)
    wait_until(lambda: not _runs(monitor), "the end of a monitor process")
    job.kill_rank(1)
    assert job.wait_exits([1], 10.0)
    assert job.exits[1].code == -signal.SIGKILL
    assert len(job.processes_of(1)) == 1  # its child

    lab.freeze(1)
    lab.kill_node(1)
    lab.reboot(2)
    assert job.wait_exits([2, 3, 4, 5], 10.0)
    assert job.running() == [0]
    assert not any(job.processes_of(rank) for rank in (2, 3, 4, 5))
    endpoints = Endpoints(lab)
    assert endpoints.arrives(2, 0)
    endpoints.close()
    job.stop()
    assert job.wait_exits([0], 10.0)
    assert job.exits[0].code == 0


def test_nothing_is_left(make_lab: MakeLab) -> None:
    lab = make_lab(2)
    lab.network.delay(1, 0.01)
    job = lab.start(_COUNT)
    job.wait_event("step", range(2), 40.0)
    ours = [name.name for name in NETNS_FOLDER.glob("lab-*") if f"-{os.getpid()}-" in name.name]
    assert len(ours) == 3
    pids = [pid for rank in range(2) for pid in job.processes_of(rank)]
    assert len(pids) == 4
    lab.freeze(0)
    lab.close()
    assert not any(map(_runs, pids))
    assert not any((NETNS_FOLDER / name).exists() for name in ours)
    assert not list(cgroups.mount_point().glob(f"lab-{os.getpid()}-*"))


_LEAVES_A_LAB = """
import subprocess, sys, time
from tests.inprocess.nodes import cgroups
from tests.inprocess.nodes.names import fresh_prefix
from tests.inprocess.nodes.network import Network
prefix = fresh_prefix()
network = Network(prefix, 2)
group = cgroups.Group(cgroups.mount_point() / prefix).make().child("n0").child("rank0")
child = subprocess.Popen(["sleep", "60"], start_new_session=True)
(group.path / "cgroup.procs").write_text(str(child.pid))
print(prefix, child.pid, flush=True)
time.sleep(60)
"""


def test_what_a_killed_test_process_leaves_is_removed(make_lab: MakeLab) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", _LEAVES_A_LAB], stdout=subprocess.PIPE, text=True, cwd=_REPOSITORY
    ) as process:
        assert process.stdout is not None
        prefix, pid = process.stdout.readline().split()
        assert not any(name.startswith(prefix) for name in remove_stale())
        process.kill()
    assert _runs(int(pid))
    make_lab(1)
    assert not _runs(int(pid))
    assert not list(NETNS_FOLDER.glob(f"{prefix}*"))
    assert not (cgroups.mount_point() / prefix).exists()


def test_two_halves_that_go_on_by_themselves_are_found(make_lab: MakeLab) -> None:
    """The judge finds what is wrong with a program that nothing protects."""
    report = play(
        make_lab(2),
        [Fault(Kind.CUT, 1)],
        ranks_per_node=2,
        options=Options(heartbeat_timeout_s=0.6, barrier_timeout_s=2.0),
        program="tests.inprocess.nodes.misbehaving:split",
    )
    found = {violation.verdict for violation in report.violations}
    assert found == {Verdict.TWO_JOBS, Verdict.TWO_OF_ONE_RANK, Verdict.WITHOUT_SERVER}, report.text


def _runs(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False
