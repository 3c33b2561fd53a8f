"""A lock among the processes of one node, which ends with the process that holds it.

It is a name in the abstract namespace of unix sockets: nothing has a name in a file system, and the kernel frees it
when the process ends. Containers with network namespaces of their own do not see each other's locks. It may only make
work cheaper: a process that never gets it, because another one is stopped or foreign, must come to the same result.
"""

from __future__ import annotations

import hashlib
import os
import socket

from inprocess.ipc.uncopied import Uncopied


class NodeLock(Uncopied):
    """A lock named by a text, for the processes of one user. Never waits. For one thread."""

    def __init__(self, name: str) -> None:
        digest = hashlib.blake2b(f"{os.getuid()} {name}".encode(errors="surrogateescape"), digest_size=16).hexdigest()
        self._address = f"\0ckpt-lock-{digest}"
        self._socket: socket.socket | None = None

    @property
    def held(self) -> bool:
        """Whether this object holds the lock."""
        return self._socket is not None

    def take(self) -> bool:
        """Return whether this object holds the lock, which it takes if it is free."""
        if self._socket is None:
            try:
                candidate = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC)
            except OSError:
                return False
            try:
                candidate.bind(self._address)
            except OSError:
                candidate.close()
            else:
                self._socket = candidate
        return self.held

    def release(self) -> None:
        """Release the lock. Idempotent."""
        held, self._socket = self._socket, None
        if held is not None:
            held.close()
