"""The process beside each rank that outlives it. `handle` is the rank's side, `daemon` the other."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from inprocess.monitor_process.handle import MonitorProcess

__all__ = ["MonitorProcess"]


def __getattr__(name: str) -> Any:
    if name == "MonitorProcess":
        from inprocess.monitor_process.handle import MonitorProcess

        return MonitorProcess
    raise AttributeError(f"module 'inprocess.monitor_process' has no attribute {name!r}")
