"""What rank, monitor and launcher tell each other, as plain values."""

from __future__ import annotations

import enum
import os
import socket
import sys
from dataclasses import dataclass

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


@dataclass(frozen=True)
class RankInfo:
    """Which process speaks. `local_rank` is -1 where it is not known."""

    global_rank: int
    local_rank: int
    host: str
    pid: int

    @classmethod
    def get_for_current_rank(cls) -> RankInfo:
        """Describe this process: by the default process group if there is one, else by RANK. ValueError without both.

        Does not import torch: where nobody else has, there is no process group.
        """
        distributed = sys.modules.get("torch.distributed")
        if distributed is not None and distributed.is_available() and distributed.is_initialized():
            rank = int(distributed.get_rank())
        elif (text := os.environ.get("RANK")) is not None:
            rank = int(text)
        else:
            raise ValueError("the rank is not known: there is no default process group, and RANK is not set")
        local_rank = int(os.environ.get("LOCAL_RANK", "-1"))
        return cls(rank, local_rank, socket.gethostname(), os.getpid())


class WorkloadAction(enum.Enum):
    """What a rank may ask the launcher for."""

    Continue = 0
    ExcludeThisNode = 1
    ShutdownWorkload = 2


@dataclass(frozen=True)
class WorkloadControlRequest:
    """An action, and why."""

    action: WorkloadAction
    description: str = ""
