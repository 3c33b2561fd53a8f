"""`Patience`: how long a writer tries again to write a file that the storage does not take for a moment.

Only the writing of a file is tried again, of the pack, the intent, the part manifest and the step's documents, and each
time to a new file. The sync of all files at the end is not: after
one that failed the kernel may have dropped the data, and the next one succeeds. Where O_DIRECT is refused, the writing
of a file ends with a sync of its own. If that fails, the file is removed, and a new one is written in full and synced.
Object stores are not asked again either, as their library has done that.
"""

from __future__ import annotations

import errno
import logging
import time
from collections.abc import Callable

from ckpt.errors import StorageError

_log = logging.getLogger("ckpt")

_LONGEST_S = 8.0  # the slot is not free meanwhile, and training may wait for it
_PART = 8  # of the time that the other ranks wait for this one
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.1, 1.0
_OF_A_MOMENT = frozenset(
    {
        *(errno.ENOSPC, errno.EDQUOT),  # other programs free space, and so do saves: removed steps are deleted later
        *(errno.ESTALE, errno.EIO, errno.ETIMEDOUT, errno.EAGAIN, errno.EREMOTEIO),  # a server that was away
        *(errno.ENETDOWN, errno.ENETUNREACH, errno.EHOSTDOWN, errno.EHOSTUNREACH, errno.ENOTCONN, errno.ECONNRESET),
    }
)


class Patience:
    """Says whether to try again, and waits before that. For one save, and for any of its threads.

    All files of the save together are waited for a few seconds at most, from the first failure; `before_pause` is
    called each time.
    """

    def __init__(self, timeout_s: float, before_pause: Callable[[], None] = lambda: None) -> None:
        """`timeout_s` is how long other ranks wait for this one."""
        self._longest_s = min(_LONGEST_S, timeout_s / _PART)
        self._before_pause = before_pause
        self._begin: float | None = None
        self._pause_s = _FIRST_PAUSE_S

    def __call__(self, error: StorageError) -> bool:
        """Return whether to try again, after a pause, what has failed by `error`."""
        cause = error.__cause__
        if not isinstance(cause, OSError) or cause.errno not in _OF_A_MOMENT:
            return False
        now = time.monotonic()
        if self._begin is None:
            self._begin = now
            _log.info("%s; this is tried again for %.0f s", error, self._longest_s)
        left_s = self._begin + self._longest_s - now
        if left_s <= 0:
            return False
        self._before_pause()
        time.sleep(min(self._pause_s, left_s))
        self._pause_s = min(2 * self._pause_s, _LONGEST_PAUSE_S)
        return True
