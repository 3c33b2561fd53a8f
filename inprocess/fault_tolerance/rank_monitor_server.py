"""The monitor process of the ranks of a node, one process per rank as launchers use it, or one for all.

    launcher                              monitor process, one thread
      run_in_subprocess ── settings ──▶     Station per rank: rank's socket, board, deadlines
      MonitorHandle    ◀── ready ─────      control socket: close the worker's connection, set the cycle, end
           │ death: end                     signals: end

It is started from scratch, without torch and without anything of the launcher but a socket; it ends when the launcher
does.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import selectors
import signal
import socket
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from inprocess.fault_tolerance import messages
from inprocess.fault_tolerance.config import FaultToleranceConfig
from inprocess.fault_tolerance.data import RankInfo
from inprocess.fault_tolerance.messages import CODEC
from inprocess.fault_tolerance.monitor_handle import MonitorControl, MonitorHandle, launcher_socket_path, start
from inprocess.fault_tolerance.peers import Done, Peers
from inprocess.fault_tolerance.side_checks import SideChecks
from inprocess.fault_tolerance.state_machine import RankMonitorStateMachine, RestarterLog
from inprocess.fault_tolerance.station import Station
from inprocess.ipc import unix_sockets
from inprocess.ipc.packets import MAX_BYTES, PacketError, receive, send
from inprocess.ipc.wakeup import Wakeup

__all__ = ["MonitorControl", "MonitorHandle", "RankMonitorServer", "launcher_socket_path"]

_log = logging.getLogger("inprocess.fault_tolerance.rank_monitor_server")
_ENDING = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2)


@dataclass(frozen=True)
class _Task:
    """What a monitor process is started for."""

    config: FaultToleranceConfig
    paths: tuple[str, ...]
    is_restarter_logger: bool
    slot_wait_s: float
    peers: tuple[str, ...] = ()


class RankMonitorServer:
    """The loop of a monitor process; made within it. `run_in_subprocess` is what launchers call."""

    def __init__(self, task: _Task, control_path: str) -> None:
        self.machine = RankMonitorStateMachine(RestarterLog(_log, task.is_restarter_logger))
        self._task = task
        self._control_path = control_path
        self._selector = selectors.DefaultSelector()
        self._ending = False
        self._cycle: int | None = None
        self._checks: dict[int, SideChecks] = {}
        self._defect = Wakeup()
        self._restart_check_s = time.monotonic() + task.config.restart_check_interval
        self._stations: list[Station] = []
        self._peers = Peers(task.peers, self._selector)

    @staticmethod
    def run_in_subprocess(
        cfg: FaultToleranceConfig,
        ipc_socket_path: str | Sequence[str],
        is_restarter_logger: bool = False,
        mp_ctx: Any = None,
        env: Mapping[str, str] | None = None,
        slot_wait_s: float = 60.0,
        peers: Sequence[str] = (),
    ) -> MonitorHandle:
        """Start a monitor process and return when it listens: 180 s at most. RuntimeError if it does not.

        It ends when the caller's process ends. Several paths: it watches so many ranks. `mp_ctx` is accepted for
        compatibility and not used: the process is always started from scratch. `env` is added to its environment. A
        rank that comes while another is watched waits for `slot_wait_s`. `peers` are the paths of other monitors, which
        are asked where their ranks stand when a rank is late.
        """
        paths = [ipc_socket_path] if isinstance(ipc_socket_path, str) else list(ipc_socket_path)
        task = {
            "config": cfg.to_dict(),
            "paths": [os.path.abspath(path) for path in paths],
            "is_restarter_logger": is_restarter_logger,
            "slot_wait_s": slot_wait_s,
            "peers": [os.path.abspath(path) for path in peers],
        }
        return start(task, env or {})

    def run(self, parent: socket.socket) -> None:
        """Watch until told to end, by a signal, the control socket, or the end of the parent's."""
        with contextlib.ExitStack() as stack:
            stack.callback(self._close, parent)
            wake = self._catch_signals(stack)
            self._selector.register(wake, selectors.EVENT_READ, lambda: self._signalled(wake))
            self._selector.register(parent, selectors.EVENT_READ, self._end)
            self._selector.register(self._defect, selectors.EVENT_READ, self._act_on_defects)
            control = unix_sockets.listen(self._control_path)
            stack.callback(unix_sockets.remove_socket, self._control_path)
            stack.enter_context(control)
            self._selector.register(control, selectors.EVENT_READ, lambda: self._accept_control(control))
            for index, path in enumerate(self._task.paths):
                self._stations.append(self._station(index, path))
            _say(parent, {"control": self._control_path})
            while not self._ending:
                for key, _ in self._selector.select(self._pause_s()):
                    key.data()
                    if self._ending:
                        break
                for station in self._stations:
                    station.step()
                self._peers.step()
                self._check_restart()

    def _station(self, index: int, path: str) -> Station:
        task = self._task
        return Station(
            path,
            task.config,
            self._selector,
            self.machine,
            slot_wait_s=task.slot_wait_s,
            on_owner=lambda rank: self._owner_changed(index, rank),
            ask_others=self._ask_others,
            cycle=lambda: self._cycle,
        )

    def _ask_others(self, done: Done) -> None:
        here = [standing for station in self._stations if (standing := station.standing()) is not None]
        self._peers.ask(lambda answers: done(here + answers))

    def _pause_s(self) -> float | None:
        steps = [self._peers.next_step_s, *(station.next_step_s for station in self._stations)]
        times = [at for at in steps if at is not None]
        if self.machine.is_restarting():
            times.append(self._restart_check_s)
        return max(0.0, min(times) - time.monotonic()) if times else None

    def _check_restart(self) -> None:
        if time.monotonic() >= self._restart_check_s:
            self._restart_check_s = time.monotonic() + self._task.config.restart_check_interval
            if self.machine.is_restarting():
                self.machine.periodic_restart_check()

    # -- health --------------------------------------------------------------------------------------------------------

    def _owner_changed(self, index: int, rank: RankInfo | None) -> None:
        earlier = self._checks.pop(index, None)
        if earlier is not None:
            earlier.stop()
        if rank is not None:
            self._checks[index] = SideChecks(self._task.config, rank.local_rank, self._defect.set)

    def _act_on_defects(self) -> None:
        self._defect.clear()
        for index, checks in self._checks.items():
            if checks.defect is not None:
                self._stations[index].kill(checks.defect)

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
                _log.warning("the control socket got rubbish: %s", error)
            self._selector.unregister(end)
            end.close()

    def _obey(self, message: messages.Message) -> messages.Message:
        match message:
            case messages.CloseConnection():
                for station in self._stations:
                    station.disconnect_owner()
            case messages.SetCycle(cycle):
                self._cycle = cycle
                _log.info("cycle %d", cycle)
            case messages.Shutdown():
                self._end()
            case _:
                return messages.Failed(f"a {type(message).__name__} is not for the control socket")
        return messages.Ok()

    # -- the end -------------------------------------------------------------------------------------------------------

    def _catch_signals(self, stack: contextlib.ExitStack) -> socket.socket:
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
        self.machine.handle_signal()
        self._end()

    def _end(self) -> None:
        self._ending = True

    def _close(self, parent: socket.socket) -> None:
        for checks in self._checks.values():
            checks.stop()
        self._checks = {}
        self._peers.close()
        for station in self._stations:
            station.close()
        for key in list(self._selector.get_map().values()):
            if isinstance(key.fileobj, socket.socket) and key.fileobj is not parent:
                key.fileobj.close()
        self._selector.close()
        self._defect.close()


def main(arguments: list[str]) -> int:
    """Entry of the process: `... CHANNEL_FD`; the first packet says what to do."""
    parent = socket.socket(fileno=int(arguments[0]))
    try:
        packet = parent.recv(MAX_BYTES)
        if not packet:
            return 0
        values = json.loads(packet)
        task = _Task(
            FaultToleranceConfig.from_kwargs(**values["config"]),
            tuple(values["paths"]),
            bool(values["is_restarter_logger"]),
            float(values["slot_wait_s"]),
            tuple(values["peers"]),
        )
        logging.basicConfig(
            level=task.config.log_level,
            format=f"%(asctime)s | %(levelname)s | rank monitor {os.getpid()} | %(name)s | %(message)s",
        )
        RankMonitorServer(task, launcher_socket_path(os.getpid())).run(parent)
    except BaseException as error:
        _log.exception("the rank monitor fails")
        _say(parent, {"failed": f"{type(error).__name__}: {error}"})
        return 1
    return 0


def _say(parent: socket.socket, values: dict[str, str]) -> None:
    with contextlib.suppress(OSError):
        parent.send(json.dumps(values).encode(), socket.MSG_NOSIGNAL)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
