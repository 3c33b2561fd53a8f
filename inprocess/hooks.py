"""The hooks of one wrapper, inspected once, in the form in which the protocol calls them."""

from __future__ import annotations

import logging
import os
from typing import Any

from inprocess.compose import Compose
from inprocess.exception import HealthCheckError, RestartError
from inprocess.hook_compat import Numbering, Role, StateHook
from inprocess.rank_assignment import RankAssignmentCtx
from inprocess.settings import Hook, Settings
from inprocess.state import FrozenState, State

__all__ = ["Hooks"]

_log = logging.getLogger(__name__)


class Hooks:
    """All hooks of a wrapper. Unless stated otherwise, a method raises what the hook raises."""

    def __init__(self, settings: Settings) -> None:
        self.restart_health_check_hook = _with_device_checks(settings.health_check)
        self._numbering = Numbering.inspect(settings.rank_assignment, settings.rank_filter)
        self._initialize = StateHook.inspect(Role.INITIALIZE, settings.initialize)
        self._health_check = StateHook.inspect(Role.HEALTH_CHECK, settings.health_check)
        self._restart_health_check = StateHook.inspect(Role.HEALTH_CHECK, self.restart_health_check_hook)
        self._abort = StateHook.inspect(Role.ABORT, settings.abort)
        self.aborts = settings.abort is not None  # the user's own hook most likely aborts torch's groups, too
        self._finalize = StateHook.inspect(Role.FINALIZE, settings.finalize)
        self._completion = StateHook.inspect(Role.COMPLETION, settings.completion)
        self._terminate = StateHook.inspect(Role.TERMINATE, settings.terminate)

    def initialize(self, state: FrozenState) -> None:
        """Run the initialize hook: main thread, at the start of an iteration."""
        self._initialize(state)

    def health_check(self, state: FrozenState) -> None:
        """Run the health check: main thread, before the function runs. Every error becomes a HealthCheckError."""
        _check(self._health_check, state)

    def restart_health_check(self, state: FrozenState) -> None:
        """Run the health check after a fault: main thread. Every error becomes a HealthCheckError."""
        _check(self._restart_health_check, state)

    def abort(self, state: FrozenState) -> None:
        """Run the abort hook: monitor thread, once per incident."""
        self._abort(state)

    def finalize(self, state: FrozenState) -> None:
        """Run the finalize hook: main thread, after the function was unwound."""
        self._finalize(state)

    def complete(self, state: FrozenState) -> None:
        """Run the completion hook: main thread, after all ranks have completed. Errors are only logged."""
        try:
            self._completion(state)
        except Exception:
            _log.exception("the completion hook failed")

    def terminate(self, state: FrozenState) -> None:
        """Run the terminate hook: main thread, when this rank leaves."""
        self._terminate(state)

    def assign(
        self, state: State, store: Any, terminated_ranks: frozenset[int], initial_ranks: tuple[int, ...]
    ) -> State:
        """Return the state with the numbers of the next iteration: main thread.

        The arguments are those of a `RankAssignmentCtx`. RestartError if no rank would be active.
        """
        assigned = self._numbering(RankAssignmentCtx(state, store, set(terminated_ranks), initial_ranks)).state
        if assigned.active_world_size == 0:
            raise RestartError(
                f"none of the {assigned.world_size} remaining ranks is active: no rank would run the function"
            )
        return assigned

    def active_of(self, world_size: int) -> int | None:
        """Return how many of so many live ranks would be active, by the rank assignment; None if it cannot know."""
        return self._numbering.active_of(world_size)


def _check(hook: StateHook, state: FrozenState) -> None:
    try:
        hook(state)
    except HealthCheckError:
        raise
    except Exception as error:
        raise HealthCheckError(f"{type(error).__name__}: {error}") from error


def _with_device_checks(health_check: Hook | None) -> Hook | None:
    """Return the user's checks, followed by those of the devices of this rank if LOCAL_RANK is set."""
    local_rank = os.environ.get("LOCAL_RANK", "")
    if not local_rank.isdecimal():
        return health_check
    from inprocess.health_check import ChainedGPUHealthCheck, ChainedNicHealthCheck, ChainedNVLHealthCheck

    index = int(local_rank)
    devices = (ChainedGPUHealthCheck(index), ChainedNVLHealthCheck(index), ChainedNicHealthCheck(index))
    users = health_check.instances if isinstance(health_check, Compose) else (health_check,) if health_check else ()
    return Compose(*reversed(devices), *users)  # called from right to left
