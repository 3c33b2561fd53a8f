"""The trainer's end of its keeper, and of the workers that the keeper forks.

Nothing here waits for the keeper, except `Keeper.close`, `give_up_start` and `wait_exit`. Orders to it are packets that
it can take before it has started, and does also if the trainer dies the next moment.
"""

from __future__ import annotations

import _thread
import contextlib
import os
import select
import signal
import subprocess
import threading
from collections.abc import Callable
from typing import Any, Generic, TypeVar

from ckpt.keeper.messages import CONTROL, Control, ControlChannel, Exited, Fork, ForkedWorker
from inprocess.ipc.deadline import Deadline
from inprocess.ipc.forks import Origin, in_forked_children
from inprocess.ipc.packets import Channel, Codec, Packet
from inprocess.ipc.process import has_ended, start_module
from inprocess.ipc.process_one import reap_adopted

_KILLED_WAIT_S = 0.5  # for the end of a killed process; one that waits for storage in the kernel does not end
# No threads in a process that forks.
_ONE_THREAD = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}

M = TypeVar("M")


class Keeper:
    """Starts the keeper process when it is first needed, and again if it died. Any thread.

    `generation` counts the processes: what one was told, the next one does not know.
    """

    def __init__(self) -> None:
        self.generation = 0
        self._lock = threading.RLock()  # not for `release`, which a fork of this process calls, and the collector
        self._origin = Origin()
        self._control: ControlChannel | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._is_up = False  # it has sent something
        self._has_orders = False  # it was told something about memory, which it must do
        self._asked: set[int] = set()  # the workers that this process was asked for
        self._next_worker_id = 0
        self._wanted: set[int] = set()  # the workers of which it is to be known how they start and end
        self._started: dict[int, tuple[int, int]] = {}  # pid and pidfd, until `take_started`
        self._exits: dict[int, str] = {}
        in_forked_children(self.release)

    @property
    def pid(self) -> int | None:
        """The id of the process; None while there is none."""
        return None if self._process is None else self._process.pid

    @property
    def control(self) -> ControlChannel | None:
        """The channel, to poll; None while there is no process."""
        return self._control

    def start(self) -> None:
        """Start the process, unless it runs. OSError if it cannot be started."""
        with self._lock:
            self.pump()
            if self._control is None:
                self._start()

    def tell(self, message: Control, *fds: int) -> None:
        """Send an order to a process that was started; ignored if it has ended."""
        with self._lock:
            if self._control is not None:
                self._has_orders = True
                self._control.send(message, *fds)
                self._control.flush()

    # -- workers -------------------------------------------------------------------------------------------------------

    def fork(self, program: str, nice: int, io_class: str | None, io_level: int, fd: int) -> int:
        """Ask for a worker that runs `program` with the socket `fd`, and return its id. The caller closes its copy.

        Returns before the worker exists: messages may be sent to it at once. OSError if no process can be started.
        """
        with self._lock:
            self.start()
            assert self._control is not None
            self._next_worker_id += 1
            self._asked.add(self._next_worker_id)
            self._wanted.add(self._next_worker_id)
            self._control.send(Fork(self._next_worker_id, program, nice, io_class, io_level), fd)
            return self._next_worker_id

    def take_started(self, worker_id: int) -> tuple[int, int] | None:
        """Return the worker's pid and pidfd, which the caller then owns; None until it has been forked."""
        with self._lock:
            return self._started.pop(worker_id, None)

    def pump(self) -> None:
        """Take in what the keeper sent.

        One that died is forgotten: its workers live on, their exit statuses are lost.
        """
        with self._lock:
            if (control := self._control) is None:
                return
            control.flush()
            try:
                self._take_in(control)
            except EOFError:
                self.release()

    def _take_in(self, control: ControlChannel) -> None:
        while (packet := control.receive()) is not None:
            match packet.message, packet.fds:
                case ForkedWorker(worker_id, pid), (pidfd,):
                    self._started[worker_id] = (pid, pidfd)
                    self._forget_unwanted(worker_id)
                case Exited(worker_id, how), ():
                    self._exits[worker_id] = how
                    self._forget_unwanted(worker_id)
            self._is_up = True

    def forget(self, worker_id: int) -> None:
        """Forget a worker that was released. Idempotent; without the lock, as `release`."""
        self._wanted.discard(worker_id)
        self._forget_unwanted(worker_id)

    def _forget_unwanted(self, worker_id: int) -> None:
        # Called after each change of the three: whichever of two threads comes last closes the descriptor, once.
        if worker_id not in self._wanted:
            self._exits.pop(worker_id, None)
            if (started := self._started.pop(worker_id, None)) is not None:
                os.close(started[1])

    def give_up_start(self, worker_id: int) -> None:
        """Kill a keeper that is still starting, and has no order but that for this worker.

        If it has forked that until then, `take_started` returns it.
        """
        with self._lock:
            self.pump()
            is_needed = self._is_up or self._has_orders or self._asked != {worker_id}
            if self._process is None or self._control is None or is_needed:
                return
            self._process.kill()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(_KILLED_WAIT_S)
            with contextlib.suppress(EOFError):
                self._take_in(self._control)

    def wait_exit(self, worker_id: int, timeout_s: float) -> str:
        """Return how a worker that is known to be dead ended; wait for the keeper to report it, if need be."""
        deadline = Deadline(timeout_s)
        while (how := self._exits.pop(worker_id, None)) is None:
            if (control := self._control) is None or deadline.is_over:
                return "died (exit status unknown)"
            poll = select.poll()
            poll.register(control, control.poll_events)
            poll.poll(deadline.poll_ms())
            self.pump()
        return how

    # -- ends ----------------------------------------------------------------------------------------------------------

    def close(self, ending: Deadline) -> None:
        """Wait until all workers and the keeper have ended, until the deadline, then kill the keeper. Idempotent.

        The memory that it keeps must be given up before.
        """
        if (process := self._process) is None or (control := self._control) is None:
            return
        try:
            control.end_sending()
            _wait_end(process, ending)
        except subprocess.TimeoutExpired:
            process.kill()
            with contextlib.suppress(subprocess.TimeoutExpired):  # a thread of `release` waits for it
                process.wait(_KILLED_WAIT_S)
        finally:
            self.release()

    def kill(self) -> None:
        """Kill a process that hangs; the next order starts another one. Its workers live on."""
        process = self._process
        self.release()
        if process is not None and self._origin.is_here:
            process.kill()

    def release(self) -> None:
        """Close the connection without waiting: the keeper ends by itself after its workers. Idempotent.

        It keeps memory as after the death of this process, unless it was told to give that up.
        """
        control, process, self._control, self._process = self._control, self._process, None, None
        started, self._started = self._started, {}  # first, so that nothing is closed twice after an interrupt
        if control is not None:
            control.end_sending()  # a child of this process, forked by foreign code, may hold the connection
            control.close()
        for _, pidfd in started.values():
            os.close(pidfd)
        if process is not None and self._origin.is_here and process.poll() is None:
            try:  # so that it does not stay a zombie; `threading` has locks that the garbage collector may hold
                _thread.start_new_thread(process.wait, ())
            except RuntimeError:  # the interpreter is shutting down, and init will reap it
                process.returncode = 0

    def __del__(self) -> None:
        self.release()

    def _start(self) -> None:
        reap_adopted()  # process 1 of a container gets the workers of an earlier keeper, which was killed
        trainer = os.pidfd_open(os.getpid())
        # The keeper ignores these, but not before it has started: it inherits that they are blocked.
        blocked = signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGINT, signal.SIGTERM))
        try:
            control, theirs = ControlChannel.pair(CONTROL)
            with theirs:
                try:
                    fds = theirs.fileno(), trainer
                    streams: dict[str, Any] = dict.fromkeys(("stdout", "stderr"))  # those of the trainer
                    arguments = (*map(str, fds), str(os.getpid()))
                    self._process = start_module(
                        "ckpt.keeper", *arguments, pass_fds=fds, env=_ONE_THREAD, cwd=None, **streams
                    )
                except BaseException:
                    control.close()
                    raise
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, blocked)
            os.close(trainer)
        self.generation += 1
        self._is_up, self._has_orders, self._asked = False, False, set()
        self._control = control


