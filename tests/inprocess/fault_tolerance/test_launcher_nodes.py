"""Several launchers on one machine, each as if it were a node."""

import signal
from collections.abc import Callable, Mapping, Sequence

import pytest

from tests.inprocess.fault_tolerance.launching import Job, Launcher
from tests.support import free_port
from tests.support.selection import full_only


def start_nodes(
    job: Job,
    script: str,
    count: int,
    *options: str,
    nodes: str = "2",
    conf: str = "keep_alive_max_attempt=4",
    env: Sequence[Mapping[str, str]] = (),
) -> list[Launcher]:
    """Launchers with a dynamic rendezvous. The first hosts its store. `env` has more variables of each."""
    port = free_port()
    common = [
        "--rdzv-backend=c10d",
        f"--rdzv-endpoint=localhost:{port}",
        "--rdzv-id=job",
        "--local-addr=localhost",
        f"--nnodes={nodes}",
        "--max-restarts=3",
        *options,
    ]
    found = []
    for number in range(count):
        host = "true" if number == 0 else "false"
        variables = {"TEST_NODE": str(number), **(env[number] if env else {})}
        all_conf = f"is_host={host},keep_alive_interval=1,last_call_timeout=1,{conf}"
        found.append(job.launch(script, *common, f"--rdzv-conf={all_conf}", env=variables))
    return found


def start_static(job: Job, script: str, count: int, *options: str) -> list[Launcher]:
    """Launchers with fixed numbers."""
    port = free_port()
    common = [f"--nnodes={count}", "--master-addr=127.0.0.1", f"--master-port={port}", *options]
    return [
        job.launch(script, *common, f"--node-rank={number}", env={"TEST_NODE": str(number)}) for number in range(count)
    ]


PROLOGUE = """
    node = os.environ["TEST_NODE"]
    say("node", node, "of world", os.environ["WORLD_SIZE"])
    others("started")
"""


@pytest.mark.parametrize("start", [start_nodes, start_static])
def test_a_worker_that_fails_on_one_node_restarts_all(job: Job, start: Callable[..., list[Launcher]]) -> None:
    script = f"""{PROLOGUE}
    if cycle == 0 and node == "1":
        sys.exit(5)
    if cycle == 0:
        hang()
    say("ends")
    """
    first, second = start(job, script, 2, "--max-restarts=1")
    assert (first.wait(), second.wait()) == (0, 0)
    for cycle in (0, 1):
        for rank in (0, 1):
            assert f"cycle {cycle} rank {rank} node" in job.events()
    assert job.events().count("ends") == 2
    assert "another node says: workers have ended: rank" in first.log()
    assert job.left() == []


@pytest.mark.parametrize("start", [pytest.param(start_nodes, marks=full_only), start_static])
def test_nodes_agree_on_the_restarts_that_are_left(job: Job, start: Callable[..., list[Launcher]]) -> None:
    script = f"""{PROLOGUE}
    if node == str(cycle % 2):
        sys.exit(5)
    hang()
    """
    launchers = start(job, script, 2, "--max-restarts=1")
    assert [each.wait() for each in launchers] == [1, 1]
    assert len(job.events().splitlines()) == 4, "two cycles of two"


def test_a_node_whose_workers_have_ended_well_comes_again_when_others_fail(job: Job) -> None:
    script = f"""{PROLOGUE}
    if cycle == 0 and node == "1":
        while "success is reported" not in open(os.environ["TEST_EVENTS"]).read():
            time.sleep(0.02)
        sys.exit(1)
    say("ends")
    """
    first, second = start_static(job, script, 2, "--max-restarts=1")
    job.wait_event("cycle 0 .* ends")
    with job.events_file.open("a") as file:
        file.write("success is reported\n")
    assert (first.wait(), second.wait()) == (0, 0)
    assert "cycle 1 rank 0 ends" in job.events()


