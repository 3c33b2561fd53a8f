"""What the agent works with."""

from __future__ import annotations

from dataclasses import dataclass

from inprocess.fault_tolerance.launcher.control import ControlInbox
from inprocess.fault_tolerance.launcher.gpu_memory import GpuMemory
from inprocess.fault_tolerance.launcher.monitors import RankMonitors
from inprocess.fault_tolerance.launcher.options import LauncherOptions
from inprocess.fault_tolerance.launcher.rendezvous import Rounds
from inprocess.fault_tolerance.launcher.signals import SignalInbox
from inprocess.fault_tolerance.progress_tracker import TrainingProgressTracker

__all__ = ["Parts"]


@dataclass(frozen=True)
class Parts:
    """Made and closed by the command, used by the agent and by what decides for it."""

    options: LauncherOptions
    rounds: Rounds
    monitors: RankMonitors
    inbox: ControlInbox
    signals: SignalInbox
    progress: TrainingProgressTracker
    gpu_memory: GpuMemory
