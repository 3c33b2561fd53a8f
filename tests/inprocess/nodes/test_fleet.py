"""A fleet of three nodes and two spares, and what can become of a node: the results are those of an undisturbed job."""

import contextlib
import json
import re
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import pytest

from tests.inprocess.fake_devices import DevicesFile
from tests.inprocess.faults.events import wait_until
from tests.inprocess.faults.nursery import Nursery
from tests.inprocess.nodes.fleet import REPOSITORY, Fleet, losses, weights
from tests.inprocess.nodes.lab import Lab
from tests.support.selection import full_only

MakeLab = Callable[[int], Lab]
Results = tuple[dict[int, str], list[str]]
_VICTIM = 1
_HELD_STEP, _SAVED_STEP = 12, 10
_DISK_BYTES = 32 << 20
_SLOW_KILOBITS = 20_000  # those of other nodes have a hundred times that
_CHECK = ("--ft-network-check=true", "--ft-network-check-mb=1", "--ft-network-check-factor=20")


@pytest.fixture(scope="module")
def undisturbed(nodes_nursery: Nursery, tmp_path_factory: pytest.TempPathFactory, _possible: str | None) -> Results:
    """The losses and weights of a job of three nodes without faults."""
    if _possible is not None:
        pytest.skip(_possible)
    with Lab(nodes_nursery, tmp_path_factory.mktemp("undisturbed"), 3) as lab:
        fleet = Fleet(lab, 3)
        fleet.start_all()
        assert fleet.wait_exits([0, 1, 2]) == [0, 0, 0], fleet.describe()
        return losses(fleet), weights(fleet)


def check_trained(fleet: Fleet, undisturbed: Results, seats: Sequence[int], cycle: int) -> None:
    """The last cycle had these nodes, by rank; every step has the values of the job without faults, to the bit."""
    assert fleet.seats(cycle) == [f"node{node}" for node in seats]
    assert fleet.seats(cycle + 1) == []
    if cycle:
        begun = {each.what for each in fleet.said() if each.cycle == cycle and each.what.startswith("from")}
        assert begun == {f"from {_SAVED_STEP}"}
    assert (losses(fleet), weights(fleet)) == undisturbed
    assert fleet.left() == {}


