"""State of a rank in the job, which every hook gets."""

from __future__ import annotations

import dataclasses
import enum
import os
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from inprocess.attribution import Cause, InterruptionRecord, cause_of
from inprocess.rank_environment import ranks_of_environment

__all__ = ["FrozenState", "Mode", "State", "Status"]


class Mode(enum.Enum):
    """What this rank does in the current iteration."""

    INITIALIZED = enum.auto()
    ACTIVE = enum.auto()
    INACTIVE = enum.auto()
    TERMINATED = enum.auto()


Status = Mode


@dataclass
class State:
    """The state of this rank.

    `rank` and `world_size` number the live ranks without gaps (`rank` is None once terminated); `active_rank` and
    `active_world_size` are what the wrapped function sees (`active_rank` is None on a spare). `initial_rank` and
    `initial_world_size` never change. `fn_exception` is what the wrapped function raised on this rank in this
    iteration; `interruptions` is why the last restart happened, on whichever rank, and `cause` the first fault in them
    with its class: the same on all ranks.
    """

    rank: int | None
    world_size: int
    active_rank: int | None = None
    active_world_size: int | None = None
    initial_rank: int | None = None
    initial_world_size: int | None = None
    iteration: int = 0
    mode: Mode = Mode.INITIALIZED
    fn_exception: BaseException | None = None
    interruptions: tuple[InterruptionRecord, ...] = ()

    def __post_init__(self) -> None:
        self.store: Any = None  # of the current iteration; not a field, so that copies do not contain it
        if self.initial_rank is None:
            self.initial_rank = self.rank
        if self.initial_world_size is None:
            self.initial_world_size = self.world_size

    @classmethod
    def from_env(cls) -> State:
        """Return the state at the start of the job; see `rank_environment` for the variables that say it."""
        ranks = ranks_of_environment()
        return cls(rank=ranks.rank, world_size=ranks.world_size)

    @property
    def status(self) -> Mode:
        """The older name of `mode`."""
        return self.mode

    @status.setter
    def status(self, mode: Mode) -> None:
        self.mode = mode

    @property
    def cause(self) -> Cause | None:
        """Why the last restart happened; None before the first one, and after one that took in processes."""
        return cause_of(self.interruptions)

    def activate_all_ranks(self) -> None:
        """Make every live rank active, with its dense number."""
        self.active_rank = self.rank
        self.active_world_size = self.world_size
        self.mode = Mode.ACTIVE

    def set_distributed_vars(self) -> None:
        """Write the active numbers to RANK and WORLD_SIZE; a spare gets its dense rank, which no active rank has."""
        rank = self.rank if self.active_rank is None else self.active_rank
        world_size = self.world_size if self.active_world_size is None else self.active_world_size
        if rank is None:
            os.environ.pop("RANK", None)
        else:
            os.environ["RANK"] = str(rank)
        os.environ["WORLD_SIZE"] = str(world_size)

    def advance(self) -> None:
        """Go on to the next iteration."""
        self.iteration += 1
        self.fn_exception = None

    def freeze(self) -> FrozenState:
        """Return the state for hooks. The copy is shallow: the exception is the same object."""
        return FrozenState(**_fields_of(self))

    def copy_from(self, other: State | FrozenState, fields: Iterable[str] | None = None) -> None:
        """Copy the named fields of `other`; all of them by default."""
        names = [field.name for field in dataclasses.fields(self)] if fields is None else list(fields)
        for name in names:
            setattr(self, name, getattr(other, name))


@dataclass(frozen=True)
class FrozenState:
    """An immutable `State`; assignment raises `dataclasses.FrozenInstanceError`."""

    rank: int | None
    world_size: int
    active_rank: int | None = None
    active_world_size: int | None = None
    initial_rank: int | None = None
    initial_world_size: int | None = None
    iteration: int = 0
    mode: Mode = Mode.INITIALIZED
    fn_exception: BaseException | None = None
    interruptions: tuple[InterruptionRecord, ...] = ()

    @property
    def status(self) -> Mode:
        """The older name of `mode`."""
        return self.mode

    @property
    def cause(self) -> Cause | None:
        """Why the last restart happened; None before the first one, and after one that took in processes."""
        return cause_of(self.interruptions)

    def freeze(self) -> FrozenState:
        """Return itself."""
        return self

    def thaw(self) -> State:
        """Return a `State` with the same values."""
        return State(**_fields_of(self))


def _fields_of(state: State | FrozenState) -> dict[str, Any]:
    return {field.name: getattr(state, field.name) for field in dataclasses.fields(state)}
