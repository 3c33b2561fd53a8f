"""`--ft-restart-policy=in-process`: workers go on when others have failed."""

import os
import re
import signal
import sys
import time
from pathlib import Path

import psutil
import pytest
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, Std, start_processes

from inprocess.fault_tolerance.launcher.workers import WorkerProcesses, start_worker, wait_readable
from tests.inprocess.fault_tolerance.launching import REPOSITORY, Job, Launcher
from tests.inprocess.fault_tolerance.test_launcher_nodes import PROLOGUE, start_nodes
from tests.support.selection import full_only

REPLACED = "--ft-restart-policy=in-process"
POLICY = (REPLACED, "--ft-max-replacements=0")

SURVIVORS = """
    def wait_for(name):
        while not os.path.exists(os.environ["TEST_EVENTS"] + name):
            time.sleep(0.02)
    say("pid", os.getpid())
    wait_for(".go")
    if rank in {fails}:
        sys.exit(3)
    say("ends")
"""


def kill_rank(job: Job, rank: int) -> int:
    pid = int(job.wait_event(rf"cycle 0 rank {rank} pid (\d+)")[1])
    os.kill(pid, signal.SIGKILL)
    return pid


def go(job: Job) -> None:
    Path(f"{job.events_file}.go").touch()


def test_a_worker_that_is_killed_is_left_behind(job: Job) -> None:
    launcher = job.one_node(SURVIVORS.format(fails="()"), *POLICY, ranks=3, restarts=3)
    for rank in (0, 2):
        job.wait_event(rf"cycle 0 rank {rank} pid")
    kill_rank(job, 1)
    launcher.wait_log("rank 1 with -9; the other 2 of 3 workers go on")
    go(job)
    assert launcher.wait() == 0
    assert {line for line in job.events().splitlines() if "ends" in line} == {f"cycle 0 rank {r} ends" for r in (0, 2)}
    assert "cycle 1" not in job.events()
    assert "ranks [1] were left behind" in launcher.log()
    assert job.left() == []


def test_what_a_dead_worker_left_behind_is_ended_at_once(job: Job) -> None:
    script = """
    if rank == 1:
        say("child", subprocess.Popen(["sleep", "600"]).pid)
    """
    launcher = job.one_node(script + SURVIVORS.format(fails="()"), *POLICY, ranks=2)
    child = psutil.Process(int(job.wait_event(r"child (\d+)")[1]))
    kill_rank(job, 1)
    launcher.wait_log("the other 1 of 2 workers go on")
    assert not child.is_running() or child.status() == psutil.STATUS_ZOMBIE
    go(job)
    assert launcher.wait() == 0


@pytest.mark.parametrize(("fails", "limit"), [("(0, 1, 2)", 1), ("(0, 2)", 2)])
def test_with_too_few_workers_all_are_started_again(job: Job, fails: str, limit: int) -> None:
    script = SURVIVORS.format(fails=f"{fails} and cycle == 0")
    options = [*POLICY] if limit == 1 else [*POLICY, f"--ft-min-workers={limit}"]
    launcher = job.one_node(script, *options, ranks=3, restarts=1)
    for rank in range(3):
        job.wait_event(rf"cycle 0 rank {rank} pid")
    go(job)
    assert launcher.wait() == 0
    assert [f"cycle 1 rank {rank} ends" in job.events() for rank in range(3)] == [True] * 3
    assert f"fewer than --ft-min-workers={limit}" in launcher.log()


def test_without_restarts_too_few_workers_are_a_failure(job: Job) -> None:
    launcher = job.one_node(SURVIVORS.format(fails="(0, 1)"), *POLICY, ranks=2, restarts=0)
    go(job)
    assert launcher.wait() == 1
    assert "exitcode  : 3" in launcher.log(), "torch's own report of the failure"


def test_survivors_are_asked_to_end_by_a_signal_to_the_launcher(job: Job) -> None:
    script = """
        def end(number, frame):
            say("saves")
            sys.exit(0)
        signal.signal(signal.SIGTERM, end)
        say("pid", os.getpid())
        hang()
    """
    launcher = job.one_node(script, *POLICY, ranks=2)
    job.wait_event("rank 0 pid")
    kill_rank(job, 1)
    launcher.wait_log("the other 1 of 2 workers go on")
    launcher.signal(signal.SIGTERM)
    assert launcher.wait() == 0
    assert "rank 0 saves" in job.events()


