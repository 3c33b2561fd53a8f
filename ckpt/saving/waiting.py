"""How a writer waits for other ranks: when it looks at storage, and when it stops waiting.

A metadata server that thousands of processes ask twenty times a second has no time for anything else. So all processes
of a job that wait, together, make less than 200 operations a second, whatever their number:

    50    looks for the outcome, by one process of each node: the one that holds a `NodeLock`
    15    the same, by processes that never get that lock
    30    looks for missing parts, by the coordinator
    70    renewals of leases (see `storage.leases`)
    10    probes whether the root can be written to, and looks at the token
    20    looks at the leases of other ranks, by writers whose trainer has ended

An object store is asked less and less often: the pauses grow with the time that has passed, up to half a minute, so the
requests of a wait are some tens at most in the first minutes, and two a minute then. There the other ranks do not begin
to look before `_FIRST_OF_OBJECTS_S`, because they are told when to.

A process that may look rarely can be told to look at once: the trainer of rank 0 tells the others by the store of their
process group, and each nudges its writer. A nudge says nothing about the outcome: only storage does.
"""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable, Iterable, Iterator

from ckpt.async_calls.writer_main import WriterContext
from ckpt.errors import CheckpointTimeoutError, StorageError
from ckpt.ranks.rounds import LateRanks, described, named
from ckpt.saving.task import COORDINATOR, WriteTask
from ckpt.storage.interface import Pending
from ckpt.storage.leases import EXPIRY_S, HostWatch, Leases
from ckpt.storage.names import pack_file
from ckpt.storage.node_lock import NodeLock
from inprocess.ipc.suspension import Suspension, starts_again

_ALONE = 0.3  # of that, for processes without the lock of their node
_COORDINATOR_PER_S = 30.0
_PROBES_PER_S = 10.0
_LIVENESS_PER_S = 20.0

_PROBE_OPERATIONS = 8
_LIVENESS_OPERATIONS = 2
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.001, 0.05  # between looks at memory and at the lock
_FIRST_SOON_S = 0.1
_FIRST_PROBE_S, _FIRST_PROBE_OF_OBJECTS_S = 1.0, 10.0
_LIVENESS_CHECK_S = 0.25
_ORPHAN_GRACE_S = 3.0  # how long a writer without a trainer waits for others that make no progress
_FIRST_OF_OBJECTS_S = 2.0
_GROWTH, _GROWTH_OF_COORDINATOR = 1.0, 0.25  # of the pauses, as a part of the time since the wait began
_LONGEST_GROWN_S = 30.0
_LONGEST_ALONE_S = 2.0  # without a trainer, which could tell: then the next start of the job waits for this process
_TURN = 0.618034  # spreads the first looks of the ranks evenly, however many they are


class OrphanedError(CheckpointTimeoutError):
    """No process is left that could finish this save now."""


class LookSchedule:
    """When a process looks at storage. For one thread.

    A process with the `lock` of its node looks every `node_s` seconds, one without it every `alone_s`; with `lock` None
    it does not share its looks. `phase`, from 0 to 1, delays the first look where looks are rare. A process that gets
    the lock later looks at once: the one before it has seen the outcome, or died. Set `operations` to what a look
    costs; it is rarer by that factor. Times are those of a monotonic clock.
    """

    def __init__(
        self,
        lock: NodeLock | None,
        node_s: float,
        alone_s: float,
        phase: float,
        *,
        first_s: float = 0.0,
        growth: float = 0.0,
    ) -> None:
        """With `first_s`, the first look is not before that. Pauses are at least `growth` of the time since then."""
        self.operations = 1
        self._longest_s = _LONGEST_GROWN_S
        self._first_look_s, self._growth = first_s, growth
        self._begin: float | None = None
        self._lock = lock
        self._node_s, self._alone_s = node_s, alone_s
        self._phase = phase
        self._held = False
        self._next: tuple[float, float] | None = None  # with the lock, without it
        self._pause_s = _FIRST_PAUSE_S
        self._soon_s = math.inf  # between looks after `look_soon`

    @property
    def leads(self) -> bool:
        """Whether this process looks for all of its node."""
        return self._lock is None or self._held

    def is_due(self, now: float) -> bool:
        """Return whether to look now."""
        held = self._lock is None or self._lock.take()
        if self._next is None:
            self._begin = now
            self._next = now + self._first_s(self._node_s), now + self._first_s(self._alone_s)
        elif held and not self._held:
            self._next = now, self._next[1]
        self._held = held
        return now >= self._next[0 if held else 1]

    def _first_s(self, usual_s: float) -> float:
        return max(self._first_look_s, self._phase * usual_s if usual_s > _LONGEST_PAUSE_S else 0.0)

    def looked(self, now: float) -> None:
        """Note a look that did not end the wait."""
        waited_s = 0.0 if self._begin is None else now - self._begin
        grown_s = max(self._pause_s, min(self._growth * waited_s, self._longest_s))
        node_s, alone_s = (max(grown_s, self.operations * usual_s) for usual_s in (self._node_s, self._alone_s))
        self._next = now + min(node_s, self._soon_s), now + min(alone_s, self._soon_s)
        self._soon_s *= 2

    def look_soon(self) -> None:
        """Let a look be due now, and others after growing pauses."""
        self._next, self._soon_s = (-math.inf, -math.inf), _FIRST_SOON_S

    def hurry(self, now: float) -> None:
        """Let pauses grow to `_LONGEST_ALONE_S` only, from now on."""
        if self._longest_s > _LONGEST_ALONE_S and self._growth and self._next is not None:
            latest = now + _LONGEST_ALONE_S
            self._next = min(self._next[0], latest), min(self._next[1], latest)
            self._longest_s = _LONGEST_ALONE_S

    def pause_s(self) -> float:
        """Return how long to sleep until `is_due` is asked again."""
        pause_s, self._pause_s = self._pause_s, min(2 * self._pause_s, _LONGEST_PAUSE_S)
        return pause_s

    def close(self) -> None:
        """Leave the lock to another process. Idempotent."""
        if self._lock is not None:
            self._lock.release()


