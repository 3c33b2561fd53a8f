"""The keeper process: single-threaded, free of torch; it forks workers, learns how they end, and keeps memory.

    trainer (`trainer_side.Keeper`) ═══ control channel ═══ keeper ──fork──▶ writer      ═══ its own socket ═══ trainer
                                                        │└────fork──▶ replicas    ═══ its own socket ═══ trainer
    processes that take over ════ listening socket ═════╡ └───fork──▶ mirror, export
                                                        ├─ memory: descriptors of slots (`kept_memory`)
                                                        └─ what workers leave (`kept_memory`) ═══ replicas

A trainer cannot be forked safely: its threads, locks and CUDA context do not survive. The keeper is started once with
exec, imports what every worker needs, and from then on a worker costs one fork of a small process. It runs in its own
session and ignores SIGINT and SIGTERM, as its workers do: neither Ctrl-C nor a job manager that ends the trainer ends a
save that is already staged.

It lives as long as its trainer has the channel, a worker runs, or memory is kept. Workers finish by themselves when
their sockets close; memory is kept as `kept_memory` says. A worker may be killed at any time: memory is not in it.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import faulthandler
import gc
import importlib
import os
import select
import signal
import socket
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from types import MappingProxyType
from typing import NoReturn

from ckpt.keeper.kept_memory import KeptMemory, LeftMemory, WorkerMemory, answer
from ckpt.keeper.messages import CONTROL, ControlChannel, Exited, Fork, ForkedWorker
from ckpt.keeper.takeover import release_all
from inprocess.ipc.packets import PacketError
from inprocess.ipc.process import has_ended

PROGRAMS = MappingProxyType(
    {
        "writer": "ckpt.async_calls.writer_main",
        "replicas": "ckpt.replication.worker",
        "mirror": "ckpt.mirroring.worker",
        "export": "ckpt.async_calls.writer_main",
    }
)
"""The module of each program, whose `run(socket)` a worker calls; that with memory, `run(socket, memory)`."""

_WITH_MEMORY = "replicas"  # the program with a `WorkerMemory`, of which one worker runs at a time

_PREIMPORT = ("numpy", "cloudpickle")
_IOPRIO_SET = MappingProxyType({"x86_64": 251, "aarch64": 30})  # the number of the system call; glibc has no function
_IOPRIO_WHO_PROCESS, _IOPRIO_CLASS_SHIFT = 1, 13
_BEST_EFFORT, _IDLE = 2, 3
_PR_SET_NAME = 15
_LEFT = (errno.ECONNABORTED, errno.EINTR, errno.EPERM)  # a taker has left again
_ACCEPT_PAUSE_S = 0.2
_GIVEN_UP = 3  # the status of a child to whom a taker has said that the memory is not needed any more


@dataclass(frozen=True, slots=True)
class _Child:
    """A forked process. `worker_id` is None for one that talks with other keepers or takers, `taker` a connection."""

    pid: int
    pidfd: int
    worker_id: int | None = None
    taker: socket.socket | None = None


@dataclass(frozen=True, slots=True)
class _Worker:
    """In a forked worker: what to run."""

    order: Fork
    socket: socket.socket
    memory: WorkerMemory | None


class _KeeperProcess:
    """The loop, in the main (and only) thread of the process. Nothing in it waits for another process."""

    def __init__(self, control: ControlChannel, trainer: int, trainer_pid: int) -> None:
        """`trainer` is a pidfd: children that the trainer has forked may keep the channel open."""
        self._control = control
        self._trainer = trainer
        self._memory = KeptMemory(trainer_pid)
        self._left = LeftMemory()
        self._hears_trainer = True  # the channel is open
        self._trainer_lives = True
        self._children: dict[int, _Child] = {}  # by pidfd
        self._given_up: list[socket.socket] = []  # the takers that gave up the memory, and are not told yet
        self._accept_at = 0.0

    def serve(self) -> _Worker | None:
        """Fork workers and keep memory until neither is needed any more.

        Returns None in the keeper, and in every forked worker what it has to run.
        """
        try:
            while self._hears_trainer or self._children or self._memory.is_kept:
                ready = self._wait()
                for pidfd in ready & self._children.keys():
                    self._reap(pidfd)
                self._left.take_in()
                if (worker := self._listen()) is not None:
                    return worker
                self._accept()
                self._memory.expire()
        finally:
            self._memory.close()
        return None

    def _wait(self) -> set[int]:
        poll = select.poll()
        if self._hears_trainer:
            poll.register(self._control, self._control.poll_events)
        if self._trainer_lives:
            poll.register(self._trainer, select.POLLIN)
        left_ms, pause_ms = self._memory.left_ms, int(1000 * (self._accept_at - time.monotonic())) + 1
        if (listener := self._memory.listener) is not None:
            if pause_ms <= 0:
                poll.register(listener, select.POLLIN)
            else:
                left_ms = pause_ms if left_ms is None else min(left_ms, pause_ms)
        if (link := self._left.link) is not None:
            poll.register(link, select.POLLIN)
        for pidfd in self._children:
            poll.register(pidfd, select.POLLIN)
        return {fd for fd, _ in poll.poll(left_ms)}  # each death and each message is an event

    # -- the trainer ---------------------------------------------------------------------------------------------------

    def _listen(self) -> _Worker | None:
        """Do what the trainer has said, also if it is dead by now; then let its memory linger."""
        died = self._trainer_lives and has_ended(self._trainer)  # before the channel is read: no message is missed
        if self._hears_trainer:
            self._control.flush()
            try:
                while (packet := self._control.receive()) is not None:
                    if not isinstance(order := packet.message, Fork):
                        if (taken := self._memory.take_in(packet)) and self._fork():
                            _end_child(lambda: release_all(taken, self._memory.job))
                        continue
                    (fd,) = packet.fds
                    with contextlib.closing(socket.socket(fileno=fd)) as end:
                        if (worker := self._fork_worker(order, end)) is not None:
                            return worker
            except EOFError:  # it has released its end, and cannot say anything any more
                self._hears_trainer = False
                self._memory.linger()
            except PacketError:  # an order is lost: the trainer sees the end of the channel, and tells another keeper
                self._hears_trainer = False
                self._memory.close()
                self._control.close()
        if died:
            self._trainer_lives = self._hears_trainer = False
            self._memory.linger()
            let_go_of_terminal()
        if not self._hears_trainer:
            self._left.forget()  # there will be no other worker
        return None

    # -- children ------------------------------------------------------------------------------------------------------

    def _fork_worker(self, order: Fork, end: socket.socket) -> _Worker | None:
        """Fork a worker. Returns None in the keeper, and in the worker what it has to run."""
        if order.program != _WITH_MEMORY:
            return _Worker(order, end.dup(), None) if self._fork(order.worker_id) else None
        try:
            link = self._left.begin()
        except OSError as error:
            self._control.send(Exited(order.worker_id, f"could not be forked: {error}"))
            return None
        with link:
            if self._fork(order.worker_id, leaves_memory=True):
                return _Worker(order, end.dup(), self._left.hand_over(link.dup()))
        return None

    def _fork(
        self, worker_id: int | None = None, taker: socket.socket | None = None, *, leaves_memory: bool = False
    ) -> bool:
        """Fork a process. True in the new one; it keeps no descriptor of the keeper, but those of its memory."""
        try:
            pid = os.fork()
        except OSError as error:  # the trainer sees the end of the socket, and this message
            if worker_id is not None:
                self._control.send(Exited(worker_id, f"could not be forked: {error}"))
            return False
        if pid == 0:
            self._control.close()
            os.close(self._trainer)
            for child in self._children.values():
                os.close(child.pidfd)
                if child.taker is not None:
                    child.taker.close()
            if worker_id is not None:
                self._memory.forget()
            if not leaves_memory:
                self._left.forget()
            return True
        try:
            pidfd = os.pidfd_open(pid)  # not reaped yet, so the pid is still its own
        except OSError as error:  # no descriptor is left: nothing would tell of its end
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
            if worker_id is not None:
                self._control.send(Exited(worker_id, f"could not be forked: {error}"))
            return False
        self._children[pidfd] = _Child(pid, pidfd, worker_id, taker)
        if worker_id is not None:
            self._control.send(ForkedWorker(worker_id, pid), pidfd)
        return False

    def _reap(self, pidfd: int) -> None:
        child = self._children.pop(pidfd)
        _, raw = os.waitpid(child.pid, 0)
        os.close(pidfd)
        status = os.waitstatus_to_exitcode(raw)
        if child.worker_id is not None and self._hears_trainer:
            self._control.send(Exited(child.worker_id, _how(status)))
        if child.taker is None:
            return
        others = [other for other in self._children.values() if other.taker is not None]
        if status != _GIVEN_UP:
            child.taker.close()
        else:  # before this taker is told, no other one gets the memory, also one that is being answered
            self._memory.close()
            self._given_up.append(child.taker)
            for other in others:
                signal.pidfd_send_signal(other.pidfd, signal.SIGKILL)
        while self._given_up and not others:
            self._memory.tell(self._given_up.pop())

    # -- those that take over ------------------------------------------------------------------------------------------

    def _accept(self) -> None:
        """Answer those that have connected, each in a child: one that hangs holds up nothing."""
        while (listener := self._memory.listener) is not None and time.monotonic() >= self._accept_at:
            try:
                connection, _ = listener.accept()
            except BlockingIOError:
                return
            except OSError as error:
                if error.errno not in _LEFT:  # no descriptor or memory is left: who has connected waits
                    self._accept_at = time.monotonic() + _ACCEPT_PAUSE_S
                continue
            self._answer(connection)

    def _answer(self, connection: socket.socket) -> None:
        if self._fork(taker=connection):
            _end_child(lambda: _GIVEN_UP if answer(self._memory, connection) else 0)


def _end_child(function: Callable[[], int]) -> NoReturn:
    """End a forked process with the status that a short function returns."""
    status = 1
    try:
        status = function()
    finally:
        os._exit(status)


def _how(exit_code: int) -> str:
    if exit_code >= 0:
        return f"exited with status {exit_code}"
    number = -exit_code
    name = signal.Signals(number).name if number in set(signal.Signals) else "unknown"
    hint = "; if no process sent it, the kernel was out of memory" if number == signal.SIGKILL else ""
    return f"was killed by signal {number} ({name}{hint})"


def let_go_of_terminal() -> None:
    """Give up the trainer's streams and directory: whoever waits for their end waits for the trainer, not for this."""
    with contextlib.suppress(OSError):
        null = os.open(os.devnull, os.O_RDWR)
        for stream in (1, 2):
            os.dup2(null, stream)
        os.close(null)
        os.chdir("/")


