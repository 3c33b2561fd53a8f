"""A rank whose GPU is broken is reported; one without a GPU is left alone. The GPU is a stand-in."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from inprocess.fault_tolerance import FaultToleranceConfig, side_checks
from inprocess.fault_tolerance.side_checks import SideChecks


class Gpu:
    bus_id = None

    def __init__(self) -> None:
        self.found: list[str] = []

    def defects(self) -> list[str]:
        return list(self.found)


def _with(monkeypatch: pytest.MonkeyPatch, gpu: Any) -> None:
    @contextmanager
    def opened(local_rank: int) -> Iterator[Any]:
        if isinstance(gpu, Exception):
            raise gpu
        yield gpu

    monkeypatch.setattr(side_checks, "open_gpu", opened)


CONFIG = FaultToleranceConfig(node_health_check_interval=0.01, enable_nic_monitor=True)


def test_a_defect_is_told_once(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu, told = Gpu(), threading.Event()
    _with(monkeypatch, gpu)
    checks = SideChecks(CONFIG, 0, told.set)
    assert checks.defect is None
    gpu.found = ["it fell off the bus"]
    assert told.wait(30)
    assert checks.defect == "it fell off the bus"
    checks.stop()


def test_without_a_gpu_nothing_is_started(monkeypatch: pytest.MonkeyPatch) -> None:
    for gpu, local_rank in ((None, 0), (RuntimeError("no driver"), 0), (Gpu(), -1)):
        _with(monkeypatch, gpu)
        checks = SideChecks(CONFIG, local_rank, lambda: None)
        assert checks._thread is None
        checks.stop()
