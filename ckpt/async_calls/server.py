"""The server process: clean, single-threaded, it exists to fork writers and to see how they end.

    trainer ==== control socket ==== server ──fork──▶ writer 0 ==== its own socket ==== trainer
                                        └─────fork──▶ writer 1 ==== its own socket ==== trainer

A trainer cannot be forked safely: its threads, locks and CUDA context do not survive. The server is started once with
exec, imports what every writer needs, and from then on a writer costs one fork of a small process. It lives in its own
session and ignores SIGINT and SIGTERM, as writers do, so that neither Ctrl-C nor a job manager that ends the trainer
takes away a save that is already staged. When the trainer closes its end or dies, the server waits for its writers,
which finish by themselves, and exits.
"""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import gc
import importlib
import os
import select
import signal
import socket
import sys
from dataclasses import dataclass

import psutil

from ckpt.async_calls.messages import CODEC, Exited, MessageChannel, Spawn, Spawned
from ckpt.async_calls.writer import WriterLoop

__all__ = ["main"]

_PREIMPORT = ("numpy", "cloudpickle")
_PR_SET_NAME = 15


@dataclass(frozen=True)
class _Child:
    writer_id: int
    pid: int
    pidfd: int


class Server:
    """Runs in the main (and only) thread of the server process."""

    def __init__(self, control: MessageChannel) -> None:
        self._control = control
        self._trainer_alive = True
        self._children: dict[int, _Child] = {}  # by pidfd

    def serve(self) -> tuple[Spawn, socket.socket] | None:
        """Returns None in the server when trainer and writers are gone, and once in every forked writer: what it was
        asked to be.
        """
        while self._trainer_alive or self._children:
            poll = select.poll()
            if self._trainer_alive:
                poll.register(self._control, self._control.poll_events)
            for pidfd in self._children:
                poll.register(pidfd, select.POLLIN)
            ready = {fd for fd, _ in poll.poll()}  # no deadline: every party's death is among the events
            for pidfd in ready & self._children.keys():
                self._reap(pidfd)
            if self._control.fileno() in ready and (order := self._listen()) is not None:
                return order
        return None

    def _listen(self) -> tuple[Spawn, socket.socket] | None:
        self._control.flush()
        try:
            while (packet := self._control.receive()) is not None:
                if isinstance(order := packet.message, Spawn):
                    (fd,) = packet.fds
                    writer_socket = socket.socket(fileno=fd)
                    if self._fork(order.writer_id):
                        return order, writer_socket
                    writer_socket.close()
        except EOFError:
            self._trainer_alive = False
        return None

    def _fork(self, writer_id: int) -> bool:
        """True in the new writer, which is left with nothing of the server's but its memory."""
        try:
            pid = os.fork()
        except OSError as error:  # the trainer sees the socket close, and this
            self._control.send(Exited(writer_id, f"could not be forked: {error}"))
            return False
        if pid == 0:
            self._control.close()
            for child in self._children.values():
                os.close(child.pidfd)
            return True
        pidfd = os.pidfd_open(pid)  # not reaped yet, so the pid is still its own
        self._children[pidfd] = _Child(writer_id, pid, pidfd)
        self._control.send(Spawned(writer_id, pid), pidfd)
        return False

    def _reap(self, pidfd: int) -> None:
        child = self._children.pop(pidfd)
        _, status = os.waitpid(child.pid, 0)
        os.close(pidfd)
        self._control.send(Exited(child.writer_id, _how(os.waitstatus_to_exitcode(status))))


def _how(exit_code: int) -> str:
    if exit_code >= 0:
        return f"exited with status {exit_code}"
    number = -exit_code
    name = signal.Signals(number).name if number in set(signal.Signals) else "unknown"
    hint = "; if nobody sent it, the kernel was out of memory" if number == signal.SIGKILL else ""
    return f"was killed by signal {number} ({name}{hint})"


def main(control_fd: int) -> None:
    """Never returns: neither the server nor a writer runs exit handlers, which might wait for threads of a user's
    library.
    """
    status = 1
    try:
        for ignored in (signal.SIGINT, signal.SIGTERM):
            signal.signal(ignored, signal.SIG_IGN)
        signal.signal(
            signal.SIGCHLD, signal.SIG_DFL
        )  # a trainer may ignore it, which would reap the writers behind our back
        with contextlib.suppress(Exception):  # no usable stderr
            faulthandler.enable()
        for module in _PREIMPORT:
            importlib.import_module(module)
        gc.freeze()  # collections in a writer leave the pages it shares with the server alone
        order = Server(MessageChannel(socket.socket(fileno=control_fd), CODEC)).serve()
        if order is not None:
            _be_writer(*order)
        status = 0
    except BaseException:
        sys.excepthook(*sys.exc_info())
    finally:
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(Exception):
                stream.flush()
        os._exit(status)


def _be_writer(order: Spawn, writer_socket: socket.socket) -> None:
    ctypes.CDLL(None).prctl(_PR_SET_NAME, b"ckpt-writer", 0, 0, 0)
    with contextlib.suppress(OSError):
        os.nice(order.nice)
    if order.io_class is not None:
        _set_io_priority(order.io_class, order.io_level)
    WriterLoop(MessageChannel(writer_socket, CODEC)).run()


def _set_io_priority(io_class: str, level: int) -> None:
    with contextlib.suppress(OSError, ValueError, psutil.Error):
        if io_class == "idle":
            psutil.Process().ionice(psutil.IOPRIO_CLASS_IDLE)
        else:
            psutil.Process().ionice(psutil.IOPRIO_CLASS_BE, level)