def _work(worker: _Worker) -> None:
    """Be a worker, in a process just forked: take its name and priorities, and run its program."""
    order = worker.order
    ctypes.CDLL(None).prctl(_PR_SET_NAME, b"ckpt-" + order.program.encode(), 0, 0, 0)
    with contextlib.suppress(OSError):
        os.nice(order.nice)
    if order.io_class == "idle":
        _set_io_priority(_IDLE, 0)
    elif order.io_class is not None and order.io_level in range(8):
        _set_io_priority(_BEST_EFFORT, order.io_level)
    program = importlib.import_module(PROGRAMS[order.program])
    program.run(worker.socket) if worker.memory is None else program.run(worker.socket, worker.memory)


def _set_io_priority(io_class: int, level: int) -> None:
    """Set the I/O priority of this process, as ioprio_set(2) does; it stays as it is if that fails."""
    if (number := _IOPRIO_SET.get(os.uname().machine)) is not None:
        ctypes.CDLL(None).syscall(number, _IOPRIO_WHO_PROCESS, 0, io_class << _IOPRIO_CLASS_SHIFT | level)
        return
    import psutil  # only here: on most machines a keeper and its workers are without it, a megabyte each

    with contextlib.suppress(OSError, psutil.Error):
        psutil.Process().ionice(io_class, level)


def main(control_fd: int, trainer: int, trainer_pid: int) -> None:
    """Run the keeper and, in forked processes, the workers. Never returns.

    Neither runs exit handlers, which might wait for threads of a user's library.
    """
    status = 1
    try:
        for ignored in (signal.SIGINT, signal.SIGTERM):
            signal.signal(ignored, signal.SIG_IGN)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, (signal.SIGINT, signal.SIGTERM))  # blocked by the trainer until now
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # if it is ignored, as by the trainer, exit statuses are lost
        ctypes.CDLL(None).prctl(_PR_SET_NAME, b"ckpt-keeper", 0, 0, 0)
        with contextlib.suppress(Exception):  # no usable stderr
            faulthandler.enable()
        for module in _PREIMPORT:
            importlib.import_module(module)
        gc.freeze()  # a collection in a worker does not touch, and so copy, pages it shares with the keeper
        control = ControlChannel(socket.socket(fileno=control_fd), CONTROL)
        worker = _KeeperProcess(control, trainer, trainer_pid).serve()
        if worker is not None:
            _work(worker)
        status = 0
    except BaseException:
        sys.excepthook(*sys.exc_info())
    finally:
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(Exception):
                stream.flush()
        os._exit(status)
