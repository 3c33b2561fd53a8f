"""Keepers that start in milliseconds: forked from one process that has imported once what all of them do.

    pytest process, rank                    keeper_template (no torch, one thread)     keeper (own session)
    start_module      -- order, fds ------>  fork  ---------------------------------->  ckpt.keeper
    ForkedKeeper.wait <- pid, exit code ---

`python -m ckpt.keeper` takes a quarter of a second of a core, and each `Checkpointer` that saves has one: it would be a
third of the time of all tests. Such a keeper is told the same, has the same descriptors, variables and directory; its
parent is the template. In tests where that matters (see `_FORKED`), in a process with other namespaces, limits or
options than this one, and with TESTS=full, keepers are started as always.
"""

import contextlib
import functools
import hashlib
import json
import os
import resource
import select
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import psutil

import ckpt.keeper.trainer_side
from inprocess.ipc import process as _process
from inprocess.ipc.interpreter import import_path
from tests.support.keeper_template import MAX_BYTES
from tests.support.selection import FULL
from tests.support.template import REPOSITORY

_VARIABLE = "TEST_KEEPERS"  # the socket of the template, and the surroundings that it has
_start_anew = _process.start_module

_FORKED = (
    "tests/ckpt/exporting/",
    "tests/ckpt/integrations/test_accelerate.py",
    "tests/ckpt/integrations/test_dcp.py",
    "tests/ckpt/integrations/test_nvrx.py",
    "tests/ckpt/integrations/test_torchdata.py",
    "tests/ckpt/loading/",
    "tests/ckpt/mirroring/",
    "tests/ckpt/planning/",
    "tests/ckpt/saving/",
    "tests/ckpt/sinks/",
    "tests/ckpt/test_branches.py",
    "tests/ckpt/test_lineage.py",
    "tests/ckpt/test_observe.py",
    "tests/ckpt/test_report_sections.py",
    "tests/ckpt/test_scale.py",
    "tests/ckpt/test_used_root.py",
    "tests/ckpt/validation/",
    "tests/ckpt/values/",
    "tests/docs/",
    "tests/examples/test_train_lm.py",
    "tests/examples/test_with_async_calls.py",
    "tests/examples/test_with_dcp.py",
    "tests/support/",
)
"""The folders and files of tests whose keepers are forked: those that are not about how processes start and end."""

_STARTED = ("tests/ckpt/loading/test_restore_costs.py",)
"""Files in these folders that look for the start of an interpreter."""


class ForkedKeeper:
    """The counterpart of `subprocess.Popen`, for a keeper that the template has forked."""

    def __init__(self, connection: socket.socket) -> None:
        """Read the answer of the template, whose order was sent through the connection. OSError."""
        self._connection = self._pidfd = -1
        packet, fds, _, _ = socket.recv_fds(connection, MAX_BYTES, 1)
        if not packet:
            raise ConnectionError("the process that forks keepers has ended")
        self.pid = int(packet)
        self.returncode: int | None = None
        self._lock = threading.RLock()
        self._connection, (self._pidfd,) = connection.detach(), fds

    def poll(self) -> int | None:
        """The exit code; None while it runs."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            return self.wait(0)
        return None

    def wait(self, timeout: float | None = None) -> int:
        """The exit code; raises `subprocess.TimeoutExpired`."""
        if self.returncode is None and not select.select([self._pidfd], [], [], timeout)[0]:
            raise subprocess.TimeoutExpired(f"keeper with pid {self.pid}", timeout or 0)
        with self._lock:
            if self.returncode is None:
                self.returncode = int(os.read(self._connection, 64) or 1)
                os.close(self._connection)
                self._connection = -1
        return self.returncode

    def send_signal(self, signum: int) -> None:
        if self.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._pidfd, signum)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def __del__(self) -> None:
        for fd in (self._connection, self._pidfd):
            if fd >= 0:
                os.close(fd)


def start_module(
    module: str,
    *arguments: str,
    pass_fds: Sequence[int] = (),
    env: Mapping[str, str] | None = None,
    cwd: str | None = "/",
    **streams: Any,
) -> Any:
    """In place of the function of `inprocess.ipc.process`: fork the process, if that is the same."""
    digest, _, path = os.environ.get(_VARIABLE, "").partition(" ")
    if digest != _surroundings() or set(streams.values()) != {None}:
        return _start_anew(module, *arguments, pass_fds=pass_fds, env=env, cwd=cwd, **streams)
    variables = {**os.environ, **(env or {})}
    outputs = [number for number, name in ((1, "stdout"), (2, "stderr")) if name in streams]
    order = {
        "module": [module],
        "arguments": arguments,
        "variables": list(variables),
        "values": list(variables.values()),
        "path": import_path(),
        "umask": [_status("Umask")],
        "blocked": [str(int(number)) for number in signal.pthread_sigmask(signal.SIG_BLOCK, ())],
        "fds": [*map(str, outputs), *map(str, pass_fds)],
    }
    folder = os.open(cwd or ".", os.O_PATH | os.O_DIRECTORY)
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as connection:
            connection.connect(path)
            socket.send_fds(connection, [json.dumps(order).encode()], [folder, *outputs, *pass_fds])
            keeper = ForkedKeeper(connection)
    finally:
        os.close(folder)
    with contextlib.suppress(psutil.NoSuchProcess):  # it has ended
        _keepers(os.getpid()).append(psutil.Process(keeper.pid))
    return keeper


@functools.lru_cache(maxsize=1)
def _keepers(_pid: int) -> list[psutil.Process]:
    """The keepers that were forked for the process with this pid. A forked child has none."""
    return []


def descendants() -> set[psutil.Process]:
    """The running processes that this one and its children have started, also the keepers forked for this process."""
    keepers = _keepers(os.getpid())
    keepers[:] = [each for each in keepers if each.is_running()]
    found = {*psutil.Process().children(recursive=True), *keepers}
    for each in keepers:
        with contextlib.suppress(psutil.NoSuchProcess):
            found.update(each.children(recursive=True))
    return found


def sessions_of_keepers(marker: str) -> set[int]:
    """The sessions of the keepers of ranks whose TEST_RANKS_ID is the marker. What a keeper has forked stays in it."""
    if FULL:
        return set()
    file = Path(keeper_template().folder, marker)
    return set(map(int, file.read_text().split())) if file.exists() else set()


def _status(name: str) -> str:
    """The value of a line of /proc/self/status."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(line.partition(":")[2].strip() for line in lines if line.startswith(f"{name}:"))


