"""The rank's side of section monitoring.

    rank_monitor_client   what training code calls
      recorder            measures each event and writes it to shared memory
      client_sections     what `section` and `begin_in_background` return
      link                finds the monitor and connects to it
      learned_limits      learned limits, saved and exchanged

`init_workload_monitoring` finds the monitor: that of the in-process wrapper around the calling function if it has
`sections=`, else the one that listens at FT_RANK_MONITOR_IPC_SOCKET.
"""

from __future__ import annotations

import contextlib
import logging
import os
import sys
import weakref
from collections.abc import Callable, Collection, Mapping
from types import TracebackType
from typing import Any

from inprocess.fault_tolerance.background_section import BackgroundSection
from inprocess.fault_tolerance.config import FaultToleranceConfig
from inprocess.fault_tolerance.data import FT_LAUNCHER_IPC_SOCKET_ENV_VAR, WorkloadControlRequest
from inprocess.fault_tolerance.errors import (
    RankMonitorClientError,
    errors,
    exit_after,
    not_initialized,
    raise_error,
)
from inprocess.fault_tolerance.ipc_connector import IpcConnector
from inprocess.fault_tolerance.learned_limits import exchange_measured, learned_state, with_learned
from inprocess.fault_tolerance.link import MonitorConnection
from inprocess.fault_tolerance.recorder import Forked, Recorder
from inprocess.fault_tolerance.timeouts_calc import TimeoutsCalcError
from inprocess.monitor_process.messages import RankInfo
from inprocess.sections.board import Board
from inprocess.sections.timeouts import HeartbeatTimeouts, SectionTimeouts

__all__ = ["RankMonitorClient", "RankMonitorClientError"]


