"""Health of a rank's devices, checked by its monitor process. Without a GPU nothing is checked."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

from inprocess.hardware import Port, nearest_ports, open_gpu

_log = logging.getLogger(__name__)


class DeviceHealth:
    """A thread that checks the rank's GPU, and nearby network ports if `checks_ports`, every `interval_s` seconds.

    A thread, because drivers may take seconds to answer. The first `defect` stays, and `on_defect` is called once, on
    that thread. Nothing is started for a rank without a GPU.
    """

    def __init__(self, local_rank: int, interval_s: float, checks_ports: bool, on_defect: Callable[[], None]) -> None:
        self.defect: str | None = None
        self._local_rank = local_rank
        self._interval_s = interval_s
        self._checks_ports = checks_ports
        self._on_defect = on_defect
        self._stopped = threading.Event()
        self._thread: threading.Thread | None = None
        if local_rank >= 0 and _has_gpu(local_rank):
            self._thread = threading.Thread(target=self._run, name="device-health", daemon=True)
            self._thread.start()

    def stop(self) -> None:
        """End the thread, without waiting for a driver. Idempotent."""
        self._stopped.set()

    def _run(self) -> None:
        ports = self._active_ports() if self._checks_ports else []
        while not self._stopped.wait(self._interval_s):
            try:
                with open_gpu(self._local_rank) as gpu:
                    defects = [] if gpu is None else gpu.defects()
                defects += [f"{port.name} is down" for port in ports if not port.is_active()]
            except Exception as error:
                defects = [f"GPU {self._local_rank} cannot be queried: {error}"]
            if defects and not self._stopped.is_set():
                self.defect = "; ".join(defects)
                self._on_defect()
                return

    def _active_ports(self) -> list[Port]:
        try:
            with open_gpu(self._local_rank) as gpu:
                bus_id = None if gpu is None else gpu.bus_id
        except Exception as error:
            _log.warning("network ports near GPU %d are not checked: %s", self._local_rank, error)
            return []
        return [] if bus_id is None else [port for port in nearest_ports(bus_id) if port.is_active()]


def _has_gpu(local_rank: int) -> bool:
    try:
        with open_gpu(local_rank) as gpu:
            return gpu is not None
    except Exception as error:
        _log.warning("GPU %d cannot be queried: %s", local_rank, error)
        return False
