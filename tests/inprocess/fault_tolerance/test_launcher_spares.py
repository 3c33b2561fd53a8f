"""Spare nodes: which of them takes the place of a lost one, and with which ranks."""

import re
import signal

import pytest

from tests.inprocess.fault_tolerance.launching import Job, Launcher
from tests.support import free_port
from tests.support.selection import full_only

SCRIPT = """
    say("node", os.environ["TEST_NODE"], "store", os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"])
    others("started")
    while not os.path.exists(os.environ["TEST_EVENTS"] + ".go"):
        time.sleep(0.02)
    say("ends")
"""
TRAINS = """
    import hashlib, torch, torch.distributed as dist
    import ckpt

    dist.init_process_group("gloo")
    say("node", os.environ["TEST_NODE"])
    world = int(os.environ["WORLD_SIZE"])
    torch.manual_seed(0)
    model = torch.nn.Linear(16, 16)
    optimizer = torch.optim.AdamW(model.parameters())
    checkpointer = ckpt.Checkpointer(os.environ["TEST_ROOT"])
    state = {"model": model, "optimizer": optimizer}
    start = checkpointer.restore(state) or 0
    say("from", start)
    for step in range(start + 1, 31):
        optimizer.zero_grad()
        data = torch.randn(4, 16, generator=torch.Generator().manual_seed(step * world + rank))
        model(data).square().mean().backward()
        for parameter in model.parameters():
            dist.all_reduce(parameter.grad)
        optimizer.step()
        if step % 5 == 0:
            checkpointer.save(state, step)
        if step == (12, 22, 0)[cycle] and os.environ["TEST_FAULTS"]:
            say("waits")
            hang()
    say("weights", hashlib.sha256(model.weight.detach().numpy().tobytes()).hexdigest())
    checkpointer.close()
    dist.destroy_process_group()
"""
WAITS = "this node waits as a spare"


class Nodes:
    """Launchers with an address each. The first hosts the rendezvous."""

    def __init__(self, job: Job, *options: str, attempts: int = 4, script: str = SCRIPT, **env: str) -> None:
        self.job = job
        self._options = options
        self._attempts = attempts
        self._script = script
        self.env = env
        self._port = free_port()
        self._count = 0

    def start(self, address: str, segment: str = "") -> Launcher:
        """The node with this last number of its address; workers call it so."""
        host = "true" if self._count == 0 else "false"
        self._count += 1
        return self.job.launch(
            self._script,
            "--rdzv-backend=c10d",
            f"--rdzv-endpoint=127.0.0.1:{self._port}",
            "--rdzv-id=job",
            "--max-restarts=5",
            f"--rdzv-conf=is_host={host},keep_alive_interval=1,keep_alive_max_attempt={self._attempts}",
            f"--local-addr=127.0.0.{address}",
            *self._options,
            env={"TEST_NODE": address, "INPROCESS_SEGMENT": segment, **self.env},
        )

    def trained_in(self, cycle: int, count: int) -> list[str]:
        """The nodes of this cycle, by rank, when they have started."""
        return [self.job.wait_event(rf"cycle {cycle} rank {rank} node (\d+)", 90)[1] for rank in range(count)]

    def end(self, launchers: list[Launcher]) -> None:
        """End the job, which all have to do well."""
        self.job.folder.joinpath("events.go").touch()
        assert [each.wait(90) for each in launchers] == [0] * len(launchers)


def test_a_spare_takes_the_place_of_a_lost_node_and_a_returning_node_comes_before_a_standby(job: Job) -> None:
    nodes = Nodes(job, "--nnodes=2:4")
    host, victim = nodes.start("150"), nodes.start("100")
    assert nodes.trained_in(0, 2) == ["100", "150"]
    spare = nodes.start("200")
    spare.wait_log(WAITS)

    victim.die_with_workers()
    assert nodes.trained_in(1, 2) == ["200", "150"], "the other node keeps its rank"
    for each in (host, spare):
        assert "cause: hardware: node 0 (127.0.0.100) is lost: silent for 4 s; take the node out" in each.log()

    standby = nodes.start("50")
    standby.wait_log(WAITS)
    returning = nodes.start("100")
    returning.wait_log(WAITS)
    spare.die_with_workers()
    assert nodes.trained_in(2, 2) == ["100", "150"]
    nodes.end([host, returning, standby])
    assert job.events().count("ends") == 2
    stores = set(re.findall(r"store 127\.0\.0\.(\d+) (\d+)", job.events()))
    assert sorted(address for address, _ in stores) == ["100", "100", "200"], "each cycle has a new one, on its node 0"


def test_a_node_that_gets_sigterm_is_replaced_at_once(job: Job) -> None:
    nodes = Nodes(job, "--nnodes=2:3", attempts=1000)
    host, leaving = nodes.start("1"), nodes.start("2")
    assert nodes.trained_in(0, 2) == ["1", "2"]
    spare = nodes.start("3")
    spare.wait_log(WAITS)
    leaving.signal(signal.SIGTERM)
    assert leaving.wait() == 128 + signal.SIGTERM
    assert nodes.trained_in(1, 2) == ["1", "3"]
    nodes.end([host, spare])


def test_a_spare_segment_takes_the_place_of_one_that_is_incomplete(job: Job) -> None:
    nodes = Nodes(job, "--nnodes=2:5", "--ft-segment=2")
    host = nodes.start("1", "a")
    first = nodes.start("3", "b")
    last = nodes.start("2", "b")
    assert nodes.trained_in(0, 2) == ["2", "3"], "one node of a is too few"
    host.wait_log(WAITS)
    other = nodes.start("4", "a")
    other.wait_log(WAITS)
    last.die_with_workers()
    assert nodes.trained_in(1, 2) == ["1", "4"]
    nodes.end([host, other, first])
    assert first.log().count("begins") == 1
    assert "a node has left and a spare waits: node 0 (127.0.0.2)" in first.log()


@full_only
@pytest.mark.timeout(300)
def test_a_job_on_changing_nodes_trains_as_one_without_faults(job: Job) -> None:
    nodes = Nodes(job, "--nnodes=2", script=TRAINS, TEST_ROOT=str(job.folder / "one"), TEST_FAULTS="")
    launchers = [nodes.start(address) for address in ("11", "12")]
    assert [each.wait(90) for each in launchers] == [0, 0]
    expected = set(re.findall(r"weights (\w+)", job.events()))
    assert len(expected) == 1
    job.events_file.unlink()

    nodes = Nodes(
        job, "--nnodes=2:4", "--ft-preload=torch", script=TRAINS, TEST_ROOT=str(job.folder / "two"), TEST_FAULTS="yes"
    )
    host, victim = nodes.start("21"), nodes.start("22")
    assert nodes.trained_in(0, 2) == ["21", "22"]
    spare = nodes.start("23")
    spare.wait_log(WAITS)
    for rank in range(2):
        job.wait_event(f"cycle 0 rank {rank} waits", 60)
    victim.die_with_workers()
    assert nodes.trained_in(1, 2) == ["21", "23"]
    standby, returning = nodes.start("20"), nodes.start("22")
    for launcher in (standby, returning):
        launcher.wait_log(WAITS)
    for rank in range(2):
        job.wait_event(f"cycle 1 rank {rank} waits", 60)
    spare.die_with_workers()
    assert nodes.trained_in(2, 2) == ["21", "22"]
    nodes.end([host, returning, standby])
    assert re.findall(r"rank 0 from (\d+)", job.events()) == ["0", "10", "20"]
    assert set(re.findall(r"weights (\w+)", job.events())) == expected
