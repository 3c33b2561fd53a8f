"""Hooks of a rank that leaves."""

from __future__ import annotations

import abc

from inprocess.state import FrozenState

__all__ = ["Terminate"]


class Terminate(abc.ABC):
    """Called on the main thread when this rank leaves with an error, after the others have been told.

    Returns the state it was given. What it raises leaves the wrapper instead of the error, chained to it.
    """

    @abc.abstractmethod
    def __call__(self, state: FrozenState) -> FrozenState: ...
