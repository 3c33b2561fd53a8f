"""The monitor that a launcher starts: ranks connect to its sockets and hand over their boards.

    launcher                                monitor process, one thread
      start_monitor ── ServeRanks ────▶       RankSocket per path: connections, and the session of one rank
      MonitorHandle ◀── Started ───────       control socket: end the sessions, set the cycle, end
           │ its death: end                   signals: end
                                              NeighborMonitors: other monitors of the node
                                              DeviceHealth per rank, a thread each

It watches one rank, as the launcher uses it, or all ranks of a node, and ends when the launcher does. A launcher that
dies, instead of sending Shutdown, leaves its worker to the monitor, which ends it: SIGTERM, and SIGKILL for its process
group after the grace.
"""

from __future__ import annotations

import contextlib
import logging
import os
import selectors
import signal
import socket
import time

from inprocess.ipc import unix_sockets
from inprocess.ipc.packets import PacketError, receive, send
from inprocess.ipc.suspension import Suspension
from inprocess.ipc.wakeup import Wakeup
from inprocess.monitor_process import messages
from inprocess.monitor_process.device_health import DeviceHealth
from inprocess.monitor_process.messages import CODEC, MonitorChannel, RankInfo, ServeRanks, Started
from inprocess.monitor_process.neighbor_monitors import NeighborMonitors, OnAnswers
from inprocess.monitor_process.rank_socket import RankSocket
from inprocess.monitor_process.session import SessionServices
from inprocess.monitor_process.state_machine import RankMonitorStateMachine, RestarterLog
from inprocess.monitor_process.watched import WatchedProcess

_log = logging.getLogger(__name__)
_ENDING = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2)


def control_socket_path(monitor_pid: int) -> str:
    """Return where the monitor process with this id listens to its launcher, in a directory of this user only."""
    return os.path.join(unix_sockets.private_directory(), f"monitor-{monitor_pid}.sock")


