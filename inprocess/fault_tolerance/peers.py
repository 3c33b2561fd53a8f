"""The other monitors of a node, asked where their ranks stand without waiting for them.

    ask ── connect, Look ──▶ each monitor's socket        done(answers): all have answered, or time is over
        ◀── Ok(Standing) ───                              a monitor that is gone or stuck is left out

Two monitors may ask each other at once: each goes on serving its sockets meanwhile.
"""

from __future__ import annotations

import contextlib
import selectors
import socket
import time
from collections.abc import Callable, Sequence

from inprocess.fault_tolerance import messages
from inprocess.fault_tolerance.messages import CODEC
from inprocess.ipc.packets import receive, send
from inprocess.sections.report import Standing

__all__ = ["Peers"]

_ANSWER_S = 1.0  # they read stacks, which takes up to half of it
Done = Callable[[list[Standing]], None]


class _Question:
    """One question to all."""

    def __init__(self, deadline: float, done: Done) -> None:
        self.deadline = deadline
        self.done = done
        self.open: list[socket.socket] = []
        self.answers: list[Standing] = []


class Peers:
    """Monitors behind these paths. Everything on the thread of the loop that owns `selector`.

    The loop calls what is registered as data of the selector, and `step` when `next_step_s` has come.
    """

    def __init__(self, paths: Sequence[str], selector: selectors.BaseSelector) -> None:
        self._paths = tuple(paths)
        self._selector = selector
        self._questions: list[_Question] = []

    def ask(self, done: Done) -> None:
        """Call `done` with the answers, in a second at the latest; at once if there is nobody to ask."""
        question = _Question(time.monotonic() + _ANSWER_S, done)
        for path in self._paths:
            end = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            try:
                end.setblocking(False)
                end.connect(path)
                send(end, CODEC, messages.Look())
            except OSError:
                end.close()
                continue
            question.open.append(end)
            self._selector.register(end, selectors.EVENT_READ, lambda end=end: self._receive(question, end))
        self._questions.append(question)
        self._finish(question)

    @property
    def next_step_s(self) -> float | None:
        """When `step` should be called, in seconds of CLOCK_MONOTONIC; None: only after something was received."""
        return min((question.deadline for question in self._questions), default=None)

    def step(self) -> None:
        """Give up on those who are too slow."""
        now = time.monotonic()
        for question in [q for q in self._questions if now >= q.deadline]:
            for end in list(question.open):
                self._hang_up(question, end)
            self._finish(question)

    def close(self) -> None:
        """Ask nobody any more; what was asked is not answered. Idempotent."""
        for question in self._questions:
            for end in list(question.open):
                self._hang_up(question, end)
        self._questions.clear()

    def _receive(self, question: _Question, end: socket.socket) -> None:
        if end not in question.open:
            return
        with contextlib.suppress(OSError, EOFError, ValueError):
            packet = receive(end, CODEC)
            packet.close_fds()
            if isinstance(packet.message, messages.Ok) and packet.message.values:
                question.answers.append(Standing.from_json(packet.message.values))
        self._hang_up(question, end)
        self._finish(question)

    def _hang_up(self, question: _Question, end: socket.socket) -> None:
        question.open.remove(end)
        self._selector.unregister(end)
        end.close()

    def _finish(self, question: _Question) -> None:
        if not question.open and question in self._questions:
            self._questions.remove(question)
            question.done(question.answers)
