"""`--ft-hot-spares`: the workers of a spare node take the places of those of a lost node, and the others live on."""

import os
import re
import signal

import pytest

from tests.inprocess.fake_devices import DevicesFile
from tests.inprocess.fault_tolerance.launching import REPOSITORY, Job
from tests.inprocess.fault_tolerance.test_launcher_spares import Nodes
from tests.support.selection import full_only
from tests.support.template import quick_python

HOT = ("--ft-restart-policy=in-process", "--ft-hot-spares", "--nproc-per-node=2")
WAITS = """
    from datetime import timedelta
    import inprocess

    def train(call: inprocess.CallWrapper):
        now = f"iteration {call.iteration}"
        say(now, "node", os.environ["TEST_NODE"], "is", os.environ["RANK"], "of", os.environ["WORLD_SIZE"], os.getpid())
        waiting = 0
        while not os.path.exists(os.environ["TEST_EVENTS"] + f".{call.iteration}"):
            if os.environ["RANK"] == "0" and call.newcomers != waiting:
                waiting = call.newcomers
                say(now, waiting, "wait")
            time.sleep(0.05)
        if os.environ["RANK"] == "0" and not os.path.exists(os.environ["TEST_EVENTS"] + ".go"):
            raise RuntimeError("restart")

    inprocess.Wrapper(abort=None)(train)()
    say("ends")
"""
TRAINS = """
    import hashlib
    from datetime import timedelta

    import torch, torch._dynamo, torch.distributed as dist  # an optimizer imports the second, if the program has not

    import ckpt, ckpt.restart, inprocess

    checkpointer = ckpt.Checkpointer(os.environ["TEST_ROOT"])

    @inprocess.Wrapper(
        abort=inprocess.Compose(ckpt.restart.CheckpointAbort(checkpointer), inprocess.abort.AbortTorchDistributed()),
        finalize=ckpt.restart.CheckpointFinalize(checkpointer),
        heartbeat_timeout=timedelta(seconds=4),
    )
    def train(call: inprocess.CallWrapper):
        dist.init_process_group("gloo")
        rank, world = dist.get_rank(), dist.get_world_size()
        now = f"iteration {call.iteration}"
        say(now, "node", os.environ["TEST_NODE"], "is", rank, "of", world, os.getpid())
        torch.manual_seed(0)
        model = torch.nn.Linear(16, 16)
        optimizer = torch.optim.AdamW(model.parameters())
        state = {"model": model, "optimizer": optimizer}
        start = checkpointer.restore(state) or 0
        say(now, "from", start)
        for step in range(start + 1, 31):
            optimizer.zero_grad()
            data = torch.randn(4, 16, generator=torch.Generator().manual_seed(step * world + rank))
            model(data).square().mean().backward()
            for parameter in model.parameters():
                dist.all_reduce(parameter.grad)
            optimizer.step()
            if step == start + 1:
                say(now, "steps at", time.time())
            if step % 5 == 0:
                checkpointer.save(state, step)
            if step == (12, 22, 0)[call.iteration] and os.environ["TEST_FAULTS"]:
                waiting = 0
                while True:  # all wait, until a node is lost
                    dist.all_reduce(torch.ones(()))
                    if rank == 0 and call.newcomers != waiting:
                        waiting = call.newcomers
                        say(now, waiting, "wait")
                    time.sleep(0.05)
        say("weights", hashlib.sha256(model.weight.detach().numpy().tobytes()).hexdigest())
        dist.destroy_process_group()

    train()
    checkpointer.close()
    say("ends")
"""


class HotNodes(Nodes):
    """Nodes of two workers each, which have imported torch before they begin."""

    def __init__(self, job: Job, script: str, *options: str, **env: str) -> None:
        super().__init__(job, *options, script=script, PYTHON_EXEC=quick_python(), **env)

    def ranks(self, iteration: int) -> list[tuple[int, int]]:
        """The node and process of each rank of this iteration, when all have begun it."""
        patterns = [rf"iteration {iteration} node (\d+) is {rank} of 4 (\d+)" for rank in range(4)]
        found = [self.job.wait_event(pattern, 90) for pattern in patterns]
        return [(int(match[1]), int(match[2])) for match in found]

    def wait_ready(self, iteration: int, count: int = 2) -> None:
        """Until so many workers of spare nodes wait in the wrapper."""
        self.job.wait_event(f"iteration {iteration} {count} wait", 90)

    def let(self, name: str) -> None:
        self.job.folder.joinpath(f"events.{name}").touch()


