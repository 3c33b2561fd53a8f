"""Forks of this process: data loader workers, children of `multiprocessing`, any `os.fork`.

A fork has a copy of every object and every descriptor, and owns nothing of it: it must not end a process that its
parent has started, send a message in its name, or keep a connection open so that the other end does not see that the
parent has closed it, or died. So a handle of another process checks `Origin.is_here` before it acts, and closes its
descriptors `in_forked_children`.
"""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable
from typing import Any


class Origin:
    """The process in which this was made."""

    __slots__ = ("pid",)

    def __init__(self) -> None:
        self.pid = os.getpid()

    @property
    def is_here(self) -> bool:
        """Whether this is the process in which it was made, and no fork of that."""
        return os.getpid() == self.pid


def in_forked_children(release: Callable[[], Any]) -> None:
    """Call a bound method in every process that is forked from this one, as long as its object exists.

    It should close descriptors and nothing more. Forks by C code are not noticed.
    """
    reference = weakref.WeakMethod(release)

    def after_fork() -> None:
        if (method := reference()) is not None:
            method()

    os.register_at_fork(after_in_child=after_fork)
