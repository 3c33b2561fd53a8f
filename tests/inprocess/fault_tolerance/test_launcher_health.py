"""Nodes whose checks fail, at the start and while they work: others take their places, and all are told."""

import json
import os
import signal
from pathlib import Path

from tests.inprocess.fake_devices import DevicesFile
from tests.inprocess.fault_tolerance.launching import REPOSITORY, Job, Launcher
from tests.inprocess.fault_tolerance.test_launcher_nodes import PROLOGUE, start_nodes
from tests.support.selection import full_only

# A command for all nodes: a node is unfit while the file with its number is there.
COMMAND = "--ft-node-health-check-command=! cat {folder}/unfit.$TEST_NODE"
WORK = f"""{PROLOGUE}
    if cycle == 0:
        while not os.path.exists(os.environ["TEST_EVENTS"] + ".go"):
            time.sleep(0.02)
        if rank == 0:
            sys.exit(1)
        hang()
    say("ends")
"""


def command(job: Job) -> str:
    return COMMAND.format(folder=job.folder)


def make_unfit(job: Job, node: int, why: str) -> None:
    (job.folder / f"unfit.{node}").write_text(why)


def test_a_node_that_is_unfit_at_the_start_does_not_join_and_a_spare_works(job: Job, tmp_path: Path) -> None:
    make_unfit(job, 1, "the fan stands still")
    published = tmp_path / "published"
    script = f"{PROLOGUE}\n    while not os.path.exists(os.environ['TEST_EVENTS'] + '.go'):\n        time.sleep(0.02)"
    nodes = start_nodes(job, script, 3, command(job), f"--ft-node-health-publish-dir={published}", nodes="2:3")
    first, unfit, spare = nodes
    for each in (first, spare):
        each.wait_log("is unfit: command: the fan stands still")
    job.folder.joinpath("events.go").touch()
    assert [each.wait() for each in nodes] == [0, 0, 0]
    assert "this node is unfit: command: the fan stands still (exit code 1)" in unfit.log()
    assert "exit code 0: this node is unfit and takes no part" in unfit.log()
    assert "cycle 0 begins" not in unfit.log()
    for other in (first, spare):
        cause = f"cause: hardware: node {os.uname().nodename} (launcher {unfit.pid}) is unfit: command: the fan stands"
        assert cause in other.log()
        assert "cycle 0 begins" in other.log()
    assert sorted(line.split()[5] for line in job.events().splitlines()) == ["0", "2"], "which nodes have worked"
    failed = {"command": "the fan stands still (exit code 1)"}
    host = os.uname().nodename
    values = json.loads((published / f"{host}.json").read_text())
    assert (values["host"], values["pid"], values["cycle"], values["failed"]) == (host, unfit.pid, 0, failed)
    (event,) = map(json.loads, (published / "events.jsonl").read_text().splitlines())
    assert (event["event"], event["host"], event["failed"]) == ("node_unfit", host, failed)
    assert event["fault_class"] == "hardware"
    assert job.left() == []


@full_only
def test_a_node_that_has_become_unfit_leaves_at_the_next_rendezvous(job: Job) -> None:
    nodes = start_nodes(job, WORK, 3, command(job), nodes="2:3")
    busy = busy_nodes(job, nodes)
    number = next(each for each in busy if each != 0)
    make_unfit(job, number, "too hot")
    job.folder.joinpath("events.go").touch()
    assert [each.wait() for each in nodes] == [0, 0, 0]
    assert "this node is unfit: command: too hot" in nodes[number].log()
    assert "cycle 1 begins" not in nodes[number].log()
    assert job.events().count("ends") == 2


def busy_nodes(job: Job, nodes: list[Launcher]) -> list[int]:
    """Wait for both ranks; the numbers of the nodes that have them, not of the spares."""
    job.wait_event("cycle 0 rank 0 node")
    job.wait_event("cycle 0 rank 1 node")
    return [number for number, each in enumerate(nodes) if "cycle 0 begins" in each.log()]


def start_with_gpus(job: Job, script: str, *options: str, nodes: str) -> tuple[list[Launcher], list[DevicesFile]]:
    """Nodes with GPUs that are made up, and are looked at all the time."""
    count = int(nodes.rpartition(":")[2])
    devices = []
    for number in range(count):
        (job.folder / f"node{number}").mkdir()
        devices.append(DevicesFile(job.folder / f"node{number}"))
    path = f"{devices[0].folder}:{REPOSITORY}"
    env = [{"TEST_NVML": str(each.file), "PYTHONPATH": path} for each in devices]
    options = ("--ft-node-health-check-interval=0.1", *options)
    return start_nodes(job, script, count, *options, nodes=nodes, env=env), devices


def test_a_node_whose_gpu_is_lost_while_it_works_makes_room_for_a_spare(job: Job) -> None:
    script = f"""{PROLOGUE}
    if cycle == 0:
        hang()
    say("ends")
    """
    nodes, devices = start_with_gpus(job, script, nodes="2:3")
    busy = busy_nodes(job, nodes)
    number = next(each for each in busy if each != 0)
    devices[number].set(lost=True)
    assert [each.wait() for each in nodes] == [0, 0, 0]
    log = nodes[number].log()
    assert "this node is unfit: gpu: GPU 0: cannot be queried" in log
    assert "cycle 1 begins" not in log
    other = nodes[next(each for each in busy if each != number)].log()
    assert "another node says: a node is unfit: gpu: GPU 0: cannot be queried" in other
    assert f"(launcher {nodes[number].pid}) is unfit: gpu" in other
    assert job.events().count("ends") == 2


