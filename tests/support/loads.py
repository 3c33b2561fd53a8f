"""Loads that wait for a save, forced: the writer is stopped until the load says that it waits."""

import contextlib
import logging
from collections.abc import Callable, Iterator

import psutil

__all__ = ["only_writer", "stopped_until_a_load_waits", "when_a_load_waits"]


@contextlib.contextmanager
def when_a_load_waits(action: Callable[[], object]) -> Iterator[None]:
    """Call `action` when a load waits for the first time; fail if none does."""
    handler = logging.Handler()
    left = [action]

    def emit(record: logging.LogRecord) -> None:
        if left and record.getMessage().startswith("waiting for step"):
            left.pop()()

    handler.emit = emit  # type: ignore[method-assign]
    log = logging.getLogger("ckpt")
    level = log.level
    log.addHandler(handler)
    log.setLevel(logging.INFO)
    try:
        yield
    finally:
        log.removeHandler(handler)
        log.setLevel(level)
    assert left == [], "no load has waited"


def only_writer() -> psutil.Process:
    """The writer process of this process."""
    (writer,) = [each for each in psutil.Process().children(recursive=True) if each.name() == "ckpt-writer"]
    return writer


@contextlib.contextmanager
def stopped_until_a_load_waits() -> Iterator[None]:
    """Stop the writer of this process, which is there already, until a load waits for it."""
    writer = only_writer()
    writer.suspend()
    try:
        with when_a_load_waits(writer.resume):
            yield
    finally:
        with contextlib.suppress(psutil.Error):
            writer.resume()
