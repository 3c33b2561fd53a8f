"""Simulated ranks that do nothing but name sections."""

from __future__ import annotations

import os
import select
import time

from inprocess.fault_tolerance import RankMonitorClient, messages
from inprocess.fault_tolerance.data import FT_RANK_MONITOR_IPC_SOCKET_ENV_VAR
from inprocess.fault_tolerance.link import LinkError

__all__ = ["BusyRank", "client_at"]

_EVENTS_PER_S = 100


def client_at(path: str) -> RankMonitorClient:
    """Return a client of the monitor at this socket."""
    os.environ[FT_RANK_MONITOR_IPC_SOCKET_ENV_VAR] = path
    client = RankMonitorClient()
    client.init_workload_monitoring()
    return client


class BusyRank:
    """A process that opens and closes a section, until `stop`."""

    def __init__(self, path: str) -> None:
        self._reader, writer = os.pipe()
        stop, self._stop = os.pipe()
        self._child = os.fork()
        if not self._child:
            os.close(self._stop)
            _be_busy(path, stop, writer)
            os._exit(0)
        os.close(writer)
        os.close(stop)
        os.read(self._reader, 1)  # it has begun

    def stop(self) -> tuple[int, int, float]:
        """Return how many events it made, how many of them its monitor has not seen, and how many it made a second."""
        os.write(self._stop, b"\n")
        os.close(self._stop)
        with os.fdopen(self._reader) as file:
            text = file.read()
        if os.waitpid(self._child, 0)[1] or not text:
            raise RuntimeError("a simulated rank has failed")
        made, lost, rate = text.split()
        return int(made), int(lost), float(rate)


def _be_busy(path: str, stop: int, tell: int) -> None:
    client = client_at(path)
    assert client._recorder is not None
    earlier = client._recorder.events()
    os.write(tell, b"\n")
    made, begun = 0, time.monotonic()
    while not select.select([stop], [], [], 1 / _EVENTS_PER_S)[0]:
        if made % 2:
            client.end_section("step")
        else:
            client.start_section("step")
        made += 1
    rate = made / (time.monotonic() - begun)
    os.write(tell, f"{made} {0 if _all_seen(client, earlier + made) else made} {rate}".encode())


def _all_seen(client: RankMonitorClient, events: int) -> bool:
    """Whether the monitor says that it has seen so many events."""
    assert client._connection is not None
    assert client._connection.link is not None
    try:
        return client._connection.link.request(messages.Confirm(events))
    except LinkError:
        return False
