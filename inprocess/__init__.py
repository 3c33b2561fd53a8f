"""In-process restart of distributed training functions.

    wrapper = inprocess.Wrapper(...)
    wrapper(train)(...)

After an exception, a hang or a death on any rank the surviving processes unwind `train`, agree on new numbers and call
it again. Importing this package is cheap and does not import torch: the monitor process uses it, too.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from inprocess.ipc.lazy_names import lazy_names

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
    "straggler",
    "terminate",
    "wrap",
)

__all__ = ["CallWrapper", "Compose", "FrozenState", "Mode", "State", "Wrapper", "rank_assignment", "rank_filter"]

__getattr__, __dir__ = lazy_names(__name__, _CLASSES, _MODULES)
