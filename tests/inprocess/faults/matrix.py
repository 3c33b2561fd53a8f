"""The fault matrix as data: how a rank fails x where x which ranks, and what must happen then.

Iteration 0 is the one with the fault. Points of the restart path need a restart: there another rank, the *instigator*,
raises in the function of iteration 0 first.
"""

from __future__ import annotations

import enum
import itertools
import random
from collections.abc import Iterator
from dataclasses import dataclass

from tests.support.selection import FULL

WORLD_SIZE = 4
_SEED = 20_240_229


class Kind(enum.Enum):
    """Ways to fail. The value is part of the test's name."""

    EXCEPTION = "exception"
    BASE_EXCEPTION = "base-exception"
    SYSTEM_EXIT = "system-exit"
    SIGKILL = "sigkill"
    SIGTERM = "sigterm"
    SIGSTOP = "sigstop"
    HANG = "hang"  # time.sleep: a wake-up brings it back to bytecode
    C_HANG = "c-hang"  # a mutex in C, without the GIL: nothing brings it back
    GLOO_HANG = "gloo-hang"  # receives from a rank that does not send
    GIL_HANG = "gil-hang"  # in C, with the GIL: no other thread of the rank runs either
    OS_EXIT = "os-exit"
    SEGFAULT = "segfault"
    MONITOR_KILLED = "monitor-killed"
    BOTH_KILLED = "both-killed"  # the monitor process, then the rank: no process on the node can report it


class Point(enum.Enum):
    """Points of the protocol."""

    ENTRY = "entry"  # before the initial barrier
    FIRST_ASSIGNMENT = "first-assignment"
    INITIALIZE = "initialize"
    HEALTH_CHECK = "health-check"
    FUNCTION = "function"
    ATOMIC = "atomic"
    OTHERS_ABORT = "others-abort"  # in the function, while the abort hook of another rank runs
    FINALIZE = "finalize"
    SECOND_HEALTH_CHECK = "second-health-check"
    ITERATION_BARRIER = "iteration-barrier"
    RANK_ASSIGNMENT = "rank-assignment"
    COMPLETION_BARRIER = "completion-barrier"


class Fate(enum.Enum):
    """What happens to the rank that fails."""

    GOES_ON = "goes on"
    LEAVES = "leaves with its own error"
    DIES = "dies"
    HANGS = "hangs until it is killed from outside"
    GIVES_UP = "leaves because the others do not arrive"


AFTER_A_FAULT = frozenset(
    {
        Point.OTHERS_ABORT,
        Point.FINALIZE,
        Point.SECOND_HEALTH_CHECK,
        Point.ITERATION_BARRIER,
        Point.RANK_ASSIGNMENT,
    }
)
FROM_OUTSIDE = frozenset({Point.ITERATION_BARRIER, Point.COMPLETION_BARRIER})
_GUARDED = frozenset(
    {Point.INITIALIZE, Point.HEALTH_CHECK, Point.FUNCTION, Point.OTHERS_ABORT, Point.COMPLETION_BARRIER}
)
_HAS_GROUP = frozenset({Point.FUNCTION, Point.ATOMIC, Point.OTHERS_ABORT})
_BETWEEN_ITERATIONS = frozenset({Point.ITERATION_BARRIER, Point.RANK_ASSIGNMENT})
_HANGS = frozenset({Kind.HANG, Kind.C_HANG, Kind.GLOO_HANG, Kind.GIL_HANG, Kind.SIGSTOP})
_LEAVES = frozenset({Kind.BASE_EXCEPTION, Kind.SYSTEM_EXIT})


def _fate(kind: Kind, point: Point) -> Fate:
    if kind is Kind.MONITOR_KILLED:
        return Fate.GOES_ON  # it is replaced, without a restart
    if kind in _LEAVES:
        return Fate.LEAVES
    if kind is Kind.EXCEPTION:
        return Fate.GOES_ON if point in _GUARDED or point is Point.ATOMIC else Fate.LEAVES
    if kind in _HANGS and point is Point.ENTRY:
        return Fate.HANGS  # no time limit counts yet
    if kind is Kind.HANG and point in _GUARDED:
        return Fate.GOES_ON
    if kind is Kind.GLOO_HANG:
        return Fate.GOES_ON  # in an atomic section, too: the aborts of the others end the wait
    return Fate.DIES


