"""What ranks ask of the launcher: leave this node out, or end the whole workload."""

from __future__ import annotations

import logging
import os

from inprocess.fault_tolerance.data import (
    FT_LAUNCHER_IPC_SOCKET_ENV_VAR,
    RankInfo,
    WorkloadAction,
    WorkloadControlRequest,
)
from inprocess.fault_tolerance.ipc_connector import IpcConnector
from inprocess.ipc import unix_sockets

__all__ = ["ControlInbox"]

_log = logging.getLogger(__name__)


class ControlInbox:
    """Receives requests from `__enter__` to `__exit__`, in a thread; nothing is acted on before `wanted` is called."""

    def __init__(self) -> None:
        self._connector = IpcConnector(os.path.join(unix_sockets.private_directory(), f"launcher-{os.getpid()}.sock"))

    @property
    def environment(self) -> dict[str, str]:
        """The variable by which workers find the inbox."""
        return {FT_LAUNCHER_IPC_SOCKET_ENV_VAR: self._connector.path}

    def wanted(self) -> WorkloadControlRequest | None:
        """Return what the requests since the last call come to: of several, the one with the widest effect."""
        widest: WorkloadControlRequest | None = None
        for item in self._connector.fetch_received():
            request = _request(item)
            if request is None:
                _log.warning("not a control request, ignored: %r", item)
                continue
            rank, asked = request
            _log.warning("rank %d asks for %s: %s", rank.global_rank, asked.action.name, asked.description)
            if asked.action is not WorkloadAction.Continue and (
                widest is None or asked.action.value > widest.action.value
            ):
                widest = asked
        return widest

    def __enter__(self) -> ControlInbox:
        self._connector.start_receiving()
        return self

    def __exit__(self, *error: object) -> None:
        self._connector.stop_receiving()


def _request(item: object) -> tuple[RankInfo, WorkloadControlRequest] | None:
    if isinstance(item, list | tuple) and len(item) == 2:
        rank, asked = item
        if isinstance(rank, RankInfo) and isinstance(asked, WorkloadControlRequest):
            return rank, asked
    return None
