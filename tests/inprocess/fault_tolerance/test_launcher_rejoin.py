"""`--ft-rejoin`: when the others restart with the process that was started in the place of a lost one."""

import os
import re
import signal
from pathlib import Path

import pytest

from tests.inprocess.fault_tolerance.launching import Job

IN_PROCESS = "--ft-restart-policy=in-process"

WAITS = """
    from datetime import timedelta
    import inprocess
    from inprocess import joining

    {before}

    def train(call: inprocess.CallWrapper):
        size = os.environ["WORLD_SIZE"]
        say("iteration", call.iteration, "of", size, "as", os.environ["RANK"], "pid", os.getpid())
        if call.iteration == 0 or size != "3":
            hang()
        say("ends")

    inprocess.Wrapper(
        abort=None,
        soft_timeout=timedelta(seconds=40),
        hard_timeout=timedelta(seconds=42),
        heartbeat_timeout=timedelta(seconds=4),
    )(train)()
"""


def kill_in_first_iteration(job: Job, rank: int) -> list[int]:
    """The processes that the ranks were."""
    pids = [int(job.wait_event(rf"rank {each} iteration 0 of 3 as {each} pid (\d+)")[1]) for each in range(3)]
    os.kill(pids[rank], signal.SIGKILL)
    return pids


def test_the_others_restart_once_when_the_replacement_is_ready(job: Job) -> None:
    launcher = job.one_node(WAITS.format(before=""), IN_PROCESS, ranks=3, restarts=0, with_torch=True)
    pids = kill_in_first_iteration(job, 1)
    assert launcher.wait(58) == 0, job.everything()
    events = job.events()
    last = re.findall(r"iteration (\d) of 3 as (\d) pid (\d+)\n", events)[3:]
    assert len({iteration for iteration, _, _ in last}) == 1
    assert {rank for _, rank, _ in last} == {"0", "1", "2"}
    assert len({int(pid) for _, _, pid in last} - set(pids)) == 1, "the third is the replacement"
    assert events.count("ends") == 3
    assert int(last[0][0]) <= 2, "one restart for the death, one for the replacement"


DIES = """
    done = joining.Newcomer.{method}

    def die(*arguments):
        done(*arguments)
        say("dies")
        os.kill(os.getpid(), signal.SIGKILL)

    if os.environ.get("INPROCESS_JOIN") in {ranks}:
        joining.Newcomer.{method} = die
"""


def test_a_replacement_that_dies_while_the_others_restart_is_replaced_again(job: Job) -> None:
    script = WAITS.format(before=DIES.format(ranks=("4",), method="_interrupt").strip())
    launcher = job.one_node(script, IN_PROCESS, ranks=3, restarts=0, with_torch=True)
    kill_in_first_iteration(job, 1)
    assert launcher.wait(58) == 0, job.everything()
    events = job.events()
    last = max(map(int, re.findall(r"iteration (\d+)", events)))
    assert events.count("dies") == 1
    assert events.count(f"iteration {last} of 3") == 3
    assert last <= 4, "two restarts for each that joined"


def test_replacements_that_always_die_end_the_restarts(job: Job) -> None:
    """As many as the launcher may start; then the others go on as they are."""
    script = WAITS.format(before=DIES.format(ranks=("4", "7"), method="report_joined").strip())
    script = script.replace("hang()", "wait_for_end(call)").replace(
        "    def train",
        """
    def wait_for_end(call):
        while call.iteration == 0 or os.environ["WORLD_SIZE"] == "3":
            time.sleep(0.02)
        while open(os.environ["TEST_EVENTS"]).read().count("dies") < 2:
            time.sleep(0.02)

    def train""",
        1,
    )
    script = script.replace('size != "3":', "True:")
    options = (IN_PROCESS, "--ft-max-replacements=2")
    launcher = job.one_node(script, *options, ranks=3, restarts=0, with_torch=True)
    kill_in_first_iteration(job, 1)
    assert launcher.wait(58) == 0, job.everything()
    events = job.events()
    assert events.count("dies") == 2
    assert max(map(int, re.findall(r"iteration (\d+)", events))) <= 5
    assert re.findall(r"rank (\d) ends", events)[-2:] in (["0", "2"], ["2", "0"])


TRAINS = """
    from datetime import timedelta
    import torch
    import torch.distributed as dist
    import ckpt, inprocess
    from ckpt.restart import CheckpointAbort, CheckpointFinalize

    checkpointer = ckpt.Checkpointer({root!r}, snapshots=1)
    state = {{"weights": torch.zeros(8), "step": torch.zeros((), dtype=torch.int64)}}

    def train(call: inprocess.CallWrapper):
        dist.init_process_group("gloo")
        restored = checkpointer.restore(state)
        tier = checkpointer.last_restore.tier if restored else None
        say("iteration", call.iteration, "of", dist.get_world_size(), "from", int(state["step"]), "tier", tier,
            "pid", os.getpid())
        end = int(state["step"]) + 5 if call.iteration and dist.get_world_size() == 3 else 10_000
        while int(state["step"]) < end:
            noise = torch.full((8,), float(dist.get_rank() + 1))
            dist.all_reduce(noise)
            state["weights"] += noise / noise[0]
            state["step"] += 1
            checkpointer.step(state, int(state["step"]))
            say("step", int(state["step"]))
            time.sleep(0.02)
        assert state["weights"].tolist() == [float(state["step"])] * 8
        say("ends")
        dist.destroy_process_group()

    inprocess.Wrapper(
        abort=inprocess.Compose(CheckpointAbort(checkpointer), inprocess.abort.AbortTorchDistributed()),
        finalize=CheckpointFinalize(checkpointer),
        soft_timeout=timedelta(seconds=40),
        hard_timeout=timedelta(seconds=42),
    )(train)()
    checkpointer.close()
"""


@pytest.mark.timeout(150)
def test_a_restart_for_a_replacement_costs_a_step_of_snapshots(job: Job, tmp_path: Path) -> None:
    script = TRAINS.format(root=str(tmp_path / "root"))
    launcher = job.one_node(script, IN_PROCESS, ranks=3, restarts=0, with_torch=True)
    job.wait_event("rank 0 step 8")
    os.kill(int(job.wait_event(r"rank 2 iteration 0 of 3 from 0 tier None pid (\d+)")[1]), signal.SIGKILL)
    assert launcher.wait(100) == 0, job.everything()
    events = job.events()
    assert events.count("ends") == 3
    before, joined = re.split(r"(?=cycle 0 rank \d iteration \d of 3 from [1-9])", events, maxsplit=1)
    steps = [int(step) for step in re.findall(r"rank 0 step (\d+)", before)]
    began = {int(step) for step in re.findall(r"of 3 from (\d+)", joined)}
    assert len(began) == 1
    assert steps[-1] - 1 <= began.pop() <= steps[-1] + 1
    assert len(steps) <= len(set(steps)) + 1, "at most one step was done twice before"
    assert not list((tmp_path / "root").glob("step_*")), "nothing was in storage"
