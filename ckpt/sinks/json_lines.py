"""`JsonLines`: a file with one line for each event."""

from __future__ import annotations

import json
import os

from ckpt.events import Event, to_document

__all__ = ["JsonLines"]


class JsonLines:
    """Appends ``{"event": "SavePublished", "time": ..., "rank": ..., ...}`` to a file, a line for each event.

    ``{rank}`` in `path` is replaced by the rank of the event; missing directories are made. Each line is one write to
    the end of the file, so several ranks of one host may share it; on a network file system give each rank its own.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self._path = os.path.abspath(os.fspath(path))
        self._files: dict[str, int] = {}

    def __call__(self, event: Event) -> None:
        """Append the line of an event. Raises OSError."""
        line = json.dumps(to_document(event)) + "\n"
        os.write(self._file(self._path.replace("{rank}", str(event.rank))), line.encode())

    def close(self) -> None:
        """Close the files. Idempotent."""
        while self._files:
            os.close(self._files.popitem()[1])

    def _file(self, path: str) -> int:
        if path not in self._files:
            os.makedirs(os.path.dirname(path), exist_ok=True)
            self._files[path] = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o666)
        return self._files[path]
