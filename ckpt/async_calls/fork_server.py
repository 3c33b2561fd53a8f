"""The fork server: a clean, single-threaded process that forks writers and learns how they end. Both ends are here.

    trainer (`ForkServer`) ═══ control socket ═══ server (`_Server`) ──fork──▶ writer 0 ═══ its own socket ═══ trainer
                                                              └────────fork──▶ writer 1 ═══ its own socket ═══ trainer

A trainer cannot be forked safely: its threads, locks and CUDA context do not survive. The server is started once with
exec, imports what every writer needs, and from then on a writer costs one fork of a small process. It runs in its own
session and ignores SIGINT and SIGTERM, as writers do, so that neither Ctrl-C nor a job manager that ends the trainer
ends a save that is already staged. When the trainer closes its end or dies, the server waits for its writers, which
finish by themselves, and exits.
"""

from __future__ import annotations

import contextlib
import faulthandler
import gc
import importlib
import os
import select
import signal
import socket
import subprocess
import sys
import threading
from dataclasses import dataclass

from ckpt.async_calls.config import WriterConfig
from ckpt.async_calls.messages import CODEC, Exited, MessageChannel, Spawn, Spawned
from ckpt.async_calls.writer_main import run_writer
from inprocess.ipc.deadline import Deadline
from inprocess.ipc.forks import Origin, in_forked_children
from inprocess.ipc.process import start_module

__all__ = ["ForkServer", "main"]

_KILLED_WAIT_S = 0.5  # for the end of a killed process
_PREIMPORT = ("numpy", "cloudpickle", "psutil")
# No threads in a process that forks.
_ONE_THREAD = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}


class ForkServer:
    """The trainer's end: starts the server when it is first needed, and again if it died.

    Only `close`, `give_up_start` and `wait_exit` block. Owned by one queue, used by all its writers, in the thread that
    uses the queue.
    """

    def __init__(self, config: WriterConfig) -> None:
        self._config = config
        self._origin = Origin()
        self._control: MessageChannel | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._is_up = False  # whether it has sent anything
        self._next_writer_id = 0
        self._spawned: dict[int, tuple[int, int]] = {}  # pid and pidfd, until `take_spawned`
        self._exits: dict[int, str] = {}
        in_forked_children(self.release)

    @property
    def control(self) -> MessageChannel | None:
        """The channel to poll together with the writers' sockets; None when no server runs."""
        return self._control

    def spawn(self, writer_socket: socket.socket) -> int:
        """Ask for a writer that serves `writer_socket`, and return its id. The caller closes its copy of the socket.

        Returns before the writer exists: messages may be sent to it at once. Raises OSError when no server can be
        started.
        """
        self.pump()
        control = self._start() if self._control is None else self._control
        self._next_writer_id += 1
        order = Spawn(self._next_writer_id, self._config.nice, self._config.io_class, self._config.io_level)
        control.send(order, writer_socket.fileno())
        return self._next_writer_id

    def take_spawned(self, writer_id: int) -> tuple[int, int] | None:
        """Return the writer's pid and pidfd, which the caller then owns; None until it has been forked."""
        return self._spawned.pop(writer_id, None)

    def pump(self) -> None:
        """Take in what the server sent.

        A server that died is forgotten: its writers live on, their exit statuses are lost.
        """
        if self._control is None:
            return
        self._control.flush()
        try:
            self._take_in(self._control)
        except EOFError:
            self.release()

    def _take_in(self, control: MessageChannel) -> None:
        while (packet := control.receive()) is not None:
            match packet.message, packet.fds:
                case Spawned(writer_id, pid), (pidfd,):
                    self._spawned[writer_id] = (pid, pidfd)
                case Exited(writer_id, how), ():
                    self._exits[writer_id] = how
            self._is_up = True

    def give_up_start(self) -> None:
        """Kill a server that is still starting. What it has forked until then can be taken by `take_spawned`."""
        self.pump()
        if self._process is None or self._control is None or self._is_up:
            return
        self._process.kill()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(_KILLED_WAIT_S)
        with contextlib.suppress(EOFError):
            self._take_in(self._control)

    def wait_exit(self, writer_id: int, timeout_s: float) -> str:
        """Return how a writer that is known to be dead ended; wait for the server to report it, if need be."""
        deadline = Deadline(timeout_s)
        while (how := self._exits.pop(writer_id, None)) is None:
            if self._control is None or deadline.is_over:
                return "died (exit status unknown)"
            _poll(self._control, deadline)
            self.pump()
        return how

    def close(self, ending: Deadline) -> None:
        """Wait until all writers and the server have exited, until the deadline, then kill the server. Idempotent."""
        if (process := self._process) is None or self._control is None:
            return
        try:
            self._control.end_sending()
            _wait_exit(process, ending.within(self._config.close_timeout_s))
        except subprocess.TimeoutExpired:
            process.kill()
            with contextlib.suppress(subprocess.TimeoutExpired):  # a thread of `release` waits for it
                process.wait(_KILLED_WAIT_S)
        finally:
            self.release()

    def release(self) -> None:
        """Close the connection without waiting: the server ends by itself after its writers. Idempotent."""
        control, process, self._control, self._process = self._control, self._process, None, None
        if control is not None:
            control.close()
        for _, pidfd in self._spawned.values():
            os.close(pidfd)
        self._spawned.clear()
        if process is not None and self._origin.is_here and process.poll() is None:
            try:  # so that it does not stay a zombie
                threading.Thread(target=process.wait, name="ckpt-reap-server", daemon=True).start()
            except RuntimeError:  # the interpreter is shutting down, and init will reap it
                process.returncode = 0

    def _start(self) -> MessageChannel:
        control, theirs = MessageChannel.pair(CODEC)
        with theirs:
            try:
                fd = theirs.fileno()
                streams = dict.fromkeys(("stdout", "stderr"))  # those of the trainer
                self._process = start_module(
                    "ckpt.async_calls.fork_server_main", str(fd), pass_fds=[fd], env=_ONE_THREAD, cwd=None, **streams
                )
            except BaseException:
                control.close()
                raise
        self._control, self._is_up = control, False
        return control