@pytest.mark.timeout(150)
def test_a_node_that_loses_a_process_makes_room_for_a_spare_node_and_is_one_itself_then(job: Job) -> None:
    nodes = HotNodes(job, WAITS, "--nnodes=2:3", *HOT)
    host, other = nodes.start("1"), nodes.start("2")
    before = nodes.ranks(0)
    assert [node for node, _ in before] == [1, 1, 2, 2]
    spare = nodes.start("3")
    nodes.wait_ready(0)
    os.kill(before[2][1], signal.SIGKILL)
    after = nodes.ranks(1)
    assert [node for node, _ in after] == [1, 1, 3, 3]
    assert after[:2] == before[:2], "the processes of the other node live on"
    other.wait_log("a replacement for local rank 0 is started")
    nodes.wait_ready(1, 1)
    nodes.let("1")  # rank 0 fails
    assert nodes.ranks(2) == after
    host.wait_log("rank 0 of 6, 0 lost, 1 joined")
    os.kill(after[3][1], signal.SIGKILL)
    last = nodes.ranks(3)
    assert [node for node, _ in last] == [1, 1, 2, 2]
    assert last[:2] == before[:2]
    assert last[3] == before[3], "the one that was not lost is in its place again"
    nodes.let("go")
    nodes.let("3")
    assert [each.wait(90) for each in (host, other, spare)] == [0, 0, 0]
    assert "cycle 1" not in job.events()
    assert job.left() == []


@full_only
@pytest.mark.timeout(150)
def test_a_spare_node_that_is_not_needed_ends_with_0(job: Job) -> None:
    nodes = HotNodes(job, WAITS, "--nnodes=2:3", *HOT)
    launchers = [nodes.start("1"), nodes.start("2")]
    nodes.ranks(0)
    launchers.append(nodes.start("3"))
    nodes.wait_ready(0)
    nodes.let("go")
    nodes.let("0")
    assert [each.wait(90) for each in launchers] == [0, 0, 0]
    assert "node 3" not in job.events()
    assert job.left() == []


@full_only
@pytest.mark.timeout(200)
def test_the_workers_are_started_again_when_the_node_with_the_store_is_lost(job: Job) -> None:
    script = WAITS.replace("abort=None", "abort=None, heartbeat_timeout=timedelta(seconds=4)")
    nodes = HotNodes(job, script, "--nnodes=2:3", *HOT)
    host, victim = nodes.start("2"), nodes.start("1")
    assert [node for node, _ in nodes.ranks(0)] == [1, 1, 2, 2]
    spare = nodes.start("3")
    nodes.wait_ready(0)
    (server,) = [each for each in job.left() if "inprocess.coordination.server_process" in each.cmdline()]
    victim.die_with_workers()
    server.kill()
    for rank in range(4):
        job.wait_event(rf"cycle 1 rank {rank} iteration 0 node {(3, 3, 2, 2)[rank]} is {rank} of 4", 90)
    nodes.let("go")
    nodes.let("0")
    assert [each.wait(90) for each in (host, spare)] == [0, 0]


@full_only
@pytest.mark.timeout(150)
def test_a_node_that_becomes_unfit_leaves_and_only_its_own_workers_end(job: Job) -> None:
    nodes = HotNodes(job, WAITS, "--nnodes=2:3", "--ft-node-health-check-interval=0.1", *HOT)
    launchers, gpus = [], {}
    for address in ("1", "2", "3"):
        (job.folder / address).mkdir()
        gpus[address] = DevicesFile(job.folder / address)
        nodes.env.update(TEST_NVML=str(gpus[address].file), PYTHONPATH=f"{gpus[address].folder}:{REPOSITORY}")
        launchers.append(nodes.start(address))
        if address == "2":
            before = nodes.ranks(0)
    nodes.wait_ready(0)
    gpus["2"].set(lost=True)
    assert launchers[1].wait(60) == 0
    assert "exit code 0: this node is unfit and takes no part: gpu: GPU 0: cannot be queried" in launchers[1].log()
    after = nodes.ranks(1)
    assert [node for node, _ in after] == [1, 1, 3, 3]
    assert after[:2] == before[:2]
    nodes.let("go")
    nodes.let("1")
    assert [launchers[0].wait(90), launchers[2].wait(90)] == [0, 0]
    assert "cycle 1" not in job.events()


