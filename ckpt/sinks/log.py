"""`Logging`: a record for each event."""

from __future__ import annotations

import logging
from typing import Any

from ckpt.events import (
    Event,
    EventsDropped,
    ExportFailed,
    MirrorFailed,
    Restarted,
    RestoreFailed,
    SaveAbandoned,
    SectionLate,
    to_document,
)

__all__ = ["Logging"]

_NOT_SHOWN = ("event", "time", "process")
_BAD = (EventsDropped, ExportFailed, MirrorFailed, Restarted, RestoreFailed, SaveAbandoned, SectionLate)


class Logging:
    """Logs each event: ``SavePublished rank=0 step=100 bytes=4004 ...``.

    To `logger`, or the one of this name. What went wrong has level WARNING, all else `level`. A record has the fields
    of the event, and its name, in the attribute `ckpt`, for formatters that write JSON.
    """

    def __init__(self, logger: logging.Logger | str = "ckpt.events", level: int = logging.INFO) -> None:
        self._logger = logging.getLogger(logger) if isinstance(logger, str) else logger
        self._level = level

    def __call__(self, event: Event) -> None:
        """Log an event."""
        level = max(self._level, logging.WARNING) if isinstance(event, _BAD) else self._level
        if not self._logger.isEnabledFor(level):
            return
        document = to_document(event)
        text = " ".join(f"{name}={_shown(document[name])}" for name in document if name not in _NOT_SHOWN)
        self._logger.log(level, "%s %s", document["event"], text, extra={"ckpt": document})


def _shown(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.6g}"
    return repr(value) if isinstance(value, str) else str(value)
