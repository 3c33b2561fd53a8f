"""The worker processes of a cycle: how they end, are stopped, and are replaced."""

from __future__ import annotations

import contextlib
import inspect
import logging
import os
import select
import signal
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from torch.distributed.elastic.agent.server.api import Worker
from torch.distributed.elastic.multiprocessing.errors import ProcessFailure
from torch.distributed.elastic.multiprocessing.subprocess_handler import SubprocessHandler, get_subprocess_handler

from inprocess.attribution import Cause
from inprocess.fault_tolerance.launcher.worker_causes import cause_of_failures
from inprocess.process_end import KernelEvidence

_log = logging.getLogger(__name__)
_KILL_WAIT_S = 30.0


class WorkerProcesses:
    """Children of this process, by local rank. Their ends are read, not reaped: their owner does that. One thread.

    Descriptors are open until `close`, so a signal never reaches another process with the same id.
    """

    def __init__(self, pids: Mapping[int, int]) -> None:
        self.pids = dict(pids)
        self.starts = dict.fromkeys(pids, 1)  # how many processes were started, by local rank
        self.kernel = KernelEvidence(os.getpid())  # workers are in the control group of the launcher
        self.stopped: set[int] = set()  # local ranks of those that `stop` has ended
        self._running: dict[int, int] = {}  # local rank -> process descriptor
        for local_rank, pid in pids.items():
            with contextlib.suppress(ProcessLookupError):  # reaped already
                self._running[local_rank] = os.pidfd_open(pid)

    @property
    def running(self) -> set[int]:
        """Local ranks of workers whose end was not taken yet."""
        return set(self._running)

    def replace(self, local_rank: int, pid: int) -> None:
        """Watch this child in place of one that has ended."""
        self._running[local_rank] = os.pidfd_open(pid)
        self.pids[local_rank] = pid
        self.starts[local_rank] += 1

    @property
    def fds(self) -> list[int]:
        """Descriptors that become readable when a worker ends."""
        return list(self._running.values())

    def take_ended(self) -> dict[int, int]:
        """Return exit codes since the last call, by local rank; negative for a signal."""
        codes = {}
        for local_rank, fd in list(self._running.items()):
            if wait_readable([fd], 0):
                codes[local_rank] = _code(fd)
                del self._running[local_rank]
                os.close(fd)
        return codes

    def signal(self, number: signal.Signals) -> None:
        """Send a signal to running workers, not to processes that they have started."""
        for fd in self._running.values():
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(fd, number)

    def kill(self, local_rank: int) -> None:
        """Kill one worker, if it runs; `take_ended` still returns it."""
        fd = self._running.get(local_rank)
        if fd is not None:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(fd, signal.SIGKILL)

    def stop(self, timeout_s: float) -> None:
        """Send SIGTERM, and SIGKILL after `timeout_s`. When it returns all have ended, or the log has an error."""
        self.take_ended()
        if not self._running:
            return
        self.stopped |= self.running
        self.signal(signal.SIGTERM)
        self.signal(signal.SIGCONT)  # a stopped process can end only when it runs
        if self._wait(timeout_s):
            return
        _log.warning("workers %s have not ended within %g s and are killed", self._named(), timeout_s)
        self.signal(signal.SIGKILL)
        if not self._wait(_KILL_WAIT_S):
            _log.error("workers %s cannot be killed: they hang in the kernel", self._named())

    def close(self) -> None:
        """Close the descriptors. Idempotent."""
        for fd in self._running.values():
            os.close(fd)
        self._running = {}

    def _wait(self, timeout_s: float) -> bool:
        deadline = time.monotonic() + timeout_s
        while self._running and (left_s := deadline - time.monotonic()) > 0:
            wait_readable(self.fds, left_s)
            self.take_ended()
        return not self._running

    def _named(self) -> str:
        return ", ".join(f"{local_rank} (pid {self.pids[local_rank]})" for local_rank in sorted(self._running))


def set_aside_torn_records(error_files: Iterable[str]) -> None:
    """Rename records of errors that torch cannot read: their writers were killed meanwhile, or a disk was full.

    The workers must have ended. Torch logs the name of such a record, and raises.
    """
    for path in error_files:
        try:
            ProcessFailure(0, 0, 1, path)
        except Exception:
            with contextlib.suppress(OSError):
                os.replace(path, f"{path}.torn")


