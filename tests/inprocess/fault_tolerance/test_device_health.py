"""A rank whose GPU is broken is reported; one without a GPU is left alone. The GPU is a stand-in."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from inprocess.monitor_process import device_health
from inprocess.monitor_process.device_health import DeviceHealth


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

    monkeypatch.setattr(device_health, "open_gpu", opened)


def test_a_defect_is_told_once(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu, told = Gpu(), threading.Event()
    _with(monkeypatch, gpu)
    health = DeviceHealth(0, 0.01, True, told.set)
    assert health.defect is None
    gpu.found = ["it fell off the bus"]
    assert told.wait(30)
    assert health.defect == "it fell off the bus"
    health.stop()


def test_without_a_gpu_nothing_is_started(monkeypatch: pytest.MonkeyPatch) -> None:
    for gpu, local_rank in ((None, 0), (RuntimeError("no driver"), 0), (Gpu(), -1)):
        _with(monkeypatch, gpu)
        health = DeviceHealth(local_rank, 0.01, True, lambda: None)
        assert health._thread is None
        health.stop()
