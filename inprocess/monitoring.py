"""Connects a call to its monitor process, and both to the store of all ranks.

    1  the server starts             on rank 0, in a process of its own; the ranks find it, see `rendezvous`
    2  the monitor process starts    it inherits nothing of the store
    3  the store is opened           by the rank
    4  all ranks meet                from now on each knows that the others are there
    5  the monitor process connects  from now on it reports for the rank

At the end of the call this is undone in reverse order. A newcomer, which joins a running job, starts no server, and
waits at 4 until the job restarts; see `joining`. One that comes before all ranks have met is the rank that was lost.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from contextlib import ExitStack, suppress
from types import TracebackType
from typing import Any

from inprocess.agreement import Agreement
from inprocess.attribution import Interruption, InterruptionRecord
from inprocess.coordination import Access, RestartIndex
from inprocess.coordination.claims import RankSlot
from inprocess.coordination.rendezvous import Rendezvous, new_access
from inprocess.coordination.server_process import ServerProcess
from inprocess.exception import RestartError, StaleViewError
from inprocess.joining import Newcomer, Place, Rejoin
from inprocess.main_thread.stacks import StackReporter
from inprocess.monitor_process.job_store import describe_store, iteration_store
from inprocess.monitor_process.messages import WatchRank
from inprocess.monitor_process.sibling import heartbeat_interval_s
from inprocess.monitor_process.supervised import MonitorProcess
from inprocess.settings import RejoinPolicy, Settings
from inprocess.state import State
from inprocess.store import EtcdStore, TCPStore

__all__ = ["Monitoring"]

_log = logging.getLogger(__name__)
_CLIENTS_OF_A_RANK = 3  # the rank, its monitor process, and one that replaces it
_SILENCE = 2  # heartbeat timeouts after which a client is taken for dead


class Monitoring:
    """The monitor `process` of one call on one rank, and the `store`; a context manager, see the module.

    `state` is that of the call and may change. The monitor process reads the rank's stacks and sections from `stacks`
    and `sections_fd`. `active_of` is that of the hooks. `place` is that of a newcomer. `takes_part` is false if the job
    was completed without it.
    """

    def __init__(
        self,
        settings: Settings,
        state: State,
        stacks: StackReporter,
        sections_fd: int | None,
        newcomer: Newcomer | None,
        active_of: Callable[[int], int | None],
    ) -> None:
        self.store: Any = None
        self.place: Place | None = None
        self.takes_part = newcomer is None
        self._newcomer = newcomer
        self._rejoin = Rejoin(RejoinPolicy.from_text(settings.rejoin), state.world_size, active_of)
        self.first_token = 0  # of iteration 0
        self._settings = settings
        self._state = state
        self._own_server = issubclass(settings.store_factory, TCPStore)
        self._is_first = state.rank == 0 and newcomer is None
        place = state.rank or 0 if newcomer is None else newcomer.place(state.world_size)
        self._first_rank = place if place < state.world_size else None  # of a newcomer, that in whose place it is
        self._rendezvous = Rendezvous(state.rank or 0, state.world_size, settings.barrier_timeout)
        self.process = MonitorProcess(self._watch_rank(stacks, sections_fd), on_lost=self._process_lost)
        self._cleanup = ExitStack()

    def __enter__(self) -> Monitoring:
        with ExitStack() as undo:
            if self._newcomer is not None and self._first_rank == 0 and self._rendezvous.lacks_rank_0():
                self._is_first = True  # the rank that it replaces has died before it was found
            server = self._start_server(undo) if self._own_server and self._is_first else None
            self.process.start()
            undo.callback(self.process.shutdown)
            self.store = self._open_store(None if server is None else server.wait_started())
            undo.callback(getattr(self.store, "close", lambda: None))
            undo.callback(self.process.stop_replacing)
            if not self._begin():
                assert self._newcomer is not None
                self._join(self._newcomer)
            if server is not None:
                server.expect_no_more()
            self.first_token = RestartIndex(self.store).first_token()
            if self.takes_part:
                self._connect_process()
            self._cleanup = undo.pop_all()
        return self

    def _begin(self) -> bool:
        """Take part from the beginning; False for a newcomer whose rank has begun, or without which the job has."""
        if self._first_rank is None:
            with suppress(StaleViewError):
                RestartIndex(self.store).begin()
            return False
        slot = RankSlot(self.store, self._first_rank)
        if self._newcomer is None:
            RestartIndex(self.store).begin()
            slot.claim()
        else:
            try:
                RestartIndex(self.store).begin()
                if self.agreement(0, None).wait_outcome(0.0) is not None or not slot.take_over():
                    return False
            except StaleViewError:
                return False
            _log.warning(
                "this process takes the place of rank %d, which has ended before the job began", self._first_rank
            )
            self._state.rank = self._first_rank
        self._meet_all("initial_barrier")
        slot.enter()
        self.takes_part = True
        return True

    def _join(self, newcomer: Newcomer) -> None:
        self.place = newcomer.wait_for_place(
            self.store,
            lambda iteration: self.agreement(iteration, None),
            self._settings.heartbeat_timeout.total_seconds(),
            self._rejoin,
            self._settings.barrier_timeout.total_seconds(),
        )
        if self.place is not None:
            self.takes_part = True
            self.place.take(self._state)

    def _connect_process(self) -> None:
        settings = self._settings
        description = describe_store(self.store, settings.store_factory, settings.store_kwargs)
        self.process.connect(description, 0 if self.place is None else self.place.iteration + 1)

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self._cleanup.close()

    def agreement(self, iteration: int, world_size: int | None) -> Agreement:
        """Return the agreement of an iteration."""
        return Agreement(iteration_store(self.store, iteration), iteration, world_size)

    @property
    def local_host(self) -> str:
        """The name by which the other ranks reach this host."""
        client = getattr(self.store, "client", None)
        return client.local_host if client is not None else os.environ.get("MASTER_ADDR", "127.0.0.1")

    def _watch_rank(self, stacks: StackReporter, sections_fd: int | None) -> WatchRank:
        state, settings = self._state, self._settings
        assert state.initial_rank is not None
        seconds = {
            f"{name}_s": getattr(settings, name).total_seconds()
            for name in ("soft_timeout", "hard_timeout", "heartbeat_interval", "heartbeat_timeout", "barrier_timeout")
        }
        seconds["heartbeat_interval_s"] = heartbeat_interval_s(
            seconds["heartbeat_interval_s"], seconds["heartbeat_timeout_s"], state.world_size
        )
        return WatchRank(
            target_pid=os.getpid(),
            initial_rank=state.initial_rank,
            initial_world_size=state.world_size,
            **seconds,
            termination_grace_s=settings.termination_grace_time.total_seconds(),
            interval_s=settings.monitor_process_interval.total_seconds(),
            logfile=_of_rank(settings.monitor_process_logfile, state.initial_rank),
            pidfile=_of_rank(settings.monitor_process_pidfile, state.initial_rank),
            log_level=logging.DEBUG,
            stack_signal=stacks.signal_number,
            stacks_fd=stacks.fd,
            sections_fd=sections_fd,
        )

    # -- the store -----------------------------------------------------------------------------------------------------

    def _open_store(self, access: Access | None) -> Any:
        """`access` is known on rank 0 only."""
        kwargs = dict(self._settings.store_kwargs)
        if issubclass(self._settings.store_factory, EtcdStore):
            if self._is_first:
                access = new_access(None, None)
            kwargs |= {"job": self._rendezvous.exchange(access).job, "patience": self._settings.heartbeat_timeout}
        elif self._own_server:
            kwargs |= {
                "access": self._rendezvous.exchange(access),
                "wait_for_workers": False,  # the barrier does that, on all ranks
                "patience": self._settings.heartbeat_timeout,
            }
            if self._newcomer is not None:  # the job may be over, and the server may have ended
                kwargs.setdefault("timeout", self._settings.heartbeat_timeout)
        return self._settings.store_factory(**kwargs)

    def _start_server(self, undo: ExitStack) -> ServerProcess:
        """Start the server, which ends after all its clients. Rank 0."""
        settings, state = self._settings, self._state
        server = ServerProcess(
            new_access(settings.store_kwargs.get("host_name"), settings.store_kwargs.get("port")),
            clients=_CLIENTS_OF_A_RANK * state.world_size,
            silence_s=_SILENCE * settings.heartbeat_timeout.total_seconds(),
            logfile=_of_rank(settings.monitor_process_logfile, 0),
        )
        undo.callback(server.close)
        server.start()
        return server

    def _meet_all(self, name: str) -> None:
        self.store.reentrant_barrier(  # a rank counts once, whichever process has arrived for it
            ranks=[self._state.rank],
            group_name=name,
            rendezvous_count=self._state.world_size,
            timeout=self._settings.barrier_timeout,
            timeout_chunk=self._settings.progress_watchdog_interval,
        )

    # -- when a monitor process is lost --------------------------------------------------------------------------------

    def _process_lost(self, error: Exception) -> None:
        """Keeper thread: this rank has no monitor process any more, and must not go on."""
        state = self._state
        record = InterruptionRecord(
            -1 if state.rank is None else state.rank, Interruption.MONITOR_PROCESS_EXCEPTION, str(error)
        )
        agreement = self.agreement(state.iteration, state.world_size)
        assert state.initial_rank is not None
        try:
            agreement.mark_departed(state.initial_rank)
            agreement.interrupt(record)
        except RestartError as problem:
            _log.critical("the others do not know that this rank has no monitor process: %s", problem)


def _of_rank(path: str | None, rank: int) -> str | None:
    return None if path is None else path.replace("{rank}", str(rank))
