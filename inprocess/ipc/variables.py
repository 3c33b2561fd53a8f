"""Variables of the environment by which the wrapper tells other code of a process where it is."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator


@contextlib.contextmanager
def variable_set(name: str, number: int) -> Iterator[None]:
    """Set a variable in this process, and in those that it starts meanwhile; put it back in the end."""
    before = os.environ.get(name)
    os.environ[name] = str(number)
    try:
        yield
    finally:
        if before is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = before


def number_in(name: str) -> int | None:
    """Return the number in a variable; None if it is not set to one."""
    text = os.environ.get(name, "")
    return int(text) if text.isascii() and text.isdigit() else None
