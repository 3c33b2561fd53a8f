"""The workers that are in a call of the wrapper: an exit code of 0 does not mean that they have done their work."""

from __future__ import annotations

import os
from contextlib import suppress

from inprocess.ipc import unix_sockets
from inprocess.ipc.open_call import OPEN_CALL_FILE


class OpenCalls:
    """The files of `count` workers in which a call may be open, by local rank; see `ipc.open_call`. OSError."""

    def __init__(self, count: int) -> None:
        folder = unix_sockets.private_directory()
        self._paths = [os.path.join(folder, f"call-{os.getpid()}-{local_rank}") for local_rank in range(count)]
        self.close()  # of an earlier launcher with the same process id

    def environment(self, local_rank: int) -> dict[str, str]:
        """Return the environment variable for the worker with this local rank."""
        return {OPEN_CALL_FILE: self._paths[local_rank]}

    def is_open(self, local_rank: int) -> bool:
        """Whether the worker is, or was at its end, in a call that is not completed."""
        return os.path.exists(self._paths[local_rank])

    def forget(self, local_rank: int) -> None:
        """Forget the call of a worker that has ended, before another one is started in its place."""
        with suppress(FileNotFoundError):
            os.unlink(self._paths[local_rank])

    def close(self) -> None:
        """Remove all files. Idempotent."""
        for local_rank in range(len(self._paths)):
            self.forget(local_rank)
