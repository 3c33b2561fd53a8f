"""The process that checks a node."""

import os
import select
import signal
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import psutil
import pytest

from inprocess.node_health.interface import FAILED, NOT_APPLICABLE, OK, CheckResult
from inprocess.node_health.messages import NodeCheckSettings
from inprocess.node_health.node_probe import NodeProbe
from tests.inprocess.fake_devices import DevicesFile


@pytest.fixture
def probe() -> Iterator[NodeProbe]:
    with closing(NodeProbe(NodeCheckSettings(interval_s=0.05, limit_s=30, command="true"))) as found:
        yield found


def test_all_checks_are_reported_in_one_run(tmp_path: Path) -> None:
    settings = NodeCheckSettings(
        interval_s=60,
        limit_s=30,
        checks_gpus=True,
        checks_shared_mounts=True,
        storage_paths=(str(tmp_path), "/nowhere"),
        command="echo no; exit 1",
        segment_folder=str(tmp_path),
    )
    with closing(NodeProbe(settings)) as probe:
        found = {result.name: result.outcome for result in probe.run()}
    assert found == {
        "gpu": NOT_APPLICABLE,
        "nvlink": NOT_APPLICABLE,
        "xid": NOT_APPLICABLE,
        f"storage {tmp_path}": OK,
        "storage /nowhere": FAILED,
        "shared mounts": found["shared mounts"],
        "segment": NOT_APPLICABLE,
        "command": FAILED,
    }


def test_a_process_that_has_died_is_replaced(probe: NodeProbe) -> None:
    assert probe.run() == (CheckResult("command", OK),)
    (first,) = probe.pids
    os.kill(first, signal.SIGKILL)
    assert select.select([probe.fd], [], [], 30)[0]
    assert probe.take_failures() == ()
    assert (probe.fd, probe.pids) == (-1, [])
    assert probe.run() == (CheckResult("command", OK),)
    (second,) = probe.pids
    os.kill(second, signal.SIGKILL)
    assert probe.run() == (CheckResult("command", OK),), "also if that was not noticed before"


def test_a_process_that_does_not_answer_is_a_failure() -> None:
    with closing(NodeProbe(NodeCheckSettings(0.05, limit_s=0.0, command="true"))) as probe:
        probe.run()
        probe._start_s = 0.5
        os.kill(probe.pids[0], signal.SIGSTOP)
        assert probe.run() == (CheckResult("checks", FAILED, "they have not answered within 0.5 s"),)
        assert probe.pids == []


def test_it_ends_while_a_check_hangs(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    settings = NodeCheckSettings(60, limit_s=0.1, storage_paths=(f"{tmp_path}/pipe",))
    probe = NodeProbe(settings)
    assert probe.run()[0].outcome == FAILED
    process = psutil.Process(probe.pids[0])
    began = time.monotonic()
    probe.close()
    assert time.monotonic() - began < 20
    assert not process.is_running()


def test_a_gpu_that_fails_while_the_node_works(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    devices = DevicesFile(tmp_path)
    monkeypatch.syspath_prepend(devices.folder)
    monkeypatch.setenv("TEST_NVML", str(devices.file))
    with closing(NodeProbe(NodeCheckSettings(0.05, limit_s=30, checks_gpus=True))) as probe:
        assert [result.outcome for result in probe.run()][:2] == [OK, OK]
        assert not select.select([probe.fd], [], [], 0.5)[0], "as long as nothing fails there is nothing to read"
        devices.set(ecc_errors=2)
        assert select.select([probe.fd], [], [], 30)[0]
        (failure,) = probe.take_failures()
        assert failure.name == "gpu"
        assert "2 uncorrected ECC errors" in failure.why
        assert not select.select([probe.fd], [], [], 0.5)[0], "it is told once"
        assert probe.run()[0].outcome == FAILED