def test_a_spare_takes_over_for_a_node_that_dies(job: Job) -> None:
    script = f"""{PROLOGUE}
    if cycle == 0:
        hang()
    say("ends")
    """
    nodes = start_nodes(job, script, 3, nodes="2:3")
    job.wait_event("cycle 0 rank 0 node")
    job.wait_event("cycle 0 rank 1 node")
    busy = [each for each in nodes if "cycle 0 begins" in each.log()]
    (spare,) = [each for each in nodes if each not in busy]
    victim = next(each for each in busy if each is not nodes[0]) if nodes[0] in busy else busy[0]
    survivors = [each for each in nodes if each is not victim]
    victim.die_with_workers()
    assert [each.wait() for each in survivors] == [0, 0]
    assert "cycle 1 begins" in spare.log()
    assert job.events().count("of world 2") == 4
    assert job.events().count("ends") == 2


@full_only
def test_a_spare_that_was_not_needed_ends_with_0(job: Job) -> None:
    script = f"""{PROLOGUE}
    while not os.path.exists(os.environ["TEST_EVENTS"] + ".go"):
        time.sleep(0.02)
    """
    nodes = start_nodes(job, script, 3, nodes="2:3")
    job.wait_event("rank 1 node")
    job.folder.joinpath("events.go").touch()
    assert [each.wait() for each in nodes] == [0, 0, 0]
    assert len(job.events().splitlines()) == 2


def test_a_node_that_a_rank_excludes_leaves_and_a_spare_takes_over(job: Job) -> None:
    script = f"""{PROLOGUE}
    from inprocess.fault_tolerance import RankMonitorClient, WorkloadAction, WorkloadControlRequest
    if cycle == 0 and rank == int(os.environ["WORLD_SIZE"]) - 1:
        RankMonitorClient().send_workload_control_request(
            WorkloadControlRequest(WorkloadAction.ExcludeThisNode, "a bad link"))
        say("excludes")
        sys.exit(1)
    if cycle == 0:
        hang()
    say("ends")
    """
    nodes = start_nodes(job, script, 3, nodes="2:3")
    # The host of the store is node 0 of both rounds or a spare: the numbers of launchers grow with their process ids.
    assert [each.wait() for each in nodes] == [0, 0, 0]
    (excluded,) = [each for each in nodes if "a rank has asked to leave this node out: a bad link" in each.log()]
    assert "cycle 1 begins" not in excluded.log()
    assert job.events().count("ends") == 2


def test_one_rank_ends_the_workload_on_all_nodes(job: Job) -> None:
    script = f"""{PROLOGUE}
    from inprocess.fault_tolerance import RankMonitorClient, WorkloadAction, WorkloadControlRequest
    if node == "1":
        RankMonitorClient().send_workload_control_request(
            WorkloadControlRequest(WorkloadAction.ShutdownWorkload, "diverged"))
        sys.exit(1)
    hang()
    """
    launchers = start_nodes(job, script, 2)
    assert [each.wait() for each in launchers] == [93, 93]
    assert len(job.events().splitlines()) == 2


@full_only
def test_a_launcher_that_is_started_again_in_a_fixed_place_joins_the_others(job: Job) -> None:
    script = f"""{PROLOGUE}
    if cycle == 0:
        hang()
    say("ends")
    """
    first, second = start_static(job, script, 2, "--max-restarts=2")
    job.wait_event("rank 1 node")
    job.wait_event("rank 0 node")
    second.die_with_workers()
    third = job.launch(script, *second.options, env={"TEST_NODE": "1"})
    assert (first.wait(), third.wait()) == (0, 0)
    assert job.events().count("cycle 1") == 4


def test_sigterm_to_all_nodes_ends_all_well(job: Job) -> None:
    script = """
    stopping = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: stopping.set())
    say("trains")
    while not stopping.wait(0.05):
        pass
    others("saved")
    """
    launchers = start_static(job, script, 2, "--max-restarts=2")
    for rank in (0, 1):
        job.wait_event(f"rank {rank} trains")
    for launcher in launchers:
        launcher.signal(signal.SIGTERM)
    assert [each.wait() for each in launchers] == [0, 0]