class RankMonitorClient:
    """Tells the phases of this rank's training to its monitor.

    Methods may be called from any thread; `init_workload_monitoring` on the main thread, or the monitor cannot read the
    stacks of this process. They raise only `RankMonitorClientError`; so does every method except `load_state_dict` and
    `send_workload_control_request` before initialization and in a forked child. None waits for a monitor that does not
    answer, except once for a few seconds; the training then goes on without a monitor, and the log says so.

    A client that is initialized while another one of this process is replaces that, except under the in-process wrapper
    with `sections=`, where that is an error. A client that is deleted ends monitoring.
    """

    def __init__(self) -> None:
        self.logger: Any = logging.getLogger(__name__)
        self.cfg: FaultToleranceConfig | None = None
        self.hb_timeouts: HeartbeatTimeouts | None = None
        self.section_timeouts: SectionTimeouts | None = None
        self.rank_info: RankInfo | None = None
        self._recorder: Recorder | None = None
        self._on_duration: Callable[[str, float], None] | None = None
        self._connection: MonitorConnection | None = None
        self._deleted: weakref.finalize[..., RankMonitorClient] | None = None
        self._loaded: Mapping[str, Any] | None = None
        self._acknowledged = False
        self._earlier_hook: Any = None
        self._follows_forks = False
        path = os.environ.get(FT_LAUNCHER_IPC_SOCKET_ENV_VAR)
        self._launcher = None if path is None else IpcConnector(path)
        if path is None:
            self.logger.debug("%s is not set: control requests cannot be sent", FT_LAUNCHER_IPC_SOCKET_ENV_VAR)

    @property
    def is_initialized(self) -> bool:
        """Whether `init_workload_monitoring` was called, and `shutdown_workload_monitoring` was not since."""
        return self._recorder is not None

    # -- connecting ----------------------------------------------------------------------------------------------------

    def init_workload_monitoring(self, num_warmup_iters: int | None = None) -> None:
        """Connect to the monitor and get the settings. From now on the rank is watched, until the interpreter exits.

        `num_warmup_iters` overrides the setting. Limits are the configured ones, or those loaded, or (in a function
        that the in-process wrapper has restarted) those learned before the restart.
        """
        if self.is_initialized:
            raise RankMonitorClientError("monitoring is initialized already; call shutdown_workload_monitoring first")
        with errors("monitoring cannot be initialized"):
            self.rank_info = RankInfo.get_for_current_rank()
            self._connection = MonitorConnection.find(self.rank_info)
            try:
                self._begin(self._connection.board, num_warmup_iters)
            except BaseException:
                self.shutdown_workload_monitoring()
                raise
        self._follow_forks()

    def _begin(self, board: Board, num_warmup_iters: int | None) -> None:
        if num_warmup_iters is not None:
            board.set_warmup(num_warmup_iters)
        self.cfg = FaultToleranceConfig.from_kwargs(**board.config)
        self._acknowledged = not self.cfg.skip_section_response
        self._recorder = Recorder(board, self.cfg.safety_factor)
        self._recorder.on_duration = self._on_duration
        self.hb_timeouts, self.section_timeouts = board.limits()
        if self._loaded is not None:
            self._install(*with_learned(self.hb_timeouts, self.section_timeouts, self._loaded))
        assert self._connection is not None
        self._deleted = weakref.finalize(self, _end_monitoring, self._recorder, self._connection)
        self._deleted.atexit = False  # the connection is closed earlier, when the interpreter begins to exit
        self._confirm()
        if self.cfg.install_exception_hook:
            self._earlier_hook, sys.excepthook = sys.excepthook, exit_after

    def shutdown_workload_monitoring(self) -> None:
        """End monitoring: the rank is not watched any more. Idempotent. It may be initialized again."""
        recorder, self._recorder = self._recorder, None
        connection, self._connection = self._connection, None
        if self._deleted is not None:
            self._deleted.detach()
        _end_monitoring(recorder, connection)
        if self._earlier_hook is not None:
            if sys.excepthook is exit_after:
                sys.excepthook = self._earlier_hook
            self._earlier_hook = None

    def _follow_forks(self) -> None:
        """Have forked children close their copies of the connection: the monitor must notice our end."""
        if self._follows_forks:
            return
        self._follows_forks = True
        client = weakref.ref(self)

        def in_child() -> None:
            found = client()
            if found is not None and found._connection is not None:
                found._connection.close_copies()

        os.register_at_fork(after_in_child=in_child)

    # -- events --------------------------------------------------------------------------------------------------------

    def start_section(self, section: str) -> None:
        """Open a section. One that is not in the settings is ignored; one that is open already is an error."""
        recorder = self._recorder
        if recorder is None:
            not_initialized()
        try:
            opened = recorder.open(section)
        except (TimeoutsCalcError, Forked) as error:
            raise_error(error)
        if opened and self._acknowledged:
            self._confirm()

    def end_section(self, section: str) -> None:
        """Close a section. One that is not in the settings is ignored; one that is not open is an error."""
        recorder = self._recorder
        if recorder is None:
            not_initialized()
        try:
            # With an exception the section has not done its work, so its duration says nothing.
            closed = recorder.close(section, learn=sys.exc_info()[0] is None)
        except (TimeoutsCalcError, Forked) as error:
            raise_error(error)
        if closed and self._acknowledged:
            self._confirm()

    def section(self, name: str) -> contextlib.AbstractContextManager[None]:
        """Return the context of a section.

        If it was entered before an in-process restart it closes nothing after it. If it is left by an exception its
        duration is not learned from.
        """
        return SectionContext(self, name)

    def begin_in_background(self, name: str, at_ns: int) -> BackgroundSection | None:
        """Begin a section that goes on beside training, at this time of CLOCK_MONOTONIC. The caller ends the result.

        It is neither an open section nor the end of a gap, and there may be several with one name. The monitor does
        nothing when it is late: the caller checks `left_s` and ends the work. None if the section is not in the
        settings, or the client is not initialized.
        """
        recorder = self._recorder
        key = None if recorder is None else recorder.begin_in_background(name, at_ns)
        return None if recorder is None or key is None else BackgroundSection(recorder, self.rank_info, name, key)

    def end_all_sections(self) -> None:
        """Close every section that is open, if any."""
        with errors("sections cannot be closed"):
            self._initialized().close_all()
        if self._acknowledged:
            self._confirm()

    def send_heartbeat(self) -> None:
        """Send a heartbeat."""
        with errors("heartbeats cannot be sent"):
            self._initialized().beat()
        if self._acknowledged:
            self._confirm()

    def set_iteration(self, iteration: int) -> None:
        """Set the iteration of training to which events belong from now on. Not needed with Megatron."""
        self._initialized().set_iteration(iteration)

    def report_durations_to(self, function: Callable[[str, float], None] | None) -> None:
        """Call a function with name and seconds of each section that ends, such as `straggler.Detector.record`.

        Not for sections that an exception has interrupted, nor for those in the background. It is called in the thread
        that ends the section, and must not raise. None: call none any more.
        """
        self._on_duration = function
        if self._recorder is not None:
            self._recorder.on_duration = function

    # -- limits --------------------------------------------------------------------------------------------------------

    def calculate_and_set_hb_timeouts(self, skip_if_not_ready: bool = False) -> bool:
        """Collective. Learn both limits of heartbeats and install them, the same on all ranks.

        With too little data: False if `skip_if_not_ready`, else an error; the same on all ranks.
        """
        recorder = self._initialized()
        with errors("limits of heartbeats cannot be learned"):
            recorder.calc.synchronize_all()
            return self._learn_hb(recorder, skip_if_not_ready)

    def calculate_and_set_section_timeouts(
        self,
        selected_sections: Collection[str] | None = None,
        calc_out_of_section: bool = True,
        skip_if_not_ready: bool = False,
    ) -> bool:
        """Collective. Learn the limits of the selected sections (None: all) and of the gap, and install them.

        With too little data: False if `skip_if_not_ready`, else an error; the same on all ranks.
        """
        recorder = self._initialized()
        with errors("limits of sections cannot be learned"):
            recorder.count_running_gap()
            recorder.calc.synchronize_all()
            return self._learn_sections(recorder, selected_sections, calc_out_of_section, skip_if_not_ready)

    def learn_through_store(self, store: Any, checkpoint: int, rank: int, world_size: int) -> bool:
        """Learn all limits for which there is data, without a collective. Call it at each checkpoint, with its number.

        Values measured by one checkpoint are used at a later one, once all ranks have put theirs into the `store` (of
        torch, or of the wrapper). So limits become the same on all ranks, and no rank waits. True if limits were
        installed.
        """
        recorder = self._initialized()
        with errors("limits cannot be learned"):
            recorder.count_running_gap()
            if not exchange_measured(store, recorder.calc, checkpoint, rank, world_size):
                return False
            learned = self._learn_hb(recorder, skip=True)
            return self._learn_sections(recorder, None, True, skip=True) or learned

    def state_dict(self) -> dict[str, Any]:
        """Return the learned limits as JSON values, equal on all ranks."""
        if self.hb_timeouts is None:
            return dict(self._loaded or learned_state(None, None))
        return learned_state(self.hb_timeouts, self.section_timeouts)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Install limits that an earlier run has learned; before initialization, keep them until then."""
        self._loaded = dict(state)
        if self.is_initialized:
            with errors("limits cannot be loaded"):
                assert self.hb_timeouts is not None
                assert self.section_timeouts is not None
                self._install(*with_learned(self.hb_timeouts, self.section_timeouts, state))
                self._confirm()

    def _learn_hb(self, recorder: Recorder, skip: bool) -> bool:
        if skip and not recorder.calc.can_get_hb_timeouts():
            return False
        assert self.section_timeouts is not None
        self._install(recorder.calc.get_hb_timeouts(self.hb_timeouts), self.section_timeouts)
        self._confirm()
        return True

    def _learn_sections(self, recorder: Recorder, names: Collection[str] | None, gap: bool, skip: bool) -> bool:
        if skip and not recorder.calc.can_get_section_timeouts(names, gap):
            return False
        assert self.hb_timeouts is not None
        self._install(self.hb_timeouts, recorder.calc.get_section_timeouts(names, gap, self.section_timeouts))
        self._confirm()
        return True

    def _install(self, beats: HeartbeatTimeouts, sections: SectionTimeouts) -> None:
        self._initialized().set_limits(beats, sections)
        self.hb_timeouts, self.section_timeouts = beats, sections

    # -- the launcher --------------------------------------------------------------------------------------------------

    def send_workload_control_request(self, req: WorkloadControlRequest) -> None:
        """Send a request to the launcher, which gets the tuple (RankInfo, request); returns when it has arrived."""
        if self._launcher is None:
            raise RankMonitorClientError(
                f"{FT_LAUNCHER_IPC_SOCKET_ENV_VAR} is not set: this process was not started by a launcher"
            )
        with errors("the request cannot be sent to the launcher"):
            self._launcher.send((self.rank_info or RankInfo.get_for_current_rank(), req))

    # -- inside --------------------------------------------------------------------------------------------------------

    def _initialized(self) -> Recorder:
        return self._recorder if self._recorder is not None else not_initialized()

    def _confirm(self) -> None:
        """Wait until the monitor has read the board."""
        if self._connection is not None:
            with errors("the monitor refuses the update"):
                self._connection.confirm(self._initialized().events())


def _end_monitoring(recorder: Recorder | None, connection: MonitorConnection | None) -> None:
    if recorder is not None and recorder.same_process:
        recorder.detach()
    if connection is not None:
        connection.close()


class SectionContext:
    """The context that `RankMonitorClient.section` returns."""

    __slots__ = ("_client", "_generation", "_name")

    def __init__(self, client: RankMonitorClient, name: str) -> None:
        self._client = client
        self._name = name
        self._generation: int | None = None

    def __enter__(self) -> None:
        recorder = self._client._initialized()
        self._client.start_section(self._name)
        self._generation = recorder.generation

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        recorder = self._client._recorder
        if recorder is None:  # shut down within the section
            return
        try:
            closed = recorder.close(self._name, self._generation, learn=kind is None)
        except (TimeoutsCalcError, Forked) as problem:
            if error is None:
                raise_error(problem)
            return  # the error that ends the section matters more
        if closed and self._client._acknowledged:
            self._client._confirm()
