"""Whether another cycle follows one that has failed."""

from __future__ import annotations

from dataclasses import replace

from inprocess.fault_tolerance.data import WorkloadAction
from inprocess.fault_tolerance.launcher.meeting import Meeting
from inprocess.fault_tolerance.launcher.outcome import CycleEnd, Outcome
from inprocess.fault_tolerance.launcher.parts import Parts

__all__ = ["decide"]


def decide(parts: Parts, meeting: Meeting, end: CycleEnd, cycle: int, max_restarts: int) -> Outcome | None:
    """Return how this node ends; None: it joins the next rendezvous.

    Nodes look at the same things and may see them differently for a moment; the first to end the job decides for all.
    In this order: a rank has asked for the end, there is no progress, there are no restarts left, a rank has asked to
    leave this node out. StoreLost.
    """
    stopped = meeting.stopped()
    if stopped is not None:
        return stopped
    if parts.progress.enabled:
        parts.progress.analyze_previous_cycle()
    request = parts.inbox.wanted()
    code = parts.options.no_restart_exit_code
    if request is not None and request.action is WorkloadAction.ShutdownWorkload:
        return meeting.stop(Outcome(code, f"a rank has asked for the end: {request.description}"))
    if parts.progress.should_terminate_early():
        return meeting.stop(Outcome(code, "restarts make no progress"))
    if cycle >= max_restarts:
        said = meeting.stop(Outcome(1, f"none of {max_restarts} restarts is left; {end.reason}"))
        return replace(said, failures=end.failures) if said.code == 1 else said
    if request is not None:
        parts.rounds.leave()
        reason = f"a rank has asked to leave this node out: {request.description}"
        return Outcome(0 if meeting.nodes > 1 else 1, reason)  # without others, the job has not ended well
    return None
