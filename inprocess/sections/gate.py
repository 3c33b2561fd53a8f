"""The in-process wrapper's side of the section board: when events and clocks count.

    wrapper               rank's process                         monitor process
    SectionGate ── makes the board; both have its memory ─────▶ SectionWatch, in the monitor's loop
        │ INPROCESS_SECTION_BOARD=PID:FD
        ▼
    RankMonitorClient in the wrapped function finds the board of its process, before it looks for a socket

The board belongs to the rank, so a new monitor process continues exactly where the last one ended. The variable names
the process: its children, forked or started, do not find a board.

A client of a launcher's monitor makes its board itself, and names it in INPROCESS_CLIENT_BOARD: when the wrapper stops
the clocks, those of this board stop, too.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Iterator

from inprocess.sections.board import Board
from inprocess.sections.making import SectionSettings, make_board

SECTION_BOARD_ENV = "INPROCESS_SECTION_BOARD"  # "PID:FD"
CLIENT_BOARD_ENV = "INPROCESS_CLIENT_BOARD"  # "PID:FD"


class SectionGate:
    """The board of one call of a wrapped function. Without settings there is none; clocks of a client's board may stop.

    `begin` and `leave` enclose the function, on the main thread; the others may be called on any thread. None waits.
    """

    def __init__(self, config: SectionSettings | None) -> None:
        self.fd: int | None = None
        self._board: Board | None = None
        self._lock = threading.Lock()
        self._freezes = 0
        self._frozen: list[Board] = []
        self._earlier: str | None = None
        if config is not None:
            self._board, self.fd = make_board(config)
            self._earlier = os.environ.get(SECTION_BOARD_ENV)
            os.environ[SECTION_BOARD_ENV] = f"{os.getpid()}:{self.fd}"

    def begin(self, restart_index: int) -> None:
        """The function is about to be called: events and clocks count from now on, and no section is open."""
        if self._board is not None:
            self._board.begin(restart_index, self._board.stamp())

    def interrupt(self) -> None:
        """The function is being unwound: its events do not count any more; the clocks of open sections go on."""
        if self._board is not None:
            self._board.drop_events()

    def leave(self) -> None:
        """The function has been left: nothing is watched. Idempotent."""
        if self._board is not None:
            self._board.stop_counting()

    @contextlib.contextmanager
    def stopped(self) -> Iterator[None]:
        """Stop the clocks in the context: the wrapper waits, not the program."""
        self.freeze()
        try:
            yield
        finally:
            self.thaw()

    def freeze(self) -> None:
        """Stop the clocks until `thaw` has been called as often."""
        with self._lock:
            self._freezes += 1
            if self._freezes == 1:
                self._frozen = [board for board in (self._board, _board_of_client()) if board is not None]
                for board in self._frozen:
                    board.freeze(time.monotonic_ns())

    def thaw(self) -> None:
        """Let the clocks go on from where they were stopped."""
        with self._lock:
            self._freezes -= 1
            if self._freezes == 0:
                for board in self._frozen:
                    board.thaw(time.monotonic_ns())
                self._frozen = []

    def close(self) -> None:
        """Watch nothing, and restore the variable for clients that are made later. Idempotent."""
        self.leave()
        fd, self.fd = self.fd, None
        if fd is None:
            return
        if self._earlier is None:
            os.environ.pop(SECTION_BOARD_ENV, None)
        else:
            os.environ[SECTION_BOARD_ENV] = self._earlier
        with contextlib.suppress(OSError):
            os.close(fd)


def _board_of_client() -> Board | None:
    """Return the board that a client of this process has made; None if there is none."""
    pid, _, fd = os.environ.get(CLIENT_BOARD_ENV, "").partition(":")
    if pid != str(os.getpid()):
        return None
    try:
        return Board.attach(int(fd))
    except ValueError:  # the client has just closed it
        return None