@dataclass(frozen=True)
class Cell:
    """One fault. `victims` are initial ranks; all of them fail in the same way at the same point."""

    kind: Kind
    point: Point
    victims: tuple[int, ...]

    def __str__(self) -> str:
        return f"{self.kind.value}/{self.point.value}/{'+'.join(map(str, self.victims))}"

    @property
    def fate(self) -> Fate:
        """What happens to the victims."""
        return _fate(self.kind, self.point)

    @property
    def survivors(self) -> tuple[int, ...]:
        """The initial ranks that must complete the function."""
        if self.ends_the_job:
            return ()
        gone = () if self.fate is Fate.GOES_ON else self.victims
        return tuple(rank for rank in range(WORLD_SIZE) if rank not in gone)

    @property
    def ends_the_job(self) -> bool:
        """Before the initial barrier, no rank can be missing. A monitor process that dies there is replaced."""
        return self.point is Point.ENTRY and self.kind is not Kind.MONITOR_KILLED

    @property
    def instigator(self) -> int | None:
        """The rank whose exception starts the restart in which the victims fail; None if it needs none."""
        if self.point not in AFTER_A_FAULT:
            return None
        return max(rank for rank in range(WORLD_SIZE) if rank not in self.victims)

    @property
    def holder(self) -> int | None:
        """The rank that arrives at the barrier last, so that the victims fail at it; None without a barrier."""
        if self.point not in FROM_OUTSIDE:
            return None
        return min(rank for rank in range(WORLD_SIZE) if rank not in self.victims)

    @property
    def last_iterations(self) -> frozenset[int]:
        """The iterations in which the survivors may complete."""
        if self.kind is Kind.MONITOR_KILLED:
            return frozenset({1 if self.point in AFTER_A_FAULT else 0})
        if self.point is Point.RANK_ASSIGNMENT:
            return frozenset({2})  # iteration 1 begins with the victims among its ranks
        if self.point is Point.ITERATION_BARRIER:
            return frozenset({1, 2})  # depends on whether they are reported before the last rank arrives
        return frozenset({1})


def _possible(kind: Kind, point: Point) -> bool:
    """A rank can only be stuck in gloo where there is a process group."""
    return kind is not Kind.GLOO_HANG or point in _HAS_GROUP


def _victims(kind: Kind, point: Point) -> Iterator[tuple[int, ...]]:
    """Rank 0; another one; two at once. Which ones, the seed decides."""
    choice = random.Random(f"{_SEED} {kind.value} {point.value}")
    yield (0,)
    yield (choice.randrange(1, WORLD_SIZE),)
    yield choice.choice(list(itertools.combinations(range(WORLD_SIZE), 2)))


CELLS = tuple(
    Cell(kind, point, victims)
    for point in Point
    for kind in Kind
    if _possible(kind, point)
    for victims in _victims(kind, point)
)

# Every kind and every point at least once; where two ways are told apart, both.
_REPRESENTATIVE = (
    (Kind.SIGKILL, Point.ENTRY, 1),
    (Kind.EXCEPTION, Point.FIRST_ASSIGNMENT, 0),
    (Kind.SIGTERM, Point.INITIALIZE, 1),
    (Kind.EXCEPTION, Point.HEALTH_CHECK, 2),
    (Kind.GLOO_HANG, Point.FUNCTION, 1),
    (Kind.GIL_HANG, Point.FUNCTION, 1),
    (Kind.BOTH_KILLED, Point.FUNCTION, 0),
    (Kind.MONITOR_KILLED, Point.FUNCTION, 0),
    (Kind.HANG, Point.ATOMIC, 0),
    (Kind.SIGSTOP, Point.OTHERS_ABORT, 1),
    (Kind.OS_EXIT, Point.FINALIZE, 2),
    (Kind.EXCEPTION, Point.SECOND_HEALTH_CHECK, 1),
    (Kind.SYSTEM_EXIT, Point.ITERATION_BARRIER, 0),
    (Kind.SEGFAULT, Point.RANK_ASSIGNMENT, 2),
    (Kind.C_HANG, Point.RANK_ASSIGNMENT, 1),
    (Kind.BASE_EXCEPTION, Point.COMPLETION_BARRIER, 1),
    (Kind.HANG, Point.COMPLETION_BARRIER, 2),
)


def selected() -> list[Cell]:
    """All cells with TESTS=full in the environment, else those that represent them."""
    if FULL:
        return list(CELLS)
    return [list(_cells_at(kind, point))[index] for kind, point, index in _REPRESENTATIVE]


def cell_named(name: str) -> Cell:
    """Return the cell with this text form."""
    return next(cell for cell in CELLS if str(cell) == name)


def _cells_at(kind: Kind, point: Point) -> Iterator[Cell]:
    return (cell for cell in CELLS if (cell.kind, cell.point) == (kind, point))
