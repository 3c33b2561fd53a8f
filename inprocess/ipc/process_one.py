"""Process 1 of a pid namespace, as the first process of a container is.

The kernel does not deliver SIGKILL to it from inside the container, and gives it the children of processes that have
ended, which stay as zombies until it waits for them. An init process (`docker run --init`, tini) deals with both.
"""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Collection

_log = logging.getLogger(__name__)
_STATE, _PARENT, _SESSION = 0, 1, 3  # fields of /proc/PID/stat behind the name


def warn_if_process_one() -> None:
    """Log a warning with the remedy if this is process 1."""
    if os.getpid() == 1:
        _log.warning(
            "this rank is process 1 of its container: if it hangs, its monitor process cannot kill it, and the "
            "container does not end. Start the container with an init process (`docker run --init`, or `tini --` in "
            "front of the command), or start the ranks with ckpt_launcher"
        )


def reap_adopted(own: Collection[int] | None = None) -> None:
    """Reap the children of this process that it has not started itself and that have ended. Only in process 1.

    Those of its own session are left alone, because other code of this process may have started them. Of other sessions
    it has started the leaders only; `own` names those that it has started if leaders may be adopted, too.
    """
    if os.getpid() != 1:
        return
    session = os.getsid(0)
    for name in os.listdir("/proc"):
        if not name.isdecimal():
            continue
        pid = int(name)
        with contextlib.suppress(OSError, IndexError):
            with open(f"/proc/{pid}/stat", "rb") as stream:
                fields = stream.read().rpartition(b")")[2].split()
            state, parent, its_session = fields[_STATE], int(fields[_PARENT]), int(fields[_SESSION])
            is_own = pid == its_session if own is None else pid in own
            if state == b"Z" and parent == 1 and its_session != session and not is_own:
                os.waitpid(pid, os.WNOHANG)
