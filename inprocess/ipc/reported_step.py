"""The largest training step of this process, in the environment: how other code reports progress to the wrapper."""

from __future__ import annotations

import os
from contextlib import AbstractContextManager

from inprocess.ipc.variables import number_in, variable_set

_VARIABLE = "INPROCESS_REPORTED_STEP"


def collected_steps() -> AbstractContextManager[None]:
    """Let `reported_step` return the largest step that is reported meanwhile."""
    return variable_set(_VARIABLE, 0)


def report_step(step: int) -> None:
    """Report a step that training has reached. Without effect outside of the wrapper, and for a step reached before."""
    if _VARIABLE in os.environ and step > reported_step():
        os.environ[_VARIABLE] = str(int(step))


def reported_step() -> int:
    """Return the largest step that was reported in this process; 0 without one."""
    return number_in(_VARIABLE) or 0
