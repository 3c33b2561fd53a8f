"""The memory of a whole job, seen from outside: the ranks are busy, and looking costs time.

rank 0 -- "b" --> the command looks at all processes again and again
       <-- ok --
       -- "e" -->
       <-- bytes before, at most, and of how many processes --
"""

import contextlib
import socket
import struct
from pathlib import Path

import psutil

__all__ = ["Monitor", "Request"]

_ANSWER = struct.Struct("<QQ")
_PAUSE_S = 0.02


class Request:
    """The end of a rank that asks."""

    def __init__(self, fd: int) -> None:
        self._socket = socket.socket(fileno=fd)
        self._begun = False

    def begin(self) -> None:
        """Returns when the first look was taken. What a system that failed had begun is ended before."""
        if self._begun:
            self.end()
        self._begun = True
        self._socket.sendall(b"b")
        self._socket.recv(1)

    def end(self) -> tuple[int, int]:
        """Bytes of all processes at the first look, and the most of all looks."""
        self._begun = False
        self._socket.sendall(b"e")
        before, most = _ANSWER.unpack(self._socket.recv(_ANSWER.size))
        return before, most


class Monitor:
    """The end that looks. `serve` until the other end is closed."""

    def __init__(self) -> None:
        self._socket, theirs = socket.socketpair()
        self._theirs = theirs
        self.fd = theirs.fileno()

    def serve(self) -> None:
        """Answer until all ranks have ended."""
        self._theirs.close()
        with self._socket:
            while self._socket.recv(1) == b"b":
                before = most = _total()
                self._socket.sendall(b".")
                self._socket.settimeout(_PAUSE_S)
                while not self._asked():
                    most = max(most, _total())
                self._socket.settimeout(None)
                self._socket.sendall(_ANSWER.pack(before, max(most, _total())))

    def _asked(self) -> bool:
        try:
            self._socket.recv(1)
        except TimeoutError:
            return False
        return True


def _total() -> int:
    """Bytes of all processes below this one; a page that several of them share counts once."""
    return sum(_proportional(process.pid) for process in psutil.Process().children(recursive=True))


def _proportional(pid: int) -> int:
    with contextlib.suppress(OSError):  # it has just ended
        for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
            if line.startswith("Pss:"):
                return int(line.split()[1]) * 1024
    return 0