@full_only
@pytest.mark.timeout(150)
def test_a_spare_node_that_has_become_unfit_does_not_disturb_the_job_that_it_joins(job: Job) -> None:
    nodes = HotNodes(job, WAITS, "--nnodes=2:3", "--ft-node-health-check-interval=0.1", *HOT)
    (job.folder / "4").mkdir()
    gpu = DevicesFile(job.folder / "4")
    launchers = [nodes.start("1"), nodes.start("2")]
    before = nodes.ranks(0)
    launchers.append(nodes.start("3"))
    nodes.wait_ready(0)
    nodes.env.update(TEST_NVML=str(gpu.file), PYTHONPATH=f"{gpu.folder}:{REPOSITORY}")
    unfit = nodes.start("4")
    unfit.wait_log("this node waits as a spare")
    gpu.set(lost=True)
    launchers.pop().die_with_workers()  # so there is room
    assert unfit.wait(60) == 0
    assert "this node is unfit and takes no part: gpu: GPU 0: cannot be queried" in unfit.log()
    nodes.let("go")
    nodes.let("0")
    assert [each.wait(90) for each in launchers] == [0, 0]
    assert "cycle 1" not in job.events()
    assert nodes.ranks(0) == before, "cycle 0 goes on"


@full_only
@pytest.mark.timeout(150)
def test_a_node_that_gets_sigterm_leaves_the_job_or_makes_room_for_a_spare_node(job: Job) -> None:
    nodes = HotNodes(job, WAITS, "--nnodes=2:4", *HOT)
    launchers = [nodes.start("1"), nodes.start("2")]
    before = nodes.ranks(0)
    launchers.append(nodes.start("3"))
    nodes.wait_ready(0)
    spare = nodes.start("4")
    nodes.wait_ready(0, 4)
    spare.signal(signal.SIGTERM)
    assert spare.wait(60) == 128 + signal.SIGTERM
    launchers[1].signal(signal.SIGTERM)
    assert launchers.pop(1).wait(60) == 128 + signal.SIGTERM
    after = nodes.ranks(1)
    assert [node for node, _ in after] == [1, 1, 3, 3]
    assert after[:2] == before[:2]
    nodes.let("go")
    nodes.let("1")
    assert [each.wait(90) for each in launchers] == [0, 0]
    assert "cycle 1" not in job.events()
    assert job.left() == []


@full_only
@pytest.mark.timeout(300)
def test_a_job_whose_nodes_are_lost_and_return_trains_as_one_without_faults(job: Job) -> None:
    nodes = HotNodes(job, TRAINS, "--nnodes=2", *HOT[::2], TEST_ROOT=str(job.folder / "one"), TEST_FAULTS="")
    launchers = [nodes.start("11"), nodes.start("12")]
    assert [each.wait(90) for each in launchers] == [0, 0]
    (expected,) = set(re.findall(r"weights (\w+)", job.events()))
    job.events_file.unlink()

    nodes = HotNodes(job, TRAINS, "--nnodes=2:3", *HOT, TEST_ROOT=str(job.folder / "two"), TEST_FAULTS="yes")
    host, victim = nodes.start("21"), nodes.start("22")
    before = nodes.ranks(0)
    assert [node for node, _ in before] == [21, 21, 22, 22]
    spare = nodes.start("23")
    nodes.wait_ready(0)
    victim.die_with_workers()
    assert [node for node, _ in nodes.ranks(1)] == [21, 21, 23, 23]
    returning = nodes.start("22")
    nodes.wait_ready(1)
    spare.die_with_workers()
    last = nodes.ranks(2)
    assert [node for node, _ in last] == [21, 21, 22, 22]
    assert nodes.ranks(1)[:2] == last[:2] == before[:2], "the processes of the node that was not lost"
    assert [each.wait(90) for each in (host, returning)] == [0, 0]
    assert set(re.findall(r"weights (\w+)", job.events())) == {expected}
    assert [set(re.findall(rf"iteration {i} from (\d+)", job.events())) for i in range(3)] == [{"0"}, {"10"}, {"20"}]
    assert "cycle 1" not in job.events()
