"""In-process restart of distributed training functions.

    wrapper = inprocess.Wrapper(...)
    wrapper(train)(...)

After an exception, a hang or a death on any rank the surviving processes unwind `train`, agree on new numbers and call
it again. Importing this package is cheap and does not import torch: the monitor process uses it, too.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from inprocess import rank_assignment, rank_filter
    from inprocess.compose import Compose
    from inprocess.state import FrozenState, Mode, State
    from inprocess.wrap import CallWrapper, Wrapper

_CLASSES = {
    "CallWrapper": "inprocess.wrap",
    "Compose": "inprocess.compose",
    "FrozenState": "inprocess.state",
    "Mode": "inprocess.state",
    "State": "inprocess.state",
    "Wrapper": "inprocess.wrap",
}
_MODULES = (
    "abort",
    "attribution",
    "completion",
    "exception",
    "finalize",
    "health_check",
    "initialize",
    "monitor_process",
    "monitor_thread",
    "nested_restarter",
    "progress_watchdog",
    "rank_assignment",
    "rank_filter",
    "state",
    "store",
    "terminate",
    "wrap",
)

__all__ = ["CallWrapper", "Compose", "FrozenState", "Mode", "State", "Wrapper", "rank_assignment", "rank_filter"]


def __getattr__(name: str) -> Any:
    if name in _CLASSES:
        return getattr(import_module(_CLASSES[name]), name)
    if name in _MODULES:
        return import_module(f"inprocess.{name}")
    raise AttributeError(f"module 'inprocess' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted((*_CLASSES, *_MODULES))
