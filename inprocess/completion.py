"""Hooks that run at the end of a successful call."""

from __future__ import annotations

import abc

from inprocess.state import FrozenState

__all__ = ["Completion"]


class Completion(abc.ABC):
    """Called on the main thread when the wrapped function has returned on all ranks.

    Returns the state it was given. What it raises is logged and otherwise ignored.
    """

    @abc.abstractmethod
    def __call__(self, state: FrozenState) -> FrozenState: ...