def _wait_end(process: subprocess.Popen[bytes], deadline: Deadline) -> None:
    """Wait for the end of a process; subprocess.TimeoutExpired at the deadline.

    With a timeout `Popen.wait` would look now and then, and notice the end up to 50 ms later.
    """
    if process.poll() is not None:
        return
    pidfd = os.pidfd_open(process.pid)  # not reaped yet, so the pid is still its own
    try:
        ended = has_ended(pidfd, deadline)
    finally:
        os.close(pidfd)
    process.wait(None if ended else 0)


class Worker(Generic[M]):
    """One worker, from the request to fork it until it is dead. Messages may be sent to `channel` at once.

    A keeper that was killed before it could report the fork leaves the pid unknown: then the end of the channel says
    that the worker is dead.
    """

    def __init__(
        self,
        keeper: Keeper,
        program: str,
        codec: Codec[M],
        *,
        nice: int = 0,
        io_class: str | None = None,
        io_level: int = 7,
    ) -> None:
        """Ask for the process; does not wait for it. OSError if it cannot be started."""
        self.pid: int | None = None
        self.pidfd: int | None = None  # None until the keeper has reported the fork
        self._keeper = keeper
        self.channel, theirs = Channel.pair(codec)
        with theirs:
            try:
                self.worker_id = keeper.fork(program, nice, io_class, io_level, theirs.fileno())
            except BaseException:
                self.channel.close()
                raise

    def refresh(self) -> None:
        """Learn the pid, if the keeper has reported it."""
        if self.pidfd is None and (started := self._keeper.take_started(self.worker_id)) is not None:
            self.pid, self.pidfd = started

    def is_dead(self, deadline: Deadline | None = None) -> bool:
        """Return whether the process is known to be dead, now or until the deadline."""
        return self.pidfd is not None and has_ended(self.pidfd, deadline)

    def receive(self, take: Callable[[Packet[M]], None]) -> bool:
        """Send what waits to be sent, and call `take` with each packet that has arrived, which owns its descriptors.

        Does not wait. Returns whether the process is dead, and all that it sent is taken.
        """
        self._keeper.pump()
        self.channel.flush()
        self.refresh()
        is_dead = self.is_dead()  # checked first: if so, all that it ever sent is in the channel
        try:
            while (packet := self.channel.receive()) is not None:
                take(packet)
        except EOFError:
            return True
        return is_dead  # a dead process without an end of the channel: a child of it still holds that

    def kill(self) -> None:
        """Send SIGKILL, if the pid is known."""
        if (pidfd := self.pidfd) is not None:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(pidfd, signal.SIGKILL)

    def how_ended(self, timeout_s: float) -> str:
        """Return how a dead worker ended, as the end of a sentence; see `Keeper.wait_exit`."""
        return self._keeper.wait_exit(self.worker_id, timeout_s)

    def how_it_ends(self, timeout_s: float) -> str:
        """Kill a process whose connection has ended, which soon ends itself; return how it ended, as `how_ended`."""
        self.kill()
        self.is_dead(Deadline(timeout_s))
        return self.how_ended(timeout_s)

    def end(self, ending: Deadline) -> None:
        """Close the connection, wait for the end of the process until the deadline, then kill it. Idempotent."""
        if self.channel.fileno() < 0:
            return
        self.channel.end_sending()
        self._learn_pid(ending)
        if not self.is_dead(ending):
            self.kill()
            self.is_dead(Deadline(_KILLED_WAIT_S))
        self.release()

    def abort(self, known: Deadline) -> None:
        """Kill the process as soon as its pid is known, and close the connection. Idempotent.

        One that is not forked until the deadline is left: it finds what it was sent, and the connection closed.
        """
        if self.channel.fileno() >= 0:
            self._learn_pid(known)
        self.end(Deadline(0.0))

    def _learn_pid(self, ending: Deadline) -> None:
        """Wait until the keeper has reported the fork, or cannot any more."""
        while self.pidfd is None:
            is_gone = self.channel.peer_gone  # checked first: if so, it has been forked and ended, or never will be
            self._keeper.pump()
            self.refresh()
            if self.pidfd is not None or is_gone or ending.is_over or (control := self._keeper.control) is None:
                return
            poll = select.poll()
            poll.register(control, control.poll_events)
            poll.poll(ending.poll_ms())

    def release(self) -> None:
        """Close the connection without waiting: the process, if alive, ends by itself. Idempotent."""
        self.channel.close()
        pidfd, self.pidfd = self.pidfd, None  # first, so that nothing is closed twice after an interrupt
        if pidfd is not None:
            os.close(pidfd)
        self._keeper.forget(self.worker_id)

    def __del__(self) -> None:
        if hasattr(self, "worker_id"):  # an exception may have interrupted whatever wanted it
            self.release()
