"""A small local cluster of Ray, in a process of its own: `running_ray`. All of its processes are gone afterwards."""

import contextlib
import os
import shutil
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Iterator
from pathlib import Path

import psutil

REPOSITORY = Path(__file__).resolve().parents[2]
_MARK = "CKPT_TEST_OF_RAY"  # in the environment of each process of the cluster, and of its workers' keepers
_END_S = 60.0
_HOLDER = """
import sys, ray
context = ray.init(num_cpus=2, object_store_memory=80 << 20, include_dashboard=False, logging_level="error")
print(context.address_info["gcs_address"], flush=True)
sys.stdin.read()
ray.shutdown()
"""


@contextlib.contextmanager
def running_ray() -> Iterator[dict[str, str]]:
    """Start a cluster of one node with two CPUs; yield the environment of drivers. AssertionError for leftovers."""
    folder = tempfile.mkdtemp(prefix="ray", dir="/tmp")  # short, for the paths of sockets
    mark = uuid.uuid4().hex
    environment = {
        **os.environ,
        _MARK: mark,
        "PYTHONPATH": str(REPOSITORY),
        "OMP_NUM_THREADS": "1",
        "RAY_TMPDIR": folder,
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_AUTH_MODE": "disabled",  # or Ray writes a token into the home directory
        "RAY_worker_register_timeout_seconds": "180",  # on a busy machine
        "RAY_memory_monitor_refresh_ms": "0",  # it kills workers when other tests use much memory
        "RAY_TRAIN_WORKER_GROUP_START_TIMEOUT_S": "180",
        "RAY_TRAIN_HEALTH_CHECK_INTERVAL_S": "0.2",  # not 2: what workers report is read then
        "RAY_TRAIN_ENABLE_PREEMPTION_WATCHER": "0",  # a process of its own
        "RAY_TRAIN_METRICS_ENABLED": "0",
    }
    holder = subprocess.Popen(
        [sys.executable, "-c", _HOLDER],
        env=environment,
        cwd=folder,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert holder.stdin is not None
    assert holder.stdout is not None
    try:
        address = holder.stdout.readline().strip()
        assert address, "Ray did not start"
        yield {**environment, "RAY_ADDRESS": address}
    finally:
        holder.stdin.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            holder.wait(_END_S)
        left = _end_all(mark)
        holder.wait(_END_S)
        holder.stdout.close()
        shutil.rmtree(folder, ignore_errors=True)
    assert not left, f"processes that did not end with Ray: {left}"


def processes_of(environment: dict[str, str]) -> dict[int, str]:
    """Return pids and names of the processes of a cluster that have not ended."""
    return _marked(environment[_MARK])


def _marked(mark: str) -> dict[int, str]:
    found = {}
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if process.environ().get(_MARK) == mark and process.status() != psutil.STATUS_ZOMBIE:
                found[process.pid] = process.name()
    return found


def _end_all(mark: str) -> dict[int, str]:
    """Wait for the end of all processes, kill those that have not ended in time, and return them."""
    deadline = time.monotonic() + _END_S
    while (left := _marked(mark)) and time.monotonic() < deadline:
        time.sleep(0.1)
    for pid in left:
        with contextlib.suppress(psutil.Error):
            psutil.Process(pid).kill()
    return left
