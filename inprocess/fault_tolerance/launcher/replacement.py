"""One more process in the place of a worker that has ended, while the others go on."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

from torch.distributed.elastic.multiprocessing.subprocess_handler import get_subprocess_handler

from inprocess.fault_tolerance.launcher.workers import WorkerProcesses

__all__ = ["start_worker"]


def start_worker(context: Any, workers: WorkerProcesses, local_rank: int, variables: Mapping[str, str]) -> int:
    """Start the command of a worker again in the place of one that has ended; returns the process id.

    `context` is torch's `SubprocessContext`, `workers` what watches its processes. The new process gets the environment
    of the earlier one with `variables` (RANK, for one) in place of what it had. Where output goes to a file, that of
    the new process goes to a file of its own beside it, with its number at the end. Main thread of the launcher.

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
    handler = get_subprocess_handler(
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
    return f"{path}.{number}" if path else path
