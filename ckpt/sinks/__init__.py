"""Sinks for `ckpt.observe`: where the events of a job go.

A package that is missing is an ImportError that names what to install; `JsonLines` and `Logging` need none.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from inprocess.ipc.lazy_names import lazy_names

if TYPE_CHECKING:
    from ckpt.sinks.lines import JsonLines, Logging
    from ckpt.sinks.open_telemetry import OpenTelemetry
    from ckpt.sinks.prometheus import Prometheus
    from ckpt.sinks.tensorboard import TensorBoard

__all__ = ["JsonLines", "Logging", "OpenTelemetry", "Prometheus", "TensorBoard"]

__getattr__, __dir__ = lazy_names(
    __name__,
    {
        "JsonLines": ".lines",
        "Logging": ".lines",
        "OpenTelemetry": ".open_telemetry",
        "Prometheus": ".prometheus",
        "TensorBoard": ".tensorboard",
    },
)
