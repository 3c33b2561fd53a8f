"""The trainer's handle on the server process (see `server`)."""

from __future__ import annotations

import json
import os
import select
import socket
import subprocess
import sys
import threading
import time
import weakref
from typing import Protocol

from ckpt.async_calls.config import WriterConfig
from ckpt.async_calls.messages import CODEC, Exited, MessageChannel, Spawn, Spawned

__all__ = ["ForkServer", "release_in_forked_children"]

# The trainer's import path comes before anything of ours is imported; -P keeps the current directory from shadowing the
# standard library until then.
_BOOTSTRAP = """\
import json, sys
sys.path[:] = json.loads(sys.argv[1])
from ckpt.async_calls.server import main
main(int(sys.argv[2]))
"""
_KILL_WAIT_S = 5.0
_ONE_THREAD = {
    "OMP_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
}  # no threads in a process that forks


class _Releasable(Protocol):
    def release(self) -> None: ...


def release_in_forked_children(owner: _Releasable) -> None:
    """A process forked from the trainer (a data loader worker) closes its copies of `owner`'s sockets: as long as
    anybody holds one, no writer can see that the trainer died.
    """
    reference = weakref.ref(owner)

    def after_fork() -> None:
        if (alive := reference()) is not None:
            alive.release()

    os.register_at_fork(after_in_child=after_fork)


class ForkServer:
    """Starts the server when it is first needed, and again if it died. Nothing here blocks but `close` and `wait_exit`.

    Owned by one queue, used by all its writers, in the thread that uses the queue.
    """

    def __init__(self, config: WriterConfig) -> None:
        self._config = config
        self._owner_pid = os.getpid()
        self._control: MessageChannel | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._next_writer_id = 0
        self._spawned: dict[int, tuple[int, int]] = {}  # pid and pidfd of each writer nobody has asked for yet
        self._exits: dict[int, str] = {}
        release_in_forked_children(self)

    @property
    def control(self) -> MessageChannel | None:
        """To poll on together with the writers' sockets; None when no server runs."""
        return self._control

    def spawn(self, writer_socket: socket.socket) -> int:
        """Ask for a writer that serves `writer_socket`; the caller closes its copy. Returns the id to ask about the
        writer by.

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
        """The writer's pid and pidfd, now the caller's, once it has been forked."""
        return self._spawned.pop(writer_id, None)

    def pump(self) -> None:
        """Take in what the server said.

        A server that died is forgotten: its writers live on, their exit statuses are lost.
        """
        if self._control is None:
            return
        self._control.flush()
        try:
            while (packet := self._control.receive()) is not None:
                match packet.message, packet.fds:
                    case Spawned(writer_id, pid), (pidfd,):
                        self._spawned[writer_id] = (pid, pidfd)
                    case Exited(writer_id, how), ():
                        self._exits[writer_id] = how
        except EOFError:
            self.release()

    def wait_exit(self, writer_id: int, timeout_s: float) -> str:
        """How a writer that is known to be dead ended; waits a moment for the server to say so."""
        deadline = time.monotonic() + timeout_s
        while (how := self._exits.pop(writer_id, None)) is None:
            remaining_s = deadline - time.monotonic()
            if self._control is None or remaining_s <= 0:
                return "died (exit status unknown)"
            _poll(self._control, remaining_s)
            self.pump()
        return how

    def close(self) -> None:
        """Wait until the server has seen the last of its writers and exited, at most `close_timeout_s`, then kill it.

        Idempotent.
        """
        if (process := self._process) is None or self._control is None:
            return
        try:
            self._control.end_sending()
            process.wait(self._config.close_timeout_s)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait(_KILL_WAIT_S)
        finally:
            self.release()

    def release(self) -> None:
        """Let go without waiting: the server ends by itself after its writers. Idempotent."""
        control, process, self._control, self._process = self._control, self._process, None, None
        if control is not None:
            control.close()
        for _, pidfd in self._spawned.values():
            os.close(pidfd)
        self._spawned.clear()
        if process is not None and process.poll() is None and os.getpid() == self._owner_pid:
            try:  # so that it does not stay a zombie
                threading.Thread(target=process.wait, name="ckpt-reap-server", daemon=True).start()
            except RuntimeError:  # the interpreter is shutting down, and init will reap it
                process.returncode = 0

    def _start(self) -> MessageChannel:
        control, theirs = MessageChannel.pair(CODEC)
        with theirs:
            try:
                self._process = subprocess.Popen(
                    [sys.executable, "-P", "-c", _BOOTSTRAP, json.dumps(sys.path), str(theirs.fileno())],
                    stdin=subprocess.DEVNULL,
                    env={**os.environ, **_ONE_THREAD},
                    pass_fds=[theirs.fileno()],
                    start_new_session=True,
                )
            except BaseException:
                control.close()
                raise
        self._control = control
        return control


def _poll(channel: MessageChannel, timeout_s: float) -> None:
    poll = select.poll()
    poll.register(channel, channel.poll_events)
    poll.poll(max(0, int(timeout_s * 1000) + 1))
