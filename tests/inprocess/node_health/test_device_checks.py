"""Checks of GPUs, links and network cards of machines that are made up, and of the clock of this one."""

import sys
from pathlib import Path
from typing import Any

import pytest

from inprocess.node_health.check_chain import CheckChain
from inprocess.node_health.device_checks import (
    ClockCheck,
    GpuCheck,
    NetworkCardCheck,
    NvLinkCheck,
    XidCheck,
    read_clock,
)
from inprocess.node_health.interface import FAILED, NOT_APPLICABLE, OK, NodeCheck
from tests.inprocess.fake_devices import FakeNvml, make_port

XID = "4,1234,5678,-;NVRM: Xid (PCI:0000:3B:00): {number}, pid=77, name=python, GPU has fallen off the bus.\n"


@pytest.fixture
def nvml(monkeypatch: pytest.MonkeyPatch) -> FakeNvml:
    fake = FakeNvml()
    monkeypatch.setitem(sys.modules, "pynvml", fake)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    return fake


def outcome(check: NodeCheck) -> tuple[str, str]:
    result = check.run()
    assert result.name == check.name
    return result.outcome, result.why


def test_without_devices_there_is_nothing_to_check(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", None)  # type: ignore[arg-type]
    for check in (GpuCheck(), NvLinkCheck(), XidCheck(), NetworkCardCheck(tmp_path)):
        assert outcome(check)[0] == NOT_APPLICABLE


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"lost": True}, "GPU 2: cannot be queried: 15"),
        ({"ecc_errors": 3}, "GPU 2: 3 uncorrected ECC errors"),
        ({"remap_pending": 1}, "GPU 2: the remapping of a memory row waits"),
        ({"remapped_failed": 1}, "GPU 2: remapping a memory row has failed"),
        ({"recovery": 2}, "GPU 2: the driver asks for recovery action 2"),
    ],
)
def test_a_gpu_that_is_unfit(nvml: FakeNvml, change: dict[str, Any], why: str) -> None:
    check = GpuCheck()
    assert outcome(check) == (OK, "")
    vars(nvml).update(change)
    found, said = outcome(check)
    assert found == FAILED
    assert why in said
    assert said.count("GPU ") == nvml.count, "all of them are told, not only the first"
    assert nvml.opened == 0


def test_only_visible_gpus_count(nvml: FakeNvml, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
    nvml.ecc_errors = 1
    assert outcome(GpuCheck()) == (FAILED, "GPU 1: 1 uncorrected ECC errors since the last reset")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "-1")
    assert outcome(GpuCheck())[0] == NOT_APPLICABLE


def test_nvlinks_are_compared_with_other_gpus_and_with_before(nvml: FakeNvml) -> None:
    check = NvLinkCheck()
    nvml.links = [1, 1, 0]  # the third is connected to nothing on this machine
    assert outcome(check) == (OK, "")
    nvml.links_of = {"1": [1, 0, 0]}
    assert outcome(check) == (FAILED, "GPU 1 has 1 links of 2")
    assert outcome(NvLinkCheck()) == (FAILED, "GPU 1 has 1 links of 2"), "also if it never had more"
    nvml.links_of = {str(number): [0, 0, 0] for number in range(3)}
    assert outcome(check)[1].count("has 0 links of 2") == 3
    assert outcome(NvLinkCheck())[0] == NOT_APPLICABLE


def test_an_error_of_the_hardware_in_the_kernels_log(nvml: FakeNvml, tmp_path: Path) -> None:
    log = tmp_path / "kmsg"
    log.write_text(XID.format(number=79))  # before this job
    check = XidCheck(log)
    assert outcome(check) == (OK, "")
    with log.open("a") as file:
        file.write(XID.format(number=31))  # a program's own error
    assert outcome(check) == (OK, "")
    with log.open("a") as file:
        file.write(XID.format(number=79) + XID.replace("3B", "9D").format(number=48))  # that of a GPU of another job
    assert outcome(check) == (FAILED, "GPU at PCI 0000:3B:00: Xid 79")
    nvml.lost = True  # then it is not known which GPU it is
    assert outcome(check)[1] == "GPU at PCI 0000:3B:00: Xid 79; GPU at PCI 0000:9D:00: Xid 48"
    nvml.lost = False
    assert outcome(XidCheck(tmp_path / "none"))[0] == NOT_APPLICABLE


def test_network_cards_whose_link_was_up(tmp_path: Path) -> None:
    port = make_port(tmp_path, "mlx5_0", "pci0000:17/0000:18:00.0", downs=4)
    make_port(tmp_path, "mlx5_1", "pci0000:3a/0000:3c:00.0").joinpath("state").write_text("1: DOWN\n")  # not in use
    (port / "counters/link_error_recovery").write_text("7\n")
    chain = CheckChain([NetworkCardCheck(tmp_path)], 30)

    def found(is_working: bool) -> tuple[str, str]:
        (result,) = chain.run(only_cheap=is_working)
        return result.outcome, result.why

    assert found(False) == (OK, "")
    (port / "counters/link_downed").write_text("5\n")
    assert found(False) == (OK, ""), "before the node joins, a link that is up again is in order"
    assert found(True) == (OK, "")
    (port / "counters/link_downed").write_text("7\n")
    (port / "counters/link_error_recovery").write_text("8\n")
    assert found(True) == (FAILED, "mlx5_0 port 1 has errors: link_downed +2, link_error_recovery +1")
    assert found(True) == (OK, ""), "errors count once"
    (port / "state").write_text("1: DOWN\n")
    assert found(True) == found(False) == (FAILED, "mlx5_0 port 1 is down")


def test_the_clock() -> None:
    def refused() -> tuple[bool, float]:
        raise PermissionError(1, "Operation not permitted")

    assert outcome(ClockCheck(0.5, lambda: (True, 0.4))) == (OK, "")
    assert outcome(ClockCheck(0.5, lambda: (True, 0.6))) == (
        FAILED,
        "the clock may be wrong by 0.600 s, more than 0.5 s",
    )
    assert "not synchronized" in outcome(ClockCheck(0.5, lambda: (False, 0.1)))[1]
    assert outcome(ClockCheck(0.5, refused))[0] == NOT_APPLICABLE
    is_synchronized, error_s = read_clock()
    assert error_s > 0
    assert outcome(ClockCheck(1e9))[0] == (OK if is_synchronized else FAILED)
