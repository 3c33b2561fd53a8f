"""Loads that wait for a save, forced: the writer is stopped until the load says that it waits."""

import contextlib
import logging
from collections.abc import Callable, Iterator

import psutil

import ckpt


def as_another_program(checkpointer: ckpt.Checkpointer) -> ckpt.Checkpointer:
    """Return it, as if it was of another program: loads and claims of this one do not wait for its saves."""
    checkpointer._parts.saver.scheduled.close()
    return checkpointer


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


def _writers() -> list[psutil.Process]:
    found = []
    for each in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.Error):  # it has ended
            if each.name() == "ckpt-writer":
                found.append(each)
    return found


def newest_writer() -> psutil.Process:
    """The writer process that was started last; those of other tests may still be ending."""
    return max(_writers(), key=lambda writer: writer.create_time())


@contextlib.contextmanager
def stopped_until_a_load_waits() -> Iterator[None]:
    """Stop the writers of this process, which are there already, until a load waits for one."""
    writers = _writers()

    def resume() -> None:
        for writer in writers:
            with contextlib.suppress(psutil.Error):
                writer.resume()

    for writer in writers:
        with contextlib.suppress(psutil.Error):
            writer.suspend()
    try:
        with when_a_load_waits(resume):
            yield
    finally:
        resume()
