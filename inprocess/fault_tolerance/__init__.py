"""Sections of a training program with time limits, watched by a process beside each rank.

    client = RankMonitorClient()
    client.init_workload_monitoring()
    with client.section("step"): ...

What is open since when is in `inprocess.sections`, which the monitor process of the in-process wrapper shares.
Importing this package is cheap and never imports torch: the monitor processes use it, too.

    data, config            what crosses between rank, monitor and launcher; the settings
    timeouts_calc           limits learned from durations
    rank_monitor_client     the rank's side (`recorder`: each event; `connection`, `link`: to the monitor)
    rank_monitor_server     the monitor process (`station`, `watched_rank`: one rank in it; `peers`: the others)
    ipc_connector           the launcher's inbox
    progress_tracker        whether restarts get anywhere
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from inprocess.fault_tolerance.client_errors import RankMonitorClientError
    from inprocess.fault_tolerance.config import FaultToleranceConfig
    from inprocess.fault_tolerance.data import WorkloadAction, WorkloadControlRequest
    from inprocess.fault_tolerance.rank_monitor_client import RankMonitorClient
    from inprocess.fault_tolerance.rank_monitor_server import RankMonitorServer
    from inprocess.fault_tolerance.state_machine import (
        InvalidStateTransitionException,
        RankMonitorState,
        RankMonitorStateMachine,
    )
    from inprocess.sections.timeouts import HeartbeatTimeouts, SectionTimeouts

_HOMES = {
    "FaultToleranceConfig": "config",
    "HeartbeatTimeouts": "data",
    "InvalidStateTransitionException": "state_machine",
    "RankMonitorClient": "rank_monitor_client",
    "RankMonitorClientError": "rank_monitor_client",
    "RankMonitorServer": "rank_monitor_server",
    "RankMonitorState": "state_machine",
    "RankMonitorStateMachine": "state_machine",
    "SectionTimeouts": "data",
    "WorkloadAction": "data",
    "WorkloadControlRequest": "data",
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


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
