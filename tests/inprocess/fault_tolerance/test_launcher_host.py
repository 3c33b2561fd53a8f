"""The host of the rendezvous is cut off: its launcher is stopped, so connections stay open and nothing is answered."""

import re
import signal
import socket
import threading
from datetime import timedelta
from pathlib import Path
from typing import Any

import psutil
import pytest
from torch.distributed import DistNetworkError, DistStoreError, PrefixStore, Store, TCPStore

from inprocess.fault_tolerance.launcher.bounded_store import BoundedStore
from tests.inprocess.fault_tolerance.launching import Job, Launcher
from tests.inprocess.fault_tolerance.test_launcher_nodes import PROLOGUE, start_nodes, start_static
from tests.support.selection import full_only

TRAINS = f"""{PROLOGUE}
    stopping = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: stopping.set())
    say("trains")
    while not stopping.wait(0.05):
        pass
    say("saves")
"""


def stop_host(job: Job, *options: str, conf: str = "keep_alive_max_attempt=4") -> Launcher:
    """Two nodes that train; the launcher that hosts the rendezvous is stopped. Returns the other one."""
    host, other = start_nodes(job, TRAINS, 2, *options, conf=conf)
    for rank in (0, 1):
        job.wait_event(f"rank {rank} trains")
    host.signal(signal.SIGSTOP)
    return other


def stop_waiting_host(job: Job) -> Launcher:
    """Two nodes that wait for a third one; the launcher that hosts the rendezvous is stopped. Returns the other one."""
    host, other = start_nodes(job, "say('runs')", 2, nodes="3", conf="keep_alive_max_attempt=4,read_timeout=5")
    job.wait_for(lambda: "connected" if connections(other) else "", "connected", 30)
    host.signal(signal.SIGSTOP)
    return other


def connections(launcher: Launcher) -> list[Any]:
    """Connections of a launcher, once it has a handler for SIGTERM."""
    status = Path(f"/proc/{launcher.pid}/status").read_text()
    caught = int(re.findall(r"SigCgt:\s*(\w+)", status)[0], 16)
    if not caught >> (signal.SIGTERM - 1) & 1:
        return []
    found = psutil.Process(launcher.pid).net_connections("tcp")
    return [each for each in found if each.status in (psutil.CONN_ESTABLISHED, psutil.CONN_SYN_SENT)]


@pytest.mark.parametrize("policy", ["in-process", pytest.param("any-failed", marks=full_only)])
def test_the_others_end_when_the_host_of_the_rendezvous_is_cut_off(job: Job, policy: str) -> None:
    other = stop_host(job, f"--ft-restart-policy={policy}")
    assert other.wait(30) == 1
    assert "the node that hosts the rendezvous does not answer" in other.log()
    assert "has not answered for 4 s" in other.log()
    assert job.events().count("saves") == 1, "its worker was asked to end"


def test_a_launcher_whose_host_is_cut_off_obeys_sigterm(job: Job) -> None:
    other = stop_host(job, conf="keep_alive_max_attempt=6")
    other.signal(signal.SIGTERM)
    job.wait_event("saves", 20)
    assert other.wait(30) == 0
    assert "SIGTERM: the workers have ended with 0" in other.log()


def test_a_launcher_that_waits_for_nodes_obeys_sigterm_when_its_host_is_cut_off(job: Job) -> None:
    other = stop_waiting_host(job)
    other.signal(signal.SIGTERM)
    assert other.wait(30) == 128 + signal.SIGTERM


def test_a_launcher_that_waits_for_nodes_ends_when_its_host_is_cut_off(job: Job) -> None:
    other = stop_waiting_host(job)
    assert other.wait(40) == 1
    assert "does not answer" in other.log()


def test_a_launcher_whose_fixed_host_does_not_answer_obeys_sigterm(job: Job) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        options = ["--nnodes=2", "--node-rank=1", "--master-addr=127.0.0.1", f"--master-port={silent.getsockname()[1]}"]
        launcher = job.launch("say('runs')", *options)
        job.wait_for(lambda: "connected" if connections(launcher) else "", "connected", 30)
        launcher.signal(signal.SIGTERM)
        assert launcher.wait(20) == 128 + signal.SIGTERM


def test_the_others_end_when_their_fixed_host_is_cut_off(job: Job) -> None:
    host, other = start_static(job, TRAINS, 2, "--rdzv-conf=keep_alive_interval=1,keep_alive_max_attempt=4")
    for rank in (0, 1):
        job.wait_event(f"rank {rank} trains")
    host.signal(signal.SIGSTOP)
    assert other.wait(30) == 1
    assert "has not answered for 4 s" in other.log()


class _Silent(Store):
    """A store whose operations wait for an event."""

    def __init__(self, answers: threading.Event) -> None:
        super().__init__()
        self.answers = answers

    def add(self, key: str, amount: int) -> int:
        assert self.answers.wait(30)
        return amount


def test_a_bounded_store_does_as_the_store_that_it_asks() -> None:
    inner = TCPStore("127.0.0.1", 0, is_master=True, timeout=timedelta(seconds=0.2))
    bounded = BoundedStore(inner, 10, lambda: False)
    store = PrefixStore("outer", PrefixStore("inner", bounded))
    store.set("a", "1")
    assert store.get("a") == inner.get("inner/outer/a") == b"1"
    store.multi_set(["b", "c"], ["2", "3"])
    assert store.multi_get(["a", "b", "c"]) == [b"1", b"2", b"3"]
    assert store.add("n", 2) == 2
    assert store.compare_set("b", "2", "4") == b"4"
    store.append("b", "5")
    assert store.get("b") == b"45"
    assert store.check(["a"])
    assert not store.check(["a", "absent"])
    with pytest.raises(DistStoreError, match="absent"):
        store.get("absent")


def test_a_store_that_has_not_answered_in_time_is_lost() -> None:
    answers = threading.Event()
    store = BoundedStore(_Silent(answers), 0.3, lambda: False)
    with pytest.raises(DistNetworkError, match=r"not answered for 0\.3 s"):
        store.add("n", 1)
    answers.set()
    with pytest.raises(DistNetworkError, match=r"not answered for 0\.3 s"):
        store.add("n", 1)


def test_a_signal_ends_the_wait_for_a_store_but_the_store_is_not_lost() -> None:
    answers = threading.Event()
    store = BoundedStore(_Silent(answers), 30, lambda: not answers.is_set())
    with pytest.raises(DistNetworkError, match="a signal has arrived"):
        store.add("n", 1)
    answers.set()
    assert store.add("n", 3) == 3
