"""The schedule of `Checkpointer.step`: which steps are saved, and which are kept in memory.

Policies that go by time need one rank that decides for all, without a collective in each step. Rank 0 makes a row of
appointments; each says what is done at its call, and when the next one is:

    call      1 ...      12          25          31
              │          │           │           │
    rank 0    │ makes 12 │ makes 25  │ makes 31  │ makes ...     one ahead, so that it is there when others look
    others    └─ read ───┴─ read ────┴─ read ────┴─ read         once at each appointment, not in each step

An appointment was made one interval before, ten seconds at most, so ranks hardly ever wait for it. All ranks make the
same calls, hence they do the same. Appointments count calls, as the number of a step may grow by any amount from one
to the next. A new row begins after a restore, and after a restart, and when the program has made its process groups
anew.
"""

from __future__ import annotations

import contextlib
import json
import logging
import math
import os
import time
import weakref
from collections.abc import Callable, Iterator, Mapping, Sized
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from ckpt.engine.costs import Costs
from ckpt.engine.parts import CheckpointerSettings
from ckpt.errors import CheckpointError, CheckpointTimeoutError
from ckpt.events import PaceChanged
from ckpt.observing import emit, is_observed
from ckpt.pace import Measured, Pace
from ckpt.ranks.collectives import Ranks
from ckpt.ranks.rounds import LateRanks, value_of
from ckpt.saving.task import COORDINATOR
from inprocess.ipc.restart_index import current_restart_index

_log = logging.getLogger("ckpt")
_SAVES = 2  # without `step`, until a warning: the first one may be the last step of a job that is about to end
_LEAST_S, _AHEAD_S = 0.5, 10.0  # from one appointment to the next, in whole calls
_PAUSE_S = 0.005
_CHANGED = 1.25  # an interval that differs by this factor from the one that was told is told

Action = Literal["save", "snapshot"]


class _Appointment(NamedTuple):
    """The action that is due at a call, and the call of the next appointment."""

    action: Action | None
    next_call: int


@dataclass(slots=True)
class _Row:
    """A row of appointments, by a name that no other one has: `number` is that of the next one, at `next_call`.

    `calls` of `Checkpointer.step` were made in it. `whole_store` is the store of the process groups that it is in; None
    without one.
    """

    name: str
    whole_store: weakref.ref[Any] | None
    calls: int = 0
    number: int = 0
    next_call: int = 1


