"""Python's garbage collection, and when it is in the way."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator

__all__ = ["without_collection"]


@contextlib.contextmanager
def without_collection() -> Iterator[None]:
    """For short work that makes many objects and leaves no cycles: looking for garbage meanwhile would take most of it.

    For the whole process; to be nested in one thread only.
    """
    enabled = gc.isenabled()
    try:
        gc.disable()
        yield
    finally:
        if enabled:
            gc.enable()
