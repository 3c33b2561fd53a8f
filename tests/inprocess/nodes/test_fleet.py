"""A fleet of three nodes and two spares, and what can become of a node: the results are those of an undisturbed job."""

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import pytest

from tests.inprocess.fake_devices import DevicesFile
from tests.inprocess.faults.nursery import Nursery
from tests.inprocess.nodes.fleet import Fleet, losses, weights
from tests.inprocess.nodes.fleet_training import STEPS
from tests.inprocess.nodes.lab import Lab
from tests.support.selection import full_only

MakeLab = Callable[[int], Lab]
_TRAINING, _SPARES = (0, 1, 2), (3, 4)
_VICTIM = 1
_HELD_STEP, _SAVED_STEP = 12, 10
_DISK_BYTES = 32 << 20


@pytest.fixture(scope="module")
def undisturbed(
    nodes_nursery: Nursery, tmp_path_factory: pytest.TempPathFactory, _possible: str | None
) -> tuple[dict[int, str], list[str]]:
    """The losses and weights of a job of three nodes without faults."""
    if _possible is not None:
        pytest.skip(_possible)
    with Lab(nodes_nursery, tmp_path_factory.mktemp("undisturbed"), 3) as lab:
        fleet = Fleet(lab, training=3)
        for node in lab.nodes:
            fleet.start(node)
        assert fleet.wait_exits([0, 1, 2]) == [0, 0, 0], fleet.describe()
        return losses(fleet), weights(fleet)


def restarted_from(fleet: Fleet, cycle: int) -> set[str]:
    return {each.what for each in fleet.said() if each.cycle == cycle and each.what.startswith("from")}


def report(fleet: Fleet) -> dict[str, object]:
    """What `inspect_ckpt report` says of the root and the events of the job."""
    command = [sys.executable, "-m", "tools.inspect_ckpt", "--json", "report", str(fleet.folder / "root")]
    command += ["-o", str(fleet.folder / "report.html"), "--events", str(fleet.folder / "ckpt.jsonl")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


# -- a node becomes sick while it works --------------------------------------------------------------------------------


def with_gpus(fleet: Fleet, lab: Lab) -> dict[int, DevicesFile]:
    """GPUs that are made up, on each node."""
    found = {}
    for node in lab.nodes:
        folder = fleet.folder / f"devices{node}"
        folder.mkdir()
        found[node] = DevicesFile(folder)
    return found


def of_gpus(devices: DevicesFile) -> dict[str, str]:
    return {"TEST_NVML": str(devices.file), "PYTHONPATH": f"{devices.folder}:{os.environ['PYTHONPATH']}"}


def test_x(make_lab: MakeLab, undisturbed) -> None:
    fleet = Fleet(make_lab(5), training=3)
    fleet.hold(_HELD_STEP, _VICTIM)
    fleet.start_in_order(_TRAINING, _SPARES)
    fleet.wait(f"reaches {_HELD_STEP}", _TRAINING)
    fleet.lab.power_off(_VICTIM)
    assert fleet.wait_exits([0, 2, 3, 4]) == [0, 0, 0, 0], fleet.describe()
    print(fleet.describe())
    assert fleet.seats(1) == ["node0", "node3", "node2"]
    assert restarted_from(fleet, 1) == {f"from {_SAVED_STEP}"}
    assert (losses(fleet), weights(fleet)) == undisturbed
    print(report(fleet))
