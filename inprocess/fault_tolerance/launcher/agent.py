"""The launcher's loop over cycles. Torch's agent starts and numbers the workers; everything else is decided here."""

from __future__ import annotations

import contextlib
import logging
import signal
import time
from typing import Any

from torch.distributed import DistNetworkError, DistStoreError
from torch.distributed.elastic.agent.server.api import RunResult, Worker, WorkerSpec, WorkerState
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.rendezvous import (
    RendezvousClosedError,
    RendezvousError,
    RendezvousGracefulExitError,
    RendezvousTimeoutError,
)

from inprocess.fault_tolerance.data import FT_LAUNCHER_IPC_SOCKET_ENV_VAR
from inprocess.fault_tolerance.launcher.cycle import CycleEnd, LauncherResources, decide
from inprocess.fault_tolerance.launcher.inboxes import Interrupted
from inprocess.fault_tolerance.launcher.meeting import LauncherExit, Meeting, MeetingError, StoreLost
from inprocess.fault_tolerance.launcher.open_calls import OpenCalls
from inprocess.fault_tolerance.launcher.orphans import end_orphans, log_survivors
from inprocess.fault_tolerance.launcher.survivors import Survivors
from inprocess.fault_tolerance.launcher.workers import (
    WorkerProcesses,
    describe_failures,
    failures_of,
    log_cause,
    set_aside_torn_records,
    start_worker,
    wait_readable,
)
from inprocess.ipc.process_one import reap_adopted

_log = logging.getLogger(__name__)
_LEAVE_TIMEOUT_S = 10.0
_PRELOAD_DELAY_S = 30.0  # the workers of this cycle are starting, and come first
_FIRST_NODES_S = 600.0  # for which the host of the store waits for other nodes to come
_MEMBERSHIP_INTERVAL_S = 1.0  # torch's handler asks the store no more often