@full_only
def test_without_a_spare_an_unfit_node_goes_on_until_the_next_rendezvous(job: Job) -> None:
    nodes, devices = start_with_gpus(job, WORK, "--rdzv-conf=join_timeout=5", nodes="2:2")
    job.wait_event("cycle 0 rank 0 node")
    job.wait_event("cycle 0 rank 1 node")
    devices[1].set(ecc_errors=1)
    nodes[1].wait_log("this node goes on until the next rendezvous")
    nodes[0].wait_log("is unfit: gpu: GPU 0: 1 uncorrected ECC errors")
    job.folder.joinpath("events.go").touch()
    nodes[1].wait_log("this node is unfit, and no spare node is left for it: gpu")
    assert nodes[1].wait() == 1
    nodes[0].signal(signal.SIGTERM)
    assert nodes[0].wait() == 143


@full_only
def test_a_spare_that_has_become_unfit_while_it_waited_leaves_when_it_gets_in(job: Job) -> None:
    script = f"""{PROLOGUE}
    if cycle == 0:
        hang()
    say("ends")
    """
    nodes, devices = start_with_gpus(job, script, nodes="2:3")
    busy = busy_nodes(job, nodes)
    (spare,) = {0, 1, 2} - set(busy)
    nodes[spare].wait_log("checks of this node: gpu: ok")
    devices[spare].set(ecc_errors=1)
    victim = nodes[next(number for number in busy if number != 0)]
    victim.die_with_workers()
    nodes[spare].wait_log("this node is unfit: gpu: GPU 0: 1 uncorrected ECC errors")
    env = {"TEST_NODE": "3", "TEST_NVML": str(DevicesFile(job.folder / "logs").file), "PYTHONPATH": str(REPOSITORY)}
    joined = job.launch(script, *victim.options, env=env)
    assert {each.wait() for each in (*nodes, joined) if each is not victim} == {0}
    assert "cycle 1 begins" not in nodes[spare].log()
    assert job.events().count("ends") == 2


@full_only
def test_an_unfit_node_goes_on_hosting_the_store(job: Job) -> None:
    make_unfit(job, 0, "too hot")
    script = f"""{PROLOGUE}
    while not os.path.exists(os.environ["TEST_EVENTS"] + ".go"):
        time.sleep(0.02)
    """
    nodes = start_nodes(job, script, 3, command(job), nodes="2:4", conf="keep_alive_max_attempt=30")
    nodes[0].wait_log("this node hosts the store of the rendezvous, so its launcher runs")
    job.wait_event("rank 1 node")
    spare = job.launch(script, *nodes[1].options, env={"TEST_NODE": "3"})
    spare.wait_log("this node waits as a spare")
    spare.signal(signal.SIGSTOP)
    job.folder.joinpath("events.go").touch()
    assert [each.wait() for each in nodes[1:]] == [0, 0]
    spare.signal(signal.SIGCONT)
    assert [spare.wait(), nodes[0].wait()] == [0, 0], "the last to leave needs the store, too"
    assert "cycle 0 begins" not in nodes[0].log()


@full_only
def test_a_node_that_a_rank_excludes_goes_on_hosting_the_store(job: Job) -> None:
    script = f"""{PROLOGUE}
    from inprocess.fault_tolerance import RankMonitorClient, WorkloadAction, WorkloadControlRequest
    while cycle == 0 and not os.path.exists(os.environ["TEST_EVENTS"] + ".go"):
        time.sleep(0.02)
    if cycle == 0 and node == "0":
        RankMonitorClient().send_workload_control_request(
            WorkloadControlRequest(WorkloadAction.ExcludeThisNode, "a bad link"))
        sys.exit(1)
    if cycle == 0:
        hang()
    say("ends")
    """
    nodes = start_nodes(job, script, 2, nodes="2:3")
    nodes[0].wait_log("cycle 0 begins")
    spare = job.launch(script, *nodes[1].options, env={"TEST_NODE": "2"})
    job.folder.joinpath("events.go").touch()
    assert [each.wait() for each in (*nodes, spare)] == [0, 0, 0]
    assert "this node hosts the store of the rendezvous, so its launcher runs" in nodes[0].log()
    assert job.events().count("ends") == 2


@full_only
def test_a_disk_that_hangs_keeps_no_launcher(job: Job) -> None:
    os.mkfifo(job.folder / "pipe")
    options = (f"--ft-storage-healthcheck-path={job.folder}/pipe", "--ft-node-health-check-timeout=0.5")
    launcher = job.one_node("say('works')", *options)
    assert launcher.wait() == 1
    assert "it has not ended within 0.5 s (reading" in launcher.log()
    assert "no spare node is left" in launcher.log()
    assert job.events() == ""
    assert job.left() == []


@full_only
def test_a_failure_while_workers_end_by_a_signal_is_told(job: Job) -> None:
    script = """
    stopping = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: stopping.set())
    say("works")
    while not stopping.wait(0.05):
        pass
    say("ends")
    while not os.path.exists(os.environ["TEST_EVENTS"] + ".go"):
        time.sleep(0.02)
    """
    (launcher,), (devices,) = start_with_gpus(job, script, nodes="1:1")
    job.wait_event("works")
    launcher.signal(signal.SIGTERM)
    job.wait_event("ends")
    devices.set(ecc_errors=1)
    launcher.wait_log("this node is unfit: gpu")
    job.folder.joinpath("events.go").touch()
    assert launcher.wait() == 0


@full_only
def test_a_signal_ends_a_launcher_whose_checks_run(job: Job) -> None:
    launcher = job.one_node("say('works')", f"--ft-node-health-check-command=touch {job.folder}/asked; sleep 1000")
    job.wait_for(lambda: "asked" * (job.folder / "asked").exists(), "asked", 30)
    launcher.signal(signal.SIGTERM)
    assert launcher.wait() == 143
    assert job.left() == []
