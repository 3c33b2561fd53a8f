"""`LateRanks`: the warning of a process that waits for other ranks, long before its time is over.

All waits of ranks for each other use it: meetings (`rounds`), the all_reduce of a queue (`collectives`), the agreement
on a step to stop after (`stop`), and writers (`ckpt.saving.waiting`).
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence

from inprocess.ipc.process import Process

__all__ = ["LateRanks", "described"]

_log = logging.getLogger("ckpt")

_FIRST_S = 30.0
_DESCRIBED = 4  # ranks


class LateRanks:
    """When a wait that goes on is to be told of: after half a minute, then each time that it has doubled."""

    def __init__(self) -> None:
        self._next_s = _FIRST_S

    def is_due(self, waited_s: float) -> bool:
        """Return whether to look, after a wait of so long, which ranks are missing; once each time."""
        if waited_s < self._next_s:
            return False
        self._next_s = 2 * waited_s
        return True

    def stop(self) -> None:
        """Let another process tell of it."""
        self._next_s = float("inf")

    def warn(
        self,
        rank: int,
        waited_s: float,
        left_s: float | None,
        what: str,
        late: Sequence[int],
        known: Callable[[int], str],
        calls: str = "save, warmup and restore",
    ) -> None:
        """Log that `rank` waits for `what`, which ranks are late, and what is `known` of the first of them.

        `left_s` is None if the process group decides. `calls` are what every rank must call.
        """
        told = [f"rank {each} {known(each)}" for each in late[:_DESCRIBED]]
        others = f"; {len(late) - len(told)} more are late" if len(late) > len(told) else ""
        until = "until the timeout of the process group" if left_s is None else f"{left_s:.0f} s more"
        _log.warning(
            "rank %d has waited %.0f s for %s, and waits %s: %s%s. Every rank must call %s, in the same order",
            *(rank, waited_s, what, until, "; ".join(told), others, calls),
        )


def described(process: Process) -> str:
    """Return a description of a process: its state, as far as it is known here."""
    activity = process.activity if process.is_here else "is on another node"
    return f"process {process.pid} {activity or 'is hidden'}"
