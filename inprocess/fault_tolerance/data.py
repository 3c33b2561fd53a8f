"""The values that ranks, monitors and launchers exchange."""

from __future__ import annotations

import enum
from dataclasses import dataclass

from inprocess.monitor_process.messages import RankInfo
from inprocess.sections.timeouts import HeartbeatTimeouts, SectionTimeouts

__all__ = [
    "FT_LAUNCHER_IPC_SOCKET_ENV_VAR",
    "FT_RANK_MONITOR_IPC_SOCKET_ENV_VAR",
    "HeartbeatTimeouts",
    "RankInfo",
    "SectionTimeouts",
    "WorkloadAction",
    "WorkloadControlRequest",
]

FT_RANK_MONITOR_IPC_SOCKET_ENV_VAR = "FT_RANK_MONITOR_IPC_SOCKET"
FT_LAUNCHER_IPC_SOCKET_ENV_VAR = "FT_LAUNCHER_IPC_SOCKET"


class WorkloadAction(enum.Enum):
    """What a rank may ask of the launcher."""

    Continue = 0
    ExcludeThisNode = 1
    ShutdownWorkload = 2


@dataclass(frozen=True)
class WorkloadControlRequest:
    """What a rank asks of the launcher, and why."""

    action: WorkloadAction
    description: str = ""
