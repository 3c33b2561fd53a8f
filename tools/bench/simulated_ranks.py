"""Simulated ranks and monitor processes, as threads, which send what real ones send to the coordination server.

    python -m tools.bench.simulated_ranks    commands on standard input, answers on standard output

Each rank runs the product's own `Agreement` and `SiblingMonitor` on a `SimulatedClient`, in the order in which the
protocol, the monitor thread and the monitor process call them.
"""

import functools
import json
import logging
import resource
import sys
import threading
import time
from collections import Counter
from dataclasses import asdict, dataclass
from typing import Any

from inprocess import agreement
from inprocess.agreement import Agreement
from inprocess.attribution import Interruption, InterruptionRecord
from inprocess.coordination import Access, Namespace, RestartIndex
from inprocess.monitor_process.sibling import SiblingMonitor
from inprocess.reasons import parse_reason
from inprocess.repetition import SECONDS
from tools.bench.simulated_client import Receiver, SimulatedClient

_LONG_S = 600.0
_NEVER_S = 1e6
_STACK_BYTES = 256 << 10
_TRACEBACK = '  File "train.py", line 1, in step\n    loss = model(batch)\n' * 50  # 3 KB
_GROUP_STORE = "group_store"


@dataclass(frozen=True)
class Command:
    """What all ranks do next: the ranks below `raising` fail after `idle_s` seconds.

    Heartbeats of the next iteration come every `heartbeat_s` seconds.
    """

    raising: int = 0
    idle_s: float = 0.0
    heartbeat_s: float = _NEVER_S
    end: bool = False


class SimulatedRank:
    """One rank and its monitor process, each with a connection. For one thread."""

    def __init__(self, access: Access, receiver: Receiver, rank: int, world_size: int, ping_s: float) -> None:
        self.rank = rank
        self.iteration = 0
        self.client = SimulatedClient(access, receiver, ping_s=ping_s)
        self.monitor_client = SimulatedClient(access, receiver, ping_s=ping_s)
        self._world_size = world_size
        self._sibling: SiblingMonitor | None = None
        self._agreement: Agreement | None = None

    def begin(self, heartbeat_s: float) -> None:
        """Begin an iteration, up to the call of the wrapped function."""
        rank, iteration, client = self.rank, self.iteration, self.client
        self._agreement = Agreement(Namespace(iteration, client), iteration, self._world_size)
        self._agreement.publish_rank(rank, rank)
        if rank == 0:
            self._agreement.report_active_size(self._world_size)
        self._start_sibling(heartbeat_s)
        if iteration > 1 and rank == 0:
            Namespace(iteration - 2, client).clear()
        client.begin_wait(f"{iteration}/outcome", RestartIndex(client).guard(iteration))
        if rank == 0:
            client.set(f"{iteration}/{_GROUP_STORE}", "10.0.0.1 12345")
        else:
            client.get(f"{iteration}/{_GROUP_STORE}")

    def idle(self, seconds: float, interval_s: float = 1.0) -> None:
        """Wait so long, or until a rank that has waited enough begins a restart."""
        assert self._agreement is not None
        deadline = time.monotonic() + seconds
        intervals = 1
        while (left_s := deadline - time.monotonic()) > 0:
            if self._agreement.wait_outcome(min(intervals * interval_s, left_s)) is not None:
                return
            intervals = min(2 * intervals, 10)

    def restart(self, raises: bool) -> None:
        """Go from the fault, of this rank or another, to the end of the iteration."""
        agreement = self._agreement
        assert agreement is not None
        if raises:
            record = InterruptionRecord(self.rank, Interruption.EXCEPTION, "RuntimeError: loss is nan", _TRACEBACK)
            agreement.interrupt(record)
        assert agreement.wait_outcome(_LONG_S) is not None
        agreement.has_hang()
        agreement.last_call(self.rank, _LONG_S)
        agreement.report_progress({SECONDS: 0})
        agreement.wait_roster(self.rank, _LONG_S, _LONG_S)
        self._stop_sibling()
        self.iteration += 1

    def close(self) -> None:
        """Close both connections."""
        self._stop_sibling()
        self.client.close()
        self.monitor_client.close()

    def _start_sibling(self, interval_s: float) -> None:
        self._sibling = SiblingMonitor(
            Namespace(self.iteration, self.monitor_client),
            self.rank,
            self._world_size,
            interval_s=interval_s,
            timeout_s=_NEVER_S,
            report=lambda ranks: None,
        )
        self._sibling.start()

    def _stop_sibling(self) -> None:
        if self._sibling is not None:
            self._sibling.stop()
            self._sibling = None


class _Process:
    """The ranks of one process. They run in step: no rank begins a command before all have finished the last one."""

    def __init__(self, access: Access, ranks: range, world_size: int, ping_s: float) -> None:
        self._access = access
        self._world_size = world_size
        self._ping_s = ping_s
        self._ranks: list[SimulatedRank] = []
        self._receiver = Receiver()
        self._barrier = threading.Barrier(len(ranks) + 1)
        self._command = Command()
        self._lock = threading.Lock()
        threading.stack_size(_STACK_BYTES)
        self._threads = [threading.Thread(target=self._run, args=(rank,)) for rank in ranks]

    def start(self) -> None:
        for thread in self._threads:
            thread.start()

    def ready(self) -> dict[str, Any]:
        """Wait until all ranks are in the next iteration; return what their connections carried since the last time."""
        self._barrier.wait(_LONG_S)
        sent: Counter[str] = Counter()
        received = 0
        for rank in self._ranks:
            for client in (rank.client, rank.monitor_client):
                sent.update({op.name: number for op, number in client.sent.items()})
                received += client.bytes_received
                client.sent.clear()
                client.bytes_received = 0
        return {"sent": sent, "received": received}

    def go(self, command: Command) -> None:
        self._command = command
        self._barrier.wait(_LONG_S)
        if command.end:
            for thread in self._threads:
                thread.join()

    def _run(self, number: int) -> None:
        try:
            with self._lock:  # one after the other: thousands at a time are too slow for the handshake
                rank = SimulatedRank(self._access, self._receiver, number, self._world_size, self._ping_s)
                self._ranks.append(rank)
            if number == 0:
                RestartIndex(rank.client).begin()
            heartbeat_s = _NEVER_S
            rank.client.wait(["restart_index"])
            while True:
                rank.begin(heartbeat_s)
                self._barrier.wait(_LONG_S)
                self._barrier.wait(_LONG_S)
                command, heartbeat_s = self._command, self._command.heartbeat_s
                if command.end:
                    rank.close()
                    return
                rank.idle(command.idle_s)
                rank.restart(number < command.raising)
        except BaseException:
            self._barrier.abort()  # the other ranks, and `main`, must not wait for this one
            raise


def main() -> int:
    logging.disable(logging.CRITICAL)
    sys.setswitchinterval(10.0)  # of thousands of threads that wait for the interpreter lock, each asks for it as often
    vars(agreement)["parse_reason"] = functools.lru_cache(2)(parse_reason)  # real ranks have a core each for that
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    start = json.loads(sys.stdin.readline())
    process = _Process(
        Access.from_document(start["access"]), range(*start["ranks"]), start["world_size"], start["ping_s"]
    )
    process.start()
    while True:
        print(json.dumps(process.ready()), flush=True)
        line = sys.stdin.readline()
        command = Command(**json.loads(line)) if line else Command(end=True)
        process.go(command)
        if command.end:
            return 0


def encode_command(command: Command) -> str:
    """Return the line that `main` reads."""
    return json.dumps(asdict(command))


if __name__ == "__main__":
    sys.exit(main())
