"""The process that forks keepers for tests: `keeper_template.py END_FD LISTENER_FD IMPORT_PATH`. See `quick_keepers`.

It has what a keeper and its writers import, nothing of torch, and one thread. It runs until its end is closed, and
reaps a keeper when the process that asked for it has closed its connection.
"""

import contextlib
import fcntl
import gc
import importlib
import json
import os
import random
import runpy
import selectors
import signal
import socket
import sys
from collections.abc import Callable
from typing import NoReturn

MAX_BYTES, MAX_FDS = 1 << 17, 100
_MODULES = ("ckpt.keeper.forking", "numpy", "cloudpickle", "ckpt.async_calls.writer_main", "ckpt.saving.task")


class _Template:
    """The sockets of the template, and the processes that it has forked."""

    def __init__(self, end: socket.socket, listener: socket.socket) -> None:
        self._selector = selectors.DefaultSelector()
        self._end, self._listener = end, listener
        self._folder = os.path.dirname(listener.getsockname())
        self._listen(end, end.close)
        self._listen(listener, self._accept)

    def serve(self) -> None:
        """Fork what is asked for until the tests have ended."""
        while self._end.fileno() >= 0:
            # One at a time: the action may close what another event is about.
            for key, _ in self._selector.select()[:1]:
                key.data()

    def _listen(self, fileobj: socket.socket | int, action: Callable[[], object]) -> None:
        self._selector.register(fileobj, selectors.EVENT_READ, action)

    def _accept(self) -> None:
        connection = self._listener.accept()[0]
        self._listen(connection, lambda: self._start(connection))

    def _start(self, connection: socket.socket) -> None:
        packet, fds, _, _ = socket.recv_fds(connection, MAX_BYTES, MAX_FDS)
        self._selector.unregister(connection)
        if not packet:
            connection.close()
            return
        pid = os.fork()
        if pid == 0:
            _run(json.loads(packet), fds, self._folder)
        for fd in fds:
            os.close(fd)
        pidfd = os.pidfd_open(pid)
        self._listen(pidfd, lambda: self._tell(connection, pidfd, pid))
        with contextlib.suppress(OSError):  # the process that asked is dead
            socket.send_fds(connection, [str(pid).encode()], [pidfd])

    def _tell(self, connection: socket.socket, pidfd: int, pid: int) -> None:
        """Send the exit code. The pid stays that of a zombie until the other side has read it."""
        self._selector.unregister(pidfd)
        os.close(pidfd)
        result = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
        assert result is not None
        code = result.si_status if result.si_code == os.CLD_EXITED else -result.si_status
        with contextlib.suppress(OSError):
            connection.send(str(code).encode())
        self._listen(connection, lambda: self._reap(connection, pid))

    def _reap(self, connection: socket.socket, pid: int) -> None:
        self._selector.unregister(connection)
        connection.close()
        os.waitpid(pid, 0)


def _take_descriptors(fds: list[int], numbers: list[int]) -> None:
    """Enter the directory that is the first, have the others under these numbers, and close what the template has."""
    above = [fcntl.fcntl(fd, fcntl.F_DUPFD, 1 + max(*fds, *numbers)) for fd in fds]
    for fd in map(int, os.listdir("/proc/self/fd")):
        if fd > 2 and fd not in above:
            with contextlib.suppress(OSError):  # that of the listing
                os.close(fd)
    os.fchdir(above[0])
    for fd, number in zip(above[1:], numbers, strict=True):
        os.dup2(fd, number)
    for fd in above:
        os.close(fd)


def _run(order: dict[str, list[str]], fds: list[int], folder: str) -> NoReturn:
    """Be the process that `start_module` of `inprocess.ipc.process` would have started."""
    status = 1
    try:
        os.setsid()
        _take_descriptors(fds, list(map(int, order["fds"])))
        os.umask(int(order["umask"][0], 8))
        os.environ.clear()
        os.environ.update(zip(order["variables"], order["values"], strict=True))
        if marker := os.environ.get("TEST_RANKS_ID"):  # /proc does not say what the variables of this process are
            with open(f"{folder}/{marker}", "a") as sessions:
                sessions.write(f"{os.getpid()}\n")
        sys.path[:] = order["path"]
        sys.argv[1:] = order["arguments"]
        random.seed()
        signal.pthread_sigmask(signal.SIG_SETMASK, map(int, order["blocked"]))
        runpy.run_module(order["module"][0], run_name="__main__", alter_sys=True)
        status = 0
    except SystemExit as error:
        status = error.code if isinstance(error.code, int) else int(error.code is not None)
    except BaseException:
        sys.excepthook(*sys.exc_info())
    finally:
        with contextlib.suppress(Exception):
            sys.stdout.flush()
        os._exit(status & 0xFF)


def main() -> NoReturn:
    end, listener = (socket.socket(fileno=int(fd)) for fd in sys.argv[1:3])
    sys.path[:] = json.loads(sys.argv[3])
    for module in _MODULES:
        importlib.import_module(module)
    assert "torch" not in sys.modules
    gc.collect()
    gc.freeze()
    _Template(end, listener).serve()
    os._exit(0)


if __name__ == "__main__":
    main()
