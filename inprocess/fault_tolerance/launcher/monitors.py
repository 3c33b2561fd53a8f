"""The monitor processes of a node: one per local rank, for all cycles."""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

from inprocess.fault_tolerance.config import FaultToleranceConfig
from inprocess.fault_tolerance.data import FT_RANK_MONITOR_IPC_SOCKET_ENV_VAR
from inprocess.fault_tolerance.rank_monitor_server import RankMonitorServer
from inprocess.ipc import unix_sockets
from inprocess.ipc.packets import PacketError
from inprocess.monitor_process.start import MonitorControl, MonitorHandle

_log = logging.getLogger(__name__)
_FAULTS = (OSError, EOFError, PacketError)


class RankMonitors:
    """The monitors of `count` local ranks. One thread. They end with this process at the latest.

    RuntimeError if one does not start. `fds` become readable when a monitor has ended: call `restart_ended` then. The
    new monitor has the same path, and the worker reconnects by itself.
    """

    def __init__(self, config: FaultToleranceConfig, count: int) -> None:
        self._config = config
        self._cycle = 0
        folder = unix_sockets.private_directory()
        self._paths = [os.path.join(folder, f"rank-{os.getpid()}-{local_rank}.sock") for local_rank in range(count)]
        self._handles: list[MonitorHandle] = []
        self._workers: dict[int, int] = {}  # local rank -> process id

    @property
    def fds(self) -> list[int]:
        """Process descriptors of the monitors."""
        return [handle.sentinel for handle in self._handles]

    @property
    def pids(self) -> list[int]:
        """Process ids of the monitors."""
        return [handle.pid for handle in self._handles]

    def environment(self, local_rank: int) -> dict[str, str]:
        """Return the environment variable by which the worker with this local rank finds its monitor."""
        return {FT_RANK_MONITOR_IPC_SOCKET_ENV_VAR: self._paths[local_rank]}

    def begin_cycle(self, cycle: int) -> None:
        """Start monitors that do not run, and tell all of them which cycle begins."""
        self._cycle = cycle
        self.start()
        self._tell(lambda control: control.set_cycle(cycle))

    def start(self) -> None:
        """Start monitors that do not run."""
        self.restart_ended()
        if not self._handles:
            with ThreadPoolExecutor(len(self._paths)) as pool:  # each start is mostly waiting
                started = [pool.submit(self._start, local_rank) for local_rank in range(len(self._paths))]
            self._handles = [future.result() for future in started if future.exception() is None]
            for future in started:
                future.result()

    def end_with_us(self, local_rank: int, pid: int) -> None:
        """Have a worker ended by its monitor if this process dies: it must not go on alone."""
        self._workers[local_rank] = pid
        try:
            self._handles[local_rank].control.end_with_launcher(pid)
        except _FAULTS as error:
            _log.debug("worker %d would outlive its launcher: %s", pid, error)  # it has ended, or its monitor has

    def end_cycle(self) -> None:
        """The workers have ended: have monitors close their connections, for the next workers."""
        self._workers = {}
        self._tell(lambda control: control.close_worker_connection())

    def restart_ended(self) -> None:
        """Start a new monitor in place of each that has ended."""
        for local_rank, handle in enumerate(self._handles):
            if not handle.is_alive():
                _log.error(
                    "the monitor of local rank %d has ended (%s); starting a new one", local_rank, handle.exitcode
                )
                handle.close()
                self._handles[local_rank] = self._start(local_rank)
                with contextlib.suppress(*_FAULTS):
                    self._handles[local_rank].control.set_cycle(self._cycle)
                if local_rank in self._workers:
                    self.end_with_us(local_rank, self._workers[local_rank])

    def close(self) -> None:
        """End all monitors. Idempotent."""
        handles, self._handles = self._handles, []
        for handle in handles:
            handle.terminate()  # all at once, then wait for each of them
        for handle in handles:
            handle.close()
        for path in self._paths:
            unix_sockets.remove_socket(path)  # a monitor that was killed leaves its socket behind

    def _start(self, local_rank: int) -> MonitorHandle:
        return RankMonitorServer.run_in_subprocess(
            self._config,
            self._paths[local_rank],
            is_restarter_logger=local_rank == 0,
            peers=[path for path in self._paths if path != self._paths[local_rank]],
        )

    def _tell(self, send: Callable[[MonitorControl], None]) -> None:
        for local_rank, handle in enumerate(self._handles):
            try:
                send(handle.control)
            except _FAULTS as error:
                _log.warning("the monitor of local rank %d does not answer: %s", local_rank, error)
