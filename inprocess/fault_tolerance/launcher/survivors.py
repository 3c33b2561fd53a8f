"""The restart policy "in-process": a worker that fails is left behind, the others go on.

    a worker ends with 0          it is done, unless it was in a call of the wrapper that is not completed
    a worker ends otherwise       it is lost; if fewer than --ft-min-workers of the job are left, the cycle has failed,
                                  else a replacement is started, at most --ft-max-replacements times per node
    all workers have ended        the node is done; when all nodes are, the job has succeeded

The other workers must go on by themselves: their `inprocess.Wrapper` restarts without the lost rank. The wrapper in the
replacement joins them at a restart, for which it asks (`--ft-rejoin`); only then does it count as a worker that is
left, and does its exit code matter. A node whose launcher does not answer is lost with all its workers; if it comes
back, those that still run count again.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from torch.distributed.elastic.agent.server.api import Worker

from inprocess.attribution import Cause
from inprocess.fault_tolerance.launcher.count_watch import CountWatch
from inprocess.fault_tolerance.launcher.cycle import CycleEnd
from inprocess.fault_tolerance.launcher.meeting import Meeting
from inprocess.fault_tolerance.launcher.orphans import end_orphans
from inprocess.fault_tolerance.launcher.workers import WorkerProcesses, describe_failures, failures_of, log_cause

_log = logging.getLogger(__name__)
_ALIVE_INTERVAL_S = 1.0


class Survivors:
    """The workers of this node in one cycle, and how many of all nodes are left. For the launcher's thread.

    All methods raise StoreLost. `fewest` is how many workers of the job must be left. A node that has not answered for
    `silence_s` is lost. `error_files` are those of torch's workers, by local rank. `replace_worker(local_rank, number)`
    starts the `number`-th replacement of the job, and returns the path of a file that exists once it has joined; it is
    called at most `most_replacements` times. `left_early(local_rank)` tells whether a worker that has ended was in a
    call of the wrapper. `note_cause` is called with the cause of each loss. `joining` are such files of workers that
    are to join the job: those of a spare node.
    """

    def __init__(
        self,
        processes: WorkerProcesses,
        workers: list[Worker],
        meeting: Meeting,
        *,
        fewest: int,
        silence_s: float,
        error_files: Mapping[int, str],
        left_early: Callable[[int], bool],
        replace_worker: Callable[[int, int], str],
        most_replacements: int,
        note_cause: Callable[[Cause | None], object],
        joining: Mapping[int, str],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.failures: dict[int, Any] = {}  # torch's, by rank
        self._processes = processes
        self._workers = workers
        self._world_size = int(workers[0].world_size)
        self._meeting = meeting
        self._fewest = fewest
        self._silence_s = silence_s
        self._error_files = error_files
        self._left_early = left_early
        self._start_process = replace_worker
        self._replacements_left = most_replacements
        self._note_cause = note_cause
        self._waiting = dict(joining)  # workers that have not joined: local rank -> file
        self._is_complete = False  # a worker has ended with 0, so there is no restart any more
        self._clock = clock
        self._next_check_s = clock()
        self._silence: CountWatch[int] = CountWatch(silence_s, clock)

    def look(self) -> CycleEnd | None:
        """Return how the cycle ends on this node; None while workers run. Ends what failed workers have left behind."""
        ended = sorted(self._processes.take_ended().items())
        self._count_joined()
        failed = {local_rank for local_rank, code in ended if code != 0 or self._left_early(local_rank)}
        counting = {local_rank: code for local_rank, code in ended if local_rank not in self._waiting}
        lost = {local_rank: code for local_rank, code in counting.items() if local_rank in failed}
        self._is_complete |= len(lost) < len(counting)
        for local_rank, code in ended:
            if self._waiting.pop(local_rank, None) is not None and local_rank in failed and not self._is_complete:
                _log.warning("the replacement in the place of local rank %d ended with %d", local_rank, code)
        if self._is_complete:
            self._end_waiting()
        if lost:
            failures = failures_of(lost, self._processes, self._workers, self._error_files)
            self.failures.update(failures)
            end_orphans([self._processes.pids[local_rank] for local_rank in lost])
            self._report_lost(len(lost))
            self._come_back()
            self._note_cause(log_cause(failures, self._processes))
            end = self._count_left(describe_failures(failures))
            if end is not None:
                return end
        for local_rank, _ in ended:
            if local_rank in failed:
                self._start_replacement(local_rank)
        if self._processes.fds:
            return None
        return CycleEnd("all workers of this node have ended")

    @property
    def has_any(self) -> bool:
        """Whether this node has workers that have joined and are not lost."""
        return self._meeting.table.own.lost < len(self._workers)

    def replaces_no_more(self) -> None:
        """Start no more processes: the workers are asked to end."""
        self._replacements_left = 0

    def _start_replacement(self, local_rank: int) -> None:
        if self._replacements_left == 0 or self._world_size == 1 or self._is_complete:
            return
        if not self._processes.fds and self._meeting.is_alone:
            return  # there is no worker to join
        self._replacements_left -= 1
        try:
            self._waiting[local_rank] = self._start_process(local_rank, self._meeting.number_replacement())
        except OSError as error:
            _log.error("no replacement can be started for local rank %d: %s", local_rank, error)
            return
        _log.warning("a replacement for local rank %d is started; it joins at a restart of the others", local_rank)

    def _end_waiting(self) -> None:
        """End replacements that have not joined: they are not needed any more, and have done nothing yet."""
        for local_rank in list(self._waiting):
            self._processes.kill(local_rank)
            end_orphans([self._processes.pids[local_rank]])

    def _count_joined(self) -> None:
        """Count replacements that have joined as workers that are left."""
        for local_rank in [local_rank for local_rank, path in self._waiting.items() if os.path.exists(path)]:
            del self._waiting[local_rank]
            self._report_lost(-1)

    def watch_nodes(self, is_waiting: bool) -> CycleEnd | None:
        """Report that this node is alive, once a second, and notice nodes that are not.

        They are noticed by the first node that answers, and by nodes that only wait for the others (`is_waiting`); the
        first one by all others. Returns the end of the cycle if too few workers are left. Workers that wait for a job
        that is done are ended.
        """
        now = self._clock()
        if self._meeting.is_alone or now < self._next_check_s:
            return None
        self._next_check_s = now + _ALIVE_INTERVAL_S
        self._meeting.say_alive()
        self._come_back()
        if self._meeting.is_late and self._waiting.keys() >= self._processes.running and not self._is_complete:
            self._is_complete = not self._meeting.table.has_work()
        others = [node for node in self._meeting.table.waited_for() if node != self._meeting.node]
        if not is_waiting and others and others[0] < self._meeting.node:
            others = others[:1]
        for node in sorted(self._silence.observe(self._meeting.alive(others))):
            self._meeting.table.give_up(node)
            end = self._count_left(f"node {node} has not answered for {self._silence_s:g} s")
            if end is not None:
                return end
        return None

    def _report_lost(self, count: int) -> None:
        table = self._meeting.table
        table.report(replace(table.own, lost=table.own.lost + count))

    def _come_back(self) -> None:
        """Have the others count this node again, if they have given it up."""
        if self._meeting.table.come_back():
            _log.warning("this node did not answer for a while and was given up; its workers count again")

    def _count_left(self, reason: str) -> CycleEnd | None:
        """Return the end of the cycle if too few workers are left, for this reason."""
        left = self._meeting.table.left()
        if left < self._fewest:
            text = (
                f"{reason}; {left} of {self._world_size} workers are left, fewer than --ft-min-workers={self._fewest}"
            )
            return CycleEnd(text, failures=self.failures, is_ours=True)
        _log.warning("%s; the other %d of %d workers go on", reason, left, self._world_size)
        return None