RESTARTS = """
    from datetime import timedelta
    import inprocess

    def train(call: inprocess.CallWrapper):
        say("iteration", call.iteration, "of", os.environ["WORLD_SIZE"], "pid", os.getpid())
        if call.iteration == 0:
            hang()
        say("ends")

    inprocess.Wrapper(
        abort=None,
        soft_timeout=timedelta(seconds=30),
        hard_timeout=timedelta(seconds=32),
    )(train)()
"""


def test_the_wrapper_restarts_without_the_worker_that_was_killed(job: Job) -> None:
    launcher = job.one_node(RESTARTS, *POLICY, ranks=3, restarts=0, with_torch=True)
    for rank in (0, 2):
        job.wait_event(rf"rank {rank} iteration 0 of 3")
    os.kill(int(job.wait_event(r"rank 1 iteration 0 of 3 pid (\d+)")[1]), signal.SIGKILL)
    assert launcher.wait(50) == 0
    assert job.events().count("iteration 1 of 2") == 2
    assert job.events().count("ends") == 2


def test_a_mistake_in_the_program_ends_the_job_with_its_error(job: Job) -> None:
    script = RESTARTS.replace("if call.iteration == 0:", "if rank == 1:").replace("hang()", 'raise KeyError("typo")')
    script = script.replace('say("ends")', "hang()")
    launcher = job.one_node(script, *POLICY, "--ft-max-same-faults=2", ranks=2, restarts=0, with_torch=True)
    assert launcher.wait(50) == 1
    said = [event for event in job.events().splitlines() if "rank 1 iteration" in event]
    assert ["iteration 0 " in said[0], "iteration 1 " in said[1], len(said)] == [True, True, 2]
    assert "max_same_faults=2" in launcher.log()
    assert "KeyError: 'typo'" in launcher.log()


@full_only
def test_a_spare_of_the_wrapper_takes_the_place_of_a_worker_that_is_killed(job: Job) -> None:
    argv = ["--standalone", "--nproc-per-node=4", REPLACED, f"--log-dir={job.folder / 'logs'}"]
    launcher = job._start([*argv, str(REPOSITORY / "examples" / "restart_spares.py")], {})
    assert launcher.wait(55) == 0
    assert launcher.log().count("sum over the active ranks 2") == 2
    assert "process 1: was a spare" in launcher.log()


def test_workers_of_other_nodes_go_on(job: Job) -> None:
    first, second = start_nodes(job, PROLOGUE + SURVIVORS.format(fails="()"), 2, *POLICY)
    for rank in (0, 1):
        job.wait_event(rf"cycle 0 rank {rank} pid")
    kill_rank(job, 1)
    job.wait_for(lambda: first.log() + second.log(), "the other 1 of 2 workers go on", 30)
    go(job)
    assert (first.wait(), second.wait()) == (0, 0)
    assert [line for line in job.events().splitlines() if "ends" in line] == ["cycle 0 rank 0 ends"]


@pytest.mark.timeout(180)
def test_a_node_that_dies_is_lost_with_its_workers(job: Job) -> None:
    nodes = start_nodes(job, PROLOGUE + SURVIVORS.format(fails="()"), 2, *POLICY)
    for rank in (0, 1):
        job.wait_event(rf"cycle 0 rank {rank} pid")
    nodes[1].die_with_workers()
    go(job)
    assert nodes[0].wait() == 0
    assert "has not answered for 4 s" in nodes[0].log()
    assert job.events().count("ends") == 1


def freeze_second_node(job: Job) -> tuple[Launcher, Launcher]:
    """Two launchers with a worker each; that of rank 1 is stopped until the other one has given its node up."""
    first, second = start_nodes(job, PROLOGUE + SURVIVORS.format(fails="()"), 2, *POLICY)
    for rank in (0, 1):
        job.wait_event(rf"cycle 0 rank {rank} pid")
    second.signal(signal.SIGSTOP)
    first.wait_log("has not answered for 4 s; the other 1 of 2 workers go on")
    return first, second


@pytest.mark.timeout(120)
def test_the_workers_of_a_node_that_comes_back_are_lost_once(job: Job) -> None:
    first, second = freeze_second_node(job)
    kill_rank(job, 1)  # as its wrapper does when the others have gone on without it
    second.signal(signal.SIGCONT)
    second.wait_log("rank 1 with -9; the other 1 of 2 workers go on")
    go(job)
    assert (first.wait(), second.wait()) == (0, 0)
    assert [line for line in job.events().splitlines() if "ends" in line] == ["cycle 0 rank 0 ends"]


