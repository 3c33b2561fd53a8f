"""How a call is joined to its monitor process, and both of them to the store of all ranks.

    1  the monitor process starts    it inherits nothing of the store
    2  the store is opened           by the rank; on some ranks the monitor process is a host of it
    3  all ranks meet                from here on each knows that the others are there
    4  the monitor process connects  from here on it speaks for the rank

In the end in the opposite order.
"""

from __future__ import annotations

import logging
import os
from contextlib import ExitStack
from types import TracebackType
from typing import Any

from inprocess.agreement import Agreement
from inprocess.attribution import Interruption, InterruptionRecord
from inprocess.coordination.wire import Host
from inprocess.main_thread.stacks import StackReporter
from inprocess.monitor_process.handle import MonitorProcess
from inprocess.monitor_process.messages import Configure, Started
from inprocess.monitor_process.stores import describe_store, iteration_store
from inprocess.settings import Settings
from inprocess.state import State
from inprocess.store import TCPStore

__all__ = ["Monitoring"]

_HOSTS = 4  # ranks whose monitor processes host the store, or stand by to do so
_CALLS: dict[tuple[str, int], int] = {}


class Monitoring:
    """The monitor `process` of one call on one rank, and the `store`; a context manager, see the module.

    `state` is that of the call and may change. `stacks` and `sections_fd` are what the monitor process reads the rank's
    stacks and sections from. Set `completed` before the exit when the call was completed on all ranks.
    """

    def __init__(self, settings: Settings, state: State, stacks: StackReporter, sections_fd: int | None) -> None:
        self.completed = False
        self.store: Any = None
        self._settings = settings
        self._state = state
        self._config = self._configuration(stacks.signal_number, sections_fd)
        self.process = MonitorProcess(
            self._config, stacks_fd=stacks.fd, describe_store=self._describe_store, on_lost=self._process_lost
        )
        self._cleanup = ExitStack()

    def __enter__(self) -> Monitoring:
        with ExitStack() as undo:
            started = self.process.start()
            undo.callback(lambda: self.process.shutdown(completed=self.completed))
            self.store = self._open_store()
            undo.callback(getattr(self.store, "close", lambda: None))
            undo.callback(self.process.stop_replacing)
            self._register_host(started)
            self._meet_all("initial_barrier")
            description = self._description()
            if self._config.session:
                # If the host of the store died before all know who stands by, some would go on without the others.
                self._meet_all("hosts_barrier")
            self.process.connect(description)
            self._cleanup = undo.pop_all()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self._cleanup.close()

    def agreement(self, iteration: int, world_size: int | None) -> Agreement:
        """Return the agreement of an iteration."""
        return Agreement(iteration_store(self.store, iteration), iteration, world_size)

    def _configuration(self, stack_signal: int | None, sections_fd: int | None) -> Configure:
        state, settings = self._state, self._settings
        assert state.initial_rank is not None
        address, session = None, ""
        if issubclass(settings.store_factory, TCPStore):
            host = settings.store_factory.server_address(**settings.store_kwargs)
            address = (host.name, host.port)
            session = _next_session(address)
        hosts = address is not None and state.initial_rank < _HOSTS
        seconds = {
            f"{name}_s": getattr(settings, name).total_seconds()
            for name in ("soft_timeout", "hard_timeout", "heartbeat_interval", "heartbeat_timeout", "barrier_timeout")
        }
        return Configure(
            target_pid=os.getpid(),
            initial_rank=state.initial_rank,
            initial_world_size=state.world_size,
            **seconds,
            termination_grace_s=settings.termination_grace_time.total_seconds(),
            interval_s=settings.monitor_process_interval.total_seconds(),
            logfile=_of_rank(settings.monitor_process_logfile, state.initial_rank),
            pidfile=_of_rank(settings.monitor_process_pidfile, state.initial_rank),
            log_level=logging.DEBUG,
            stack_signal=stack_signal,
            host_position=state.initial_rank if hosts else None,
            host_address=address if hosts and state.initial_rank == 0 else None,
            session=session,
            sections_fd=sections_fd,
        )

    # -- the store -----------------------------------------------------------------------------------------------------

    def _open_store(self) -> Any:
        kwargs = dict(self._settings.store_kwargs)
        if self._config.session:
            kwargs["session"] = self._config.session
            kwargs.setdefault("wait_for_workers", False)  # the barrier does that, and on all ranks
        return self._settings.store_factory(**kwargs)

    def _meet_all(self, name: str) -> None:
        self.store.barrier(
            ranks=[self._state.rank],
            group_name=name,
            rendezvous_count=self._state.world_size,
            timeout=self._settings.barrier_timeout,
            timeout_chunk=self._settings.progress_watchdog_interval,
        )

    def _register_host(self, started: Started) -> None:
        client = getattr(self.store, "client", None)
        position = self.process.host_position
        if client is not None and position and started.address is not None:
            client.register_host(Host(position, client.local_name, started.address[1]))

    def _description(self) -> dict[str, Any]:
        client = getattr(self.store, "client", None)
        if client is not None:
            client.refresh_hosts()
        return describe_store(self.store, self._settings.store_factory, self._settings.store_kwargs)

    # -- when a monitor process is lost --------------------------------------------------------------------------------

    def _describe_store(self, started: Started) -> dict[str, Any]:
        """Keeper thread: another monitor process runs."""
        self._register_host(started)
        return self._description()

    def _process_lost(self, error: Exception) -> None:
        """Keeper thread: this rank is not watched any more, and must not go on."""
        state = self._state
        record = InterruptionRecord(
            -1 if state.rank is None else state.rank, Interruption.MONITOR_PROCESS_EXCEPTION, str(error)
        )
        agreement = self.agreement(state.iteration, state.world_size)
        assert state.initial_rank is not None
        agreement.mark_gone(state.initial_rank)
        agreement.interrupt(record)


def _next_session(address: tuple[str, int]) -> str:
    """Name this call, the same on all ranks: they make the same calls with the same store, in the same order."""
    _CALLS[address] = _CALLS.get(address, 0) + 1
    return f"call {_CALLS[address]}"


def _of_rank(path: str | None, rank: int) -> str | None:
    return None if path is None else path.replace("{rank}", str(rank))
