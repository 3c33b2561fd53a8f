"""A meeting of all ranks of a process group in its store, before a collective: all of them enter it, or none does.

If some ranks do not enter a collective, the others wait in it until the timeout of the process group, and the group is
unusable afterwards. So the ranks first count themselves in the store, and wait for all with a deadline of their own.

    arrive at a round --> the last one decides "go"           --> the collective
           |
           +-- deadline of any rank, a rank died, or is interrupted: "given up" --> an error on all that had arrived

A rank that waits watches the process of the next rank, if that was on the same node when it arrived at an earlier
round: a dead rank is not waited for.

A decision is made by one atomic `compare_set`, so a rank that arrives at the deadline is either in time or late. A late
rank arrives at the next round, so that later calls meet again.

Keys of the store, below a prefix of ours and the name of the group:

    round            the number of the current round
    at/RANK          the round that RANK arrived at last, and its node and process
    N/arrived        how many ranks have arrived at round N
    N/closing        how many ranks want to give up round N
    N/decision       "go", or why round N was given up

Those of a round are deleted at the end of the next one in which all meet. If no rank is missing, each makes half a
dozen operations. It waits by polling: the `wait` of a store blocks the connection, which other threads use as well, and
logs a warning each time it ends without a key.
"""

from __future__ import annotations

import contextlib
import json
import time
from dataclasses import astuple
from typing import Any

from inprocess.ipc.process import Process
from inprocess.ipc.suspension import Suspension

__all__ = ["MeetingError", "meet", "named"]

_GO = "go"
_CLOSING_S = 10.0  # for the first rank that gives up a round to find out who is missing
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.001, 0.25
_PAUSE = 0.1  # of the time waited: so all together wait at most that much longer than the last rank needs
_WATCH_S = 1.0
_SHOWN = 16


class MeetingError(Exception):
    """The ranks did not meet. `missing` did not arrive in time; it is empty if one that had arrived left again."""

    def __init__(self, text: str, missing: list[int]) -> None:
        super().__init__(text)
        self.missing = missing


def meet(store: Any, rank: int, world_size: int, timeout_s: float) -> None:
    """Return when all ranks have called this. `store` is for this group alone.

    MeetingError, on all ranks that have arrived, when some have not `timeout_s` after one of those, or when one of
    those was interrupted. Then no rank returns. Errors of the store are passed on.
    """
    deadline = time.monotonic() + timeout_s
    number = int(store.add("round", 0))
    while True:
        if store.check([f"{number}/decision"]):  # given up, and the number of the next round is about to be set
            number += 1
            continue
        decision = _Round(store, rank, world_size, number).attend(deadline, timeout_s)
        if decision == _GO:
            return
        reason = json.loads(decision)
        if rank not in reason["missing"]:
            raise MeetingError(reason["why"], reason["missing"])
        number += 1


class _Round:
    def __init__(self, store: Any, rank: int, world_size: int, number: int) -> None:
        self._store = store
        self._rank = rank
        self._world_size = world_size
        self._number = number

    def attend(self, deadline: float, timeout_s: float) -> str:
        """Arrive, and return the decision."""
        try:
            self._store.set(f"at/{self._rank}", json.dumps([self._number, *astuple(Process.here())]))
            if self._store.add(self._key("arrived"), 1) == self._world_size:
                return self._decide(_GO)
            return self._wait(deadline) or self._give_up(timeout_s)
        except Exception:
            raise
        except BaseException as error:  # an interrupt: the others must not enter the collective without this rank
            with contextlib.suppress(Exception):
                self._decide(self._reason(f"rank {self._rank} left again ({type(error).__name__})", []))
            raise

    def _key(self, name: str) -> str:
        return f"{self._number}/{name}"

    def _wait(self, deadline: float) -> str | None:
        """Wait for the decision; return None if there is none by the deadline, or if the next rank died."""
        begin = time.monotonic()
        watch_at = begin + _WATCH_S
        suspension = Suspension()
        while not self._store.check([self._key("decision")]):
            now = time.monotonic()
            deadline += suspension.missed_s()  # the others may have been suspended with this process
            if now >= deadline:
                return None
            if now >= watch_at:
                if self._has_died((self._rank + 1) % self._world_size):
                    return None
                watch_at = now + _WATCH_S
            pause_s = min(max(_FIRST_PAUSE_S, _PAUSE * (now - begin)), _LONGEST_PAUSE_S)
            pause_s = min(pause_s, deadline - now)
            suspension.expect(pause_s)
            time.sleep(pause_s)
        return str(self._store.get(self._key("decision")).decode())

    def _give_up(self, timeout_s: float) -> str:
        """Give up the round: the first rank to do so finds out which are missing, the others wait for that."""
        if self._store.add(self._key("closing"), 1) > 1:
            decision = self._wait(time.monotonic() + _CLOSING_S)
            if decision is not None:
                return decision
        missing = [rank for rank in range(self._world_size) if self._last_of(rank)[0] != self._number]
        dead = [rank for rank in range(self._world_size) if self._has_died(rank)]
        if dead:
            return self._decide(self._reason(f"{named(dead)} died", missing))
        late = f"the last rank came when {timeout_s:g} s were just over"
        why = f"{named(missing)} did not come within {timeout_s:g} s" if missing else late
        return self._decide(self._reason(why, missing))

    def _last_of(self, rank: int) -> list[Any]:
        """Return the last round of a rank, and its node, pid and start time; None for each if there was none."""
        key = f"at/{rank}"
        return list(json.loads(self._store.get(key))) if self._store.check([key]) else [None] * 4

    def _has_died(self, rank: int) -> bool:
        """Return whether the process of a rank is known to have ended."""
        _, *process = self._last_of(rank)
        return Process(*process).alive is False

    def _reason(self, why: str, missing: list[int]) -> str:
        return json.dumps({"by": self._rank, "why": why, "missing": missing})

    def _decide(self, decision: str) -> str:
        """Make the decision unless there is one, and return what it is. No two ranks propose the same."""
        decided = str(self._store.compare_set(self._key("decision"), "", decision).decode())
        if decided == decision:
            self._store.add("round", 1)  # before this rank enters a collective, so before any rank leaves it
            if decision == _GO:
                self._forget_earlier()
        return decided

    def _forget_earlier(self) -> None:
        """Delete the keys of earlier rounds: all ranks have arrived at this one."""
        number = self._number - 1
        # Not until `delete_key` returns False: a FileStore says of any key that it was deleted.
        while number >= 0 and self._store.check([f"{number}/decision"]):
            for name in ("decision", "arrived", "closing"):
                self._store.delete_key(f"{number}/{name}")
            number -= 1


def named(ranks: list[int]) -> str:
    """Return ranks as text, such as "ranks 1, 2"; of very many only the first."""
    shown = ", ".join(map(str, ranks[:_SHOWN])) + (f" and {len(ranks) - _SHOWN} more" if len(ranks) > _SHOWN else "")
    return f"rank {shown}" if len(ranks) == 1 else f"ranks {shown}"
