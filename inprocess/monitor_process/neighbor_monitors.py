"""The other monitors of a node, asked where their ranks are, without waiting for them.

    ask ── connect, QueryStanding ──▶ each monitor's socket
        ◀── Ok(Standing) ────────────                       done(answers): all have answered, or the time is over

A monitor that is dead or does not answer is left out. Two monitors may ask each other at the same time: each goes on
serving its sockets meanwhile.
"""

from __future__ import annotations

import contextlib
import selectors
import socket
import time
from collections.abc import Callable, Sequence

from inprocess.ipc import unix_sockets
from inprocess.ipc.packets import receive, send
from inprocess.monitor_process.messages import CODEC, Ok, QueryStanding
from inprocess.sections.report import Standing

_ANSWER_S = 1.0  # they read stacks, which takes up to half of it
OnAnswers = Callable[[list[Standing]], None]


class _Query:
    """One query to all neighbors."""

    def __init__(self, deadline: float, done: OnAnswers) -> None:
        self.deadline = deadline
        self.done = done
        self.open: list[socket.socket] = []
        self.answers: list[Standing] = []


class NeighborMonitors:
    """The monitors behind these paths. Everything on the thread of the loop that owns `selector`.

    The loop calls the data of ready selector keys, and `step` when `next_step_s` has come.
    """

    def __init__(self, paths: Sequence[str], selector: selectors.BaseSelector) -> None:
        self._paths = tuple(paths)
        self._selector = selector
        self._queries: list[_Query] = []

    def ask(self, done: OnAnswers) -> None:
        """Call `done` with the answers, within a second; at once if there is no monitor to ask."""
        query = _Query(time.monotonic() + _ANSWER_S, done)
        for path in self._paths:
            end = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            try:
                end.setblocking(False)
                with unix_sockets.short_path(path) as short:
                    end.connect(short)
                send(end, CODEC, QueryStanding())
            except OSError:
                end.close()
                continue
            query.open.append(end)
            self._selector.register(end, selectors.EVENT_READ, lambda end=end: self._receive(query, end))
        self._queries.append(query)
        self._finish(query)

    @property
    def next_step_s(self) -> float | None:
        """When to call `step`, in seconds of CLOCK_MONOTONIC; None: not before something is received."""
        return min((query.deadline for query in self._queries), default=None)

    def note_suspension(self, missed_s: float) -> None:
        """Let no query end because this process was suspended: the others may go on some seconds later."""
        for query in self._queries:
            query.deadline += missed_s

    def step(self) -> None:
        """Finish queries whose time is over."""
        now = time.monotonic()
        for query in [q for q in self._queries if now >= q.deadline]:
            for end in list(query.open):
                self._disconnect(query, end)
            self._finish(query)

    def close(self) -> None:
        """Drop all queries without calling `done`. Idempotent."""
        for query in self._queries:
            for end in list(query.open):
                self._disconnect(query, end)
        self._queries.clear()

    def _receive(self, query: _Query, end: socket.socket) -> None:
        if end not in query.open:
            return
        with contextlib.suppress(OSError, EOFError, ValueError):
            packet = receive(end, CODEC)
            packet.close_fds()
            if isinstance(packet.message, Ok) and packet.message.values:
                query.answers.append(Standing.from_json(packet.message.values))
        self._disconnect(query, end)
        self._finish(query)

    def _disconnect(self, query: _Query, end: socket.socket) -> None:
        query.open.remove(end)
        self._selector.unregister(end)
        end.close()

    def _finish(self, query: _Query) -> None:
        if not query.open and query in self._queries:
            self._queries.remove(query)
            query.done(query.answers)
