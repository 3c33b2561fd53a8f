"""The restart index in the environment: how other code of a process learns which iteration of the wrapper it is in."""

from __future__ import annotations

from contextlib import AbstractContextManager

from inprocess.ipc.variables import number_in, variable_set

_VARIABLE = "INPROCESS_RESTART_INDEX"


def announced_restart_index(index: int) -> AbstractContextManager[None]:
    """Let `current_restart_index` return `index` in this process, and in those that it starts meanwhile."""
    return variable_set(_VARIABLE, index)


def current_restart_index() -> int | None:
    """Return how often the function that runs in the wrapper was restarted; None if there is no wrapper."""
    return number_in(_VARIABLE)
