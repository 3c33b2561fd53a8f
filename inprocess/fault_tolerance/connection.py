"""How a client finds the monitor of its rank, and gives it the board."""

from __future__ import annotations

import os
import threading
from typing import Self

from inprocess.fault_tolerance.client_errors import RankMonitorClientError
from inprocess.fault_tolerance.config import FaultToleranceConfig
from inprocess.fault_tolerance.data import FT_RANK_MONITOR_IPC_SOCKET_ENV_VAR, RankInfo
from inprocess.fault_tolerance.link import MonitorLink
from inprocess.main_thread.stacks import StackReporter
from inprocess.monitor_process import messages
from inprocess.sections.board import Board
from inprocess.sections.gate import SECTION_BOARD_ENV
from inprocess.sections.making import make_board

__all__ = ["MonitorConnection"]


class MonitorConnection:
    """The `board` that a monitor reads. That of the in-process wrapper needs no connection: `link` is None."""

    def __init__(self, board: Board, link: MonitorLink | None = None, stacks: StackReporter | None = None) -> None:
        self.board = board
        self.link = link
        self._stacks = stacks

    @classmethod
    def find(cls, rank_info: RankInfo) -> Self:
        """Find the wrapper around this process's function, else connect to the socket of the monitor.

        RankMonitorClientError, LinkError, BoardError, OSError, ValueError.
        """
        pid, _, fd = os.environ.get(SECTION_BOARD_ENV, "").partition(":")
        if pid != str(os.getpid()):
            return cls._connect(rank_info)
        board = Board.attach(int(fd))
        if board.has_live_client():
            raise RankMonitorClientError("another client of this process is initialized; shut it down first")
        return cls(board)

    @classmethod
    def _connect(cls, rank_info: RankInfo) -> Self:
        path = os.environ.get(FT_RANK_MONITOR_IPC_SOCKET_ENV_VAR)
        if path is None:
            raise RankMonitorClientError(
                f"{FT_RANK_MONITOR_IPC_SOCKET_ENV_VAR} is not set: this process was not started by a launcher"
            )
        stacks = StackReporter()
        stacks.install()
        link = MonitorLink(path, messages.Init(rank_info, stacks.signal_number), stacks.fd)
        try:
            board, fd = make_board(FaultToleranceConfig.from_kwargs(**link.open()))
            board.begin(0, board.stamp())
            link.attach(fd)
        except BaseException:
            _close(link, stacks)
            raise
        return cls(board, link, stacks)

    def confirm(self, events: int) -> None:
        """Have the monitor look at the board, and wait until it has; it must have so many events. LinkError."""
        if self.link is not None:
            self.link.request(messages.Confirm(events))

    def close(self) -> None:
        """Hang up, in the process that has connected; a forked child only closes its copies. Idempotent."""
        _close(self.link, self._stacks)

    def close_copies(self) -> None:
        """In a forked child: close what would keep the connection open."""
        if self.link is not None:
            self.link.close_copies()


def _close(link: MonitorLink | None, stacks: StackReporter | None) -> None:
    if link is not None:
        link.close()
    if stacks is not None and threading.current_thread() is threading.main_thread():
        stacks.uninstall()