class Schedule:
    """Which steps of one Checkpointer are due. Notices that `save_every` is given, and `step` is not called.

    For the thread that trains. `in_flight` returns the saves that are not decided; `clock` returns seconds that only
    grow.
    """

    def __init__(
        self,
        settings: CheckpointerSettings,
        ranks: Ranks,
        in_flight: Callable[[], Sized],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._save_every = settings.save_every
        self._keep_every = None if settings.snapshots is None else settings.snapshots.pace
        paces: list[tuple[Action, Pace | None]] = [("save", self._save_every), ("snapshot", self._keep_every)]
        self._agreed = [(action, pace) for action, pace in paces if pace is not None and pace.needs_agreement]
        self._ranks = ranks
        self._timeout_s = settings.timeout_s
        self._kept = max(64, math.ceil(settings.timeout_s / _LEAST_S))  # as late as a rank may be
        self._has_failed = False  # the save that is being begun
        self._last_step = -1  # of this row
        self._in_flight = in_flight
        self._clock = clock
        self._saves: int | None = 0  # without `step`; None once that was called, or warned of
        self._row: _Row | None = None
        self._costs: dict[Action, Costs] = {"save": Costs(clock), "snapshot": Costs(clock)}
        self._alone: dict[str, str] = {}  # the appointments of a job of one process
        self._restart: int | None = None
        self._recorded: Mapping[str, Any] | None = None
        self._told_s = 0.0

    @contextlib.contextmanager
    def due(self, step: int) -> Iterator[Action | None]:
        """Yield the action that is due after a step of training, and measure it. ValueError if no step is ever due."""
        self._saves = None
        if self._save_every is None and self._keep_every is None:
            raise ValueError(
                "step() would never save anything: give Checkpointer save_every=1000 or snapshots=10, or call "
                "async_save(state, step) for the steps that are to be saved, and maybe_finalize() in each iteration"
            )
        action = self._appointed(step) if self._agreed else None
        before = self._last_step if -1 < self._last_step < step else step - 1
        self._last_step = step
        if action == "save" or (self._save_every is not None and self._save_every.is_due_at(step, before)):
            action = "save"
        elif self._keep_every is not None and self._keep_every.is_due_at(step, before):
            action = "snapshot"
        begin, self._has_failed = self._clock(), False
        yield action
        if action is not None:
            for each in (action, "snapshot") if action == "save" else (action,):  # a save is a snapshot, too
                self._costs[each].begin(self._clock() - begin, is_measured=not self._has_failed)

    def save_failed(self) -> None:
        """Note that the save that is being begun has failed: the time until then is not what saves cost."""
        self._has_failed = True

    def note_save(self) -> None:
        """Note a save. Warns once if the schedule has no effect, as `step` is not called."""
        if self._save_every is None or self._saves is None:
            return
        self._saves += 1
        if self._saves == _SAVES:
            self._saves = None
            _log.warning(
                "save_every=%r has no effect: it says which steps `Checkpointer.step` saves, and that was not called. "
                "Call step(state, step) after each training step, or leave save_every out",
                self._save_every,
            )

    def restored(self, document: Mapping[str, Any] | None) -> None:
        """Begin a new row, as after each restore and each fault. `document`: what the step has recorded as `measured`.

        It counts in a new process alone: one that goes on knows more.
        """
        self._row, self._last_step = None, -1
        self._recorded = document

    @property
    def measured(self) -> dict[str, Any] | None:
        """The measurements of the job, for the step to record; None if nothing depends on them."""
        return {action: costs.to_document() for action, costs in self._costs.items()} if self._agreed else None

    # -- appointments --------------------------------------------------------------------------------------------------

    def _appointed(self, step: int) -> Action | None:
        """Return the action that is due at a step by appointment."""
        decides = self._ranks.rank == COORDINATOR
        row, store = self._row, self._ranks.whole_store()
        is_elsewhere = (
            row is not None and store is not None and (row.whole_store is None or row.whole_store() is not store)
        )
        if row is None or is_elsewhere:
            if row is None:
                self._count_faults()
            self._ranks.doing = "the schedule of saves"
            name = self._ranks(os.urandom(8).hex().encode())[COORDINATOR].decode()
            row = self._row = _Row(name, None if store is None else weakref.ref(store))
            if decides:
                self._put(row, 0, _Appointment(None, 2))
        self._costs["save"].note_step(len(self._in_flight()) > 0)
        self._costs["snapshot"].note_step(False)
        row.calls += 1
        if row.calls < row.next_call:
            return None
        now = self._read(row, step)
        row.number, row.next_call = row.number + 1, now.next_call
        if decides:
            self._put(row, row.number, self._next(row.calls, now))
        return now.action

    def _count_faults(self) -> None:
        """Count the restarts since the last row, and go on with what an earlier process has measured."""
        restart, self._restart = self._restart, current_restart_index()
        faults = 0 if restart is None or self._restart is None else max(0, self._restart - restart)
        known = None if any(costs.measured.trained_s for costs in self._costs.values()) else self._recorded
        for action, costs in self._costs.items():
            of_action = None if known is None else known.get(action)
            is_known = isinstance(of_action, dict)  # then the process that had measured it is gone
            costs.restored(of_action if is_known else None, faults + is_known)

    def _next(self, call: int, now: _Appointment) -> _Appointment:
        """Return the appointment after `now`, which is at `call`. On rank 0."""
        step_s = self._costs["save"].step_s
        action, left_s = self._wanted((now.next_call - call) * step_s, now.action)
        ahead_s = min(max(left_s, _LEAST_S), _AHEAD_S)
        return _Appointment(action, now.next_call + max(1, math.floor(ahead_s / step_s) if step_s else 1))

    def _wanted(self, until_s: float, begins: Action | None) -> tuple[Action | None, float]:
        """Return the action that is wanted `until_s` from now, and the seconds from then until the next one is."""
        least_s = math.inf
        for action, pace in self._agreed:
            costs = self._costs[action]
            begins_now = begins == action or begins == "save"
            interval_s = pace.interval_s(costs.measured)
            if action == "save":
                self._tell(pace, interval_s, costs.measured)
            left_s = interval_s - (0.0 if begins_now else costs.since_s) - until_s
            is_busy = action == "save" and (begins_now or len(self._in_flight()) > 0)
            if left_s <= 0 and not is_busy:
                return action, interval_s
            least_s = min(least_s, left_s)
        return None, least_s

    def _tell(self, pace: Pace, interval_s: float, measured: Measured) -> None:
        """Log an interval between saves when it has changed, and emit an event."""
        if measured.cost_s is None or not math.isfinite(interval_s):
            return
        if self._told_s and 1 / _CHANGED < interval_s / self._told_s < _CHANGED:
            return
        self._told_s = interval_s
        _log.info(
            "from now on saves are %.3g s apart (%r): one takes %.3g s of training, and faults are %.3g s apart",
            *(interval_s, pace, measured.cost_s, measured.mtbf_s),
        )
        if is_observed():
            known = measured.cost_s, measured.mtbf_s, measured.faults
            emit(PaceChanged(time.time(), self._ranks.rank, repr(pace), interval_s, *known))

    def _store(self) -> Any:
        store = self._ranks.store()
        if store is None:
            raise CheckpointError(
                f"rank {self._ranks.rank} has no process group any more to agree with the others when to save: call "
                "step() before it is destroyed",
                rank=self._ranks.rank,
            )
        return store

    def _put(self, row: _Row, number: int, appointment: _Appointment) -> None:
        value = json.dumps(appointment)
        if self._ranks.world_size == 1:
            self._alone = {f"{row.name}/{number}": value}
            return
        store = self._store()
        store.set(f"pace/{row.name}/{number}", value)
        if number >= self._kept:
            store.delete_key(f"pace/{row.name}/{number - self._kept}")

    def _read(self, row: _Row, step: int) -> _Appointment:
        """Return the next appointment of a row. Waits only if rank 0 is more than an appointment behind."""
        if self._ranks.world_size == 1:
            return _Appointment(*json.loads(self._alone[f"{row.name}/{row.number}"]))
        store, begin, late = self._store(), time.monotonic(), LateRanks()
        while (value := value_of(store, f"pace/{row.name}/{row.number}")) is None:
            waited_s = time.monotonic() - begin
            if waited_s >= self._timeout_s:
                raise CheckpointTimeoutError(
                    f"rank {self._ranks.rank} came to step {step} and has waited {waited_s:.0f} s for rank 0 to say "
                    "when the next save is: every rank must call step(state, step) with the same steps",
                    rank=self._ranks.rank,
                    step=step,
                )
            if late.is_due(waited_s):
                what = f"rank 0 to say at step {step} when the next save is"
                left_s = self._timeout_s - waited_s
                late.warn(self._ranks.rank, waited_s, left_s, what, [0], lambda rank: "has not come so far")
            time.sleep(_PAUSE_S)
        return _Appointment(*json.loads(value))
