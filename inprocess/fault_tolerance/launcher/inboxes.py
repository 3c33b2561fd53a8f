"""Input to the launcher's loop: signals, and requests of ranks."""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import weakref
from collections.abc import Iterator, Sequence
from types import FrameType, TracebackType
from typing import Any

from inprocess.fault_tolerance.data import FT_LAUNCHER_IPC_SOCKET_ENV_VAR, WorkloadAction, WorkloadControlRequest
from inprocess.fault_tolerance.ipc_connector import IpcConnector
from inprocess.ipc import unix_sockets
from inprocess.ipc.wakeup import Wakeup
from inprocess.monitor_process.messages import RankInfo

_log = logging.getLogger(__name__)


class Interrupted(BaseException):
    """A signal arrived while nothing ran that must be ended first."""

    def __init__(self, number: signal.Signals) -> None:
        super().__init__(number.name)
        self.number = number


class SignalInbox:
    """Catches signals from `__enter__` to `__exit__`. Main thread only.

    `fd` becomes readable when a signal arrives. Within `raising()` the signal is raised as `Interrupted` instead: code
    that blocks there (a rendezvous) does not poll our descriptors.
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
        """Create one from names like "SIGTERM,SIGINT"; those that the platform does not have are ignored."""
        found = [getattr(signal, name.strip(), None) for name in names.split(",")]
        return cls([number for number in found if isinstance(number, signal.Signals)])

    def take(self) -> signal.Signals | None:
        """Return the earliest signal that was not taken yet."""
        self._wake.clear()
        first = self._received.pop(0) if self._received else None
        if self._received:
            self._wake.set()
        return first

    def has_any(self) -> bool:
        """Whether a signal was not taken yet."""
        return bool(self._received)

    @contextlib.contextmanager
    def raising(self) -> Iterator[None]:
        """Raise signals as `Interrupted`, including one that has arrived before."""
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

        def in_child() -> None:  # a worker that is forked must not catch the launcher's signals
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
            self._raises = False  # once: cleaning up must not be interrupted again
            raise Interrupted(signal.Signals(number))
        self._received.append(signal.Signals(number))
        self._wake.set()


class ControlInbox:
    """Receives requests of ranks from `__enter__` to `__exit__`, in a thread, and keeps them until `wanted`."""

    def __init__(self) -> None:
        self._connector = IpcConnector(os.path.join(unix_sockets.private_directory(), f"launcher-{os.getpid()}.sock"))

    @property
    def environment(self) -> dict[str, str]:
        """The environment variable by which workers find the inbox."""
        return {FT_LAUNCHER_IPC_SOCKET_ENV_VAR: self._connector.path}

    def wanted(self) -> WorkloadControlRequest | None:
        """Return the request with the widest effect of those since the last call."""
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
