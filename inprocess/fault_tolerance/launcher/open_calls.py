"""The workers that are in a call of the wrapper, and those that have joined a running job, by files that they write.

An exit code of 0 does not mean that a worker in a call has done its work.
"""

from __future__ import annotations

import os
from contextlib import suppress

from inprocess.ipc import unix_sockets
from inprocess.ipc.open_call import OPEN_CALL_FILE
from inprocess.joining import JOIN, JOINED_FILE


class OpenCalls:
    """The files of `count` workers, by local rank; see `ipc.open_call` and `joining`. OSError."""

    def __init__(self, count: int) -> None:
        folder = unix_sockets.private_directory()
        self._paths = [os.path.join(folder, f"call-{os.getpid()}-{local_rank}") for local_rank in range(count)]
        self.close()  # of an earlier launcher with the same process id

    def environment(self, local_rank: int) -> dict[str, str]:
        """Return the environment variable for the worker with this local rank."""
        return {OPEN_CALL_FILE: self._paths[local_rank]}

    def joining(self, local_rank: int, initial_rank: int) -> dict[str, str]:
        """Return the environment variables for a worker with this local rank that is to join a running job."""
        return {JOIN: str(initial_rank), JOINED_FILE: self.joined_file(local_rank)}

    def joined_file(self, local_rank: int) -> str:
        """Return the path of the file that exists as soon as such a worker has joined."""
        return f"{self._paths[local_rank]}-joined"

    def is_open(self, local_rank: int) -> bool:
        """Whether the worker is, or was at its end, in a call that is not completed."""
        return os.path.exists(self._paths[local_rank])

    def forget(self, local_rank: int) -> None:
        """Forget a worker that has ended, before another one is started in its place."""
        for path in (self._paths[local_rank], self.joined_file(local_rank)):
            with suppress(FileNotFoundError):
                os.unlink(path)

    def close(self) -> None:
        """Remove all files. Idempotent."""
        for local_rank in range(len(self._paths)):
            self.forget(local_rank)
