"""Jobs with more than one fault: many restarts in a row, many ranks, deaths of the processes that host the store."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import inprocess
from tests.inprocess.faults.events import Journal
from tests.inprocess.faults.program import timeouts
from tests.inprocess.faults.strike import Fault
from tests.inprocess.restarting import UNBOUNDED

_PATIENT = {
    "soft_timeout": timedelta(seconds=25),
    "hard_timeout": timedelta(seconds=30),
    "heartbeat_interval": timedelta(seconds=2),
    "heartbeat_timeout": timedelta(seconds=25),
    "barrier_timeout": timedelta(seconds=60),
    "completion_timeout": timedelta(seconds=60),
    "progress_watchdog_interval": timedelta(seconds=2),
}


def _run(journal: Journal, function: Callable[[inprocess.CallWrapper], Any], **settings: Any) -> Any:
    """Run `function` in a wrapper whose hooks write down that they are called."""

    def note(name: str, then: Callable[[Any], Any] = lambda state: None) -> Callable[[Any], Any]:
        def hook(state: Any) -> Any:
            journal.note(name, state)
            then(state)
            journal.note(f"{name} ends", state)
            return state

        return hook

    def wrapped(call: inprocess.CallWrapper | None = None) -> Any:
        assert call is not None
        with _noted(journal, call):
            return function(call)

    finalize = settings.pop("finalize", lambda state: None)
    wrapper = inprocess.Wrapper(
        **{
            **timeouts(),
            **UNBOUNDED,
            "initialize": note("initialize"),
            "abort": inprocess.Compose(inprocess.abort.AbortTorchDistributed(), note("abort")),
            "finalize": note("finalize", finalize),
            "monitor_process_logfile": str(journal.folder / "monitor_{rank}.log"),
            "monitor_process_pidfile": str(journal.folder / "monitor_{rank}.pid"),
            **settings,
        }
    )
    return wrapper(wrapped)()


@contextmanager
def _noted(journal: Journal, call: inprocess.CallWrapper) -> Iterator[None]:
    state = call.state.freeze()
    journal.note("function", state)
    try:
        yield
    finally:
        journal.note("function ends", state)


def _sum_over_ranks(value: int) -> int:
    dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    total = torch.tensor([value])
    dist.all_reduce(total)
    return int(total)


# -- many restarts -----------------------------------------------------------------------------------------------------


def endure(restarts: int, journal: Journal) -> int:
    """In each iteration but the last another rank raises, while the others are blocked in gloo."""

    def function(call: inprocess.CallWrapper) -> int:
        if call.iteration in (restarts // 5, restarts):
            journal.note("holdings", call.state, **_holdings(), keys=call.base_store.num_keys())
        total = _sum_over_ranks(1)
        if call.iteration < restarts:
            fails = call.iteration % call.state.world_size
            call.state.store.arrive("added", str(journal.process))
            if call.state.rank == fails:
                call.state.store.wait_size("added", call.state.world_size)
                raise Fault(f"fault {call.iteration}")
            dist.recv(torch.empty(1), src=fails)
        dist.destroy_process_group()
        return total

    return int(_run(journal, function, last_call_wait=timedelta(0)))


def _holdings() -> dict[str, Any]:
    """What stays: of several looks the one with the fewest threads, as one of the last iteration may just be ending."""
    looks = []
    for _ in range(10):
        looks.append(_held_now())
        time.sleep(0.01)
    return min(looks, key=lambda look: int(look["tasks"]))


def _held_now() -> dict[str, Any]:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return {
        "tasks": len(os.listdir("/proc/self/task")),
        "threads": threading.active_count(),
        "names": sorted(thread.name for thread in threading.enumerate()),
        "fds": len(os.listdir("/proc/self/fd")),
        "mappings": Path("/proc/self/maps").read_text().count("\n"),
        "resident_kb": pages * os.sysconf("SC_PAGE_SIZE") // 1024,
    }


# -- many ranks --------------------------------------------------------------------------------------------------------


def crowd(victims: list[int], journal: Journal) -> int:
    """Iteration 0: one rank raises. Iteration 1: several die. Returns the number of ranks in the last one."""

    def function(call: inprocess.CallWrapper) -> int:
        world_size = call.state.world_size
        call.state.store.arrive("there", str(journal.process))
        call.state.store.wait_size("there", world_size, timedelta(seconds=20))
        if call.iteration == 0 and journal.process == max(victims) + 1:
            raise Fault("the first fault")
        if call.iteration == 1 and journal.process in victims:
            os.kill(os.getpid(), signal.SIGKILL)
        while call.iteration < 2:
            time.sleep(0.05)
        return world_size

    return int(_run(journal, function, **_PATIENT))


# -- the store's hosts -------------------------------------------------------------------------------------------------


def serve(when: str, journal: Journal) -> int:
    """Wait for the mark "go": in the function of iteration 0 ("function"), or in `finalize` ("restart")."""

    def wait(_: Any = None) -> None:
        journal.mark(f"waits-{journal.process}")
        journal.wait_marks("go", timeout_s=40.0)

    def function(call: inprocess.CallWrapper) -> int:
        total = _sum_over_ranks(journal.process + 1)
        if call.iteration == 0 and when == "function":
            wait()
        if call.iteration == 0 and when == "restart":
            call.state.store.arrive("added", str(journal.process))
            if journal.process == 3:
                call.state.store.wait_size("added", 4)
                raise Fault("the first fault")
            dist.recv(torch.empty(1), src=3)
        dist.destroy_process_group()
        return total

    return int(_run(journal, function, finalize=wait if when == "restart" else lambda state: None))


def orphan(journal: Journal) -> int:
    """The monitor process of rank 1 is stopped when its rank fails; it goes on when all are in the next iteration."""

    def function(call: inprocess.CallWrapper) -> int:
        total = _sum_over_ranks(journal.process + 1)
        call.state.store.arrive("added", str(journal.process))
        call.state.store.wait_size("added", 3)
        if call.iteration == 0 and journal.process == 1:
            os.kill(call.monitor_process.pid, signal.SIGSTOP)
            raise Fault("the first fault")
        if call.iteration == 0:
            dist.recv(torch.empty(1), src=1)
        if journal.process == 1:
            os.kill(call.monitor_process.pid, signal.SIGCONT)
        dist.destroy_process_group()
        return total

    return int(_run(journal, function))