@pytest.mark.timeout(120)
def test_a_node_that_comes_back_with_its_workers_counts_again(job: Job) -> None:
    first, second = freeze_second_node(job)
    second.signal(signal.SIGCONT)
    second.wait_log("its workers count again")
    kill_rank(job, 0)
    first.wait_log("rank 0 with -9; the other 1 of 2 workers go on")
    go(job)
    assert (first.wait(), second.wait()) == (0, 0)
    assert [line for line in job.events().splitlines() if "ends" in line] == ["cycle 0 rank 1 ends"]


@full_only
def test_too_few_workers_of_all_nodes(job: Job) -> None:
    script = PROLOGUE + SURVIVORS.format(fails="(1,) and cycle == 0")
    nodes = start_nodes(job, script, 2, *POLICY, "--ft-min-workers=2", "--max-restarts=1")
    go(job)
    assert [each.wait() for each in nodes] == [0, 0]
    assert [f"cycle 1 rank {rank} ends" in job.events() for rank in (0, 1)] == [True, True]


def test_one_worker_can_be_started_in_the_place_of_another(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHELASTIC_SIGNALS_TO_HANDLE", "SIGRTMAX")
    earlier = signal.getsignal(signal.SIGRTMAX)
    script = tmp_path / "worker.py"
    script.write_text("import os; print(os.environ['RANK'], os.environ['KEPT'], flush=True); os.read(0, 1)")
    ours, theirs = os.pipe()
    saved = os.dup(0)
    os.dup2(ours, 0)  # what the workers read, until we close our end
    try:
        context = start_processes(
            "test",
            sys.executable,
            {rank: (str(script),) for rank in range(2)},
            {rank: {"RANK": str(rank), "KEPT": "kept"} for rank in range(2)},
            DefaultLogsSpecs(log_dir=str(tmp_path), redirects=Std.OUT),
        )
        workers = WorkerProcesses(context.pids())
        with pytest.raises(RuntimeError, match="still runs"):
            start_worker(context, workers, 1, {})
        os.kill(workers.pids[1], signal.SIGKILL)
        assert wait_readable(workers.fds, 30)
        assert workers.take_ended() == {1: -9}
        pid = start_worker(context, workers, 1, {"RANK": "7"})
        assert workers.pids[1] == pid == context.pids()[1]
        assert workers.running == {0, 1}
        os.close(theirs)
        while workers.fds:
            assert wait_readable(workers.fds, 30)
            assert set(workers.take_ended().values()) <= {0}
        assert Path(f"{context.stdouts[1]}.1").read_text() == "7 kept\n"
        assert Path(context.stdouts[0]).read_text() == "0 kept\n"
    finally:
        context.close()
        for handler in context.subprocess_handlers.values():
            handler._stdout.close()  # torch leaves that to the end of its process
        os.dup2(saved, 0)
        os.close(saved)
        os.close(ours)
        signal.signal(signal.SIGRTMAX, earlier)


JOINS = """
    from datetime import timedelta
    import inprocess

    def train(call: inprocess.CallWrapper):
        say("iteration", call.iteration, "of", os.environ["WORLD_SIZE"], "as", os.environ["RANK"], "pid", os.getpid())
        if call.iteration == 0:
            hang()
        if call.iteration == 1 and os.environ["RANK"] == "0":
            while not call.newcomers:
                time.sleep(0.02)
            raise RuntimeError("now")
        if call.iteration == 1:
            hang()
        say("ends")

    inprocess.Wrapper(
        abort=None,
        soft_timeout=timedelta(seconds=30),
        hard_timeout=timedelta(seconds=32),
        rank_assignment=inprocess.rank_assignment.{numbering},
        rejoin="next-restart",
    )(train)()
"""


@pytest.mark.parametrize(
    ("killed", "numbering"),
    [(0, "LauncherOrder"), pytest.param(1, "LauncherOrder", marks=full_only), (1, "ShiftRanks")],
)
def test_a_replacement_joins_at_the_next_restart(job: Job, killed: int, numbering: str) -> None:
    launcher = job.one_node(JOINS.format(numbering=f"{numbering}()"), REPLACED, ranks=3, restarts=0, with_torch=True)
    pids = [int(job.wait_event(rf"rank {rank} iteration 0 of 3 as {rank} pid (\d+)")[1]) for rank in range(3)]
    os.kill(pids[killed], signal.SIGKILL)
    assert launcher.wait(58) == 0, launcher.log()
    events = job.events()
    assert events.count("iteration 1 of 2") == 2
    last = re.findall(r"iteration 2 of 3 as (\d) pid (\d+)", events)
    assert {rank for rank, _ in last} == {"0", "1", "2"}
    assert len({int(pid) for _, pid in last} & set(pids)) == 2, "the third is the replacement"
    if numbering == "LauncherOrder":
        assert {(pids.index(int(pid)), int(rank)) for rank, pid in last if int(pid) in pids} == {
            (rank, rank) for rank in range(3) if rank != killed
        }
    assert events.count("ends") == 3


DIES_EARLY = """
    import signal
    from inprocess import monitoring

    rank, begin, meet = int(os.environ["RANK"]), monitoring.Monitoring._begin, monitoring.Monitoring._meet_all

    def die(*arguments):
        say("dies")
        os.kill(os.getpid(), signal.SIGKILL)

    def arrive_and_die(self, name):
        self.store.reentrant_barrier([rank], name, 3, timedelta(0))
        die()

    if rank == {dying} and "INPROCESS_JOIN" not in os.environ:
        {how}
"""


@pytest.mark.parametrize(
    ("dying", "how"),
    [
        (0, "die()"),
        (0, "monitoring.Monitoring._begin = die"),
        (1, "monitoring.Monitoring._meet_all = arrive_and_die"),
    ],
)
def test_a_replacement_that_comes_before_the_first_meeting_is_the_rank_that_was_lost(
    job: Job, dying: int, how: str
) -> None:
    begins = JOINS.format(numbering="LauncherOrder()").replace("if call.iteration", "if False and call.iteration")
    late = """
    if rank == 2:  # so that the job cannot begin before the replacement is there
        while "takes the place" not in open(os.environ["TEST_EVENTS"]).read():
            time.sleep(0.02)
    """
    says = """
    take_over = monitoring.RankSlot.take_over
    monitoring.RankSlot.take_over = lambda slot: (took := take_over(slot)) and (say("takes the place") or took)
    """
    script = begins.replace("    def train", DIES_EARLY.format(dying=dying, how=how) + says + late + "\n    def train")
    launcher = job.one_node(script, REPLACED, ranks=3, restarts=0, with_torch=True)
    assert launcher.wait(58) == 0, launcher.log()
    events = job.events()
    assert events.count("dies") == events.count("takes the place") == 1
    assert sorted(re.findall(r"iteration 0 of 3 as (\d)", events)) == ["0", "1", "2"]
    assert events.count("ends") == 3
    assert "iteration 1" not in events


EARLY = """
        if call.iteration == 0 and rank == 1:
            sys.exit(0)
        if call.iteration == 0:
            hang()
"""


@pytest.mark.timeout(150)
def test_a_worker_that_ends_with_0_in_the_wrapped_function_is_replaced(job: Job) -> None:
    script = JOINS.format(numbering="LauncherOrder()").replace(
        """
        if call.iteration == 0:
            hang()
""",
        EARLY,
        1,
    )
    launcher = job.one_node(script, REPLACED, ranks=3, restarts=0, with_torch=True)
    assert launcher.wait(100) == 0, launcher.log()
    assert "rank 1 with 0 before the function in the wrapper was completed" in launcher.log()
    assert job.events().count("iteration 1 of 2") == 2
    assert set(re.findall(r"iteration 2 of 3 as (\d)", job.events())) == {"0", "1", "2"}
    assert job.events().count("ends") == 3


@pytest.mark.timeout(150)
def test_a_worker_that_ends_with_0_in_the_wrapped_function_has_failed(job: Job) -> None:
    script = """
    import inprocess

    def train(call: inprocess.CallWrapper):
        others("there")
        if cycle == 0 and rank == 1:
            sys.exit(0)
        if cycle == 0:
            hang()
        say("ends")

    inprocess.Wrapper()(train)()
    """
    launcher = job.one_node(script, ranks=2, restarts=1, with_torch=True)
    assert launcher.wait(100) == 0, launcher.log()
    assert "cycle 0 is over: workers have ended: rank 1 with 0 before the function in the wrapper" in launcher.log()
    assert sorted(line for line in job.events().splitlines() if "ends" in line) == [
        f"cycle 1 rank {rank} ends" for rank in (0, 1)
    ]


@pytest.mark.parametrize(
    "policy", [(), ("--ft-restart-policy=in-process", "--ft-min-workers=2")], ids=["", "in-process"]
)
def test_a_crash_beside_a_worker_that_ends_with_0_is_the_cause(job: Job, policy: tuple[str, ...]) -> None:
    """Both are seen in the same look: the launcher is stopped meanwhile."""
    script = """
    import inprocess

    def train():
        say("is there")
        while not os.path.exists(os.environ["TEST_EVENTS"] + ".go"):
            time.sleep(0.02)
        os._exit(3 if rank == 1 else 0)

    inprocess.Wrapper()(train)()
    """
    launcher = job.one_node(script, *policy, ranks=2, restarts=0, with_torch=True)
    for rank in (0, 1):
        job.wait_event(rf"cycle 0 rank {rank} is there", 50)
    workers = [each for each in psutil.Process(launcher.pid).children() if str(job.folder) in " ".join(each.cmdline())]
    fds = [os.pidfd_open(each.pid) for each in workers]
    assert len(fds) == 2
    launcher.signal(signal.SIGSTOP)
    job.wait_for(lambda: psutil.Process(launcher.pid).status(), psutil.STATUS_STOPPED, 30)
    go(job)
    for fd in fds:
        assert wait_readable([fd], 30), job.everything()
        os.close(fd)
    launcher.signal(signal.SIGCONT)
    assert launcher.wait() == 1
    both = "workers have ended: rank 1 with 3, rank 0 with 0 before the function in the wrapper was completed"
    assert both in launcher.log(), launcher.log()
    assert re.search(r"Root Cause .*\n.*\n.*\n.*\n *rank *: 1 .*\n *exitcode *: 3 ", launcher.log()), launcher.log()
    assert re.search(r" rank *: 0 .*\n *exitcode *: 0 ", launcher.log()), launcher.log()


def test_without_the_wrapper_0_is_success(job: Job) -> None:
    script = SURVIVORS.format(fails="()") + "\n    sys.exit(0)\n"
    launcher = job.one_node(script.replace("wait_for(name):", "wait_for(name):\n        if rank == 1: return"), ranks=2)
    job.wait_event("cycle 0 rank 1 ends")
    go(job)
    assert launcher.wait() == 0
    assert "cycle 1" not in job.events()


@pytest.mark.timeout(150)
def test_a_sigterm_that_workers_obey_with_0_in_the_wrapped_function_is_success(job: Job) -> None:
    script = """
    import inprocess

    def train():
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
        say("trains")
        hang()

    inprocess.Wrapper()(train)()
    """
    launcher = job.one_node(script, REPLACED, ranks=2, with_torch=True)
    for rank in (0, 1):
        job.wait_event(f"rank {rank} trains")
    launcher.signal(signal.SIGTERM)
    assert launcher.wait(100) == 0, launcher.log()
    assert "is started" not in launcher.log()


def test_a_tree_goes_on_without_the_replacement(job: Job) -> None:
    tree = "Tree([inprocess.rank_assignment.Layer()])"
    launcher = job.one_node(JOINS.format(numbering=tree), REPLACED, ranks=3, restarts=0, with_torch=True)
    os.kill(int(job.wait_event(r"rank 1 iteration 0 of 3 as 1 pid (\d+)")[1]), signal.SIGKILL)
    assert launcher.wait(58) == 0, launcher.log()
    events = job.events()
    assert events.count("iteration 2 of 2") == events.count("ends") == 2
    assert "a Tree takes in no process that joins later" in launcher.log()


def test_a_replacement_that_is_not_needed_ends_with_the_job(job: Job) -> None:
    script = (
        JOINS.format(numbering="ShiftRanks()")
        .replace('raise RuntimeError("now")', "return")
        .replace("if call.iteration == 1:", "if False:")
    )
    launcher = job.one_node(script, REPLACED, ranks=3, restarts=0, with_torch=True)
    for rank in (0, 2):
        job.wait_event(rf"rank {rank} iteration 0 of 3")
    os.kill(int(job.wait_event(r"rank 1 iteration 0 of 3 as 1 pid (\d+)")[1]), signal.SIGKILL)
    assert launcher.wait(58) == 0, launcher.log()
    assert job.events().count("iteration 1 of 2") == 2
    assert "iteration 2" not in job.events()
    assert job.left() == []


def test_a_replacement_that_fails_before_it_joins_costs_the_others_nothing(job: Job) -> None:
    script = """
    if "INPROCESS_JOIN" in os.environ:
        say("fails as", os.environ["INPROCESS_JOIN"])
        sys.exit(7)
    """ + RESTARTS.replace(
        'say("ends")',
        'wait_until(lambda: open(os.environ["TEST_EVENTS"]).read().count("fails as") == 2)\n        say("ends")',
    )
    script = (
        """
    def wait_until(condition):
        while not condition():
            time.sleep(0.02)
    """
        + script
    )
    launcher = job.one_node(script, REPLACED, "--ft-max-replacements=2", ranks=3, restarts=0, with_torch=True)
    for rank in (0, 2):
        job.wait_event(rf"rank {rank} iteration 0 of 3")
    os.kill(int(job.wait_event(r"rank 1 iteration 0 of 3 pid (\d+)")[1]), signal.SIGKILL)
    assert launcher.wait(58) == 0, launcher.log()
    events = job.events()
    assert sorted(re.findall(r"fails as (\d)", events)) == ["4", "7"]
    assert events.count("iteration 1 of 2") == 2
    assert events.count("ends") == 2


TRAINS = """
    from datetime import timedelta
    import torch
    import torch.distributed as dist
    import ckpt, inprocess
    from ckpt.restart import CheckpointAbort, CheckpointFinalize

    checkpointer = ckpt.Checkpointer({root!r})
    state = {{"weights": torch.zeros(8), "step": torch.zeros((), dtype=torch.int64)}}
    checkpointer.register(**state)

    def train(call: inprocess.CallWrapper):
        dist.init_process_group("gloo")
        checkpointer.restore(state)
        say("iteration", call.iteration, "of", dist.get_world_size(), "from", int(state["step"]), "pid", os.getpid())
        while int(state["step"]) < 40 or call.iteration < 2:
            noise = torch.full((8,), float(dist.get_rank() + 1))
            dist.all_reduce(noise)
            state["weights"] += noise / noise[0]
            state["step"] += 1
            joining = torch.tensor(call.newcomers if dist.get_rank() == 0 else 0)
            dist.all_reduce(joining)
            if call.iteration == 1 and int(joining) > 0 and dist.get_rank() == 1:
                raise RuntimeError("now")
            checkpointer.maybe_finalize()
            if int(state["step"]) % 5 == 0:
                checkpointer.async_save(state, int(state["step"]))
            time.sleep(0.05)
        assert state["weights"].tolist() == [float(state["step"])] * 8
        say("ends")
        checkpointer.maybe_finalize(blocking=True)
        dist.destroy_process_group()

    inprocess.Wrapper(
        abort=inprocess.Compose(CheckpointAbort(checkpointer), inprocess.abort.AbortTorchDistributed()),
        finalize=CheckpointFinalize(checkpointer),
        soft_timeout=timedelta(seconds=30),
        hard_timeout=timedelta(seconds=32),
        rejoin="next-restart",
    )(train)()
    checkpointer.close()
"""


@full_only
@pytest.mark.timeout(150)
@pytest.mark.parametrize("killed", [0, 2])
def test_a_replacement_trains_from_the_last_checkpoint(job: Job, killed: int, tmp_path: Path) -> None:
    launcher = job.one_node(TRAINS.format(root=str(tmp_path / "root")), REPLACED, ranks=3, restarts=0, with_torch=True)
    pids = [int(job.wait_event(rf"rank {rank} iteration 0 of 3 from 0 pid (\d+)")[1]) for rank in range(3)]
    deadline = time.monotonic() + 30
    while not (tmp_path / "root" / "step_00000005").exists():
        assert time.monotonic() < deadline, job.everything()
        time.sleep(0.02)
    os.kill(pids[killed], signal.SIGKILL)
    assert launcher.wait(100) == 0, job.everything()
    events = job.events()
    began = re.findall(r"iteration 2 of 3 from (\d+)", events)
    assert len(began) == 3
    assert len(set(began)) == 1
    assert int(began[0]) >= 5
    assert events.count("ends") == 3
