"""The cause of each restart of a job: which rank was first, why, and what to do."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from torch.distributed import TCPStore
from torch.utils.data import DataLoader, Dataset

from ckpt.errors import StorageError
from inprocess import CallWrapper, Wrapper
from tests.inprocess.restarting import PATIENT, SHORT, UNBOUNDED, logged, seconds
from tests.support import rank_values
from tests.support.memory_groups import EATS_MEMORY, MemoryGroup, memory_group


class Records(Dataset[Any]):
    """Records that cannot be read, or that need more memory than there is."""

    def __init__(self, eats_memory: bool) -> None:
        self._eats_memory = eats_memory

    def __getitem__(self, index: int) -> Any:
        if self._eats_memory:
            exec(EATS_MEMORY)
        raise KeyError(f"record {index}")

    def __len__(self) -> int:
        return 1


def lose_a_peer() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    TCPStore("127.0.0.1", port, is_master=False, timeout=seconds(a=0.5)["a"])


def fail_to_write() -> None:
    raise StorageError("/scratch/run7 is not a directory")


def end_by(number: signal.Signals) -> None:
    os.kill(os.getpid(), number)
    threading.Event().wait(60)


# Of a process that its parent reaps at once.
LOSES_EXIT_CODES = tuple(map(int, re.findall(r"\d+", os.uname().release)[:2])) < (6, 15)

# In each iteration another fault: the rank, how to make it, the class, and parts of the text.
FAULTS: list[tuple[int, Any, str, tuple[str, ...]]] = [
    (1, lambda: next(iter(DataLoader(Records(False)))), "data", ("KeyError", "record 0")),
    (2, fail_to_write, "storage", ("StorageError: /scratch/run7", "in fail_to_write")),
    (2, lose_a_peer, "network", ("Dist", "in lose_a_peer")),
    (1, lambda: [][1], "user code", ("IndexError",)),
    (2, lambda: end_by(signal.SIGTERM), "preempted", ("died: SIGTERM",)),
    (1, lambda: end_by(signal.SIGKILL), "unknown", ("died: SIGKILL",)),
]


@pytest.mark.timeout(120)
def test_each_restart_has_one_cause_that_all_ranks_know(tmp_path: Path) -> None:
    def main(rank: int, world_size: int, folder: Path) -> Any:
        causes = []

        @Wrapper(monitor_process_logfile=tmp_path / "rank_{rank}.log", **PATIENT, **UNBOUNDED)
        def train(call: CallWrapper | None = None) -> Any:
            assert call is not None
            causes.append(None if call.cause is None else call.cause.document())
            (folder / f"causes_{rank}").write_text(json.dumps(causes))
            if call.iteration < len(FAULTS):
                faulty, act, _, _ = FAULTS[call.iteration]
                if call.state.initial_rank == faulty:
                    act()
            while call.iteration < len(FAULTS):
                time.sleep(0.02)

        with logged() as lines:
            train()
        return causes, [line for line in lines if "cause of the restart" in line]

    (causes, lines), *others = rank_values(
        main, 3, tmp_path, timeout=100, returncodes={2: -signal.SIGTERM, 1: -signal.SIGKILL}
    )
    assert others == [None, None]
    for rank, known in ((1, 6), (2, 5)):  # until they died
        assert json.loads((tmp_path / f"causes_{rank}").read_text()) == causes[:known]
    assert causes[0] is None
    assert [cause["rank"] for cause in causes[1:]] == [rank for rank, _, _, _ in FAULTS]
    for cause, (_, _, fault_class, parts) in zip(causes[1:], FAULTS, strict=True):
        assert cause["evidence"][0] == f"host {os.uname().nodename}"
        if "died" in parts[0] and LOSES_EXIT_CODES and "SIG" not in cause["text"]:
            continue
        assert cause["fault_class"] == fault_class, cause
        assert all(part in cause["text"] for part in parts), cause
    events = [json.loads(line) for line in (tmp_path / "events.jsonl").read_text().splitlines()]
    assert [event["cause"] for event in events] == causes[1:]
    assert len(lines) == 2  # of ranks that are gone, which the lowest one logs
    assert all(len(line.splitlines()) == 1 for line in lines)


@pytest.mark.parametrize("is_worker", [False, True])
def test_a_process_that_the_kernel_has_killed_for_lack_of_memory(is_worker: bool, tmp_path: Path) -> None:
    """A rank, or the data worker of a rank."""

    def main(rank: int, world_size: int, path: Path) -> Any:
        @Wrapper(**PATIENT)
        def train(call: CallWrapper | None = None) -> Any:
            assert call is not None
            if call.iteration == 0 and rank == 1:
                if is_worker:
                    data = iter(DataLoader(Records(True), num_workers=1))
                    MemoryGroup(path).add(data._workers[0].pid)
                else:
                    MemoryGroup(path).add(os.getpid())
            while call.iteration == 0:
                if rank == 1:
                    next(data) if is_worker else exec(EATS_MEMORY)
                time.sleep(0.02)
            return call.cause.document()

        if rank == 1:
            MemoryGroup(path).add(os.getpid())
        return train()

    with memory_group(1 << 30) as group:
        first, second = rank_values(main, 2, group.path, returncodes={} if is_worker else {1: -signal.SIGKILL})
    assert second == (first if is_worker else None)
    assert (first["rank"], first["fault_class"]) == (1, "out of memory")
    assert any("the kernel has killed 1 of" in line for line in first["evidence"])


def test_hangs_have_the_class_of_what_they_wait_for(tmp_path: Path) -> None:
    class Slow(Dataset[Any]):
        def __getitem__(self, index: int) -> Any:
            threading.Event().wait(60)

        def __len__(self) -> int:
            return 1

    def main(rank: int, world_size: int) -> Any:
        @Wrapper(**SHORT, **UNBOUNDED)
        def train(call: CallWrapper | None = None) -> Any:
            assert call is not None
            seen.append(None if call.cause is None else (call.cause.rank, call.cause.fault_class.value))
            if call.iteration == 0 and rank == 1:
                next(iter(DataLoader(Slow(), num_workers=1)))
            if call.iteration == 1 and rank == 1:
                threading.Event().wait(60)
            while call.iteration < 2:
                time.sleep(0.02)

        seen: list[Any] = []
        train()
        return seen

    for seen in rank_values(main, 2):
        assert seen == [None, (1, "data"), (1, "user code")]