def published_steps(fleet: Fleet, root: str = "root") -> list[int]:
    """The steps of a root that `inspect_ckpt report` shows, with the events of all ranks; all of them are whole."""
    command = [sys.executable, "-m", "tools.inspect_ckpt", "report", "--json", "-o", str(fleet.folder / "report.html")]
    command += [str(fleet.folder / root), "--events", str(fleet.folder / "ckpt.jsonl")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    steps: list[int] = json.loads(done.stdout)["steps"]
    return sorted(steps)


def check_unfit(fleet: Fleet, fault_class: str, check: str, why: str) -> None:
    """Node 1 has left because of this check; the nodes of the job say so, with the class, and it is published."""
    assert f"this node is unfit: {check}" in fleet.log(_VICTIM)
    for node in sorted({*fleet.training, *fleet.spares[:1]} - {_VICTIM}):
        assert re.search(f"cause: {fault_class}: node node1 .* is unfit: {check}.*{re.escape(why)}", fleet.log(node))
    (line,) = (fleet.published / "events.jsonl").read_text().splitlines()
    event = json.loads(line)
    assert (event["host"], event["fault_class"]) == ("node1", fault_class)
    ((name, reason),) = event["failed"].items()
    assert name.startswith(check)
    assert why in reason


@full_only
@pytest.mark.timeout(400)
@pytest.mark.parametrize("lose", ["power_off", "kill_node", "cut"])
def test_a_node_is_lost(lose: str, make_lab: MakeLab, undisturbed: Results) -> None:
    """Without a sign to others, with its connections closed by the kernel, or cut off while its processes go on."""
    fleet = Fleet(make_lab(5), 3)
    fleet.hold(_HELD_STEP, _VICTIM)
    fleet.start_all()
    fleet.wait(f"reaches {_HELD_STEP}", fleet.training)
    getattr(fleet.lab, lose)(_VICTIM)
    assert fleet.wait_exits([0, 2, 3, 4]) == [0, 0, 0, 0], fleet.describe()
    check_trained(fleet, undisturbed, (0, 3, 2), cycle=1)
    for node in (0, 2, 3):
        assert "cause: hardware: node 1 (10.77.0.2) is lost" in fleet.log(node)
    assert "this spare node was not needed" in fleet.log(4)
    if lose == "cut":
        assert fleet.wait_exits([_VICTIM]) == [1], "it ends by itself"
        assert "the node that hosts the rendezvous does not answer" in fleet.log(_VICTIM)
        assert fleet.left() == {}
    assert published_steps(fleet) == [5, 10, 15, 20]


@full_only
@pytest.mark.timeout(400)
@pytest.mark.parametrize("check", ["command", "segment", "storage"])
def test_a_node_is_sick_at_the_start(check: str, make_lab: MakeLab, tmp_path: Path, undisturbed: Results) -> None:
    """By a command, by what the scheduler has decided about its allocation, or because its disk is full."""
    lab = make_lab(5)
    disk = make_disks(lab, tmp_path, {_VICTIM: 1 << 19})
    decision = tmp_path / "segment_health_check.7.7"
    decision.write_text("too hot")
    option, why, fault_class = {
        "command": (f"node-health-check-command=[ $(hostname) != node1 ] || ! cat {decision}", "too hot", "hardware"),
        "segment": (f"segment-health-check-dir={tmp_path}", f"{decision} excludes this allocation", "hardware"),
        "storage": (f"storage-healthcheck-path={disk}", "No space left on device", "storage"),
    }[check]
    fleet = Fleet(lab, 3, f"--ft-{option}", env_of={_VICTIM: {"SLURM_PROCID": "0", "SLURM_JOB_ID": "7"}})
    for node in (0, _VICTIM):
        fleet.start(node)
    assert fleet.wait_exits([_VICTIM]) == [0], fleet.describe()
    for node in (2, 3):
        fleet.start(node)
    fleet.wait("from", [0, 2, 3])
    fleet.start(4)
    assert fleet.wait_exits([0, 2, 3, 4]) == [0, 0, 0, 0], fleet.describe()
    check_trained(fleet, undisturbed, (0, 2, 3), cycle=0)
    check_unfit(fleet, fault_class, check, why)
    assert published_steps(fleet) == [5, 10, 15, 20]


@pytest.mark.timeout(180)
def test_a_node_becomes_sick(make_lab: MakeLab, tmp_path: Path) -> None:
    """One of two nodes loses a GPU, and a spare goes on from the newest step: a small fleet, to be quick."""
    fleet = lose_a_gpu(make_lab(3), 2, tmp_path)
    assert fleet.wait_exits([0, 1, 2]) == [0, 0, 0], fleet.describe()
    check_trained(fleet, (losses(fleet), weights(fleet)), (0, 2), cycle=1)
    check_unfit(fleet, "hardware", "gpu", "GPU 0: cannot be queried")


@full_only
@pytest.mark.timeout(400)
def test_one_of_three_nodes_becomes_sick(make_lab: MakeLab, tmp_path: Path, undisturbed: Results) -> None:
    fleet = lose_a_gpu(make_lab(5), 3, tmp_path)
    assert fleet.wait_exits([0, 1, 2, 3, 4]) == [0, 0, 0, 0, 0], fleet.describe()
    check_trained(fleet, undisturbed, (0, 3, 2), cycle=1)
    check_unfit(fleet, "hardware", "gpu", "GPU 0: cannot be queried")
    assert published_steps(fleet) == [5, 10, 15, 20]


@full_only
@pytest.mark.timeout(400)
def test_a_node_has_a_slow_link(make_lab: MakeLab, undisturbed: Results) -> None:
    """The check of the links names it before the first cycle, and a spare works in its place."""
    lab = make_lab(5)
    lab.network.slow(_VICTIM, _SLOW_KILOBITS)
    fleet = Fleet(lab, 3, *_CHECK, silence_s=15)
    for node in lab.nodes[:3]:
        fleet.start(node)
    for node in lab.nodes[:3]:
        fleet.wait_log(node, "the links of 3 nodes are checked")
    for node in lab.nodes[3:]:
        fleet.start(node)
    assert fleet.wait_exits([0, 1, 2, 3, 4]) == [0, 0, 0, 0, 0], fleet.describe()
    check_trained(fleet, undisturbed, (0, 3, 2), cycle=0)
    check_unfit(fleet, "network", "network", "Gbit/s")
    for node in (0, 2):
        assert "network check: the link of node 1 (node1, " in fleet.log(node)
    assert published_steps(fleet) == [5, 10, 15, 20]


@full_only
@pytest.mark.timeout(400)
def test_a_save_to_a_full_disk_fails_and_a_spare_takes_the_place(
    make_lab: MakeLab, tmp_path: Path, undisturbed: Results
) -> None:
    """All ranks raise the error of the save; the check of the disk then keeps the node out."""
    lab = make_lab(5)
    disk = make_disks(lab, tmp_path)
    fleet = Fleet(lab, 3, f"--ft-storage-healthcheck-path={disk}", env={"FLEET_DISK": str(disk)})
    fill_disk(fleet, disk)
    fleet.release(_HELD_STEP)
    assert fleet.wait_exits([0, 1, 2, 3, 4]) == [0, 0, 0, 0, 0], fleet.describe()
    check_trained(fleet, undisturbed, (0, 3, 2), cycle=1)
    check_unfit(fleet, "storage", "storage", "No space left on device")
    logs = "".join(map(fleet.log, fleet.training))  # the others are ended when the first rank has raised
    assert re.search(r"cause: storage: rank \d was first: .*step 15 .* rank 1: StorageError: .*No space left", logs)
    assert published_steps(fleet, "mirror") == [5, 10, 15, 20]
    check_abandoned(fleet, 1)


@full_only
@pytest.mark.timeout(400)
def test_training_goes_on_beside_a_full_disk(make_lab: MakeLab, tmp_path: Path, undisturbed: Results) -> None:
    """With `on_failed_save="warn"` the save fails on all ranks, and one after there is room again is published."""
    lab = make_lab(3)
    disk = make_disks(lab, tmp_path)
    fleet = Fleet(lab, 3, env={"FLEET_DISK": str(disk), "FLEET_FAILED_SAVES": "warn"})
    fleet.hold(18, _VICTIM)
    filler = fill_disk(fleet, disk)
    fleet.release(_HELD_STEP)
    fleet.wait("reaches 18", fleet.training)
    filler.unlink()
    fleet.release(18)
    assert fleet.wait_exits([0, 1, 2]) == [0, 0, 0], fleet.describe()
    check_trained(fleet, undisturbed, (0, 1, 2), cycle=0)
    assert re.search("step 15.*rank 1.*No space left on device", fleet.log(0)), "a warning of rank 0"
    assert published_steps(fleet, "mirror") == [5, 10, 20]
    check_abandoned(fleet, 3)


def check_abandoned(fleet: Fleet, ranks: int) -> None:
    """Events of so many ranks say on which rank the save has failed, and why; the page of the report does, too."""
    events = map(json.loads, (fleet.folder / "ckpt.jsonl").read_text().splitlines())
    found = [event for event in events if event["event"] == "SaveAbandoned"]
    assert len({event["rank"] for event in found if event["step"] == 15}) >= ranks
    for event in found:  # the next save may have failed before the error is raised
        assert event["step"] in (15, 20)
        assert (event["by_rank"], event["kind"]) == (1, "StorageError")
        assert "No space left on device" in event["cause"]
    assert "step 15: StorageError: cannot write" in (fleet.folder / "report.html").read_text()


def make_disks(lab: Lab, folder: Path, sizes: Mapping[int, int] | None = None) -> Path:
    """A disk for each node, at the same path on all."""
    path = folder / "disk"
    path.mkdir()
    lab.disks = {node: (path, (sizes or {}).get(node, _DISK_BYTES)) for node in lab.nodes}
    return path


def fill_disk(fleet: Fleet, disk: Path) -> Path:
    """Start all nodes, and fill the disk of one when its steps so far are copied; return the file that fills it."""
    fleet.hold(_HELD_STEP, _VICTIM)
    fleet.start_all()
    fleet.wait(f"reaches {_HELD_STEP}", fleet.training)
    copy = fleet.folder / "mirror" / f"step_{_SAVED_STEP:08}"
    wait_until(copy.exists, "the copy of a step", 60.0)
    filler = fleet.disk(_VICTIM, disk) / "filler"
    with contextlib.suppress(OSError), filler.open("wb", buffering=0) as file:
        while True:
            file.write(bytes(1 << 12))
    return filler


def lose_a_gpu(lab: Lab, training: int, folder: Path) -> Fleet:
    """Let node 1 lose a GPU, which is made up, while it works."""
    devices = DevicesFile(folder)
    own = {"TEST_NVML": str(devices.file), "PYTHONPATH": f"{devices.folder}:{REPOSITORY}"}
    fleet = Fleet(lab, training, "--ft-node-health-check-interval=0.1", env_of={_VICTIM: own})
    fleet.hold(_HELD_STEP, _VICTIM)
    fleet.start_all()
    fleet.wait(f"reaches {_HELD_STEP}", fleet.training)
    devices.set(lost=True)
    return fleet
