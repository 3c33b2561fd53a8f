"""The process that forks ranks and programs: `template_main SOCKET_FD LISTENER_FD`. See `template`.

Each connection to the listener is a program that tests have started by a command (see `command`): its arguments and
descriptors come, signals may follow, the exit code is the answer. If the connection is closed, the program is killed.

It has one thread, and never runs an operation of torch, so that its children can.
"""

import contextlib
import ctypes
import gc
import importlib
import json
import os
import selectors
import signal
import socket
import sys
import warnings
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

import cloudpickle

from tests.support.programs import end_after, run_program, use_environment
from tests.support.template import MAX_BYTES, Fork, Grow

_HUGE_PAGE = 2 << 20
_MADV_COLLAPSE = 25  # of Linux 6.1; an older one refuses it


class _Template:
    """The sockets of the template, and the programs that run."""

    def __init__(self, end: socket.socket, listener: socket.socket | None) -> None:
        self._end = end
        self._selector = selectors.DefaultSelector()
        self._listen(end, self._answer)
        if listener is not None:
            self._listen(listener, lambda: self._accept(listener))

    def serve(self) -> None:
        """Do what is asked for until the tests have ended."""
        while self._end.fileno() >= 0:
            # One at a time: the action may close what another event is about, as the end of a program does its pidfd.
            for key, _ in self._selector.select()[:1]:
                key.data()

    def _listen(self, fileobj: socket.socket | int, action: Callable[[], None]) -> None:
        self._selector.register(fileobj, selectors.EVENT_READ, action)

    def _answer(self) -> None:
        packet = self._end.recv(MAX_BYTES)
        if not packet:
            self._selector.unregister(self._end)
            self._end.close()
            return
        request = cloudpickle.loads(packet)
        if isinstance(request, Fork):
            answer = self._fork(lambda: _run_rank(request))
        elif isinstance(request, Grow):
            answer = self._fork(lambda: _grow(request))
        else:
            answer = os.waitstatus_to_exitcode(os.waitpid(request.pid, 0)[1])
        self._end.send(cloudpickle.dumps(answer))

    def _accept(self, listener: socket.socket) -> None:
        connection = listener.accept()[0]
        self._listen(connection, lambda: self._start(connection))

    def _start(self, connection: socket.socket) -> None:
        packet, fds, _, _ = socket.recv_fds(connection, MAX_BYTES, 3)
        self._selector.unregister(connection)
        if not packet:
            connection.close()
            return
        order = json.loads(packet)
        pid = self._fork(lambda: _run_command(order, fds))
        for fd in fds:
            os.close(fd)
        pidfd = os.pidfd_open(pid)
        self._listen(connection, lambda: self._pass_on(connection, pidfd))
        self._listen(pidfd, lambda: self._tell(connection, pidfd, pid))

    def _pass_on(self, connection: socket.socket, pidfd: int) -> None:
        packet = connection.recv(64)
        if not packet:  # the process that was started is dead
            self._selector.unregister(connection)
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(pidfd, int(packet or signal.SIGKILL))

    def _tell(self, connection: socket.socket, pidfd: int, pid: int) -> None:
        code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        self._selector.unregister(pidfd)
        os.close(pidfd)
        with contextlib.suppress(OSError):
            connection.send(str(code).encode())
        if connection in self._selector.get_map():
            # Closed with a signal unread, the connection would fail at its other end before the code is read there.
            self._selector.modify(connection, selectors.EVENT_READ, lambda: self._end_of(connection))
        else:
            connection.close()

    def _end_of(self, connection: socket.socket) -> None:
        with contextlib.suppress(ConnectionResetError):  # the process that was started has not read the code
            if connection.recv(64):  # a signal to a program that has ended
                return
        self._selector.unregister(connection)
        connection.close()

    def _fork(self, function: Callable[[], object]) -> int:
        pid = os.fork()
        if pid == 0:
            self._close()
            end_after(function)
        return pid

    def _close(self) -> None:
        """Keep nothing of the template in a child."""
        for key in list(self._selector.get_map().values()):
            if isinstance(key.fileobj, socket.socket):
                key.fileobj.close()
            else:
                os.close(key.fd)
        self._selector.close()


