"""A file that exists while a call of the wrapper is open in a worker of a launcher.

A worker that ends while its file exists has not done its work, whatever its exit code is. The launcher names the file;
a worker that never calls the wrapper creates none, and its exit code alone counts.
"""

from __future__ import annotations

import contextlib
import os

OPEN_CALL_FILE = "INPROCESS_OPEN_CALL_FILE"
"""The environment variable with the path of the file."""


def open_call() -> None:
    """Create the file, if a launcher has named one. OSError if it cannot be created."""
    path = os.environ.get(OPEN_CALL_FILE)
    if path is not None:
        os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600))


def close_call() -> None:
    """Remove the file: the function has been completed on all ranks, or a hook has decided that the job ends."""
    path = os.environ.get(OPEN_CALL_FILE)
    if path is not None:
        with contextlib.suppress(OSError):  # the launcher has ended, and removed it
            os.unlink(path)
