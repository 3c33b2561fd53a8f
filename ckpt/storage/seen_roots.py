"""The roots whose steps this process has seen: it restored, loaded or saved some, or found none when it restored.

A job that goes on in a root without a restore of its own is told from one that was started in a used root by mistake:
see `ckpt.saving.root_claim`. The set belongs to the whole process, as any part of a program may load what another part
goes on to save.
"""

from __future__ import annotations

import os

__all__ = ["is_seen", "note_seen"]

_seen: set[str] = set()  # paths without links, and URLs; changed by atomic operations only


def note_seen(path: str) -> None:
    """Note that this process has seen the steps of the root at `path`, an absolute path or a URL."""
    _seen.add(_real(path))


def is_seen(path: str) -> bool:
    """Return whether this process has seen the steps of the root at `path`."""
    return _real(path) in _seen


def _real(path: str) -> str:
    return path if "://" in path else os.path.realpath(path)
