"""The interface of a check of a node, and its result."""

from __future__ import annotations

import abc
from dataclasses import dataclass

OK, FAILED, NOT_APPLICABLE = "ok", "failed", "not applicable"


@dataclass(frozen=True)
class CheckResult:
    """The result of the check `name`. `why` is the reason of a failure, or why there is nothing to check."""

    name: str
    outcome: str
    why: str = ""

    @property
    def is_failure(self) -> bool:
        """Whether the node is not in order."""
        return self.outcome == FAILED

    def __str__(self) -> str:
        return f"{self.name}: {self.outcome}{f': {self.why}' if self.why else ''}"


class NodeCheck(abc.ABC):
    """A check of this node. `run` is called in a thread, by one at a time, and may hang: it counts as failed then.

    `name` is that in the report, `limit_s` how long it may take. `is_cheap` checks also run while the node works.
    """

    name: str
    limit_s: float = 20.0
    is_cheap: bool = False
    doing: str = ""  # the present operation, for the report if it hangs
    is_working: bool = False  # the node works meanwhile; else it is about to join

    @abc.abstractmethod
    def run(self) -> CheckResult:
        """Return the result. Any exception counts as a failure."""

    def stop(self) -> None:  # noqa: B027 - most have nothing to stop
        """End what `run` has started outside of this process. Any thread."""


def ok(check: NodeCheck) -> CheckResult:
    """Return the result of a check that has found nothing."""
    return CheckResult(check.name, OK)


def failed(check: NodeCheck, why: str) -> CheckResult:
    """Return the result of a check that has found a defect."""
    return CheckResult(check.name, FAILED, why)


def failed_if(check: NodeCheck, defects: list[str]) -> CheckResult:
    """Return the result of a check that has found these defects."""
    return failed(check, "; ".join(defects)) if defects else ok(check)


def not_applicable(check: NodeCheck, why: str) -> CheckResult:
    """Return the result of a check for which this node has nothing to check."""
    return CheckResult(check.name, NOT_APPLICABLE, why)
