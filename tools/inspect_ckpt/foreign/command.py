"""What the commands `export` and `convert` have in common."""

from __future__ import annotations

import os
from collections.abc import Callable

from ..opening import CannotReadError
from ..output import Meter

__all__ = ["check_outside", "counting", "listed"]


def check_outside(target: str, source: str) -> None:
    """CannotReadError if `target` is the directory `source` or below it, for a checkpoint is not written to, and if
    there is no directory to make `target` in."""
    try:
        inner, outer = os.path.realpath(target), os.path.realpath(source)
    except ValueError as error:
        raise CannotReadError(f"{target!r}: {error}") from None
    if os.path.isdir(outer) and os.path.commonpath([inner, outer]) == outer:
        raise CannotReadError(f"{target} is inside {source}; give a directory outside of it")
    parent = os.path.dirname(os.path.abspath(target))
    if not os.path.isdir(parent):
        raise CannotReadError(f"{parent}: there is no such directory to make {os.path.basename(target)} in")


def counting(meter: Meter | None, total: int) -> Callable[[int], None]:
    """Adds up the bytes it is called with and shows them."""
    done = 0

    def tick(count: int) -> None:
        nonlocal done
        done += count
        if meter is not None:
            meter(min(done, total), total)

    return tick


def listed(names: list[str]) -> str:
    """Some names, for a message."""
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
