"""Hooks that run on a rank that leaves."""

from __future__ import annotations

import abc

from inprocess.state import FrozenState

__all__ = ["Terminate"]


class Terminate(abc.ABC):
    """Called on the main thread when this rank leaves with an error, after the others were notified.

    Returns the state it was given. An error of the hook leaves the wrapper instead of the original one, chained to it.
    """

    @abc.abstractmethod
    def __call__(self, state: FrozenState) -> FrozenState: ...
