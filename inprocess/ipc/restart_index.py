"""The restart index in the environment: how other code of a process learns which iteration of the wrapper it is in."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator

__all__ = ["announced_restart_index", "current_restart_index"]

_VARIABLE = "INPROCESS_RESTART_INDEX"


@contextlib.contextmanager
def announced_restart_index(index: int) -> Iterator[None]:
    """Let `current_restart_index` return `index` in this process, and in those that it starts meanwhile."""
    before = os.environ.get(_VARIABLE)
    os.environ[_VARIABLE] = str(index)
    try:
        yield
    finally:
        if before is None:
            os.environ.pop(_VARIABLE, None)
        else:
            os.environ[_VARIABLE] = before


def current_restart_index() -> int | None:
    """Return how often the function that runs in the wrapper was restarted; None if there is no wrapper."""
    text = os.environ.get(_VARIABLE, "")
    return int(text) if text.isascii() and text.isdigit() else None
