"""Checks of a rank's hardware that go on beside it, in its monitor process. Without a GPU they do nothing."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

from inprocess.fault_tolerance.config import FaultToleranceConfig
from inprocess.hardware import Port, nearest_ports, open_gpu

__all__ = ["SideChecks"]

_log = logging.getLogger(__name__)


class SideChecks:
    """A thread that looks every `node_health_check_interval`: drivers may take seconds to answer.

    `defect` is what was found, for the monitor to act on; it stays. Nothing is started for a rank without GPU.
    """

    def __init__(self, config: FaultToleranceConfig, local_rank: int, on_defect: Callable[[], None]) -> None:
        self.defect: str | None = None
        self._interval_s = config.node_health_check_interval
        self._watches_network = config.enable_nic_monitor
        self._local_rank = local_rank
        self._on_defect = on_defect
        self._stopped = threading.Event()
        self._thread: threading.Thread | None = None
        if local_rank >= 0 and _has_gpu(local_rank):
            self._thread = threading.Thread(target=self._run, name="side-checks", daemon=True)
            self._thread.start()

    def stop(self) -> None:
        """End; does not wait for a driver. Idempotent."""
        self._stopped.set()

    def _run(self) -> None:
        ports = self._active_ports() if self._watches_network else []
        while not self._stopped.wait(self._interval_s):
            try:
                with open_gpu(self._local_rank) as gpu:
                    defects = [] if gpu is None else gpu.defects()
                defects += [f"{port.name} is down" for port in ports if not port.is_active()]
            except Exception as error:
                defects = [f"GPU {self._local_rank} cannot be asked: {error}"]
            if defects and not self._stopped.is_set():
                self.defect = "; ".join(defects)
                self._on_defect()
                return

    def _active_ports(self) -> list[Port]:
        try:
            with open_gpu(self._local_rank) as gpu:
                bus_id = None if gpu is None else gpu.bus_id
        except Exception as error:
            _log.warning("the place of GPU %d is not known: %s", self._local_rank, error)
            return []
        return [] if bus_id is None else [port for port in nearest_ports(bus_id) if port.is_active()]


def _has_gpu(local_rank: int) -> bool:
    try:
        with open_gpu(local_rank) as gpu:
            return gpu is not None
    except Exception as error:
        _log.warning("GPU %d cannot be asked: %s", local_rank, error)
        return False