def look_schedule(
    rank: int, world_size: int, ranks_here: int, lock: NodeLock, looks_per_s: float, least_s: float = 0.0
) -> LookSchedule:
    """Return when a rank looks for the outcome, `ranks_here` being those that share the lock; at most every `least_s`.

    The coordinator is the only one that looks for parts: it does so at its own pace. With `least_s` each look costs
    money, and the pauses grow.
    """
    if rank == COORDINATOR:
        growth = _GROWTH_OF_COORDINATOR if least_s else 0.0
        return LookSchedule(None, max(least_s, 1 / _COORDINATOR_PER_S), 0.0, 0.0, growth=growth)
    alone_s = world_size / looks_per_s
    node_s = max(least_s, alone_s / ranks_here)
    grows = {"first_s": _FIRST_OF_OBJECTS_S, "growth": _GROWTH} if least_s else {}
    return LookSchedule(lock, node_s, max(node_s, alone_s / _ALONE), rank * _TURN % 1, **grows)


class Waiting:
    """The wait of one writer in one save. Iterate: each time, look at what is awaited.

    Iterating raises CheckpointTimeoutError after `commit_timeout_s`; StorageError when the root cannot be written to:
    then the other ranks may not learn anything, either; FencedError when it has another owner. Without a trainer, it
    waits only as long as a writer of the `awaited` ranks is alive, and a little longer: `OrphanedError`.
    """

    def __init__(
        self,
        task: WriteTask,
        world_size: int,
        context: WriterContext | None,
        what: str,
        awaited: Callable[[], Iterable[int]] = lambda: (),
        schedule: LookSchedule | None = None,
        *,
        pending: Pending,
        begin: float | None = None,
    ) -> None:
        """`schedule` None: what is awaited is in memory, and there is always time for a look."""
        self._task = task
        self._pending = pending
        self._context = context
        self._what = what
        self._awaited = awaited
        self.schedule = schedule or LookSchedule(None, 0.0, 0.0, 0.0)
        self._begin = time.monotonic() if begin is None else begin
        self._nudges = 0 if context is None else context.nudges()
        alone = task.rank == COORDINATOR
        first_s = _FIRST_PROBE_OF_OBJECTS_S if pending.root.least_look_s else _FIRST_PROBE_S
        self._probe_pause_s = max(first_s, 0.0 if alone else _PROBE_OPERATIONS * world_size / _PROBES_PER_S)
        self._probe_at = self._begin + self._probe_pause_s
        self._liveness_s = max(_LIVENESS_CHECK_S, _LIVENESS_OPERATIONS * world_size / _LIVENESS_PER_S)
        self._alone_since: float | None = None
        self._check_at = self._begin
        self._host: HostWatch | None = None
        self._late = LateRanks()

    def __iter__(self) -> Iterator[None]:
        suspension = Suspension()
        try:
            while True:
                self._note_suspension(suspension.missed_s())
                if self.is_due(time.monotonic()):
                    yield
                    self.schedule.looked(time.monotonic())
                self.check(time.monotonic())
                pause_s = self.schedule.pause_s()
                suspension.expect(pause_s)
                time.sleep(pause_s)
        finally:
            self.schedule.close()

    def _note_suspension(self, missed_s: float) -> None:
        """Give the others time to go on: they may have been suspended with this process, and their leases expired."""
        self._begin += missed_s
        if starts_again(missed_s, EXPIRY_S):
            self._alone_since = None
            self._check_at = time.monotonic() + EXPIRY_S

    def is_due(self, now: float) -> bool:
        """Return whether to look now; also when the trainer says so."""
        if self._context is not None and (nudges := self._context.nudges()) != self._nudges:
            self._nudges = nudges
            self.schedule.look_soon()
            self._probe_at = min(self._probe_at, now + _FIRST_PROBE_S)  # rank 0 may have given up without a record
        return self.schedule.is_due(now)

    def check(self, now: float) -> None:
        """Raise one of the errors that end the wait; show progress otherwise."""
        if self._context is not None:
            self._context.progress()
        if now - self._begin >= self._task.options.commit_timeout_s:
            raise self._timeout()
        if self._late.is_due(now - self._begin):
            with contextlib.suppress(StorageError):  # of which the next probe tells
                self._warn_of_late_ranks(now)
        if now >= self._probe_at:
            self._pending.root.check_writable()
            self._pending.check_token()
            self._probe_pause_s *= 2
            self._probe_at = now + self._probe_pause_s
        if self._context is None or not self._context.trainer_left():
            self._alone_since = None
        elif now >= self._check_at:
            self.schedule.hurry(now)
            self._check_at = now + self._liveness_s
            self._check_others(now)

    def _warn_of_late_ranks(self, now: float) -> None:
        """Log which ranks are missing: the coordinator, or one process of each node if that has not begun the save.

        Ranks that write are not late before half of the time is over: their storage may be slow.
        """
        rank, timeout_s, waited_s = self._task.rank, self._task.options.commit_timeout_s, now - self._begin
        late = sorted(set(self._awaited()) - {rank})
        if not late or (rank != COORDINATOR and (not self.schedule.leads or self._pending.has_begun())):
            return
        if waited_s < timeout_s / 2 and all(map(self._is_writing, late)):
            return
        ownership = self._pending.root.ownership
        writers = {each.rank: each for each in ownership.leases(self._task.save.owner).writers()}

        def known(other: int) -> str:
            if (writer := writers.get(other)) is None:
                return "has saved nothing since this job owns the root"
            if not writer.has_trainer:
                return "has left, or died"
            doing = "is writing" if self._is_writing(other) else "has written nothing of this save"
            return f"{doing}; its writer, {described(writer.process)}"

        what = f"{self._what} of step {self._task.save.step} ({named(late)} missing)"
        self._late.warn(rank, waited_s, timeout_s - waited_s, what, late, known)

    def _is_writing(self, rank: int) -> bool:
        return bool(self._pending.source.changed_s(pack_file(rank, 0)))

    def _check_others(self, now: float) -> None:
        rank = self._task.rank
        if (self._alive() - {rank}) & set(self._awaited()):
            self._alone_since = None
        elif self._alone_since is None:
            self._alone_since = now
        elif now - self._alone_since > _ORPHAN_GRACE_S:
            raise OrphanedError(
                f"rank {rank} waited for {self._what}, but its trainer and the writers it waits for are dead"
            )

    def _alive(self) -> set[int]:
        """Return the ranks with a live writer; on others than the coordinator, only those of the coordinator's host."""
        ownership, owner = self._pending.root.ownership, self._task.save.owner
        leases: Leases = ownership.leases(owner)
        if self._task.rank == COORDINATOR:
            return leases.alive_ranks()
        if self._host is None:
            claimer = ownership.claimer(owner)  # rank 0 has claimed the root
            if claimer is None:
                return leases.alive_ranks()
            self._host = leases.watch_host(claimer.host)
        return self._host.alive_ranks()

    def _timeout(self) -> CheckpointTimeoutError:
        rank, step, timeout_s = self._task.rank, self._task.save.step, self._task.options.commit_timeout_s
        return CheckpointTimeoutError(
            f"step {step}: rank {rank} waited {timeout_s:g} s for {self._what}; look for ranks that died or "
            "did not save this step, or raise the timeout",
            rank=rank,
            step=step,
        )


def ranks_here(leases: Leases) -> int:
    """Return how many ranks of this host wait together; 1 if that cannot be read."""
    try:
        return leases.ranks_here()
    except StorageError:
        return 1
