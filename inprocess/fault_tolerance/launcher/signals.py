"""Signals to the launcher, as events for its loop."""

from __future__ import annotations

import contextlib
import os
import signal
import weakref
from collections.abc import Iterator, Sequence
from types import FrameType, TracebackType
from typing import Any

from inprocess.ipc.wakeup import Wakeup

__all__ = ["Interrupted", "SignalInbox"]


class Interrupted(BaseException):
    """A signal has come while nothing ran that would have to be ended first."""

    def __init__(self, number: signal.Signals) -> None:
        super().__init__(number.name)
        self.number = number


class SignalInbox:
    """Catches signals from `__enter__` to `__exit__`. Main thread only.

    `fd` becomes readable when one comes. Within `raising()` it is raised as `Interrupted` instead: what blocks in
    there (a rendezvous) watches no descriptor of ours.
    """

    def __init__(self, numbers: Sequence[signal.Signals]) -> None:
        self._wake = Wakeup()
        self.fd = self._wake.fileno()
        self._numbers = tuple(numbers)
        self._received: list[signal.Signals] = []
        self._raises = False
        self._earlier: dict[signal.Signals, Any] = {}

    @classmethod
    def of_names(cls, names: str) -> SignalInbox:
        """Make one from "SIGTERM,SIGINT"; names the platform does not have are left out."""
        found = [getattr(signal, name.strip(), None) for name in names.split(",")]
        return cls([number for number in found if isinstance(number, signal.Signals)])

    def take(self) -> signal.Signals | None:
        """Return the signal that came first and was not taken yet."""
        self._wake.clear()
        first = self._received.pop(0) if self._received else None
        if self._received:
            self._wake.set()
        return first

    @contextlib.contextmanager
    def raising(self) -> Iterator[None]:
        """Raise signals as `Interrupted`, also one that has come before."""
        self._raises = True
        try:
            number = self.take()
            if number is not None:
                raise Interrupted(number)
            yield
        finally:
            self._raises = False

    def __enter__(self) -> SignalInbox:
        for number in self._numbers:
            self._earlier[number] = signal.signal(number, self._receive)
        inbox = weakref.ref(self)

        def in_child() -> None:  # a worker that is forked, not started, must not take the launcher's signals
            found = inbox()
            if found is not None:
                found._restore()

        os.register_at_fork(after_in_child=in_child)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self._restore()
        self._wake.close()

    def _restore(self) -> None:
        earlier, self._earlier = self._earlier, {}
        for number, handler in earlier.items():
            signal.signal(number, handler)

    def _receive(self, number: int, _frame: FrameType | None) -> None:
        if self._raises:
            self._raises = False  # once: what cleans up must not be interrupted again
            raise Interrupted(signal.Signals(number))
        self._received.append(signal.Signals(number))
        self._wake.set()
