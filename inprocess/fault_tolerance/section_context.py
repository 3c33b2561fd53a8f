"""The context of one section."""

from __future__ import annotations

from types import TracebackType
from typing import TYPE_CHECKING

from inprocess.fault_tolerance.client_errors import raise_error
from inprocess.fault_tolerance.recorder import Forked
from inprocess.fault_tolerance.timeouts_calc import TimeoutsCalcError

if TYPE_CHECKING:
    from inprocess.fault_tolerance.rank_monitor_client import RankMonitorClient

__all__ = ["SectionContext"]


class SectionContext:
    """See `RankMonitorClient.section`."""

    __slots__ = ("_client", "_generation", "_name")

    def __init__(self, client: RankMonitorClient, name: str) -> None:
        self._client = client
        self._name = name
        self._generation: int | None = None

    def __enter__(self) -> None:
        recorder = self._client._initialized()
        self._client.start_section(self._name)
        self._generation = recorder.generation

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        recorder = self._client._recorder
        if recorder is None:  # shut down within the section
            return
        try:
            closed = recorder.close(self._name, self._generation, learn=kind is None)
        except (TimeoutsCalcError, Forked) as problem:
            if error is None:
                raise_error(problem)
            return  # the error that ends the section matters more
        if closed and self._client._acknowledged:
            self._client._confirm()
