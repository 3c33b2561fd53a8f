"""Spare nodes: which of them takes the place of a lost one, and with which ranks."""

import re

from tests.inprocess.fault_tolerance.launching import Job, Launcher
from tests.support import free_port

SCRIPT = """
    say("node", os.environ["TEST_NODE"], "store", os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"])
    others("started")
    while not os.path.exists(os.environ["TEST_EVENTS"] + ".go"):
        time.sleep(0.02)
    say("ends")
"""
WAITS = "this node waits as a spare"


class Nodes:
    """Launchers with an address each. The first hosts the rendezvous."""

    def __init__(self, job: Job, *options: str) -> None:
        self.job = job
        self._options = options
        self._port = free_port()
        self._count = 0

    def start(self, address: str, segment: str = "") -> Launcher:
        """The node with this last number of its address; workers call it so."""
        host = "true" if self._count == 0 else "false"
        self._count += 1
        return self.job.launch(
            SCRIPT,
            "--rdzv-backend=c10d",
            f"--rdzv-endpoint=127.0.0.1:{self._port}",
            "--rdzv-id=job",
            "--max-restarts=5",
            f"--rdzv-conf=is_host={host},keep_alive_interval=1,keep_alive_max_attempt=4",
            f"--local-addr=127.0.0.{address}",
            *self._options,
            env={"TEST_NODE": address, "INPROCESS_SEGMENT": segment},
        )

    def trained_in(self, cycle: int, count: int) -> list[str]:
        """The nodes of this cycle, by rank, when they have started."""
        return [self.job.wait_event(rf"cycle {cycle} rank {rank} node (\d+)")[1] for rank in range(count)]

    def end(self, launchers: list[Launcher]) -> None:
        """End the job, which all have to do well."""
        self.job.folder.joinpath("events.go").touch()
        assert [each.wait() for each in launchers] == [0] * len(launchers)


def test_a_spare_takes_the_place_of_a_lost_node_and_a_returning_node_comes_before_a_standby(job: Job) -> None:
    nodes = Nodes(job, "--nnodes=2:4")
    host, victim = nodes.start("150"), nodes.start("100")
    assert nodes.trained_in(0, 2) == ["100", "150"]
    spare = nodes.start("200")
    spare.wait_log(WAITS)

    victim.die_with_workers()
    assert nodes.trained_in(1, 2) == ["200", "150"], "the other node keeps its rank"

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