def _surroundings() -> str:
    """A digest of what a child that is started by exec would have of this process, but for what an order says."""
    proc = Path("/proc/self")
    limits = [resource.getrlimit(getattr(resource, name)) for name in sorted(dir(resource)) if "RLIMIT_" in name]
    spaces = sorted((entry.name, entry.stat().st_ino) for entry in (proc / "ns").iterdir())
    names = ("PYTHONWARNINGS", "PYTHONHASHSEED", "PYTHONDEVMODE", "PYTHONUTF8", "PYTHONIOENCODING", "LANG", "LC_ALL")
    variables = sorted((name, value) for name, value in os.environ.items() if name in names or name.startswith("LD_"))
    folders = {*os.environ.get("PYTHONPATH", "").split(os.pathsep)} - {"", str(REPOSITORY)}  # of `sitecustomize`
    root, flags = os.stat("/"), (sys.flags.utf8_mode, sys.flags.isolated, sys.flags.ignore_environment)
    parts = [limits, spaces, variables, (root.st_dev, root.st_ino), flags, os.getresuid(), os.getresgid()]
    parts += [sorted(folders), (proc / "cgroup").read_text(), sys.executable, os.sched_getaffinity(0), os.nice(0)]
    return hashlib.sha256(repr(parts).encode()).hexdigest()[:16]


class KeeperTemplate:
    """The process that forks keepers. `close` ends it; the keepers go on."""

    def __init__(self) -> None:
        self.folder = tempfile.mkdtemp(prefix="test_keepers_")
        path = f"{self.folder}/socket"
        self.variable = f"{_surroundings()} {path}"
        self._end, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs, socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
            listener.bind(path)
            listener.listen(64)
            fds = [theirs.fileno(), listener.fileno()]
            flags = ["-X", f"utf8={sys.flags.utf8_mode}", "-P"]
            program = str(Path(__file__).with_name("keeper_template.py"))
            self._process = subprocess.Popen(
                [sys.executable, *flags, program, *map(str, fds), json.dumps(import_path())],
                env={**os.environ, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"},
                stdin=subprocess.DEVNULL,
                pass_fds=fds,
                start_new_session=True,
            )

    def close(self) -> None:
        self._end.close()
        self._process.kill()
        self._process.wait()
        shutil.rmtree(self.folder)


@functools.cache
def keeper_template() -> KeeperTemplate:
    """The one of this process."""
    return KeeperTemplate()


def install() -> None:
    """Let keepers of this process, and of its forked children, be forked where the variable is set."""
    ckpt.keeper.trainer_side.start_module = start_module  # type: ignore[attr-defined]


def select_keepers(path: str) -> None:
    """Say how the keepers of the next test, which is in this file, are started."""
    if FULL or not path.startswith(_FORKED) or path.startswith(_STARTED):
        os.environ.pop(_VARIABLE, None)
    else:
        os.environ[_VARIABLE] = keeper_template().variable


def end_keeper_template() -> None:
    """End the process that forks keepers; those go on."""
    if not FULL:
        keeper_template().close()
