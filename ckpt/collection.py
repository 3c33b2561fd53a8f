"""Control of Python's garbage collection."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator

__all__ = ["without_collection"]


@contextlib.contextmanager
def without_collection() -> Iterator[None]:
    """Switch garbage collection off, for short work that makes many objects and leaves no cycles.

    Collections would take most of the time of such work. Affects the whole process; may be nested in one thread only.
    """
    enabled = gc.isenabled()
    try:
        gc.disable()
        yield
    finally:
        if enabled:
            gc.enable()
