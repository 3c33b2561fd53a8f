"""Launchers on nodes with networks of their own, one of which has a bad link. Needs root."""

import json
import re
import textwrap
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path

import pytest

from tests.inprocess.fault_tolerance.launching import Job, Launcher
from tests.inprocess.fault_tolerance.test_launcher_nodes import PROLOGUE, start_nodes, start_static
from tests.inprocess.nodes.lab import why_not
from tests.inprocess.nodes.names import fresh_prefix, remove_stale
from tests.inprocess.nodes.network import Network
from tests.inprocess.nodes.place import Place
from tests.support.selection import full_only

PORT = 29400
CHECK = (
    "--ft-network-check=true",
    "--ft-network-check-mb=0.25",
    "--ft-network-check-timeout=20",
    "--ft-network-check-factor=10",
)
WORKER = """
    say("node", os.environ["TEST_NODE"])
    while not os.path.exists(os.environ["TEST_EVENTS"] + ".go"):
        time.sleep(0.02)
"""


@pytest.fixture
def network() -> Iterator[Network]:
    reason = why_not()
    if reason is not None:
        pytest.skip(reason)
    remove_stale()
    with Network(fresh_prefix(), 4) as found:
        yield found


@pytest.fixture
def start_node(job: Job, network: Network) -> Callable[..., Launcher]:
    """Return a function that starts the launcher of a node; node 0 hosts the rendezvous."""

    def launch(number: int, script: str, nodes: str, *options: str) -> Launcher:
        conf = f"is_host={'true' if number == 0 else 'false'},keep_alive_interval=1,keep_alive_max_attempt=15"
        common = [
            "--rdzv-backend=c10d",
            f"--rdzv-endpoint={network.addresses[0]}:{PORT}",
            f"--rdzv-conf={conf}",
            "--rdzv-id=job",
            f"--local-addr={network.addresses[number]}",
            f"--nnodes={nodes}",
            "--max-restarts=3",
        ]
        hosts = job.folder / "hosts"
        hosts.write_text("".join(f"{address} node{node}\n" for node, address in enumerate(network.addresses)))
        place = Place(f"node{number}", str(network.namespace(number)), "", {"/etc/hosts": str(hosts)})
        env = {
            "TEST_NODE": str(number),
            "TEST_PLACE": json.dumps(asdict(place)),
            "GLOO_SOCKET_IFNAME": network.device,
            "SLURM_PROCID": str(number),
        }
        return job.launch(script, *common, *CHECK, *options, env=env)

    return launch


@pytest.mark.timeout(200)
def test_a_node_whose_link_is_broken_is_named_and_a_spare_takes_its_place(
    job: Job, network: Network, start_node: Callable[..., Launcher], tmp_path: Path
) -> None:
    published = tmp_path / "published"
    network.cut_but(2, PORT)
    options = (
        f"--ft-node-health-publish-dir={published}",
        "--ft-network-check-timeout=8",
        "--ft-network-check-factor=1000",
    )
    nodes = [start_node(number, WORKER, "3:4", *options) for number in range(3)]
    for each in nodes:
        each.wait_log("the links of 3 nodes are checked", 90)
    spare = start_node(3, WORKER, "3:4")
    bad = nodes.pop(2)
    for each in nodes:
        each.wait_log(rf"the link of node 2 \(.*, launcher {bad.pid}\) is broken: no transfer with nodes 0, 1", 90)
    assert bad.wait(60) == 0
    assert "this node is unfit: network: no transfer with nodes 0, 1 has worked" in bad.log()
    assert "cycle 0 begins" not in bad.log()
    for number in (0, 1, 3):
        job.wait_event(f"cycle 0 rank . node {number}", 60)
    job.folder.joinpath("events.go").touch()
    assert [each.wait(60) for each in (*nodes, spare)] == [0, 0, 0]
    (event,) = map(json.loads, (published / "events.jsonl").read_text().splitlines())
    assert (event["event"], list(event["failed"])) == ("node_unfit", ["network"])
    assert job.left() == []


@pytest.mark.timeout(200)
def test_a_node_whose_link_is_slow_goes_on_until_a_spare_comes(
    job: Job, network: Network, start_node: Callable[..., Launcher], tmp_path: Path
) -> None:
    published = tmp_path / "published"
    options = f"--ft-node-health-publish-dir={published}"
    network.slow(2, 1000)
    nodes = [start_node(number, WORKER, "3:4", options) for number in range(3)]
    bad = nodes[2]
    for each in nodes:
        each.wait_log(rf"the link of node 2 \(node2, launcher {bad.pid}\) is slow: transfers with nodes 0, 1 took", 90)
        each.wait_log(
            r"node 2 \(node2, launcher \d+\): the link is slow, and no spare is seen to run: the node goes on"
        )
    for number in range(3):
        job.wait_event(f"cycle 0 rank . node {number}", 60)
    assert list(json.loads((published / "node2.json").read_text())["failed"]) == ["network"]
    spare = start_node(3, WORKER, "3:4", options)
    assert bad.wait(90) == 0
    assert "this node is unfit and takes no part: network: transfers with nodes 0, 1" in bad.log()
    for number in (0, 1, 3):
        job.wait_event(f"cycle 1 rank . node {number}", 60)
    job.folder.joinpath("events.go").touch()
    assert [each.wait(60) for each in (*nodes[:2], spare)] == [0, 0, 0]
    assert nodes[0].log().count("the network check of 3 nodes took") == 2
    assert job.left() == []


@pytest.mark.timeout(200)
@pytest.mark.parametrize("start", [start_nodes, pytest.param(start_static, marks=full_only)])
def test_the_same_nodes_are_checked_again_only_after_a_fault_of_the_network(
    job: Job, start: Callable[..., list[Launcher]]
) -> None:
    script = f"""{PROLOGUE}
    import json
    message = "ConnectionResetError: a link" if cycle == 0 else "ValueError: a mistake"
    if cycle < 2 and rank == 1:
        with open(os.environ["TORCHELASTIC_ERROR_FILE"], "w") as file:
            json.dump({{"message": {{"message": message, "extraInfo": {{"timestamp": "1"}}}}}}, file)
        sys.exit(1)
    if cycle < 2:
        hang()
    """
    nodes = start(job, script, 2, *CHECK, "--max-restarts=3")
    assert [each.wait(150) for each in nodes] == [0, 0]
    for each in nodes:
        told = re.findall(r"\| (cycle \d begins|links are not checked again|the network check of 2 nodes)", each.log())
        checked, again = "the network check of 2 nodes", "links are not checked again"
        assert told == [checked, "cycle 0 begins", checked, "cycle 1 begins", again, "cycle 2 begins"]
    assert job.left() == []


@full_only
@pytest.mark.timeout(200)
def test_a_node_that_dies_while_links_are_checked_is_replaced(job: Job) -> None:
    first, victim = start_nodes(job, WORKER, 2, *CHECK, nodes="2:3")
    for each in (first, victim):
        each.wait_log("the links of 2 nodes are checked", 60)
    victim.die_with_workers()
    spare = job.launch(textwrap.dedent(WORKER), *victim.options, env={"TEST_NODE": "2"})
    first.wait_log("joining the rendezvous again", 90)
    job.wait_event("rank . node 2", 90)
    job.folder.joinpath("events.go").touch()
    assert [first.wait(60), spare.wait(60)] == [0, 0]
    assert "the network check of 2 nodes took" in spare.log()
    assert job.left() == []
