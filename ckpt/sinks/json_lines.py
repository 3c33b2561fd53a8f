"""`JsonLines`: a file with one line for each event."""

from __future__ import annotations

import errno
import json
import os
import stat

from ckpt.events import Event, to_document

__all__ = ["JsonLines"]


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
