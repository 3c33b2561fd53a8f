"""Program of the ranks of a laboratory: a wrapped function that makes small all-reduces, and a journal of it.

It goes on until the file `stop` is there, which all ranks see in the same step.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

import ckpt
import inprocess
from ckpt.restart import CheckpointAbort, CheckpointFinalize
from inprocess.abort import AbortTorchDistributed
from inprocess.store import EtcdStore
from tests.inprocess.nodes.journal import Journal
from tests.inprocess.restarting import UNBOUNDED

CHECKPOINTS = "checkpoints"
ETCD = "LAB_ETCD"
PHASES = ("abort", "finalize", "health check", "initialize")
"""The phases of a restart that a program can observe, in this order."""
_SAVE_EVERY = 5
_GROUP_TIMEOUT = timedelta(seconds=60)
_DRAIN_TIMEOUT = timedelta(seconds=5)


@dataclass(frozen=True)
class Options:
    """Options of a job. Times are in seconds.

    With `etcd` the store is in the cluster that ETCD in the environment names. `pauses` are the phases of the first
    restart that last so much longer, so that a fault can be applied in them.
    """

    step_s: float = 0.05
    soft_timeout_s: float = 4.0
    hard_timeout_s: float = 10.0  # long enough not to end what the loss of the server must end
    heartbeat_timeout_s: float = 2.0
    barrier_timeout_s: float = 15.0
    checkpoints: bool = False
    etcd: bool = False
    pauses: dict[str, float] = field(default_factory=dict)

    def store(self) -> dict[str, Any]:
        """Return the arguments of the wrapper that concern its store."""
        if not self.etcd:
            return {}
        return {"store_factory": EtcdStore, "store_kwargs": {"endpoints": os.environ[ETCD]}}

    def timeouts(self) -> dict[str, Any]:
        """Return the arguments of the wrapper."""
        seconds = {
            "soft_timeout": self.soft_timeout_s,
            "hard_timeout": self.hard_timeout_s,
            "heartbeat_interval": self.heartbeat_timeout_s / 8,
            "heartbeat_timeout": self.heartbeat_timeout_s,
            "barrier_timeout": self.barrier_timeout_s,
            "completion_timeout": self.barrier_timeout_s,
            "last_call_wait": 0.2,
            "termination_grace_time": 0.5,
            "monitor_thread_interval": 0.5,
            "monitor_process_interval": 0.5,
            "progress_watchdog_interval": 0.2,
        }
        return {name: timedelta(seconds=value) for name, value in seconds.items()}


class InjectedFault(Exception):
    """An ordinary failure of the function."""


def join_group() -> None:
    """Create the process group of an iteration, as in a function that knows nothing of restarts."""
    dist.init_process_group("gloo", timeout=_GROUP_TIMEOUT)


class Program:
    """One rank of a job."""

    def __init__(self, journal: Journal, options: Options) -> None:
        self._journal = journal
        self._options = options
        self._fails = False
        self._state = {"weights": torch.zeros(64), "step": torch.zeros((), dtype=torch.int64)}
        self._checkpointer: ckpt.Checkpointer | None = None
        if options.checkpoints:
            root = journal.folder / CHECKPOINTS
            self._checkpointer = ckpt.Checkpointer(root, timeout=timedelta(seconds=options.barrier_timeout_s))
            self._checkpointer.register(**self._state)
        signal.signal(signal.SIGUSR1, self._fail_in_next_step)

    def run(self) -> None:
        """Return when all ranks have completed the function. Raises what the wrapper raises."""
        abort: Any = AbortTorchDistributed()
        finalize: Any = None
        if self._checkpointer is not None:
            abort = inprocess.Compose(CheckpointAbort(self._checkpointer), abort)
            finalize = CheckpointFinalize(self._checkpointer, drain_timeout=_DRAIN_TIMEOUT)
        wrapper = inprocess.Wrapper(
            initialize=self._phase("initialize", None),
            health_check=self._phase("health check", None),
            abort=self._phase("abort", abort),
            finalize=self._phase("finalize", finalize),
            monitor_process_logfile=self._journal.folder / "monitor_{rank}.log",
            monitor_process_pidfile=self._journal.folder / "monitor_{rank}.pid",
            **self._options.store(),
            **self._options.timeouts(),
            **UNBOUNDED,
        )

        def function(call: inprocess.CallWrapper | None = None) -> None:
            assert call is not None
            self._iterate(call)

        wrapper(function)()
        if self._checkpointer is not None:
            self._checkpointer.close()

    def _phase(self, name: str, hook: Callable[[Any], Any] | None) -> Callable[[Any], Any]:
        """Return a hook that notes its phase, and lasts as long as the options say, before it calls `hook`."""
        first_restart = 1 if name == "initialize" else 0  # the iteration in which the phase is part of it

        def noted(state: Any) -> Any:
            self._journal.note(name, state.iteration, state.rank, state.world_size)
            if state.iteration == first_restart and name in self._options.pauses:
                time.sleep(self._options.pauses[name])
            return state if hook is None else hook(state)

        return noted

    # -- the function --------------------------------------------------------------------------------------------------

    def _iterate(self, call: inprocess.CallWrapper) -> None:
        rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        self._journal.note("begin", call.iteration, rank, world_size)
        try:
            join_group()
            if self._checkpointer is not None:
                self._meet_at_step()
            while not self._step(call.iteration, rank, world_size):
                time.sleep(self._options.step_s)
            if self._checkpointer is not None:
                self._checkpointer.maybe_finalize(blocking=True)
            dist.destroy_process_group()
        finally:
            self._journal.note("end", call.iteration, rank, world_size)

    def _meet_at_step(self) -> None:
        """AssertionError if the ranks go on from different steps: the hook has restored the newest one on all."""
        here = int(self._state["step"])
        least_and_most = torch.tensor([-here, here])
        dist.all_reduce(least_and_most, dist.ReduceOp.MAX)
        assert -least_and_most[0] == least_and_most[1], f"ranks go on from steps {least_and_most.tolist()}"

    def _step(self, iteration: int, rank: int, world_size: int) -> bool:
        """One step of training. True if it was the last one."""
        if self._fails:
            self._fails = False
            raise InjectedFault("injected")
        stops = rank == 0 and (self._journal.folder / "stop").exists()
        sums = torch.tensor([1, int(stops), 1 << self._journal.process])
        dist.all_reduce(sums)
        count, stop, members = sums.tolist()
        assert count == world_size, f"{count} ranks instead of {world_size} took part"
        self._journal.note("step", iteration, rank, world_size, members)
        self._train()
        return bool(stop > 0)

    def _train(self) -> None:
        self._state["step"] += 1
        self._state["weights"] += 1.0
        if self._checkpointer is not None:
            if self._checkpointer.maybe_finalize():
                self._journal.note("saved")
            if int(self._state["step"]) % _SAVE_EVERY == 0:
                self._checkpointer.async_save(self._state, int(self._state["step"]))

    def _fail_in_next_step(self, *_: object) -> None:
        self._fails = True


def train(journal: Journal, options: dict[str, Any] | None = None) -> None:
    """Run a rank; `options` are those of `Options`."""
    with contextlib.suppress(RuntimeError):
        torch.set_num_threads(1)
    Program(journal, Options(**(options or {}))).run()
