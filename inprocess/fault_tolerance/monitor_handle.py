"""The launcher's side of a monitor process: start it, tell it things, notice its end."""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping
from typing import Any

from inprocess.fault_tolerance import messages
from inprocess.fault_tolerance.messages import CODEC
from inprocess.ipc import unix_sockets
from inprocess.ipc.packets import MAX_BYTES, receive, send
from inprocess.ipc.process import child_environment

__all__ = ["MonitorControl", "MonitorHandle", "launcher_socket_path", "start"]

_START_TIMEOUT_S = 180.0
_REQUEST_TIMEOUT_S = 10.0


def launcher_socket_path(monitor_pid: int) -> str:
    """Return where the monitor process with this id listens to its launcher, in a directory of this user only."""
    return os.path.join(unix_sockets.private_directory(), f"monitor-{monitor_pid}.sock")


class MonitorControl:
    """Requests of a launcher to a monitor. Each connects, is answered, and takes 10 s at most. OSError, PacketError."""

    def __init__(self, path: str) -> None:
        self.path = path

    def close_worker_connection(self) -> None:
        """The workers have been stopped: make room for the next."""
        self._tell(messages.CloseConnection())

    def set_cycle(self, cycle: int) -> None:
        """Say which cycle this is."""
        self._tell(messages.SetCycle(cycle))

    def shutdown(self) -> None:
        """Have it end."""
        self._tell(messages.Shutdown())

    def _tell(self, message: messages.Message) -> None:
        with unix_sockets.connect(self.path, _REQUEST_TIMEOUT_S) as end:
            send(end, CODEC, message)
            try:
                answer = receive(end, CODEC).message
            except EOFError:
                raise ConnectionError(f"the monitor at {self.path} hung up") from None
        if isinstance(answer, messages.Failed):
            raise ConnectionError(answer.cause)


class MonitorHandle:
    """A monitor process, with the methods of `multiprocessing.Process` that launchers use. For one thread.

    `control` speaks to it. `sentinel` is a process descriptor that becomes readable when it ends. `join` or `close` it.
    """

    def __init__(self, process: subprocess.Popen[bytes], channel: socket.socket, control_path: str) -> None:
        self._process = process
        self._channel = channel
        self.control = MonitorControl(control_path)
        self.sentinel = os.pidfd_open(process.pid)

    @property
    def pid(self) -> int:
        """Its process id."""
        return self._process.pid

    @property
    def exitcode(self) -> int | None:
        """How it ended; None while it runs."""
        return self._process.poll()

    def is_alive(self) -> bool:
        """Whether it runs."""
        return self.exitcode is None

    def terminate(self) -> None:
        """Ask it to end."""
        self._signal(signal.SIGTERM)

    def kill(self) -> None:
        """Force it to end; a rank then connects to the next monitor at the same path."""
        self._signal(signal.SIGKILL)

    def join(self, timeout: float | None = None) -> None:
        """Wait for its end, for so many seconds at most."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(timeout)

    def close(self) -> None:
        """End it, wait for that, release everything. Idempotent."""
        self._channel.close()  # it ends when this does
        self.join(_REQUEST_TIMEOUT_S)
        if self.is_alive():
            self.kill()
            self.join()
        fd, self.sentinel = self.sentinel, -1
        if fd >= 0:
            os.close(fd)

    def __enter__(self) -> MonitorHandle:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _signal(self, number: signal.Signals) -> None:
        if self.is_alive():
            self._process.send_signal(number)


def start(task: Mapping[str, Any], env: Mapping[str, str]) -> MonitorHandle:
    """Start a process for a task in JSON's types; see `RankMonitorServer.run_in_subprocess`."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    module = "inprocess.fault_tolerance.rank_monitor_server"
    with theirs:
        process = subprocess.Popen(
            [sys.executable, "-P", "-m", module, str(theirs.fileno())],
            stdin=subprocess.DEVNULL,
            pass_fds=[theirs.fileno()],
            start_new_session=True,  # a Ctrl-C in the terminal is the launcher's to handle
            env={**child_environment(), **env},
        )
    try:
        ours.send(json.dumps(task).encode(), socket.MSG_NOSIGNAL)
        ready, _, _ = select.select([ours], [], [], _START_TIMEOUT_S)
        answer = ours.recv(MAX_BYTES) if ready else b""
        values = json.loads(answer) if answer else {"failed": "no answer" if not ready else "it has ended"}
        if "control" not in values:
            raise RuntimeError(f"the rank monitor does not start: {values['failed']}")
    except BaseException:
        ours.close()
        process.kill()
        process.wait()
        raise
    return MonitorHandle(process, ours, values["control"])