def failures_of(
    codes: Mapping[int, int], processes: WorkerProcesses, workers: Sequence[Worker], error_files: Mapping[int, str]
) -> dict[int, ProcessFailure]:
    """Return the failures of workers that have ended with these codes, by rank. Keys of the arguments: local ranks.

    Crashes come first: torch takes the first of the earliest failures for the cause of all, and a worker that ends with
    0 too early is often a consequence.
    """
    set_aside_torn_records(error_files[local_rank] for local_rank in codes)
    return {
        int(workers[local_rank].global_rank): ProcessFailure(
            local_rank, processes.pids[local_rank], code, error_files[local_rank]
        )
        for local_rank, code in sorted(codes.items(), key=lambda ended: (ended[1] == 0, ended[0]))
    }


def describe_failures(failures: Mapping[int, ProcessFailure]) -> str:
    """Return the failures, by rank, as text. A worker that has failed although it ended with 0 was in the wrapper."""
    early = " before the function in the wrapper was completed"
    ended = [f"rank {rank} with {each.exitcode}{'' if each.exitcode else early}" for rank, each in failures.items()]
    return f"workers have ended: {', '.join(ended)}"


def log_cause(failures: Mapping[int, ProcessFailure], processes: WorkerProcesses) -> Cause | None:
    """Log why workers have failed, on one line, and return it. Those that were stopped after others are no cause."""
    if not failures:
        return None
    first = {rank: each for rank, each in failures.items() if each.local_rank not in processes.stopped}
    cause = cause_of_failures(first or failures, processes.kernel)
    _log.error("cause: %s", cause)
    return cause


def start_worker(
    context: Any,
    workers: WorkerProcesses,
    local_rank: int,
    variables: Mapping[str, str],
    get_handler: Callable[..., SubprocessHandler] = get_subprocess_handler,
) -> int:
    """Start a worker's command again in place of one that has ended; returns the process id. Main thread.

    `context` is torch's `SubprocessContext`, `workers` watches its processes. The new process gets the environment of
    the earlier one, changed by `variables`. If output goes to a file, that of the new process goes to another file
    beside it, with a number appended. `get_handler` is torch's function that starts a process, or another one.

    RuntimeError if the worker still runs, OSError if the process cannot be started.
    """
    if local_rank in workers.running:
        raise RuntimeError(f"worker {local_rank} (pid {workers.pids[local_rank]}) still runs")
    earlier = context.subprocess_handlers[local_rank]
    earlier.proc.wait()
    for output in (earlier._stdout, earlier._stderr):
        if output is not None:
            output.close()
    number = workers.starts[local_rank]
    options: dict[str, Any] = {}
    if "numa_options" in inspect.signature(get_subprocess_handler).parameters:  # since torch 2.9
        options["numa_options"] = context._numa_options
    handler = get_handler(
        entrypoint=context.entrypoint,
        args=context.args[local_rank],
        env={**context.envs[local_rank], **variables},
        stdout=_file(context.stdouts[local_rank], number),
        stderr=_file(context.stderrs[local_rank], number),
        local_rank_id=local_rank,
        **options,
    )
    context.subprocess_handlers[local_rank] = handler
    workers.replace(local_rank, handler.proc.pid)
    return int(handler.proc.pid)


def _file(path: str, number: int) -> str:
    return f"{path}.{number}" if os.path.isfile(path) else path


def wait_readable(fds: list[int], timeout_s: float | None) -> list[int]:
    """Return readable descriptors, after `timeout_s` (None: no limit) at the latest; negative ones are ignored."""
    poll = select.poll()
    for fd in fds:
        if fd >= 0:
            poll.register(fd, select.POLLIN)
    return [fd for fd, _ in poll.poll(None if timeout_s is None else max(0, int(timeout_s * 1000 + 0.999)))]


def _code(fd: int) -> int:
    """Return the exit code without reaping the process; 0 if it was reaped already."""
    try:
        found = os.waitid(os.P_PIDFD, fd, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:
        return 0
    if found is None:
        return 0
    return found.si_status if found.si_code == os.CLD_EXITED else -found.si_status
