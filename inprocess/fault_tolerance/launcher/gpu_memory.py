"""Whether the memory of the GPUs is free again: the driver takes a while after the end of a process."""

from __future__ import annotations

import logging
import os
import shutil
import subprocess
import threading
import time

from inprocess.fault_tolerance.config import FaultToleranceConfig

__all__ = ["GpuMemory"]

_log = logging.getLogger(__name__)
_QUERY_TIMEOUT_S = 30.0


class GpuMemory:
    """Compares the memory in use with what was in use when this was made: before the first workers.

    The GPUs of CUDA_VISIBLE_DEVICES, or all. Asks the driver's nvidia-smi; without one, or without GPU, never waits.
    """

    def __init__(self, config: FaultToleranceConfig) -> None:
        self._timeout_s = config.gpu_memory_reclaim_timeout
        self._tolerance_mb = config.gpu_memory_tolerance_mb
        self._interval_s = config.gpu_memory_poll_interval
        self._tool = shutil.which("nvidia-smi")
        self._before = self._used_mb()

    def wait_free(self) -> bool:
        """Wait until no GPU holds more than before, within the tolerance. False, and a warning, if that takes too long.

        Blocks its thread; the driver has no event for this, so it is asked every `gpu_memory_poll_interval`.
        """
        deadline = time.monotonic() + self._timeout_s
        while self._before:
            used = self._used_mb()
            full = {gpu: mb for gpu, mb in used.items() if mb > self._before.get(gpu, 0.0) + self._tolerance_mb}
            if not full:
                return True
            if time.monotonic() >= deadline:
                _log.warning("after %g s GPUs still hold memory, in MiB: %s", self._timeout_s, full)
                return False
            threading.Event().wait(min(self._interval_s, max(0.0, deadline - time.monotonic())))
        return True

    def _used_mb(self) -> dict[str, float]:
        if self._tool is None:
            return {}
        command = [self._tool, "--query-gpu=uuid,memory.used", "--format=csv,noheader,nounits"]
        visible = os.environ.get("CUDA_VISIBLE_DEVICES")
        if visible is not None:
            if not visible.strip():
                return {}
            command.append(f"--id={visible}")
        try:
            answer = subprocess.run(
                command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=_QUERY_TIMEOUT_S, check=True
            )
            pairs = [line.split(",") for line in answer.stdout.splitlines() if line.strip()]
            return {gpu.strip(): float(used) for gpu, used in pairs}
        except (OSError, ValueError, subprocess.SubprocessError) as error:
            _log.debug("the memory of the GPUs is not known: %s", error)
            return {}
