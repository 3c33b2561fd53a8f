"""An agreement of all ranks of a process group on one step to stop after, through its store, without a collective.

    a rank that was asked     request; proposes a step that lies ahead
    every rank                passed that step already? --no--> holds it, and arrives; the last one decides "stop"
                                       |
                                       +-- yes --> proposes a later step, in the next round
    a rank that gave up       decides "leave"; if a step is decided that it does not reach in time, it says "over"

A rank that holds a step does not pass it before there is a decision or a next round. So a step is decided only if no
rank has passed it, and each rank stops there. There is one decision, made by one atomic `compare_set`: a rank that
gives up and the last one that arrives get the same answer.

Each rank has two threads here. Its main thread comes to steps (`arrive`) and never uses the store. Another one (`look`)
takes part, also while the main thread is in a collective: no rank waits at a step for a main thread that needs it to go
on.

Rounds in the store (see `rounds`), below a prefix for this agreement:

    request      decides why the ranks are to stop, which rank was asked, and how many seconds were left then
    N            decides the step that is proposed in round N; ranks that hold it arrive
    stop         decides: "stop STEP" or "leave"
    over         is decided if a rank did not come to the step in time

The ranks that have arrived at round N are also in the `Attendance` of ``stop/N``: a rank whose main thread waits long
for the decision logs the others.
"""

from __future__ import annotations

import enum
import json
import threading
import time
from dataclasses import asdict, dataclass
from typing import Any

from ckpt.ranks.rounds import Attendance, LateRanks, Round

_SLICE_S = 0.01  # a main thread that waits looks this often, and can be interrupted
_WEIGHT = 0.3  # of the newest step in the mean time of a step
_LEAVE = "leave"


class Outcome(enum.Enum):
    """What a rank does at a step."""

    GO_ON = enum.auto()
    STOP = enum.auto()
    LEAVE = enum.auto()


@dataclass(frozen=True, slots=True)
class StopRequest:
    """Why the ranks are to stop, which rank was asked, and how many seconds were left when this was made."""

    why: str
    rank: int
    left_s: float


class StopAgreement:
    """The part of one rank. `arrive` is for the main thread, everything else for one other thread."""

    def __init__(self, rank: int, world_size: int) -> None:
        self.rank = rank
        self.world_size = world_size
        self._lock = threading.Lock()  # for the next five
        self._passed: int | None = None  # the step of the last call that went on
        self._passed_at = 0.0
        self._held: int | None = None  # the main thread does not pass it: this rank has told the others so
        self._decision: int | str | None = None
        self._is_over = False
        self._step_s = 0.0  # how long a step takes
        self._request: StopRequest | None = None
        self._waits_since: float | None = None  # the main thread waits for the decision
        self._late = LateRanks()
        self._number = 0  # of the round
        self._has_arrived = False  # at this round

    @property
    def is_decided(self) -> bool:
        """Whether the decision is known."""
        return self._decision is not None

    @property
    def leaves(self) -> bool:
        """Whether all ranks are to leave, as far as known, because they have no common step or no time left for it."""
        return self._is_over or self._decision == _LEAVE

    def arrive(self, step: int) -> Outcome:
        """Come to the end of a step. Waits only if this rank holds this step or an earlier one, for the decision."""
        while True:
            with self._lock:
                outcome = self._outcome(step)
                waits_since = time.monotonic() if self._waits_since is None else self._waits_since
                self._waits_since = waits_since if outcome is None else None
            if outcome is not None:
                return outcome
            time.sleep(_SLICE_S)

    def _outcome(self, step: int) -> Outcome | None:
        if self.leaves:
            return Outcome.LEAVE
        if isinstance(self._decision, int) and step >= self._decision:
            return Outcome.STOP
        if self._decision is None and self._held is not None and step >= self._held:
            return None
        now = time.monotonic()
        if self._passed is not None and step > self._passed:
            step_s = (now - self._passed_at) / (step - self._passed)
            self._step_s += (step_s - self._step_s) * (_WEIGHT if self._step_s else 1.0)
        self._passed, self._passed_at = step, now
        return Outcome.GO_ON

    def look(self, store: Any, request: StopRequest | None, ahead_s: float) -> StopRequest | None:
        """Take part, with a few operations of the store, and return the request that the ranks have; None without one.

        `request` is that of this rank; the first one of all counts. A step that is proposed is about `ahead_s` away.
        Never waits for a rank. Errors of the store are passed on; then this can be called again.
        """
        if self._request is None:
            asked = self._round(store, "request")
            found = asked.decision if request is None else asked.decide(json.dumps(asdict(request)))
            if found is None:
                return None
            self._request = StopRequest(**json.loads(found))
        while self._decision is None and self._take_part(store, ahead_s):
            pass
        if self._decision is None:
            self._warn_of_late_ranks(store)
        if isinstance(self._decision, int) and not self._is_over:
            self._is_over = self._round(store, "over").is_decided
        return self._request

    def leave(self, store: Any) -> None:
        """Make all ranks leave without a common step; of those that have stopped at one already, none."""
        self._decide(self._round(store, "stop").decide(_LEAVE))
        if not self.leaves:
            self._round(store, "over").decide(_LEAVE)
            self._is_over = True

    def _take_part(self, store: Any, ahead_s: float) -> bool:
        """Do what can be done next; return whether there may be more."""
        stop = self._round(store, "stop")
        if (decision := stop.decision) is not None:
            self._decide(decision)
            return False
        if self._has_arrived:
            if not self._round(store, f"{self._number + 1}").is_decided:
                return False
            self._number, self._has_arrived = self._number + 1, False
        proposed = self._round(store, f"{self._number}")
        step = int(proposed.decide(str(self._proposal(ahead_s))))
        if not self._hold(step):
            self._number += 1  # and propose a step there
            return True
        self._attendance(store).note()
        self._has_arrived = True  # before it arrives, which it may have done even if that fails: never twice
        if proposed.arrive():
            self._decide(stop.decide(f"stop {step}"))
        return True

    def _attendance(self, store: Any) -> Attendance:
        return Attendance(store, f"stop/{self._number}", self.rank, self.world_size)

    def _warn_of_late_ranks(self, store: Any) -> None:
        """Log which ranks have not arrived at this round, if the main thread has waited long."""
        since, request = self._waits_since, self._request
        if since is None or request is None or not self._late.is_due(waited_s := time.monotonic() - since):
            return
        left_s = max(0.0, request.left_s - waited_s)
        what, calls = "a step to stop after", "the same method of a PreemptionWatcher"
        self._attendance(store).warn(self._late, waited_s, left_s, what, calls)

    def _round(self, store: Any, name: str) -> Round:
        return Round(store, name, self.world_size)

    def _proposal(self, ahead_s: float) -> int:
        """Return a step that probably no rank has passed; further ahead in each round."""
        with self._lock:
            ahead = 1 + int(ahead_s / self._step_s if self._step_s else 0)
            return (self._passed or 0) + (ahead << self._number)

    def _hold(self, step: int) -> bool:
        with self._lock:
            if self._passed is not None and self._passed >= step:
                return False
            self._held = step
            return True

    def _decide(self, decision: str) -> None:
        what, _, step = decision.partition(" ")
        with self._lock:
            self._decision = what if what == _LEAVE else int(step)
