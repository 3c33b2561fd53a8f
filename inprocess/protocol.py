"""The restart protocol of one rank: an explicit state machine on the main thread.

    ASSIGN ──▶ BEGIN ──▶ INITIALIZE ──▶ RUN or RESERVE ──▶ COMPLETE ──▶ DONE
      ▲                      └──────────────┴──────────────────┘
      │                        a fault, of this rank or another
      │                                     ▼
      └── END ◀── BARRIER ◀── HEALTH ◀── FINALIZE ◀── RELEASE

Between BEGIN and COMPLETE the monitor thread may throw RankShouldRestart into any line; elsewhere nothing is thrown. An
exception that is not a fault of the iteration (KeyboardInterrupt, SystemExit, RestartAbort, a hook of the restart path
that raises) leads from any phase to LEAVE: the rank reports that it leaves, and the others restart without it.

What the ranks decide together is in `agreement`; no rank decides for others here.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass
from typing import Any, Protocol

from inprocess.abort import flight_recorder_files
from inprocess.absent import AbsentRanks
from inprocess.agreement import Agreement, IterationOutcome, Roster, depart
from inprocess.attribution import Interruption, InterruptionRecord, is_bystander
from inprocess.exception import (
    InternalError,
    RankDiscarded,
    RankShouldRestart,
    RestartError,
    StaleViewError,
    StoreError,
    StoreLostError,
    TimeoutError,
    is_restart,
)
from inprocess.hooks import Hooks
from inprocess.joining import Place
from inprocess.leftovers import Leftovers
from inprocess.main_thread.async_raise import reraise_if_unraisable
from inprocess.main_thread.atomic import AtomicLock
from inprocess.main_thread.thrower import MainThreadThrower
from inprocess.monitor_process.supervised import MonitorProcess
from inprocess.monitor_thread import MonitorThread
from inprocess.process_end import KernelEvidence
from inprocess.process_state import handler_errors_logged, reset_libraries
from inprocess.progress_watchdog import ProgressWatchdog
from inprocess.protocol_phases import Phase
from inprocess.repetition import SECONDS, FaultBounds, FaultHistory, FaultLimits
from inprocess.restart_events import RestartClock, RestartEvents
from inprocess.settings import Settings
from inprocess.state import Mode, State
from inprocess.torn_locks import HeldLock
from inprocess.unblock.process_groups import discard_process_groups, release_gloo

__all__ = ["ITERATION_CODE", "RestartProtocol", "Services"]

_log = logging.getLogger(__name__)
_MOST_BARRIER_TIMEOUTS = 10


class Services(Protocol):
    """What the protocol uses of the call around it, the `CallWrapper`."""

    monitor_process: MonitorProcess
    progress_watchdog: ProgressWatchdog
    atomic_lock: AtomicLock
    thrower: MainThreadThrower
    held_locks: list[HeldLock]

    def wake_main_thread(self) -> None: ...
    def stopped_clocks(self) -> AbstractContextManager[None]: ...
    def iteration_store(self, iteration: int) -> Any: ...
    def agreement(self, iteration: int, world_size: int | None) -> Agreement: ...
    def forget_iteration(self, iteration: int) -> None: ...
    def progress(self) -> dict[str, int]: ...
    def open_group_store(self) -> None: ...
    def close_group_store(self) -> None: ...


@dataclass
class _Interrupted:
    """An iteration that did not complete on this rank."""

    monitor: MonitorThread
    exception: BaseException | None


class RestartProtocol:
    """Runs `function` until all ranks have completed it or this rank leaves. One object per call of the wrapper."""

    def __init__(
        self,
        state: State,
        settings: Settings,
        hooks: Hooks,
        services: Services,
        function: Callable[[], Any],
        place: Place | None = None,
    ) -> None:
        self.state = state
        self.phase: Phase | None = None
        self.completed = False
        self._settings = settings
        self._hooks = hooks
        self._services = services
        self._function = function
        self._events = RestartEvents(settings.monitor_process_logfile)
        self._place = place  # of a newcomer
        self._terminated_ranks: frozenset[int] = frozenset() if place is None else place.terminated_ranks
        self._initial_ranks: tuple[int, ...] = () if place is None else place.initial_ranks
        self._records: tuple[InterruptionRecord, ...] = () if place is None else place.interruptions
        limits = (settings.max_same_faults, settings.max_faults_per_hour, settings.max_backoff.total_seconds())
        self._faults = FaultBounds(FaultLimits(*limits), FaultHistory() if place is None else place.faults)
        self._roster_s = time.monotonic()  # when the last one was read
        self._agreement: Agreement | None = None
        self._result: Any = None
        self._clock = RestartClock()
        self._kernel = KernelEvidence(os.getpid())
        self._leftovers = Leftovers(services.thrower, services.held_locks)
        self._threads_left: list[str] = []

    def __str__(self) -> str:
        phase = "not begun" if self.phase is None else self.phase.value
        return f"iteration {self.state.iteration}, rank {self.state.rank} of {self.state.world_size}: {phase}"

    def run(self) -> Any:
        """Return what the function returned (None on a spare); raise the error with which this rank leaves."""
        try:
            phase = self._assign()
            if self._place is not None:
                self._end_if_repeated()
                self.state.advance()
            while phase is not Phase.DONE:
                phase = self._iteration() if phase is Phase.BEGIN else self._restart()
        except BaseException as error:
            self._leave(error)
            raise
        finally:
            self._leftovers.close()
        self.completed = True
        return self._result

    def _enter(self, phase: Phase) -> None:
        if self.phase is not None and not self.phase.leads_to(phase):
            raise InternalError(f"{self.phase.name} cannot be followed by {phase.name}")
        self.phase = phase
        self._clock.note(phase.name.lower(), time.monotonic())
        _log.debug("%s", self)

    @property
    def _initial_rank(self) -> int:
        assert self.state.initial_rank is not None
        return self.state.initial_rank

    # -- from ASSIGN to BEGIN ------------------------------------------------------------------------------------------

    def _assign(self) -> Phase:
        self._enter(Phase.ASSIGN)
        store = self._services.iteration_store(self.state.iteration)
        self.state.copy_from(self._hooks.assign(self.state, store, self._terminated_ranks, self._initial_ranks))
        self.state.set_distributed_vars()
        return Phase.BEGIN

    # -- an iteration --------------------------------------------------------------------------------------------------

    def _iteration(self) -> Phase:
        """Run one iteration, with the monitor thread. Return DONE, or FINALIZE after a fault."""
        interrupted = self._guarded()
        if interrupted is None:
            return Phase.DONE
        monitor, error = interrupted.monitor, interrupted.exception
        self._records = monitor.records
        for name, at in asdict(monitor.times).items():
            self._clock.note(name, at)
        if monitor.failure is not None:
            raise monitor.failure from error
        if error is not None and not isinstance(error, Exception):
            raise error
        if self._threads_left and self._settings.threads == "error":
            raise RestartError(
                f"{self}: the function has left threads running, and threads='error': {', '.join(self._threads_left)}"
            ) from error
        if error is not None and is_bystander(self.state.rank, error, self._records):
            _log.info("%s: not a fault of this rank: %s", self, error)
            error = None
        elif error is not None:
            self._log_if_left_out(error)
        self.state.fn_exception = error
        self.state.interruptions = self._records
        return Phase.FINALIZE

    def _guarded(self) -> _Interrupted | None:
        """Run one iteration; None if all ranks completed it.

        RankShouldRestart may surface at any bytecode in here, and a KeyboardInterrupt, which goes before it. The first
        statement of the handler keeps the exception of this rank before anything else can happen.
        """
        failure: BaseException | None = None
        at_fault = False  # stays so for an error after the outcome is known: the abort causes that
        self._enter(Phase.BEGIN)
        self._leftovers.begin()
        monitor = self._begin()
        try:
            try:
                monitor.start()
                with reraise_if_unraisable(RankShouldRestart):
                    if self._act() is IterationOutcome.INTERRUPTED:
                        monitor.wait_thrown()
                        raise RankShouldRestart  # the function has swallowed the one that was thrown
            except BaseException as error:
                failure = error
                if not is_restart(error):
                    if monitor.times.outcome is None:
                        at_fault = True
                        self._report(error, monitor)
                    monitor.wait_thrown()
        except RankShouldRestart:
            pass
        except Exception:  # what this rank waits for is the restart: its own failure is known
            _log.exception("%s: a signal handler failed while the rank waited for the others", self)
        except BaseException as error:
            failure = error
        while True:
            try:
                monitor.shutdown()
                break
            except RankShouldRestart:  # thrown again, because unwinding took long, and raised before `shutdown` began
                continue
            except TimeoutError:
                raise
            except Exception:
                _log.exception("%s: a signal handler failed at the end of the iteration", self)
            except BaseException as error:
                failure = error
        try:
            return self._interrupted(monitor, failure, at_fault)
        finally:
            del failure  # its traceback refers to this frame: in a cycle it would keep process groups, and the model

    def _interrupted(
        self, monitor: MonitorThread, failure: BaseException | None, at_fault: bool
    ) -> _Interrupted | None:
        if failure is None:
            return None
        self._enter(Phase.RELEASE)
        with handler_errors_logged():
            discard_process_groups()
            self._services.close_group_store()
            self._threads_left = self._leftovers.make_good(failure, self.state.iteration, str(self))
            release_gloo()
        if is_restart(failure):
            return _Interrupted(monitor, None)
        if monitor.times.thrown is None and monitor.failure is None and isinstance(failure, Exception):
            raise InternalError("this rank failed after all had completed, and cannot restart alone") from failure
        return _Interrupted(monitor, failure if at_fault or not isinstance(failure, Exception) else None)

    def _begin(self) -> MonitorThread:
        state, services, settings = self.state, self._services, self._settings
        assert state.rank is not None
        self._agreement = services.agreement(state.iteration, state.world_size)
        self._agreement.publish_rank(self._initial_rank, state.rank)
        if state.rank == 0 and state.active_world_size is not None:
            self._agreement.report_active_size(state.active_world_size)
        services.monitor_process.start_iteration(state.rank, state.world_size, state.iteration)
        services.progress_watchdog.reset()
        self._kernel.begin()
        state.store = services.iteration_store(state.iteration)
        if state.iteration > 1 and state.rank == 0:
            services.forget_iteration(state.iteration - 2)
        return MonitorThread(
            agreement=self._agreement,
            state=state.freeze(),
            abort=self._hooks.abort,
            watchdog=services.progress_watchdog,
            atomic_lock=services.atomic_lock,
            thrower=services.thrower,
            wake=services.wake_main_thread,
            interval_s=settings.monitor_thread_interval.total_seconds(),
            soft_timeout_s=settings.soft_timeout.total_seconds(),
            last_call_wait_s=settings.last_call_wait.total_seconds(),
        )

    def _act(self) -> IterationOutcome:
        """Go through INITIALIZE, RUN or RESERVE, and COMPLETE."""
        assert self._agreement is not None
        settings = self._settings
        self._enter(Phase.INITIALIZE)
        with self._services.stopped_clocks():
            self._faults.back_off()
        self._services.open_group_store()
        self._hooks.initialize(self.state.freeze())
        self._hooks.health_check(self.state.freeze())
        if self.state.mode is Mode.INACTIVE:
            self._enter(Phase.RESERVE)
            self._wait_as_spare()
        else:
            self._enter(Phase.RUN)
            self._result = self._function()
            self._agreement.announce_done()
        self._enter(Phase.COMPLETE)
        self._services.progress_watchdog.reset()
        return self._agreement.complete(
            self._initial_rank,
            settings.completion_timeout.total_seconds(),
            settings.progress_watchdog_interval.total_seconds(),
            self._absent("completion_timeout", None).look,
        )

    def _absent(self, option: str, most: int | None) -> AbsentRanks:
        assert self._agreement is not None
        limit_s = getattr(self._settings, option).total_seconds()
        return AbsentRanks(self._agreement, option, limit_s, self._settings.soft_timeout.total_seconds(), most)

    def _wait_as_spare(self) -> None:
        assert self._agreement is not None
        self._result = None
        interval_s = self._settings.progress_watchdog_interval.total_seconds()
        while not self._agreement.wait_done(interval_s):
            self._services.progress_watchdog.ping()

    def _report(self, error: BaseException, monitor: MonitorThread) -> None:
        """Record the fault of this rank. If that fails, the others wait for it: it leaves."""
        kind = Interruption.EXCEPTION if isinstance(error, Exception) else Interruption.BASE_EXCEPTION
        record = InterruptionRecord.of_exception(error, self.state.rank, kind, self._kernel)
        _log.error("%s failed: %s (%s)", self, record.summary, record.place)
        _log.debug("%s", record.detail)  # one rank of all with this fault logs it when all have reported theirs
        assert self._agreement is not None
        try:
            self._agreement.interrupt(record)
        except (StoreError, StaleViewError) as problem:
            monitor.give_up(problem)

    def _log_if_left_out(self, error: BaseException) -> None:
        """Log the traceback of an exception of this rank that came too late to be among the faults of all ranks."""
        record = InterruptionRecord.of_exception(error, self.state.rank, Interruption.EXCEPTION)
        if record.fault not in [each.fault for each in self._records]:
            _log.error("%s failed, too:\n%s", self, record.detail)

    # -- after a fault -------------------------------------------------------------------------------------------------

    @handler_errors_logged()
    def _restart(self) -> Phase:
        """Go from FINALIZE to the next BEGIN. Any exception makes this rank leave, but for those of signal handlers."""
        self._enter(Phase.FINALIZE)
        self._hooks.finalize(self.state.freeze())
        self._enter(Phase.HEALTH)
        self._hooks.restart_health_check(self.state.freeze())
        self._enter(Phase.BARRIER)
        roster = self._wait_for_all()
        self._enter(Phase.END)
        self._services.monitor_process.disable_sibling_monitor()
        if self._initial_rank in roster.departed or self.state.rank in roster.terminated_ranks:
            raise RankDiscarded(f"{self}: the others consider this rank lost and go on without it")
        self._faults.history = roster.faults
        self._end_if_repeated()
        self._terminated_ranks, self._initial_ranks = roster.terminated_ranks, roster.initial_ranks
        world_size = self.state.world_size
        self.state.world_size += len(roster.joined)  # newcomers count as spares of the iteration that ends
        phase = self._assign()
        reset_libraries()
        self._write_event(world_size, len(roster.joined))
        self.state.advance()
        return phase

    def _wait_for_all(self) -> Roster:
        assert self._agreement is not None
        took_s = int(time.monotonic() - self._roster_s)
        self._agreement.report_progress({**self._services.progress(), SECONDS: took_s})
        roster = self._agreement.wait_roster(
            self._initial_rank,
            self._settings.barrier_timeout.total_seconds(),
            self._settings.progress_watchdog_interval.total_seconds(),
            self._absent("barrier_timeout", _MOST_BARRIER_TIMEOUTS).look,
        )
        self._roster_s = time.monotonic()
        return roster

    def _end_if_repeated(self) -> None:
        """End the job, if its faults came back too often by the roster: on all ranks, newcomers included."""
        self._faults.raise_if_exceeded(
            self.state.fn_exception,
            self._records,
            lambda why: self._events.gave_up(self.state.rank, self.state.iteration, self._records, why),
        )

    def _write_event(self, world_size_before: int, joined: int) -> None:
        """Log the restart; the lowest surviving rank also writes the event."""
        _log.warning(
            "restart: iteration %d ends, rank %s of %d, %d lost, %d joined",
            self.state.iteration,
            self.state.rank,
            self.state.world_size,
            len(self._terminated_ranks),
            joined,
        )
        if self.state.rank == 0:
            self._events.restarted(
                iteration=self.state.iteration,
                records=self._records,
                terminated_ranks=self._terminated_ranks,
                world_size=(world_size_before, self.state.world_size),
                seconds=self._clock.seconds(),
                pause_s=self._faults.pause_s,
                flight_recorder=flight_recorder_files(self._settings.abort, self.state.iteration),
            )
        self._clock.clear()

    # -- leaving -------------------------------------------------------------------------------------------------------

    def _leave(self, error: BaseException) -> None:
        """Report that this rank leaves, wait for the others, run the terminate hook (it may replace `error`)."""
        _log.critical("%s: leaving with %s: %s", self, type(error).__name__, error)
        self.phase = Phase.LEAVE
        if isinstance(error, StaleViewError):  # the job must not be touched any more
            self._services.monitor_process.leave(reported=True)
            self.state.mode, self.state.rank = Mode.TERMINATED, None
            return
        self._services.monitor_process.leave(reported=False)  # until the others know, it reports a death for this rank
        if not isinstance(error, RankDiscarded | StoreLostError):
            record = InterruptionRecord.of_exception(error, self.state.rank, Interruption.BASE_EXCEPTION)
            try:
                depart(
                    lambda iteration: self._services.agreement(iteration, self._world_size_in(iteration)),
                    self.state.iteration,
                    self._initial_rank,
                    [record],
                    self._settings.barrier_timeout.total_seconds(),
                )
            except RestartError as problem:
                _log.error("the others may not know that this rank leaves: %s", problem)
        self._services.monitor_process.leave(reported=True)
        self._services.monitor_process.disable_sibling_monitor()
        self.state.mode, self.state.rank = Mode.TERMINATED, None
        self._hooks.terminate(self.state.freeze())

    def _world_size_in(self, iteration: int) -> int | None:
        return self.state.world_size if iteration == self.state.iteration else None


ITERATION_CODE = RestartProtocol._guarded.__code__
"""The code of the frame that calls what may be interrupted."""
