"""The processes that transfer between nodes: both ends of a pair are here, each with its own process."""

import math
import os
import signal
import threading
from collections.abc import Callable, Iterator

import psutil
import pytest
import torch.distributed
from torch.distributed import TCPStore

from inprocess.node_health.link_probe import LinkProbe, TransferTime
from inprocess.node_health.messages import MeasureTransfer

START_S = 100.0


class Pair:
    """Two nodes, and the store in which their processes meet."""

    def __init__(self) -> None:
        self.store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        self.probes = LinkProbe(1), LinkProbe(1)
        self._number = 0

    def prepare(self) -> list[str]:
        found = ["", ""]

        def prepare(node: int) -> None:
            found[node] = self.probes[node].prepare(START_S)

        self._on_both(prepare)
        return found

    def request(self, node: int, limit_s: float) -> MeasureTransfer:
        number = self._number
        return MeasureTransfer(
            number, "127.0.0.1", self.store.port, f"pair/{number}", node, 2, "gloo", 0, 1 << 18, 3, limit_s
        )

    def measure(self, limit_s: float, nodes: tuple[int, ...] = (0, 1)) -> list[TransferTime]:
        """Transfer; only these nodes take part."""
        self._number += 1
        found = [TransferTime(math.inf)] * 2

        def measure(node: int) -> None:
            if node in nodes:
                found[node] = self.probes[node].measure([self.request(node, limit_s)], limit_s)

        self._on_both(measure)
        return found

    def process(self, node: int) -> psutil.Process:
        (pid,) = self.probes[node].pids
        return psutil.Process(pid)

    def close(self) -> None:
        for probe in self.probes:
            probe.close()

    def _on_both(self, function: Callable[[int], None]) -> None:
        threads = [threading.Thread(target=function, args=(node,)) for node in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()


@pytest.fixture(scope="module")
def pair() -> Iterator[Pair]:
    found = Pair()
    yield found
    found.close()


@pytest.mark.timeout(200)
def test_processes_transfer_again_after_a_partner_did_not_come(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    assert pair.prepare() == ["", ""]
    pids = [pair.process(node).pid for node in (0, 1)]
    assert all(time.seconds < math.inf for time in pair.measure(30))
    assert all(time.seconds < math.inf for time in pair.measure(30))
    assert [pair.process(node).pid for node in (0, 1)] == pids
    alone, _ = pair.measure(1, nodes=(0,))
    assert alone.seconds == math.inf
    assert alone.why
    assert pair.prepare() == ["", ""]
    assert all(time.seconds < math.inf for time in pair.measure(30))
    assert not torch.distributed.is_initialized(), "the caller has no state of it"


@pytest.mark.timeout(200)
def test_a_process_that_hangs_is_killed_at_the_limit_and_replaced(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    assert pair.prepare() == ["", ""]
    hanging = pair.process(1)
    hanging.suspend()
    first, second = pair.measure(1)
    assert first.seconds == second.seconds == math.inf
    assert second.why == "no transfer has ended within 1 s"
    assert not hanging.is_running()
    assert pair.prepare() == ["", ""]
    os.kill(pair.process(0).pid, signal.SIGKILL)
    assert pair.measure(5, nodes=(0,))[0].why.startswith("its process has ended")
    other = pair.process(1)
    pair.close()
    assert not other.is_running()
