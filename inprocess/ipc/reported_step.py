"""The largest training step of this process, in the environment: how other code reports progress to the wrapper."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator

__all__ = ["collected_steps", "report_step", "reported_step"]

_VARIABLE = "INPROCESS_REPORTED_STEP"


@contextlib.contextmanager
def collected_steps() -> Iterator[None]:
    """Let `reported_step` return the largest step that is reported meanwhile."""
    before = os.environ.get(_VARIABLE)
    os.environ[_VARIABLE] = "0"
    try:
        yield
    finally:
        if before is None:
            os.environ.pop(_VARIABLE, None)
        else:
            os.environ[_VARIABLE] = before


def report_step(step: int) -> None:
    """Report a step that training has reached. Without effect outside of the wrapper, and for a step reached before."""
    if _VARIABLE in os.environ and step > reported_step():
        os.environ[_VARIABLE] = str(int(step))


def reported_step() -> int:
    """Return the largest step that was reported in this process; 0 without one."""
    text = os.environ.get(_VARIABLE, "")
    return int(text) if text.isascii() and text.isdigit() else 0
