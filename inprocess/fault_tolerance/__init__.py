"""Sections of a training program with time limits, enforced by a process beside each rank.

    client = RankMonitorClient()
    client.init_workload_monitoring()
    with client.section("step"): ...

Importing this package is cheap and does not import torch.

    config, config_cli      the settings, and their command line options
    data                    values that ranks, monitors and launchers exchange
    rank_monitor_client     the rank's side; its parts are `recorder`, `client_sections`, `link` and `errors`
    timeouts_calc           limits learned from durations; `learned_limits`: saved and exchanged
    rank_monitor_server     starts monitor processes, which are in `inprocess.monitor_process`
    ipc_connector           the launcher's inbox
    progress_tracker        progress between restarts
    launcher                the command `ckpt_launcher`
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from inprocess.ipc.lazy_names import lazy_names

if TYPE_CHECKING:
    from inprocess.fault_tolerance.config import FaultToleranceConfig
    from inprocess.fault_tolerance.data import WorkloadAction, WorkloadControlRequest
    from inprocess.fault_tolerance.errors import RankMonitorClientError
    from inprocess.fault_tolerance.rank_monitor_client import RankMonitorClient
    from inprocess.fault_tolerance.rank_monitor_server import RankMonitorServer
    from inprocess.monitor_process.state_machine import (
        InvalidStateTransitionException,
        RankMonitorState,
        RankMonitorStateMachine,
    )
    from inprocess.sections.timeouts import HeartbeatTimeouts, SectionTimeouts

_DEFINED_IN = {
    "FaultToleranceConfig": "inprocess.fault_tolerance.config",
    "HeartbeatTimeouts": "inprocess.fault_tolerance.data",
    "InvalidStateTransitionException": "inprocess.monitor_process.state_machine",
    "RankMonitorClient": "inprocess.fault_tolerance.rank_monitor_client",
    "RankMonitorClientError": "inprocess.fault_tolerance.rank_monitor_client",
    "RankMonitorServer": "inprocess.fault_tolerance.rank_monitor_server",
    "RankMonitorState": "inprocess.monitor_process.state_machine",
    "RankMonitorStateMachine": "inprocess.monitor_process.state_machine",
    "SectionTimeouts": "inprocess.fault_tolerance.data",
    "WorkloadAction": "inprocess.fault_tolerance.data",
    "WorkloadControlRequest": "inprocess.fault_tolerance.data",
}

__all__ = [
    "FaultToleranceConfig",
    "HeartbeatTimeouts",
    "InvalidStateTransitionException",
    "RankMonitorClient",
    "RankMonitorClientError",
    "RankMonitorServer",
    "RankMonitorState",
    "RankMonitorStateMachine",
    "SectionTimeouts",
    "WorkloadAction",
    "WorkloadControlRequest",
]


__getattr__, __dir__ = lazy_names(__name__, _DEFINED_IN)