def _import_what_ranks_need() -> None:
    # ruff: noqa: F401
    import pytest
    import tensorstore
    import torch._dynamo  # by the first optimizer
    import torch.distributed.checkpoint.state_dict
    import torch.distributed.fsdp
    import torch.distributed.run
    import torch.distributed.tensor
    import torch.nn.parallel

    import ckpt.restart
    import inprocess.store
    import inprocess.wrap
    from tests.support import quick_keepers

    quick_keepers.install()
    with contextlib.suppress(ImportError):  # of an extra that is not installed
        import inprocess.fault_tolerance.launcher
    for name in ckpt.__all__:
        with contextlib.suppress(ImportError):
            getattr(ckpt, name)


def _grow(request: Grow) -> None:
    """Be a template that has more modules. Those that are not installed, its programs will miss, too."""
    end = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    end.connect(request.path)
    os.environ["HF_HUB_OFFLINE"] = "1"  # read once, by an import; no test asks the hub
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for name in request.modules:
            with contextlib.suppress(ImportError):
                importlib.import_module(name)
    _serve(_Template(end, None))


def _serve(template: _Template) -> NoReturn:
    gc.collect()
    gc.freeze()  # a collection in a child would otherwise look at, and so copy, every object of torch
    for finalizer in weakref.finalize._registry:  # type: ignore[attr-defined]
        finalizer.atexit = False  # taking torch's libraries apart takes longer than most ranks run
    _use_huge_pages()
    template.serve()
    os._exit(0)


def _use_huge_pages() -> None:
    """Move the memory of this process to huge pages, where the kernel has them.

    A fork, and the end of the child, would otherwise count its 60,000 pages: half of what a rank costs.
    """
    libc = ctypes.CDLL(None)
    for line in Path("/proc/self/maps").read_text().splitlines():
        fields = line.split()
        begin, end = (int(number, 16) for number in fields[0].split("-"))
        begin, end = -(-begin // _HUGE_PAGE) * _HUGE_PAGE, end // _HUGE_PAGE * _HUGE_PAGE
        if fields[1] == "rw-p" and fields[4] == "0" and begin < end:  # of no file
            libc.madvise(ctypes.c_void_p(begin), ctypes.c_size_t(end - begin), _MADV_COLLAPSE)


def _run_command(order: dict[str, object], fds: list[int]) -> None:
    """Run a program, with the descriptors of the process that was started for it."""
    for number, fd in enumerate(fds):
        os.dup2(fd, number)
        os.close(fd)
    os.chdir(str(order["folder"]))
    use_environment(order["environment"])  # type: ignore[arg-type]
    run_program(order["arguments"])  # type: ignore[arg-type]


def _run_rank(request: Fork) -> None:
    use_environment(request.environment)
    folder = Path(request.folder)
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    for number, name in ((1, "stdout"), (2, "stderr")):
        fd = os.open(folder / f"rank_{rank:05d}.{name}", os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
        os.dup2(fd, number)
        os.close(fd)
    if request.script:
        run_program(request.script)
        return
    import torch.distributed as dist

    with_group = bool(os.environ["TEST_RANKS_INIT"])
    if with_group:
        # A file store: unlike a port it cannot be taken by somebody else between choosing and using it.
        dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=world_size)
        dist.barrier()  # one that ends before the others have connected to it would break their connections
    function, args = cloudpickle.loads((folder / "call.pickle").read_bytes())
    value = function(rank, world_size, *args)
    partial = folder / f"rank_{rank:05d}.partial"
    partial.write_bytes(cloudpickle.dumps(value))
    partial.rename(folder / f"rank_{rank:05d}.result")
    if with_group and dist.is_initialized():
        dist.destroy_process_group()


def main() -> NoReturn:
    end, listener = (socket.socket(fileno=int(fd)) for fd in sys.argv[1:])
    _import_what_ranks_need()
    _serve(_Template(end, listener))


if __name__ == "__main__":
    main()
