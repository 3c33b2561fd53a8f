"""Hooks that decide whether this rank may go on."""

from __future__ import annotations

import abc
import logging
import os
import sys
from datetime import timedelta
from pathlib import Path

from inprocess.bounded_waits import bounded_call
from inprocess.exception import FaultCounterExceeded, HealthCheckError
from inprocess.hardware import Port, nearest_ports, open_gpu
from inprocess.state import FrozenState

__all__ = [
    "ChainedGPUHealthCheck",
    "ChainedNVLHealthCheck",
    "ChainedNicHealthCheck",
    "CudaHealthCheck",
    "FaultCounter",
    "HealthCheck",
]

_log = logging.getLogger(__name__)


class HealthCheck(abc.ABC):
    """Called on the main thread at the start of every iteration, and again after a fault, when `finalize` has returned.

    No collectives. Returns the state it was given. A `HealthCheckError` at the start of an iteration restarts all
    ranks; after a fault, any error makes this rank leave.
    """

    @abc.abstractmethod
    def __call__(self, state: FrozenState) -> FrozenState: ...


class CudaHealthCheck(HealthCheck):
    """Synchronizes the CUDA device of this rank (LOCAL_RANK, else the current one); HealthCheckError if that fails.

    It does so first in a thread, limited by `timeout` (a timedelta, or seconds), because a broken device may hang;
    then on the main thread, so that an error which CUDA keeps for that thread is raised here. Does nothing if CUDA is
    not initialized.
    """

    def __init__(self, timeout: timedelta | float = timedelta(seconds=30)) -> None:
        self.timeout = timeout

    def __call__(self, state: FrozenState) -> FrozenState:
        torch = sys.modules.get("torch")
        if torch is None or not torch.cuda.is_available() or not torch.cuda.is_initialized():
            _log.debug("CUDA is not in use; nothing to check")
            return state
        seconds = self.timeout.total_seconds() if isinstance(self.timeout, timedelta) else float(self.timeout)
        device = _local_rank()
        if device is None or device >= torch.cuda.device_count():
            device = torch.cuda.current_device()
        try:
            bounded_call(lambda: torch.cuda.synchronize(device), seconds, f"synchronizing CUDA device {device}")
            torch.cuda.synchronize(device)
        except Exception as error:
            raise HealthCheckError(f"CUDA device {device} is not usable: {error}") from error
        return state


class FaultCounter(HealthCheck):
    """Counts the iterations in which the wrapped function raised on this rank.

    `FaultCounterExceeded` after more than `max_rank_faults`; None: only count. An iteration counts once, however often
    the hook is called in it.
    """

    def __init__(self, max_rank_faults: int | None = None) -> None:
        self.max_rank_faults = max_rank_faults
        self._faulty: set[int] = set()

    @property
    def faults(self) -> int:
        """The number of such iterations so far."""
        return len(self._faulty)

    def __call__(self, state: FrozenState) -> FrozenState:
        if state.fn_exception is not None:
            self._faulty.add(state.iteration)
        if self.max_rank_faults is not None and self.faults > self.max_rank_faults:
            raise FaultCounterExceeded(
                f"initial rank {state.initial_rank} failed in {self.faults} iterations, "
                f"more than max_rank_faults={self.max_rank_faults}"
            )
        return state


class ChainedGPUHealthCheck(HealthCheck):
    """Fails with HealthCheckError if the driver reports that the GPU with this CUDA index is lost or needs a reset.

    `device_index` is by default LOCAL_RANK. Needs pynvml; a no-op without it.
    """

    def __init__(self, device_index: int | None = None) -> None:
        self.device_index = _local_rank() if device_index is None else device_index

    def __call__(self, state: FrozenState) -> FrozenState:
        if self.device_index is None:
            _log.debug("LOCAL_RANK is not set; no GPU to check")
            return state
        try:
            with open_gpu(self.device_index) as gpu:
                defects = [] if gpu is None else gpu.defects()
        except Exception as error:
            raise HealthCheckError(f"GPU {self.device_index} cannot be queried: {error}") from error
        if defects:
            raise HealthCheckError(f"GPU {self.device_index} is unfit: {'; '.join(defects)}")
        return state


class ChainedNVLHealthCheck(HealthCheck):
    """Logs NVLinks of the GPU that are down. Never fails, because collectives use other paths.

    `device_index` is by default LOCAL_RANK. Needs pynvml; a no-op without it.
    """

    def __init__(self, device_index: int | None = None) -> None:
        self.device_index = _local_rank() if device_index is None else device_index

    def __call__(self, state: FrozenState) -> FrozenState:
        if self.device_index is None:
            _log.debug("LOCAL_RANK is not set; no NVLinks to check")
            return state
        try:
            with open_gpu(self.device_index) as gpu:
                down = [] if gpu is None else gpu.inactive_links()
            if down:
                _log.warning("NVLinks %s of GPU %d are down", down, self.device_index)
        except Exception as error:
            _log.warning("the NVLinks of GPU %d cannot be queried: %s", self.device_index, error)
        return state


class ChainedNicHealthCheck(HealthCheck):
    """Fails with HealthCheckError if a link of the InfiniBand card nearest to the GPU is down, or was meanwhile.

    `device_index` is by default LOCAL_RANK. Links that are down at construction are not in use and do not count. A
    no-op without pynvml (which knows the PCI address of the GPU) or without such cards. `sys_root` is the path of /sys.
    """

    def __init__(self, device_index: int | None = None, sys_root: str | os.PathLike[str] = "/sys") -> None:
        self.device_index = _local_rank() if device_index is None else device_index
        self._times_down: dict[Port, int] = {}
        bus_id = _bus_id(self.device_index)
        if bus_id is None:
            _log.debug("the PCI address of GPU %s is not known; no network cards to check", self.device_index)
            return
        ports = [port for port in nearest_ports(bus_id, Path(sys_root)) if port.is_active()]
        self._times_down = {port: port.times_down() for port in ports}
        _log.debug("GPU %s is near %s", self.device_index, [port.name for port in ports] or "no network card")

    def __call__(self, state: FrozenState) -> FrozenState:
        bad = []
        for port, before in self._times_down.items():
            now = port.times_down()
            if not port.is_active():
                bad.append(f"{port.name} is down")
            elif now > before:
                bad.append(f"{port.name} went down {now - before} times")
            self._times_down[port] = now
        if bad:
            raise HealthCheckError(f"the network of GPU {self.device_index} is unfit: {'; '.join(bad)}")
        return state


def _local_rank() -> int | None:
    try:
        return int(os.environ["LOCAL_RANK"])
    except (KeyError, ValueError):
        return None


def _bus_id(device_index: int | None) -> str | None:
    if device_index is None:
        return None
    try:
        with open_gpu(device_index) as gpu:
            return None if gpu is None else gpu.bus_id
    except Exception as error:
        _log.debug("the PCI address of GPU %d cannot be read: %s", device_index, error)
        return None
