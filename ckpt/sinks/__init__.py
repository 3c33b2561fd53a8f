"""Sinks for `ckpt.observe`: where the events of a job go.

A package that is missing is an ImportError that names what to install; `JsonLines` and `Logging` need none.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ckpt.sinks.json_lines import JsonLines
    from ckpt.sinks.log import Logging
    from ckpt.sinks.open_telemetry import OpenTelemetry
    from ckpt.sinks.prometheus import Prometheus
    from ckpt.sinks.tensorboard import TensorBoard

__all__ = ["JsonLines", "Logging", "OpenTelemetry", "Prometheus", "TensorBoard"]

_LAZY = {
    "JsonLines": "ckpt.sinks.json_lines",
    "Logging": "ckpt.sinks.log",
    "OpenTelemetry": "ckpt.sinks.open_telemetry",
    "Prometheus": "ckpt.sinks.prometheus",
    "TensorBoard": "ckpt.sinks.tensorboard",
}


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module 'ckpt.sinks' has no attribute {name!r}")
    return getattr(import_module(_LAZY[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)
