"""Real monitor processes: what they do to a rank that hangs, or say when it dies; and what they are themselves."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
import pytest

from inprocess.agreement import Agreement, IterationOutcome
from inprocess.attribution import Interruption, InterruptionRecord
from inprocess.coordination import Access, CoordinationStore, RestartIndex, StoreServer
from inprocess.exception import InternalError, StoreError
from inprocess.monitor_process.job_store import iteration_store
from inprocess.monitor_process.limits import Limit, ProgressLimits
from inprocess.monitor_process.messages import WatchRank
from inprocess.monitor_process.sibling import SiblingMonitor
from inprocess.monitor_process.supervised import MonitorProcess
from inprocess.monitor_process.watched import WatchedProcess
from inprocess.progress_watchdog import Timestamp
from tests.support import LeakCheck, is_gone

LONG_S = 20.0
SLEEPER = "import time; print('ready', flush=True); time.sleep(1000)"
DEAF = "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN);" + SLEEPER
POLITE = """
import signal, sys, time
def leave(*_):
    print('asked', flush=True)
    sys.exit(3)
signal.signal(signal.SIGTERM, leave)
print('ready', flush=True)
time.sleep(1000)
"""


class Rank:
    """A process that stands for a rank."""

    def __init__(self, program: str = SLEEPER) -> None:
        self.process = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True)
        assert self.process.stdout is not None
        assert self.process.stdout.readline() == "ready\n"

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        assert self.process.stdout is not None
        self.process.stdout.close()


@dataclass
class Job:
    """Ranks, their monitor processes, and the store."""

    client: CoordinationStore
    stack: contextlib.ExitStack
    lost: list[Exception] = field(default_factory=list)

    def rank(self, program: str = SLEEPER) -> Rank:
        rank = Rank(program)
        self.stack.callback(rank.close)
        return rank

    def monitor(self, rank: Rank, initial_rank: int = 0, world_size: int = 1, **options: Any) -> MonitorProcess:
        """A monitor of the rank, in iteration 0."""
        monitor = self.unconnected(rank.process.pid, initial_rank, world_size, **options)
        monitor.connect(self.description(), 0)
        self.agreement(world_size).publish_rank(initial_rank, initial_rank)
        monitor.start_iteration(initial_rank, world_size, 0)
        return monitor

    def unconnected(self, pid: int, initial_rank: int = 0, world_size: int = 1, **options: Any) -> MonitorProcess:
        seconds: dict[str, Any] = {
            "soft_timeout_s": 1000.0,
            "hard_timeout_s": 2000.0,
            "heartbeat_interval_s": 1.0,
            "heartbeat_timeout_s": 1000.0,
            "barrier_timeout_s": 3000.0,
            "termination_grace_s": 5.0,
            "interval_s": 1.0,
        }
        task = WatchRank(
            target_pid=pid, initial_rank=initial_rank, initial_world_size=world_size, **(seconds | options)
        )
        monitor = MonitorProcess(task, on_lost=self.lost.append)
        monitor.start()
        self.stack.callback(monitor.shutdown)
        return monitor

    def description(self) -> dict[str, Any]:
        return {"access": self.client.access.to_document()}

    def agreement(self, world_size: int = 1, iteration: int = 0) -> Agreement:
        return Agreement(iteration_store(self.client, iteration), iteration, world_size)

    def faults(self, world_size: int = 1) -> list[tuple[int, str]]:
        """Wait until the iteration is interrupted; return why."""
        return [(r.rank, r.interruption.name) for r in self.records(world_size)]

    def records(self, world_size: int = 1) -> tuple[InterruptionRecord, ...]:
        agreement = self.agreement(world_size)
        assert (
            self.client.get("0/outcome").decode() == IterationOutcome.INTERRUPTED.value
        )  # whatever iteration it is by now
        return tuple(
            InterruptionRecord.from_str(line) for line in agreement.store.get("records").decode().splitlines() if line
        )


@pytest.fixture
def job(leak_check: LeakCheck) -> Iterator[Job]:
    server = StoreServer(Access("127.0.0.1", 0))
    access = server.start()
    with contextlib.closing(server), CoordinationStore(access) as client:  # noqa: SIM117
        with contextlib.ExitStack() as stack:
            RestartIndex(client).begin()
            yield Job(client, stack)


def eventually(condition: Callable[[], Any], what: str) -> None:
    deadline = time.monotonic() + LONG_S
    while not condition():
        assert time.monotonic() < deadline, f"not in {LONG_S} s: {what}"
        time.sleep(0.01)


# -- time limits -------------------------------------------------------------------------------------------------------


def test_the_soft_limit_is_reported_and_kills_nobody(job: Job) -> None:
    rank = job.rank()
    job.monitor(rank, soft_timeout_s=0.2)
    (record,) = job.records()
    assert record == InterruptionRecord(0, Interruption.SOFT_TIMEOUT)
    assert record.summary.startswith("no progress for 0.")
    assert rank.process.poll() is None


def test_progress_counts_of_both_kinds(job: Job) -> None:
    job.monitor(job.rank(), 0, 2, soft_timeout_s=0.3).send_timestamp(Timestamp(auto=time.monotonic() + 1000.0))
    # The other one promised pings, and none comes.
    now = time.monotonic()
    job.monitor(job.rank(), 1, 2, soft_timeout_s=0.3).send_timestamp(Timestamp(auto=now + 1000.0, manual=now))
    assert job.faults(2) == [(1, "SOFT_TIMEOUT")]


def test_limits_can_be_switched_off(job: Job) -> None:
    monitor = job.monitor(job.rank(), soft_timeout_s=0.3)
    monitor.disable_timeouts()
    monitor.disable_timeouts()
    monitor.enable_timeouts()
    assert job.agreement().wait_outcome(0.5) is None
    monitor.enable_timeouts()
    assert job.faults() == [(0, "SOFT_TIMEOUT")]


def test_the_hard_limit_asks_first(job: Job) -> None:
    rank = job.rank(POLITE)
    job.monitor(rank, soft_timeout_s=0.1, hard_timeout_s=0.2, termination_grace_s=LONG_S)
    assert rank.process.wait(LONG_S) == 3
    assert job.faults()[:2] == [(0, "SOFT_TIMEOUT"), (0, "HARD_TIMEOUT")]
    assert job.agreement().wait_roster(0, LONG_S).departed == {0}


@pytest.mark.parametrize("stopped", [False, True])
def test_a_rank_that_does_not_end_is_killed(job: Job, stopped: bool) -> None:
    rank = job.rank(DEAF)
    if stopped:
        rank.process.send_signal(signal.SIGSTOP)
    job.monitor(rank, soft_timeout_s=0.1, hard_timeout_s=0.2, termination_grace_s=0.2)
    assert rank.process.wait(LONG_S) == -signal.SIGKILL
    assert (0, "HARD_TIMEOUT") in job.faults()


def test_a_stopped_rank_is_asked_and_continued(job: Job) -> None:
    rank = job.rank(POLITE)
    rank.process.send_signal(signal.SIGSTOP)
    job.monitor(rank, soft_timeout_s=0.1, hard_timeout_s=0.2, termination_grace_s=LONG_S)
    assert rank.process.wait(LONG_S) == 3
    assert rank.process.stdout is not None
    assert rank.process.stdout.read() == "asked\n"


def test_a_rank_that_waits_for_others_gets_more_time(job: Job, tmp_path: Path) -> None:
    rank, log = job.rank(), tmp_path / "log"
    job.agreement(2).arrive_at_end(0)
    job.monitor(rank, 0, 2, soft_timeout_s=0.1, hard_timeout_s=0.2, barrier_timeout_s=0.8, logfile=str(log))
    eventually(lambda: "waits at the iteration barrier; its hard limit is 0.8 s" in log.read_text(), "more time")
    assert rank.process.poll() is None
    rank.process.wait(LONG_S)


def test_limits_by_themselves() -> None:
    limits = ProgressLimits(soft_s=10, hard_s=20)
    assert (limits.overrun(1e9), limits.next_deadline()) == (None, None)  # not in an iteration yet
    limits.start(100)
    assert (limits.overrun(109.9), limits.next_deadline()) == (None, 110)
    assert limits.overrun(125) is Limit.SOFT
    assert limits.overrun(125) is Limit.HARD
    assert (limits.overrun(1e9), limits.next_deadline()) == (None, None)
    limits.start(200)
    limits.update(Timestamp(auto=250, manual=205))
    assert (limits.overrun(216), limits.silent_s(216)) == (Limit.SOFT, 11)
    assert limits.next_deadline() == 225
    assert limits.overrun(226) is Limit.HARD
    assert limits.stretch(40) is True
    assert limits.stretch(50) is False
    assert limits.overrun(244) is None
    limits.enabled = False
    assert limits.overrun(245) is None
    limits.enabled = True
    assert limits.overrun(245) is Limit.HARD


def test_limits_start_again_after_a_suspension_of_the_monitor() -> None:
    limits = ProgressLimits(soft_s=10, hard_s=20)
    limits.start(100)
    limits.note_suspension(30, 135)
    assert (limits.overrun(135), limits.next_deadline()) == (None, 145)
    limits.update(Timestamp(auto=102))  # sent before, and read now
    assert limits.overrun(144.9) is None
    assert limits.overrun(145) is Limit.SOFT
    limits.note_suspension(2, 150)  # too short
    assert limits.overrun(155) is Limit.HARD


# -- death -------------------------------------------------------------------------------------------------------------


def test_a_death_is_reported(job: Job) -> None:
    rank = job.rank()
    monitor = job.monitor(rank, 1, 2, interval_s=60.0)
    rank.process.kill()
    began = time.monotonic()
    (record,) = job.records(2)
    assert time.monotonic() - began < 30.0  # an event, not found by looking every minute
    assert record == InterruptionRecord(1, Interruption.TERMINATED)
    assert str(rank.process.pid) in record.summary
    other = job.agreement(2)
    other.publish_rank(0, 0)
    other.arrive_at_end(0)
    roster = other.wait_roster(0, LONG_S)
    assert (roster.terminated_ranks, roster.departed) == ({1}, {1})
    eventually(lambda: is_gone(monitor.pid), "the monitor ends after its rank")


def test_the_end_of_a_rank_that_has_left_is_not_reported(job: Job) -> None:
    rank = job.rank()
    monitor = job.monitor(rank)
    monitor.leave(reported=True)
    rank.process.kill()
    eventually(lambda: is_gone(monitor.pid), "the monitor ends after its rank")
    assert job.agreement().wait_outcome(0.0) is None


def test_the_death_of_a_rank_that_is_about_to_leave_is_reported(job: Job) -> None:
    rank = job.rank()
    job.monitor(rank).leave(reported=False)
    rank.process.kill()
    assert job.faults() == [(0, "TERMINATED")]


@pytest.mark.parametrize("leaves", [True, False])
def test_a_rank_that_leaves_is_not_ended_when_the_others_go_on(job: Job, leaves: bool, tmp_path: Path) -> None:
    rank, log = job.rank(), tmp_path / "monitor.log"
    monitor = job.monitor(rank, 1, 2, heartbeat_interval_s=0.1, interval_s=0.1, logfile=str(log))
    agreement = job.agreement(2)
    agreement.publish_rank(0, 0)
    if leaves:
        monitor.leave(reported=False)
    agreement.interrupt(InterruptionRecord(1, Interruption.BASE_EXCEPTION))
    agreement.mark_departed(1)
    for number in (0, 1):
        agreement.arrive_at_end(number)
    assert agreement.wait_roster(0, LONG_S).departed == {1}
    RestartIndex(job.client).advance(0)
    eventually(lambda: "the others went on without this rank" in log.read_text(), "the monitor notices")
    if leaves:
        monitor.shutdown()
        assert rank.process.poll() is None
    else:
        eventually(lambda: rank.process.poll() is not None, "the rank is ended")


def test_a_rank_that_dies_before_the_monitor_is_connected(job: Job) -> None:
    rank = job.rank()
    monitor = job.unconnected(rank.process.pid)
    rank.process.kill()
    eventually(lambda: is_gone(monitor.pid), "the monitor ends after its rank")


def test_a_node_that_vanishes_is_noticed_by_its_neighbour(job: Job) -> None:
    ranks = [job.rank() for _ in range(4)]
    limits = {"heartbeat_interval_s": 0.1, "heartbeat_timeout_s": 3.0}
    monitors = [job.unconnected(rank.process.pid, number, 4, **limits) for number, rank in enumerate(ranks)]
    for number, monitor in enumerate(monitors):
        monitor.connect(job.description(), 0)
        job.agreement(4).publish_rank(number, number)
    for number, monitor in enumerate(monitors):
        monitor.start_iteration(number, 4, 0)
    for number in (1, 2):  # they shared a machine
        os.kill(ranks[number].process.pid, signal.SIGSTOP)
        os.kill(monitors[number].pid, signal.SIGSTOP)
    agreement = job.agreement(4)
    for number in (0, 3):
        agreement.arrive_at_end(number)
    roster = agreement.wait_roster(0, LONG_S)
    assert (roster.terminated_ranks, roster.departed) == ({1, 2}, {1, 2})
    assert set(job.faults(4)) == {(1, "UNRESPONSIVE"), (2, "UNRESPONSIVE")}
    for number in (1, 2):
        os.kill(monitors[number].pid, signal.SIGCONT)


def test_a_rank_that_was_suspended_itself_takes_no_other_for_lost(job: Job) -> None:
    """As in the migration of a virtual machine: all are stopped, and half of them go on a bit later."""
    ranks = [job.rank() for _ in range(4)]
    limits = {"heartbeat_interval_s": 0.1, "heartbeat_timeout_s": 4.0, "soft_timeout_s": 4.0, "hard_timeout_s": 5.0}
    options: dict[str, Any] = {**limits, "interval_s": 0.5}
    monitors = [job.unconnected(rank.process.pid, number, 4, **options) for number, rank in enumerate(ranks)]
    for number, monitor in enumerate(monitors):
        monitor.connect(job.description(), 0)
        job.agreement(4).publish_rank(number, number)
    for number, monitor in enumerate(monitors):
        monitor.start_iteration(number, 4, 0)
    running, agreement = set(range(4)), job.agreement(4)

    def send(ranks: set[int], signal_number: int) -> None:
        for number in ranks:
            os.kill(monitors[number].pid, signal_number)
            ranks_of[number].send_signal(signal_number)

    def beats(number: int) -> int:
        return int(agreement.heartbeat_of(number).split()[0])

    def all_have_beaten(times: int) -> bool:
        for number in running:
            monitors[number].send_timestamp(Timestamp(auto=time.monotonic()))
        return all(beats(number) >= before[number] + times for number in running)

    ranks_of = {number: rank.process for number, rank in enumerate(ranks)}
    eventually(lambda: all(agreement.heartbeat_of(number) for number in running), "all beat")
    before = {number: beats(number) for number in running}
    eventually(lambda: all_have_beaten(5), "all go on")
    send(running, signal.SIGSTOP)
    assert agreement.wait_outcome(6.0) is None  # longer than all limits
    before, running = {number: beats(number) for number in running}, {0, 1}
    send(running, signal.SIGCONT)
    eventually(lambda: all_have_beaten(2), "half of them go on")
    running = {0, 1, 2, 3}
    send({2, 3}, signal.SIGCONT)
    eventually(lambda: all_have_beaten(50), "all go on")  # longer than a watcher looks again
    assert agreement.wait_outcome(0.0) is None
    assert all(rank.process.poll() is None for rank in ranks)


def test_a_report_that_does_not_reach_the_store_is_made_again() -> None:
    """The store refuses the report; the rank that is lost would never be noticed."""
    server = StoreServer(Access("127.0.0.1", 0))
    reports: list[list[int]] = []
    reported = threading.Event()

    def report(ranks: list[int]) -> None:
        reports.append(ranks)
        if len(reports) == 1:
            raise StoreError("no space is left")
        reported.set()

    with contextlib.closing(server), CoordinationStore(server.start()) as client:
        sibling = SiblingMonitor(client, 0, 2, interval_s=0.05, timeout_s=0.3, report=report)
        sibling.start()
        assert reported.wait(LONG_S)
        sibling.stop(LONG_S)
    assert reports == [[1], [1]]


# -- the process -------------------------------------------------------------------------------------------------------


def test_another_monitor_takes_over(job: Job) -> None:
    monitor = job.monitor(job.rank(), soft_timeout_s=0.5)
    monitor.disable_timeouts()
    first = monitor.pid
    os.kill(first, signal.SIGKILL)
    eventually(lambda: monitor.pid != first, "another one")
    assert job.agreement().wait_outcome(0.7) is None, "it knows that limits are off"
    monitor.enable_timeouts()
    assert job.faults() == [(0, "SOFT_TIMEOUT")]
    assert job.lost == []


def test_monitors_that_die_again_and_again(job: Job) -> None:
    monitor = job.monitor(job.rank())
    dead: set[int] = set()
    while not job.lost:
        eventually(lambda: job.lost or monitor.pid not in dead, "another one")
        if not job.lost:
            dead.add(monitor.pid)
            os.kill(monitor.pid, signal.SIGKILL)
            eventually(lambda: job.lost or monitor.pid not in dead, "another one, or the end")
    assert len(dead) == 3
    assert "3 times in a row" in str(job.lost[0])


def test_one_that_is_killed_while_it_starts_is_replaced(job: Job) -> None:
    rank, killed = job.rank(), threading.Event()

    def kill_the_next() -> None:
        before = set(psutil.Process().children())
        ready.set()
        while not killed.is_set():
            for child in set(psutil.Process().children()) - before:
                with contextlib.suppress(psutil.NoSuchProcess):
                    child.kill()
                    killed.set()

    ready = threading.Event()
    killer = threading.Thread(target=kill_the_next)
    killer.start()
    ready.wait()
    job.monitor(rank, soft_timeout_s=0.5)
    killer.join()
    assert job.faults() == [(0, "SOFT_TIMEOUT")]
    assert job.lost == []


def test_pid_file_and_log_file(job: Job, tmp_path: Path) -> None:
    rank, log, pidfile = job.rank(), tmp_path / "logs" / "monitor.log", tmp_path / "pids" / "monitor.pid"
    monitor = job.monitor(rank, logfile=str(log), pidfile=str(pidfile))
    assert int(pidfile.read_text()) == monitor.pid
    rank.process.kill()
    eventually(lambda: is_gone(monitor.pid), "the monitor ends after its rank")
    assert not pidfile.exists()
    died = [line for line in log.read_text().splitlines() if line.endswith("has died")]
    assert len(died) == 1
    fields = died[0].split(" | ")
    assert fields[1:6] == [
        "ERROR",
        "monitor_process",
        "inprocess.monitor_process.rank_monitor",
        f"target_pid {rank.process.pid}",
        "rank 0",
    ]


def test_one_that_cannot_start(job: Job, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(InternalError, match="did not start"):
        job.unconnected(os.getpid(), logfile=str(tmp_path / "file" / "log"))


def test_it_is_detached_from_its_rank(job: Job) -> None:
    """No terminal, no standard stream, no socket and no other descriptor of the process that started it."""
    with socket.create_server(("127.0.0.1", 0)) as listener, open(os.devnull) as file:
        for descriptor in (listener.fileno(), file.fileno()):
            os.set_inheritable(descriptor, True)
        monitor = job.unconnected(os.getpid())
        process = psutil.Process(monitor.pid)
        assert os.getsid(monitor.pid) == os.getpgid(monitor.pid) == monitor.pid
        assert process.terminal() is None
        assert process.cwd() == "/"
        opened = {int(fd): os.readlink(f"/proc/{monitor.pid}/fd/{fd}") for fd in os.listdir(f"/proc/{monitor.pid}/fd")}
        assert [opened[number] for number in range(3)] == ["/dev/null"] * 3
        sockets = [link for link in opened.values() if link.startswith("socket:")]
        assert len(sockets) == 1, "the channel to its rank, and nothing else"
        assert f"socket:[{os.fstat(listener.fileno()).st_ino}]" not in sockets
        assert [link for number, link in opened.items() if number > 2 and link == os.devnull] == []
        for name in ("libtorch", "numpy"):
            assert name not in Path(f"/proc/{monitor.pid}/maps").read_text()


def test_signals_for_the_rank_do_not_reach_it(job: Job) -> None:
    monitor = job.monitor(job.rank())
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        os.kill(monitor.pid, number)
    pid = monitor.pid
    monitor.disable_sibling_monitor()
    assert job.agreement().wait_outcome(0.2) is None
    assert monitor.pid == pid
    assert not is_gone(pid)


def test_it_ends_with_the_call(job: Job) -> None:
    monitor = job.monitor(job.rank())
    threads = threading.active_count()
    monitor.shutdown()
    assert not psutil.pid_exists(monitor.pid)
    assert threading.active_count() < threads
    monitor.shutdown()


def test_idle_it_costs_next_to_nothing(job: Job) -> None:
    monitor = job.monitor(job.rank())
    process = psutil.Process(monitor.pid)
    before = process.cpu_times()
    time.sleep(2.0)
    after = process.cpu_times()
    assert after.user + after.system - before.user - before.system <= 0.05


def test_a_watched_process_is_not_a_number() -> None:
    child = subprocess.Popen([sys.executable, "-c", SLEEPER], stdout=subprocess.DEVNULL)
    target = WatchedProcess(child.pid)
    assert not target.gone
    assert not target.wait_gone(0.01)
    child.kill()
    assert target.wait_gone(LONG_S)
    child.wait()
    assert target.gone
    target.send(signal.SIGKILL)  # no process, and no other process is hit
    target.close()
    target.close()
    with pytest.raises(ProcessLookupError):
        WatchedProcess(child.pid)
