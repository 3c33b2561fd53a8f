"""Health checks against machines that are made up: a CUDA, an NVML and a /sys."""

import logging
import sys
import threading
import types
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from inprocess.exception import FaultCounterExceeded, HealthCheckError
from inprocess.health_check import (
    ChainedGPUHealthCheck,
    ChainedNicHealthCheck,
    ChainedNVLHealthCheck,
    CudaHealthCheck,
    FaultCounter,
    HealthCheck,
)
from inprocess.state import FrozenState
from tests.inprocess.fake_devices import BUS_ID, FakeNvml, make_port

STATE = FrozenState(rank=0, world_size=1)


def fake_cuda(monkeypatch: pytest.MonkeyPatch, synchronize: Callable[[int], None], initialized: bool = True) -> None:
    cuda = types.SimpleNamespace(
        is_available=lambda: True,
        is_initialized=lambda: initialized,
        current_device=lambda: 0,
        set_device=lambda device: None,
        device_count=lambda: 8,
        synchronize=synchronize,
    )
    monkeypatch.setitem(sys.modules, "torch", types.SimpleNamespace(cuda=cuda))  # type: ignore[arg-type]


@pytest.fixture
def nvml(monkeypatch: pytest.MonkeyPatch) -> FakeNvml:
    fake = FakeNvml()
    monkeypatch.setitem(sys.modules, "pynvml", fake)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    return fake


@pytest.fixture
def sys_root(tmp_path: Path) -> Path:
    gpu = tmp_path / "devices/pci0000:3a/0000:3a:00.0" / BUS_ID
    gpu.mkdir(parents=True)
    (tmp_path / "bus/pci/devices").mkdir(parents=True)
    (tmp_path / "bus/pci/devices" / BUS_ID).symlink_to(gpu)
    return tmp_path


def test_without_hardware_nothing_is_checked(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", None)  # type: ignore[arg-type]
    caplog.set_level(logging.DEBUG, "inprocess")
    checks = [ChainedGPUHealthCheck(0), ChainedNVLHealthCheck(0), ChainedNicHealthCheck(0, tmp_path), CudaHealthCheck()]
    assert all(isinstance(check, HealthCheck) and check(STATE) is STATE for check in checks)
    assert {record.levelno for record in caplog.records} == {logging.DEBUG}
    assert "without NVML" in caplog.text


def test_cuda_is_synchronized_twice_on_the_device_of_this_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[tuple[int, bool]] = []
    main = threading.main_thread()
    fake_cuda(monkeypatch, lambda device: calls.append((device, threading.current_thread() is main)))
    monkeypatch.setenv("LOCAL_RANK", "5")
    assert CudaHealthCheck()(STATE) is STATE
    assert calls == [(5, False), (5, True)]


def test_cuda_is_not_initialized_by_the_check(monkeypatch: pytest.MonkeyPatch) -> None:
    fake_cuda(monkeypatch, lambda device: pytest.fail("touched"), initialized=False)
    assert CudaHealthCheck()(STATE) is STATE


def test_a_broken_cuda_device_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(device: int) -> None:
        raise RuntimeError("device-side assert triggered")

    fake_cuda(monkeypatch, broken)
    with pytest.raises(HealthCheckError, match="device-side assert"):
        CudaHealthCheck()(STATE)


def test_a_cuda_device_that_hangs_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    release = threading.Event()
    fake_cuda(monkeypatch, lambda device: bool(release.wait()))  # type: ignore[arg-type, return-value]
    with pytest.raises(HealthCheckError, match=r"not ended within 0\.05 s"):
        CudaHealthCheck(0.05)(STATE)
    release.set()


def test_faults_of_this_rank_are_counted_once_per_iteration() -> None:
    counter = FaultCounter(max_rank_faults=1)
    failed = replace(STATE, fn_exception=ValueError())
    for state in (STATE, failed, failed, replace(STATE, iteration=1)):
        assert counter(state) is state
    assert counter.faults == 1
    with pytest.raises(FaultCounterExceeded, match="2 iterations"):
        counter(replace(failed, iteration=2))


def test_a_counter_without_limit_only_counts() -> None:
    counter = FaultCounter()
    for iteration in range(5):
        counter(replace(STATE, iteration=iteration, fn_exception=ValueError()))
    assert counter.faults == 5


def test_a_gpu_that_is_well(nvml: FakeNvml, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCAL_RANK", "2")
    assert ChainedGPUHealthCheck()(STATE) is STATE
    assert nvml.opened == 0


def test_more_ranks_than_gpus(nvml: FakeNvml, monkeypatch: pytest.MonkeyPatch) -> None:
    nvml.remapped_failed = 1
    assert ChainedGPUHealthCheck(3)(STATE) is STATE
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert ChainedGPUHealthCheck(0)(STATE) is STATE
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,GPU-ab")
    assert ChainedGPUHealthCheck(2)(STATE) is STATE
    with pytest.raises(HealthCheckError, match="memory row"):
        ChainedGPUHealthCheck(1)(STATE)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2")  # as launchers do it that give each rank its own
    with pytest.raises(HealthCheckError, match="memory row"):
        ChainedGPUHealthCheck(7)(STATE)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"remapped_failed": 1}, "memory row"),
        ({"recovery": 2}, "recovery action 2"),
        ({"lost": True}, "cannot be queried"),
    ],
)
def test_a_gpu_that_is_not(nvml: FakeNvml, change: dict[str, Any], message: str) -> None:
    vars(nvml).update(change)
    with pytest.raises(HealthCheckError, match=message):
        ChainedGPUHealthCheck(0)(STATE)


def test_nvlinks_that_are_down_are_only_logged(nvml: FakeNvml, caplog: pytest.LogCaptureFixture) -> None:
    nvml.links = [1, 0, 1]
    assert ChainedNVLHealthCheck(0)(STATE) is STATE
    assert "NVLinks [1] of GPU 0 are down" in caplog.text


def test_only_the_nearest_card_counts(nvml: FakeNvml, sys_root: Path) -> None:
    make_port(sys_root, "mlx5_0", "pci0000:17/0000:17:00.0/0000:18:00.0").joinpath("state").write_text("1: DOWN\n")
    near = make_port(sys_root, "mlx5_1", "pci0000:3a/0000:3a:00.0/0000:3c:00.0", downs=4)
    check = ChainedNicHealthCheck(0, sys_root)
    assert check(STATE) is STATE
    (near / "counters/link_downed").write_text("6\n")
    with pytest.raises(HealthCheckError, match="mlx5_1 port 1 went down 2 times"):
        check(STATE)
    assert check(STATE) is STATE  # once is enough
    (near / "state").write_text("1: DOWN\n")
    with pytest.raises(HealthCheckError, match="mlx5_1 port 1 is down"):
        check(STATE)


def test_a_port_that_never_was_up_does_not_count(nvml: FakeNvml, sys_root: Path) -> None:
    port = make_port(sys_root, "mlx5_0", "pci0000:3a/0000:3a:00.0/0000:3c:00.0")
    (port / "state").write_text("1: DOWN\n")
    assert ChainedNicHealthCheck(0, sys_root)(STATE) is STATE
