"""A cycle of the launcher: what it works with, how it ends on a node, and whether another one follows."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from inprocess.fault_tolerance.data import WorkloadAction
from inprocess.fault_tolerance.launcher.cycle_logs import CycleLogs
from inprocess.fault_tolerance.launcher.inboxes import ControlInbox, SignalInbox
from inprocess.fault_tolerance.launcher.meeting import LauncherExit, Meeting
from inprocess.fault_tolerance.launcher.monitors import RankMonitors
from inprocess.fault_tolerance.launcher.network_check import NetworkCheck
from inprocess.fault_tolerance.launcher.node_admission import NodeAdmission
from inprocess.fault_tolerance.launcher.options import LauncherOptions
from inprocess.fault_tolerance.launcher.orphans import GpuMemory
from inprocess.fault_tolerance.launcher.preloading import PreloadedWorkers
from inprocess.fault_tolerance.launcher.rendezvous_rounds import Rounds
from inprocess.fault_tolerance.progress_tracker import TrainingProgressTracker


@dataclass(frozen=True)
class LauncherResources:
    """The resources of the agent. Created and closed by the command.

    A node, or the host of the rendezvous, that has not answered for `silence_s` is lost.
    """

    options: LauncherOptions
    rounds: Rounds
    silence_s: float
    monitors: RankMonitors
    preloaded: PreloadedWorkers
    inbox: ControlInbox
    signals: SignalInbox
    progress: TrainingProgressTracker
    gpu_memory: GpuMemory
    admission: NodeAdmission
    network: NetworkCheck
    cycle_logs: CycleLogs | None = None


@dataclass(frozen=True)
class CycleEnd:
    """Why a cycle is over on this node. With an `outcome` the launcher ends; else `decide` is called.

    `is_ours`: the cause is on this node, and the others must be told. `failures` are as in `LauncherExit`.
    """

    reason: str
    outcome: LauncherExit | None = None
    failures: Mapping[int, Any] = field(default_factory=dict)
    is_ours: bool = False


def decide(
    resources: LauncherResources, meeting: Meeting, end: CycleEnd, cycle: int, max_restarts: int
) -> LauncherExit | None:
    """Return how this launcher ends; None: it joins the next rendezvous. StoreLost.

    It ends if a rank has asked for the end of the job, restarts make no progress, no restart is left, or a rank has
    asked to leave this node out, in this order. Nodes may see these differently for a moment; the first that ends the
    job decides for all.
    """
    stopped = meeting.stopped()
    if stopped is not None:
        return stopped
    if resources.progress.enabled:
        resources.progress.analyze_previous_cycle()
    request = resources.inbox.wanted()
    code = resources.options.no_restart_exit_code
    if request is not None and request.action is WorkloadAction.ShutdownWorkload:
        return meeting.stop(LauncherExit(code, f"a rank has asked for the end: {request.description}"))
    if resources.progress.should_terminate_early():
        return meeting.stop(LauncherExit(code, "restarts make no progress"))
    if cycle >= max_restarts:
        said = meeting.stop(LauncherExit(1, f"none of {max_restarts} restarts is left; {end.reason}"))
        return replace(said, failures=end.failures) if said.code == 1 else said
    if request is not None:
        resources.rounds.leave()
        reason = f"a rank has asked to leave this node out: {request.description}"
        if meeting.is_alone:
            return LauncherExit(1, reason)  # on the only node this is a failure of the job
        return LauncherExit(0, reason, is_excluded=True)
    return None
