"""Run faults in a laboratory during a job, wait for the end of all, and collect the facts for the judge."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import ckpt
from ckpt.storage.root import CheckpointRoot
from tests.inprocess.nodes.faults import Fault
from tests.inprocess.nodes.job import Job
from tests.inprocess.nodes.judge import Apart, End, Facts, Limits, Published, Stopped, Violation, judge
from tests.inprocess.nodes.lab import Lab
from tests.inprocess.nodes.program import CHECKPOINTS, ETCD, Options

_START_S = 40.0  # ranks that are started at the same time import torch's distributed package one after the other
_PAUSE_S = 0.01
_OBSERVED_S = 1.5
_PROCESSES_S = 10.0
_PHASE_S = 15.0


@dataclass(frozen=True)
class Report:
    """The violations found, with the information to understand them."""

    violations: list[Violation]
    text: str

    def check(self) -> None:
        """AssertionError if there is a violation."""
        if self.violations:
            raise AssertionError("\n".join(["", *map(str, self.violations), self.text]))


@dataclass
class _Played:
    """A fault and when it began and ended: seconds of CLOCK_MONOTONIC, None for not yet."""

    fault: Fault
    begun: float | None = None
    ended: float | None = None

    @property
    def is_over(self) -> bool:
        return self.begun is not None and (self.fault.lasts_s is None or self.ended is not None)


def limits_of(options: Options) -> Limits:
    """Return what the judge allows a job with these settings."""
    return Limits(
        quiet_s=2 * (options.heartbeat_timeout_s + options.barrier_timeout_s),
        alone_s=1.5 * options.heartbeat_timeout_s + 1.0,
    )


def play(
    lab: Lab,
    faults: Sequence[Fault],
    *,
    ranks_per_node: int,
    options: Options,
    all_finish: bool = False,
    program: str = "tests.inprocess.nodes.program:train",
) -> Report:
    """Run a job with these faults, and judge it. With `all_finish` no fault may cost a rank."""
    limits = limits_of(options)
    env = {ETCD: ",".join(lab.start_etcd())} if options.etcd else None
    job = lab.start(program, [asdict(options)], ranks_per_node=ranks_per_node, env=env)
    if options.etcd:
        job.server_rank = None
    base = job.wait_event("saved" if options.checkpoints else "step", job.pids, _START_S)
    played = _apply(lab, job, faults, base)
    _observe(job, played, limits)
    job.stop()
    job.wait_exits(job.pids, limits.quiet_s + 2.0)
    facts = _facts(job, played, base, all_finish)
    violations = judge(job.lines(), facts, limits)
    times = [
        f"{its.fault}: {_since(job, its.begun)} to {_since(job, its.ended)} s after the start of the job"
        for its in played
    ]
    return Report(violations, "\n".join([*times, job.summaries(), job.describe() if violations else ""]))


def _apply(lab: Lab, job: Job, faults: Sequence[Fault], base: float) -> list[_Played]:
    """Begin and end each fault at its time. Returns when all are over."""
    played = [_Played(fault) for fault in faults]
    while not all(its.is_over for its in played):
        for its in played:
            now = time.monotonic()
            if its.begun is None and _is_due(job, its.fault, base):
                its.begun = now
                its.fault.begin(lab, job)
            elif its.begun is not None and not its.is_over and now >= its.begun + (its.fault.lasts_s or 0.0):
                its.ended = now  # what happens from here on can be due to the end of the fault
                its.fault.end(lab, job)
        time.sleep(_PAUSE_S)
    return played


def _is_due(job: Job, fault: Fault, base: float) -> bool:
    """A phase that the job never gets to is an error of the scenario or of the restart."""
    if fault.during is None:
        return time.monotonic() >= base + fault.begin_s
    if any(line.event == fault.during and line.time > base for line in job.lines()):
        return True
    if time.monotonic() > base + _PHASE_S:
        raise AssertionError(f"no restart came to {fault.during!r}\n{job.describe()}")
    return False


def _observe(job: Job, played: Sequence[_Played], limits: Limits) -> None:
    """Let the job continue: the program must not end before two jobs could work at the same time.

    Ranks that must end because they were without the server for too long are waited for: a second job of them could
    begin late. The wait takes its whole time only if they do not end.
    """
    job.wait_exits(job.pids, limits.alone_s + _OBSERVED_S)
    for its in played:
        assert its.begun is not None
        if its.ended is None or its.ended - its.begun > limits.alone_s:
            doomed = its.fault.without_server(job) - its.fault.stopped(job)
            job.wait_exits(doomed, its.begun + limits.quiet_s + _OBSERVED_S - time.monotonic())


def _facts(job: Job, played: Sequence[_Played], base: float, all_finish: bool) -> Facts:
    apart, stopped = [], []
    must_finish = frozenset(job.pids)
    for its in played:
        assert its.begun is not None
        end = its.ended if its.ended is not None else float("inf")
        if without := its.fault.without_server(job):
            apart.append(Apart(without, its.begun, end))
        stopped += [Stopped(rank, its.begun, end) for rank in its.fault.stopped(job)]
        must_finish -= frozenset() if all_finish else its.fault.may_cost(job)
    now = time.monotonic()
    ends = {rank: End(its.time, its.code) for rank, its in job.exits.items()}
    left = job.wait_no_process(_PROCESSES_S) if len(ends) == len(job.pids) else {}
    return Facts(
        started=job.started,
        now=now,
        processes=frozenset(job.pids),
        ends=ends,
        apart=apart,
        stopped=[Stopped(rank, job.started, base) for rank in job.pids] + stopped,
        must_finish=must_finish,
        left=left,
        published=read_published(job.folder / CHECKPOINTS),
    )


def read_published(root: Path) -> list[Published]:
    """Return the published steps of a root; none if there is no root. `ckpt`'s errors if one cannot be read."""
    if not root.exists():
        return []
    found = []
    for step in CheckpointRoot(str(root)).steps():
        summary = ckpt.open(root, step).summary
        before = summary["continues"]
        continues = None if before is None else (before["step"], before["save"])
        found.append(Published(step, summary["save"], continues))
    return found


def _since(job: Job, at: float | None) -> str:
    return "..." if at is None else f"{at - job.started:.2f}"
