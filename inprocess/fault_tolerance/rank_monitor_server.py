"""The monitor processes of a launcher, as launchers start them. What they do is in `inprocess.monitor_process`."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any

from inprocess.fault_tolerance.config import FaultToleranceConfig
from inprocess.monitor_process.messages import ServeRanks
from inprocess.monitor_process.start import MonitorControl, MonitorHandle, MonitorStartError, start_monitor

__all__ = ["MonitorControl", "MonitorHandle", "RankMonitorServer"]

_START_TIMEOUT_S = 180.0


class RankMonitorServer:
    """Starts monitor processes. It is not instantiated."""

    @staticmethod
    def run_in_subprocess(
        cfg: FaultToleranceConfig,
        ipc_socket_path: str | Sequence[str],
        is_restarter_logger: bool = False,
        mp_ctx: Any = None,
        env: Mapping[str, str] | None = None,
        slot_wait_s: float = 60.0,
        peers: Sequence[str] = (),
    ) -> MonitorHandle:
        """Start a monitor process and return when it listens: 180 s at most. RuntimeError if it does not.

        It ends when the caller's process ends. With several paths it watches a rank at each. `mp_ctx` is accepted for
        compatibility and not used: the process is always started from scratch. `env` is added to its environment. A
        rank that connects while another is watched waits for `slot_wait_s`. `peers` are the paths of other monitors,
        which are asked where their ranks are when a rank is late.
        """
        paths = [ipc_socket_path] if isinstance(ipc_socket_path, str) else list(ipc_socket_path)
        task = ServeRanks(
            paths=[os.path.abspath(path) for path in paths],
            neighbors=[os.path.abspath(path) for path in peers],
            settings=cfg.to_dict(),
            slot_wait_s=slot_wait_s,
            check_interval_s=cfg.workload_check_interval,
            restart_check_interval_s=cfg.restart_check_interval,
            health_check_interval_s=cfg.node_health_check_interval,
            checks_network_ports=cfg.enable_nic_monitor,
            termination_signal=int(cfg.rank_termination_signal),
            termination_grace_s=cfg.termination_grace_time,
            logs_restarts=is_restarter_logger,
            log_level=cfg.log_level,
        )
        try:
            return start_monitor(task, timeout_s=_START_TIMEOUT_S, env=env, stdout=None, stderr=None)
        except MonitorStartError as error:
            raise RuntimeError(str(error)) from error
