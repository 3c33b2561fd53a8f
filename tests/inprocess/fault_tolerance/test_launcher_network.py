"""Launchers on nodes with networks of their own, one of which has a bad link. Needs root."""

import json
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path

import pytest

from tests.inprocess.fault_tolerance.launching import Job, Launcher
from tests.inprocess.nodes.lab import why_not
from tests.inprocess.nodes.names import fresh_prefix, remove_stale
from tests.inprocess.nodes.network import Network
from tests.inprocess.nodes.place import Place

PORT = 29400
CHECK = ("--ft-network-check=true", "--ft-network-check-mb=0.25", "--ft-network-check-timeout=8")
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
def start(job: Job, network: Network) -> Callable[..., Launcher]:
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
    job: Job, network: Network, start: Callable[..., Launcher], tmp_path: Path
) -> None:
    published = tmp_path / "published"
    network.cut_but(2, PORT)
    nodes = [start(number, WORKER, "3:4", f"--ft-node-health-publish-dir={published}") for number in range(3)]
    for each in nodes:
        each.wait_log("the links of 3 nodes are checked", 90)
    spare = start(3, WORKER, "3:4")
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