class LauncherAgent(LocalElasticAgent):
    """The agent of one node. Call `run_job` once, on the main thread; torch's own loop is not used."""

    def __init__(self, spec: WorkerSpec, resources: LauncherResources, **torchs: Any) -> None:
        super().__init__(spec, **torchs)
        self._resources = resources
        self._workers = WorkerProcesses({})
        self._survivors: Survivors | None = None
        self._cycle = 0
        self._open_calls = OpenCalls(spec.local_world_size)
        self._is_ending = False  # a signal has asked the workers to end, wherever they are
        self._is_polled = not isinstance(spec.entrypoint, str)  # functions send their results before they end

    @property
    def entrypoint_name(self) -> str:
        """What the workers run."""
        return str(self._worker_group.spec.get_entrypoint_name())

    def run_job(self) -> LauncherExit:
        """Run cycles until the job is over for this node. Workers and what they have left behind have ended then."""
        rounds = self._resources.rounds
        outcome: LauncherExit | None = None
        try:
            while outcome is None:
                outcome = self._meet() or self._run_cycle()
            if outcome.is_excluded and self._resources.rounds.hosts_store():
                self._host_store()
            return outcome
        except StoreLost as error:
            return LauncherExit(1, f"the node that hosts the rendezvous does not answer: {error}")
        finally:
            self._end_workers()
            self._open_calls.close()
            self._shutdown()
            if outcome is not None and outcome.ends_job:
                rounds.shutdown()
                if rounds.meeting is not None:
                    rounds.meeting.leave(_LEAVE_TIMEOUT_S)
            elif self._is_ending:  # a spare need not wait until this node is silent
                rounds.leave()

    def _host_store(self) -> None:
        """Wait until no other node needs the store, or a signal arrives."""
        _log.warning("this node hosts the store of the rendezvous, so its launcher runs until the others have ended")
        rounds, signals = self._resources.rounds, self._resources.signals
        limit_s, deserted_s = _FIRST_NODES_S, 0.0
        with contextlib.suppress(RendezvousError, DistNetworkError):
            while signals.take() is None:
                if not rounds.is_deserted():
                    limit_s, deserted_s = self._resources.silence_s, 0.0
                elif rounds.is_closed() or deserted_s >= limit_s:
                    return
                wait_readable([signals.fd], _MEMBERSHIP_INTERVAL_S)
                deserted_s += _MEMBERSHIP_INTERVAL_S

    # -- a cycle -------------------------------------------------------------------------------------------------------

    def _run_cycle(self) -> LauncherExit | None:
        """Return how this launcher ends; None if another cycle follows."""
        meeting = self._resources.rounds.meeting
        assert meeting is not None
        self._start(meeting)
        end = self._watch(meeting)
        try:
            if end.is_ours:
                meeting.ask_restart(end.reason)
        except StoreLost:
            if end.outcome is None:  # else this node ends anyway
                raise
        self._end_workers()
        if end.outcome is not None:
            return end.outcome
        _log.warning("cycle %d is over: %s", self._cycle, end.reason)
        self._resources.admission.report_others(at_once=True)
        outcome = decide(self._resources, meeting, end, self._cycle, self._worker_group.spec.max_restarts)
        if outcome is None:
            if not self._resources.admission.is_refused:
                self._resources.gpu_memory.wait_free()
            self._cycle += 1
        return outcome

    def _meet(self) -> LauncherExit | None:
        """Join the next cycle, however long that takes. Returns an outcome if there is none for this node."""
        rounds, group = self._resources.rounds, self._worker_group
        earlier = rounds.meeting
        self._resources.monitors.start()  # a spare that waits has what takes time behind it
        self._resources.preloaded.fill()
        while True:
            try:
                with self._resources.signals.raising():
                    reason = self._join()
                if reason is None:
                    break
                rounds.leave()
                return self._resources.admission.exit(reason)
            except (MeetingError, DistStoreError) as error:
                _log.warning("joining the rendezvous again: %s", error)
            except Interrupted as interrupted:
                rounds.leave()
                return LauncherExit(
                    128 + interrupted.number, f"{interrupted.number.name} while waiting for other nodes"
                )
            except RendezvousGracefulExitError:
                return LauncherExit(0, "this spare node was not needed")
            except RendezvousClosedError:
                return self._closed(earlier)
            except RendezvousTimeoutError:
                return LauncherExit(1, "there are not enough nodes for another cycle")
            except (RendezvousError, DistNetworkError) as error:
                raise StoreLost(_causes(error)) from error
        self._remaining_restarts = group.spec.max_restarts - self._cycle
        return None

    def _join(self) -> str | None:
        """Join the next rendezvous if the checks of this node find nothing; return why it may not take part."""
        rounds, admission, group = self._resources.rounds, self._resources.admission, self._worker_group
        reason = admission.refusal(self._cycle)
        if reason is not None:
            return reason
        self._rendezvous(group)
        assert rounds.meeting is not None
        if admission.look(self._cycle):  # a spare may have waited for days since it was checked
            reason = admission.refuse()
            if not rounds.meeting.is_late:  # else no other waits for it
                rounds.meeting.ask_restart(f"a node that has joined is unfit: {reason}")
            return reason
        least = max(self._cycle, rounds.least_cycle())
        network = self._resources.network
        self._cycle, states = rounds.meeting.agree_on_cycle(least, len(group.workers), network.state())
        reason = network.refusal(rounds.meeting, states, self._cycle)
        if reason is None:
            rounds.record_cycle(self._cycle)
            rounds.meeting.begin()
        return reason

    def _closed(self, earlier: Meeting | None) -> LauncherExit:
        if earlier is None:
            return LauncherExit(0, "the job is over; this node was not needed")
        return earlier.stopped() or LauncherExit(1, "the rendezvous was closed")

    def _start(self, meeting: Meeting) -> None:
        group = self._worker_group
        self._resources.monitors.begin_cycle(self._cycle)
        self._open_calls.close()
        _log.info("cycle %d begins: node %d of %d", self._cycle, group.group_rank, group.group_world_size)
        if (logs := self._resources.cycle_logs) is not None:
            ranks = [int(worker.global_rank) for worker in group.workers]
            logs.begin_cycle(self._cycle, ranks, int(group.workers[0].world_size))
        with self._resources.preloaded.used_by_torch():
            started = self._start_workers(group)
        self._resources.preloaded.fill(_PRELOAD_DELAY_S)
        for local_rank, pid in started.items():
            group.workers[local_rank].id = pid
            self._resources.monitors.end_with_us(local_rank, pid)
        assert self._pcontext is not None
        workers = self._workers = WorkerProcesses(self._pcontext.pids())
        torchs_close, error_files = self._pcontext._close, self._pcontext.error_files

        def close(death_sig: signal.Signals = signal.SIGTERM, timeout: int = 30) -> None:
            workers.stop(self._resources.options.workers_stop_timeout_s)
            if not workers.running:  # torch waits without limit for those that hang in the kernel
                set_aside_torn_records(error_files.values())
                torchs_close(death_sig, 1)  # closes files and the like

        # When torch is asked for the workers' state it stops the others itself, with a timeout of its own.
        setattr(self._pcontext, "_close", close)  # noqa: B010 - a method is replaced
        group.state = WorkerState.HEALTHY
        options = self._resources.options
        if options.leaves_survivors:
            self._survivors = Survivors(
                workers,
                group.workers,
                meeting,
                fewest=options.min_workers,
                silence_s=self._resources.silence_s,
                error_files=self._pcontext.error_files,
                left_early=self._left_early,
                replace_worker=self._replace_worker,
                most_replacements=options.max_replacements,
                note_cause=self._resources.network.note_cause,
                joining={rank: self._open_calls.joined_file(rank) for rank in workers.pids} if meeting.is_late else {},
            )

    def _replace_worker(self, local_rank: int, number: int) -> str:
        """Start a process in the place of a worker that has ended; see `Survivors`."""
        assert self._pcontext is not None
        lost, layout = self._worker_group.workers[local_rank], self._resources.rounds.layout()
        places = int(lost.world_size) if layout is None else layout.places
        variables = self._open_calls.joining(local_rank, int(lost.global_rank) + places * (number + 1))
        self._open_calls.forget(local_rank)
        preloaded = self._resources.preloaded
        lost.id = start_worker(self._pcontext, self._workers, local_rank, variables, preloaded.handler)
        preloaded.fill(_PRELOAD_DELAY_S)
        self._resources.monitors.end_with_us(local_rank, self._workers.pids[local_rank])
        return self._open_calls.joined_file(local_rank)

    def _assign_worker_ranks(
        self, store: Any, group_rank: int, group_world_size: int, spec: WorkerSpec
    ) -> list[Worker]:
        """Return the workers with their ranks. A node that joins a running cycle has larger ones than all others."""
        if group_rank < group_world_size:
            workers: list[Worker] = super()._assign_worker_ranks(store, group_rank, group_world_size, spec)
            return workers
        first, size = self._resources.rounds.first_rank(), group_world_size * spec.local_world_size
        return [
            Worker(local_rank, rank, role_rank=rank, world_size=size, role_world_size=size)
            for local_rank, rank in enumerate(range(first, first + spec.local_world_size))
        ]

    def _setup_local_watchdog(self, envs: dict[int, dict[str, str]]) -> None:
        """Add our variables to those of the workers. Torch's agent calls this when it has made them."""
        rounds = self._resources.rounds
        layout = rounds.layout()
        for local_rank, env in envs.items():
            if layout is not None:
                env.update(layout.environment())
            if rounds.meeting is not None and rounds.meeting.is_late:
                env.update(self._open_calls.joining(local_rank, int(env["RANK"])))
            env.update(self._resources.inbox.environment)
            env.update(self._resources.monitors.environment(local_rank))
            env.update(self._open_calls.environment(local_rank))
        super()._setup_local_watchdog(envs)

    def _watch(self, meeting: Meeting) -> CycleEnd:
        """Wait for the end of the cycle. Monitors that end are replaced meanwhile."""
        is_done = False
        while True:
            self._wait(None if meeting.is_alone and not self._is_polled else self._worker_group.spec.monitor_interval)
            number = self._resources.signals.take()
            if number is not None:
                return self._end_gracefully(number, meeting, is_done)
            self._resources.monitors.restart_ended()
            try:
                if not is_done:
                    end = self._look()
                    if end is not None and end.is_ours:
                        return end
                    if end is not None:
                        is_done = True
                        meeting.report_done()
                if is_done and meeting.all_done():
                    return CycleEnd("success", LauncherExit(0, self._success(), ends_job=True))
                if meeting.has_words():
                    return self._told(meeting)
                if (end := self._look_at_health(is_done)) is not None:
                    return end
                if self._survivors is not None:
                    end = self._survivors.watch_nodes(is_done)
                    if end is not None:
                        return end
            except StoreLost:
                if self._resources.signals.has_any():
                    continue  # the workers are told of the signal first
                if is_done:
                    return CycleEnd("success", LauncherExit(0, "all workers of this node have ended with 0"))
                raise

    def _wait(self, timeout_s: float | None) -> None:
        resources = self._resources
        fds = [resources.signals.fd, resources.admission.fd, *resources.monitors.fds, *self._workers.fds]
        wait_readable(fds, timeout_s)

    def _look_at_health(self, is_done: bool) -> CycleEnd | None:
        """Return the end of the cycle if this node has become unfit and a spare can take its place."""
        admission = self._resources.admission
        is_news = admission.look(self._cycle)
        is_second = admission.report_others()
        if admission.unfit is None or is_done or not (is_news or is_second):
            return None
        if self._cycle < self._worker_group.spec.max_restarts and self._resources.rounds.has_spare():
            reason = admission.refuse()
            if self._resources.options.hot_spares:  # the workers of the others go on, as when this node is lost
                self._resources.rounds.leave()
                return CycleEnd("unfit", admission.exit(str(reason)))
            return CycleEnd(f"a node is unfit: {reason}", is_ours=True)
        if is_news:
            _log.error("this node goes on until the next rendezvous: no spare is seen to run, or no restart is left")
        return None

    def _look(self) -> CycleEnd | None:
        """Return how the workers of this node have ended, `is_ours` if the cycle has failed; None while they run."""
        if self._survivors is not None:
            return self._survivors.look()
        ended = self._workers.take_ended()
        failed = {local_rank: code for local_rank, code in ended.items() if code != 0 or self._left_early(local_rank)}
        assert self._pcontext is not None
        set_aside_torn_records(self._pcontext.error_files[local_rank] for local_rank in failed)
        if 0 in failed.values():  # for torch, that worker has succeeded
            failures = failures_of(failed, self._workers, self._worker_group.workers, self._pcontext.error_files)
            self._resources.network.note_cause(log_cause(failures, self._workers))
            return CycleEnd(describe_failures(failures), failures=failures, is_ours=True)
        if not ended and self._workers.fds and not self._is_polled:
            return None
        result: RunResult = self._monitor_workers(self._worker_group)
        if result.state == WorkerState.HEALTHY:
            return None
        if result.is_failed():  # torch has stopped the others
            self._resources.network.note_cause(log_cause(result.failures, self._workers))
            return CycleEnd(describe_failures(result.failures), failures=result.failures, is_ours=True)
        return CycleEnd("all workers of this node have ended with 0")

    def _left_early(self, local_rank: int) -> bool:
        """Whether a worker that has ended was in a call of the wrapper, and was not asked to end."""
        return self._open_calls.is_open(local_rank) and not self._is_ending

    def _success(self) -> str:
        lost = sorted(self._survivors.failures) if self._survivors is not None else []
        if not lost:
            return "all workers have ended with 0"
        return f"the workers that are left have ended with 0; of this node, ranks {lost} were left behind"

    def _told(self, meeting: Meeting) -> CycleEnd:
        stopped = meeting.stopped()
        if stopped is not None:
            return CycleEnd(stopped.reason, stopped)
        return CycleEnd(f"another node says: {meeting.restart_reason()}")

    def _end_gracefully(self, number: signal.Signals, meeting: Meeting, is_done: bool) -> CycleEnd:
        """Pass a signal to the launcher on to the workers, and give them time to end by themselves."""
        options = self._resources.options
        wait_s = options.term_timeout_s if number == signal.SIGTERM else options.workers_stop_timeout_s
        _log.warning("%s is passed on to the workers, which have %g s to end", number.name, wait_s)
        self._is_ending = True
        if (survivors := self._survivors) is not None:
            survivors.replaces_no_more()
        self._workers.signal(number)
        deadline = time.monotonic() + wait_s
        end: CycleEnd | None = None
        failed_before = self._failed()
        while not is_done and end is None and (left_s := deadline - time.monotonic()) > 0:
            self._wait(min(left_s, self._worker_group.spec.monitor_interval) if self._is_polled else left_s)
            if self._resources.signals.take() is not None:  # a second signal shortens the wait
                deadline = min(deadline, time.monotonic() + options.workers_stop_timeout_s)
            self._resources.monitors.restart_ended()
            self._resources.admission.look(self._cycle)
            end = self._look_alone()
        has_any = survivors is None or survivors.has_any
        if is_done or (end is not None and not end.is_ours and self._failed() == failed_before and has_any):
            is_over = False
            with contextlib.suppress(StoreLost):  # the others notice by themselves
                if not is_done:
                    meeting.report_done()
                is_over = self._wait_for_others(meeting, deadline)
            return CycleEnd("done", LauncherExit(0, f"{number.name}: the workers have ended with 0", ends_job=is_over))
        outcome = LauncherExit(128 + number, f"{number.name}: not all workers have ended with 0")
        # With hot spares the workers of the others go on, as when this node is lost.
        return CycleEnd(
            outcome.reason, outcome, is_ours=not meeting.is_alone and not self._resources.options.hot_spares
        )

    def _look_alone(self) -> CycleEnd | None:
        """Do as `_look` does, whether the store answers or not."""
        try:
            return self._look()
        except StoreLost:
            return None if self._workers.fds else CycleEnd("all workers of this node have ended")

    def _failed(self) -> int:
        """Return how many workers of this node were left behind."""
        return 0 if self._survivors is None else len(self._survivors.failures)

    def _wait_for_others(self, meeting: Meeting, deadline: float) -> bool:
        """Wait until the workers of all nodes have ended with 0. False if that does not happen."""
        while not meeting.all_done():
            if meeting.has_words() or time.monotonic() >= deadline:
                return False
            wait_readable([self._resources.signals.fd], self._worker_group.spec.monitor_interval)
            if self._resources.signals.take() is not None:
                return False
        return True

    def _end_workers(self) -> None:
        """End the workers and what they have left behind, in any state. Idempotent."""
        if not self._workers.pids:
            return
        workers, self._workers = self._workers, WorkerProcesses({})
        self._survivors = None
        workers.stop(self._resources.options.workers_stop_timeout_s)
        if self._pcontext is not None:
            self._pcontext.close()
        workers.close()
        end_orphans(workers.pids.values())
        if self._resources.options.config.check_remaining_processes:
            log_survivors(
                f"{FT_LAUNCHER_IPC_SOCKET_ENV_VAR}={self._resources.inbox.environment[FT_LAUNCHER_IPC_SOCKET_ENV_VAR]}"
            )
        self._resources.monitors.end_cycle()
        reap_adopted(
            {
                *workers.pids.values(),
                *self._resources.monitors.pids,
                *self._resources.preloaded.pids,
                *self._resources.admission.pids,
            }
        )


def _causes(error: BaseException) -> str:
    """Return the text of an error and of those that caused it: torch's own says little."""
    texts = []
    found: BaseException | None = error
    while found is not None:
        texts.append(str(found))
        found = found.__cause__
    return ": ".join(dict.fromkeys(texts))
