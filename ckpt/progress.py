"""Progress on one line of a terminal, for a person who waits. Nothing is written unless stderr is a terminal.

``CKPT_PROGRESS=0`` in the environment turns it off.
"""

from __future__ import annotations

import os
import shutil
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

__all__ = ["line", "polled", "wanted"]

_QUIET_S = 2.0  # what is done by then shows nothing
_REDRAW_S = 0.25


def wanted() -> bool:
    """Return whether progress is to be shown: stderr is a terminal, and CKPT_PROGRESS is not 0."""
    try:
        return os.environ.get("CKPT_PROGRESS") != "0" and sys.stderr.isatty()
    except (AttributeError, ValueError):  # there is no stderr, or it is closed
        return False


@contextmanager
def line(title: str, begin: float | None = None) -> Iterator[Callable[[int, int], None]]:
    """Give a function that shows the bytes done and in all on a line of stderr, which is erased at the end.

    Call it as often as you like, in one thread at a time; it writes a few times a second. The work began at `begin`, a
    time of `time.monotonic`; by default now.
    """
    shown = time.monotonic()
    begin = shown if begin is None else begin
    width = 0

    def show(done: int, total: int) -> None:
        nonlocal shown, width
        now = time.monotonic()
        if now - shown < _REDRAW_S:
            return
        shown = now
        text = f"{title}: {_described(done, total, now - begin)}"[: shutil.get_terminal_size().columns - 1]
        _write(f"\r{text:<{width}}")
        width = len(text)

    try:
        yield show
    finally:
        if width:
            _write(f"\r{'':<{width}}\r")


@contextmanager
def polled(title: str, total: int, done: Callable[[], int]) -> Iterator[None]:
    """Show how many of `total` bytes are `done` while the block runs, if it runs longer than about two seconds.

    `done` is called a few times a second in a thread, so that the block does nothing for it.
    """
    if not wanted():
        yield
        return
    ended = threading.Event()
    begin = time.monotonic()

    def draw() -> None:
        if ended.wait(_QUIET_S):
            return
        with line(title, begin) as show:
            while not ended.wait(_REDRAW_S):
                show(done(), total)

    thread = threading.Thread(target=draw, name="ckpt-progress", daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


def _described(done: int, total: int, seconds: float) -> str:
    done = min(done, total)
    rate = done / max(seconds, 1e-9)
    left = f", {(total - done) / rate:.0f} s left" if done else ""
    return f"{100 * done / max(total, 1):3.0f}% of {total / 1e9:.2f} GB, {rate / 1e9:.2f} GB/s{left}"


def _write(text: str) -> None:
    with suppress(OSError, ValueError):  # the terminal is gone
        sys.stderr.write(text)
        sys.stderr.flush()
