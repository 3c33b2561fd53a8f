"""A line for each event: in a file (`JsonLines`), or as a record of a logger (`Logging`)."""

from __future__ import annotations

import errno
import json
import logging
import os
import stat
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


class JsonLines:
    """Appends ``{"event": "SavePublished", "time": ..., "rank": ..., ...}`` to a file, a line for each event.

    ``{rank}`` in `path` is replaced by the rank of the event; missing directories are made. Each line is one write to
    the end of the file, so several ranks of one host may share it; on a network file system give each rank its own. A
    file that was renamed or removed meanwhile is made anew. Of a full disk one line at most is lost besides those that
    do not fit: the next one begins on a line of its own.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self._path = os.path.abspath(os.path.expanduser(path))
        self._files: dict[str, int] = {}
        self._torn: set[str] = set()  # files whose last line has no end

    def __call__(self, event: Event) -> None:
        """Append the line of an event. Raises OSError."""
        path = self._path.replace("{rank}", str(event.rank))
        fd = self._file(path)
        line = (json.dumps(to_document(event)) + "\n").encode()
        data = b"\n" + line if path in self._torn else line
        written = os.write(fd, data)
        if 0 < written < len(data):
            self._torn.add(path)
            raise OSError(errno.ENOSPC, "an event was written in part only", path)
        self._torn.discard(path)

    def close(self) -> None:
        """Close the files. Idempotent."""
        while self._files:
            os.close(self._files.popitem()[1])

    def _file(self, path: str) -> int:
        fd = self._files.get(path)
        if fd is not None and not _is_file(path, fd):
            os.close(self._files.pop(path))
            fd = None
        if fd is None:
            os.makedirs(os.path.dirname(path), exist_ok=True)
            fd = self._files[path] = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o666)
            (self._torn.add if _is_torn(fd) else self._torn.discard)(path)
        return fd


def _is_file(path: str, fd: int) -> bool:
    """Return whether the file that was opened is still the one at this path."""
    try:
        return os.path.samestat(os.stat(path), os.fstat(fd))
    except FileNotFoundError:
        return False


def _is_torn(fd: int) -> bool:
    """Return whether the last line of a file has no end: an earlier process was stopped there, or the disk was full."""
    about = os.fstat(fd)
    return stat.S_ISREG(about.st_mode) and about.st_size > 0 and os.pread(fd, 1, about.st_size - 1) != b"\n"


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