class NodeMonitor:
    """The loop of the process. `channel` is the connection to the launcher's process."""

    def __init__(self, task: ServeRanks, channel: MonitorChannel) -> None:
        self._task = task
        self._channel = channel
        self._selector = selectors.DefaultSelector()
        self._suspension = Suspension()
        self._machine = RankMonitorStateMachine(RestarterLog(_log, task.logs_restarts))
        self._neighbors = NeighborMonitors(task.neighbors, self._selector)
        self._sockets: list[RankSocket] = []
        self._health: dict[int, DeviceHealth] = {}  # by index of the rank's socket
        self._defect_found = Wakeup()
        self._restart_check_s = time.monotonic() + task.restart_check_interval_s
        self._cycle: int | None = None
        self._worker: WatchedProcess | None = None
        self._ending = False

    def run(self) -> None:
        """Watch ranks until told to end: by a signal, the control socket, or the end of the launcher."""
        with contextlib.ExitStack() as stack:
            stack.callback(self._close)
            wake = self._catch_signals(stack)
            self._selector.register(wake, selectors.EVENT_READ, lambda: self._signalled(wake))
            self._selector.register(self._channel, selectors.EVENT_READ, self._end_with_launcher)
            self._selector.register(self._defect_found, selectors.EVENT_READ, self._kill_on_defect)
            control_path = control_socket_path(os.getpid())
            control = stack.enter_context(unix_sockets.listen(control_path))
            stack.callback(unix_sockets.remove_socket, control_path)
            self._selector.register(control, selectors.EVENT_READ, lambda: self._accept_control(control))
            services = SessionServices(
                self._task, self._machine, self._ask_others, lambda: self._cycle, lambda: self._suspension.checked_s
            )
            for index, path in enumerate(self._task.paths):
                self._sockets.append(self._listen(index, path, services))
            self._channel.send(Started(control_path))
            while not self._ending:
                self._wait()
                for sock in self._sockets:
                    sock.step()
                self._neighbors.step()
                self._check_restart()

    def _listen(self, index: int, path: str, services: SessionServices) -> RankSocket:
        return RankSocket(path, self._selector, services, lambda rank: self._check_health(index, rank))

    def _wait(self) -> None:
        """Sleep until something is received or due, and handle what is received."""
        steps = [self._neighbors.next_step_s, *(sock.next_step_s for sock in self._sockets)]
        times = [at for at in steps if at is not None]
        if self._machine.is_restarting():
            times.append(self._restart_check_s)
        pause_s = max(0.0, min(times) - time.monotonic()) if times else None
        self._suspension.expect(pause_s)
        ready = self._selector.select(pause_s)
        self._note_suspension()
        for key, _ in ready:
            key.data()
            if self._ending:
                return
        self._note_suspension()

    def _note_suspension(self) -> None:
        if missed_s := self._suspension.missed_s():
            self._neighbors.note_suspension(missed_s)
            for sock in self._sockets:
                sock.note_suspension(missed_s)

    def _ask_others(self, done: OnAnswers) -> None:
        here = [standing for sock in self._sockets if (standing := sock.standing()) is not None]
        self._neighbors.ask(lambda answers: done(here + answers))

    def _check_restart(self) -> None:
        if time.monotonic() >= self._restart_check_s:
            self._restart_check_s = time.monotonic() + self._task.restart_check_interval_s
            if self._machine.is_restarting():
                self._machine.periodic_restart_check()

    # -- device health -------------------------------------------------------------------------------------------------

    def _check_health(self, index: int, rank: RankInfo | None) -> None:
        """Check the devices of the rank that is watched from now on, not those of the one before."""
        earlier = self._health.pop(index, None)
        if earlier is not None:
            earlier.stop()
        if rank is not None:
            task = self._task
            self._health[index] = DeviceHealth(
                rank.local_rank, task.health_check_interval_s, task.checks_network_ports, self._defect_found.set
            )

    def _kill_on_defect(self) -> None:
        self._defect_found.clear()
        for index, health in self._health.items():
            if health.defect is not None:
                self._sockets[index].kill(health.defect)

    # -- the launcher --------------------------------------------------------------------------------------------------

    def _accept_control(self, control: socket.socket) -> None:
        try:
            end, _ = control.accept()
        except OSError:
            return
        try:
            unix_sockets.peer_pid(end)
            end.setblocking(False)
            self._selector.register(end, selectors.EVENT_READ, lambda: self._receive_control(end))
        except OSError as error:
            _log.warning("a control connection is refused: %s", error)
            end.close()

    def _receive_control(self, end: socket.socket) -> None:
        try:
            packet = receive(end, CODEC)
            packet.close_fds()
            send(end, CODEC, self._obey(packet.message))
        except BlockingIOError:
            return
        except (PacketError, EOFError, OSError) as error:
            if isinstance(error, PacketError):
                _log.warning("invalid message on the control socket: %s", error)
            self._selector.unregister(end)
            end.close()

    def _obey(self, message: messages.Message) -> messages.Message:
        match message:
            case messages.CloseConnection():
                for sock in self._sockets:
                    sock.end_session()
            case messages.SetCycle(cycle):
                self._cycle = cycle
                _log.info("cycle %d", cycle)
            case messages.EndWithLauncher(pid):
                return self._take_worker(pid)
            case messages.Shutdown():
                self._end()
            case _:
                return messages.RequestFailed(f"unexpected message {type(message).__name__} on the control socket")
        return messages.Ok()

    # -- the worker of a launcher that dies ----------------------------------------------------------------------------

    def _take_worker(self, pid: int) -> messages.Message:
        try:
            worker = WatchedProcess(pid)
        except OSError as error:
            return messages.RequestFailed(f"process {pid}: {error}")
        if self._worker is not None:
            self._worker.close()
        self._worker = worker
        return messages.Ok()

    def _end_with_launcher(self) -> None:
        """The launcher has sent Shutdown, or has died: then its worker must not go on alone."""
        has_died = False
        try:
            if self._channel.receive() is None:
                return
        except EOFError:
            has_died = True
        worker = self._worker
        if has_died and worker is not None and not worker.gone:
            grace_s = self._task.termination_grace_s
            _log.error("the launcher has died; its worker %d is ended: it has %g s", worker.pid, grace_s)
            worker.terminate(signal.SIGTERM, grace_s)
            worker.wait_gone(grace_s)
            with contextlib.suppress(OSError):  # what it has started, and itself
                os.killpg(worker.pid, signal.SIGKILL)
            worker.send(signal.SIGKILL)
        self._end()

    # -- the end -------------------------------------------------------------------------------------------------------

    def _catch_signals(self, stack: contextlib.ExitStack) -> socket.socket:
        """Have signals that end the monitor make the returned socket readable."""
        ours, theirs = socket.socketpair()
        stack.enter_context(ours)
        stack.enter_context(theirs)
        ours.setblocking(False)
        theirs.setblocking(False)
        signal.set_wakeup_fd(theirs.fileno(), warn_on_full_buffer=False)
        stack.callback(signal.set_wakeup_fd, -1)
        for number in _ENDING:
            signal.signal(number, lambda _number, _frame: None)
        return ours

    def _signalled(self, wake: socket.socket) -> None:
        with contextlib.suppress(BlockingIOError):
            wake.recv(64)
        self._machine.handle_signal()
        self._end()

    def _end(self) -> None:
        self._ending = True

    def _close(self) -> None:
        for health in self._health.values():
            health.stop()
        self._health = {}
        self._neighbors.close()
        if self._worker is not None:
            self._worker.close()
        for sock in self._sockets:
            sock.close()
        for key in list(self._selector.get_map().values()):
            if isinstance(key.fileobj, socket.socket):
                key.fileobj.close()
        self._selector.close()
        self._defect_found.close()
