"""Hooks that run at the start of every iteration."""

from __future__ import annotations

import abc

from inprocess.exception import RestartAbort
from inprocess.state import FrozenState

__all__ = ["Initialize", "RetryController"]


class Initialize(abc.ABC):
    """Called on the main thread at the start of every iteration, when faults of other ranks already interrupt it.

    Returns the state it was given. An Exception counts as a fault of this iteration: all ranks restart. A
    `RestartAbort`, or any other BaseException, makes this rank leave.
    """

    @abc.abstractmethod
    def __call__(self, state: FrozenState) -> FrozenState: ...


class RetryController(Initialize):
    """Ends the job with `RestartAbort` after too many iterations, or with too few ranks.

    That is at iteration `max_iterations` (so there are at most that many; None: no limit), with fewer than
    `min_world_size` live ranks, or fewer than `min_active_world_size` active ones. All ranks decide the same.
    """

    def __init__(
        self, max_iterations: int | None = None, min_world_size: int = 1, min_active_world_size: int = 1
    ) -> None:
        self.max_iterations = max_iterations
        self.min_world_size = min_world_size
        self.min_active_world_size = min_active_world_size

    def __call__(self, state: FrozenState) -> FrozenState:
        active = state.world_size if state.active_world_size is None else state.active_world_size
        if self.max_iterations is not None and state.iteration >= self.max_iterations:
            raise RestartAbort(f"iteration {state.iteration} would exceed max_iterations={self.max_iterations}")
        if state.world_size < self.min_world_size:
            raise RestartAbort(f"{state.world_size} ranks are live, fewer than min_world_size={self.min_world_size}")
        if active < self.min_active_world_size:
            raise RestartAbort(
                f"{active} ranks are active, fewer than min_active_world_size={self.min_active_world_size}"
            )
        return state