def _wait_exit(process: subprocess.Popen[bytes], deadline: Deadline) -> None:
    """Wait for the end of a process; subprocess.TimeoutExpired at the deadline.

    With a timeout `Popen.wait` would look now and then, and notice the end up to 50 ms later.
    """
    if process.poll() is not None:
        return
    pidfd = os.pidfd_open(process.pid)  # not reaped yet, so the pid is still its own
    try:
        poll = select.poll()
        poll.register(pidfd, select.POLLIN)
        ended = poll.poll(deadline.poll_ms())
    finally:
        os.close(pidfd)
    process.wait(None if ended else 0)


def _poll(channel: MessageChannel, deadline: Deadline) -> None:
    poll = select.poll()
    poll.register(channel, channel.poll_events)
    poll.poll(deadline.poll_ms())


# -- the server process -----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Child:
    writer_id: int
    pid: int
    pidfd: int


class _Server:
    """The loop of the server, in the main (and only) thread of its process."""

    def __init__(self, control: MessageChannel) -> None:
        self._control = control
        self._trainer_alive = True
        self._children: dict[int, _Child] = {}  # by pidfd

    def serve(self) -> tuple[Spawn, socket.socket] | None:
        """Fork writers until the trainer has closed its end and all writers have exited.

        Returns None in the server, and in every forked writer the message that asked for it and its socket.
        """
        while self._trainer_alive or self._children:
            poll = select.poll()
            if self._trainer_alive:
                poll.register(self._control, self._control.poll_events)
            for pidfd in self._children:
                poll.register(pidfd, select.POLLIN)
            ready = {fd for fd, _ in poll.poll()}  # no deadline: the death of any of them is an event
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
        """Fork a writer. True in the writer, which keeps no descriptor of the server's."""
        try:
            pid = os.fork()
        except OSError as error:  # the trainer sees the end of the socket, and this message
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
    hint = "; if no process sent it, the kernel was out of memory" if number == signal.SIGKILL else ""
    return f"was killed by signal {number} ({name}{hint})"


def main(control_fd: int) -> None:
    """Run the server and, in forked processes, the writers. Never returns.

    Neither runs exit handlers, which might wait for threads of a user's library.
    """
    status = 1
    try:
        for ignored in (signal.SIGINT, signal.SIGTERM):
            signal.signal(ignored, signal.SIG_IGN)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # if it is ignored, as by the trainer, exit statuses are lost
        with contextlib.suppress(Exception):  # no usable stderr
            faulthandler.enable()
        for module in _PREIMPORT:
            importlib.import_module(module)
        gc.freeze()  # a collection in a writer does not touch, and so copy, pages it shares with the server
        order = _Server(MessageChannel(socket.socket(fileno=control_fd), CODEC)).serve()
        if order is not None:
            run_writer(*order)
        status = 0
    except BaseException:
        sys.excepthook(*sys.exc_info())
    finally:
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(Exception):
                stream.flush()
        os._exit(status)
