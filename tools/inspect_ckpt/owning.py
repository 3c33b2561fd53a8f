"""Commands that change a root: as its owner for a moment, never beside a job that is alive."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator

from ckpt.storage.ownership import OwnerState
from ckpt.storage.root import CheckpointRoot

from .opening import CannotReadError
from .output import Output

__all__ = ["agreed", "owning"]


@contextlib.contextmanager
def owning(root: CheckpointRoot) -> Iterator[int]:
    """Own the root; gives the token. CannotReadError if a job that is alive, or just finishing, owns it."""
    root.make()
    newest = root.ownership.newest()
    if root.ownership.state(newest) is not OwnerState.GONE:
        raise CannotReadError(
            f"{root.path} is owned by {root.ownership.describe(newest)}, which is alive: stop the job first, or let it "
            "do this itself (Checkpointer.delete, keep_last)"
        )
    token = root.ownership.claim(newest)
    try:
        yield token
    finally:
        root.ownership.release(token)


def agreed(question: str, output: Output) -> bool:
    """Whether the person at the terminal says yes. CannotReadError where there is none."""
    if output.as_json or not sys.stdin.isatty():
        raise CannotReadError("this asks before it removes anything; without a terminal give --yes")
    try:
        return input(question).strip().lower() in ("y", "yes")
    except EOFError:
        return False
