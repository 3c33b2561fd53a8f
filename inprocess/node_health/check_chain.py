"""All checks of a node, run at once, each within its limit."""

from __future__ import annotations

import time
from collections.abc import Sequence

from inprocess.bounded_waits import BoundedCall
from inprocess.ipc.deadline import Deadline
from inprocess.node_health.device_checks import ClockCheck, GpuCheck, NetworkCardCheck, NvLinkCheck, XidCheck
from inprocess.node_health.interface import CheckResult, NodeCheck, failed
from inprocess.node_health.messages import NodeCheckSettings
from inprocess.node_health.outside_checks import CommandCheck, SegmentDecisionCheck, ServiceCheck
from inprocess.node_health.storage_checks import SharedMountsCheck, StoragePathCheck

# After the limits: for checks that end themselves at their limit, and if this process was suspended meanwhile.
_GRACE_S = 2.0


class CheckChain:
    """Runs checks, all at once. A failure stops none of the others.

    A check that has not ended at its limit, or after `limit_s`, has failed. It keeps its thread, and the next run takes
    no second one for it: it fails at once. One thread.
    """

    def __init__(self, checks: Sequence[NodeCheck], limit_s: float) -> None:
        self.checks = tuple(checks)
        self._limit_s = limit_s
        self._running: dict[NodeCheck, BoundedCall[CheckResult]] = {}

    @property
    def has_cheap(self) -> bool:
        """Whether there is something to check while the node works."""
        return any(check.is_cheap for check in self.checks)

    def run(self, only_cheap: bool = False) -> tuple[CheckResult, ...]:
        """Return the results, in the order of the checks, after the longest limit at the latest."""
        began = time.monotonic()
        checks = [check for check in self.checks if check.is_cheap or not only_cheap]
        late = {check: call for check, call in self._running.items() if check in checks and not call.wait(0)}
        calls = {}
        for check in checks:
            if check not in late:
                check.is_working = only_cheap
                calls[check] = BoundedCall(check.run, check.name)
        for check, call in calls.items():
            call.wait(max(0.0, began + self._limit_of(check) - time.monotonic()))
        deadline = Deadline(_GRACE_S)
        self._running = late | {check: call for check, call in calls.items() if not call.wait(deadline.left_s)}
        return tuple(self._result(check, calls.get(check)) for check in checks)

    def stop(self) -> None:
        """End what checks have started outside of this process."""
        for check in self.checks:
            check.stop()

    def _limit_of(self, check: NodeCheck) -> float:
        return min(check.limit_s, self._limit_s)

    def _result(self, check: NodeCheck, call: BoundedCall[CheckResult] | None) -> CheckResult:
        if call is None or check in self._running:
            what = f" ({check.doing})" if check.doing else ""
            return failed(check, f"it has not ended within {self._limit_of(check):g} s{what}")
        try:
            return call.result(0)
        except Exception as error:
            return failed(check, f"{type(error).__name__}: {error}")


def checks_of(settings: NodeCheckSettings) -> list[NodeCheck]:
    """Return the checks that these settings ask for."""
    limit_s = settings.limit_s
    checks: list[NodeCheck] = [GpuCheck(), NvLinkCheck(), XidCheck()] if settings.checks_gpus else []
    if settings.checks_network_cards:
        checks.append(NetworkCardCheck())
    if settings.max_clock_error_s is not None:
        checks.append(ClockCheck(settings.max_clock_error_s))
    checks += [StoragePathCheck(path, settings.min_free_bytes, limit_s) for path in settings.storage_paths]
    if settings.checks_shared_mounts:
        checks.append(SharedMountsCheck(limit_s))
    if settings.segment_folder:
        checks.append(SegmentDecisionCheck(settings.segment_folder))
    if settings.endpoint:
        checks.append(ServiceCheck(settings.endpoint, limit_s))
    if settings.command:
        checks.append(CommandCheck(settings.command, limit_s))
    return checks
