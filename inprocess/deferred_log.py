"""Messages of this package that no lock, handler or pipe of the program can hold up.

A restart must not depend on what it recovers: the main thread may have been interrupted while it held the lock of a
handler, or it may wait for a pipe that no process reads. So during a call of the wrapper messages of `inprocess` go
into a queue, and a thread passes them on to the handlers of the program.

    any thread  ──record──▶  queue  ──▶  log thread  ──▶  handlers of the logger "inprocess" and of its parents
"""

from __future__ import annotations

import logging
import os
import queue
import threading
import traceback
from types import TracebackType

from inprocess.ipc.threads import JoinableThread

__all__ = ["DeferredLog"]

_LOGGER = "inprocess"
_MOST_RECORDS = 10_000
_LEVELS = (logging.DEBUG, logging.INFO, logging.WARNING, logging.ERROR, logging.CRITICAL)


class DeferredLog(logging.Handler):
    """A context in which the messages of `inprocess` are passed on by a thread. Nothing changes if it is entered twice.

    On leaving, messages that are left are waited for, at most `patience_s`. In a forked child messages are passed on
    directly.
    """

    def __init__(self, patience_s: float = 2.0) -> None:
        super().__init__()
        self._patience_s = patience_s
        self._pid = os.getpid()
        self._queue: queue.SimpleQueue[logging.LogRecord | threading.Event | None] = queue.SimpleQueue()
        self._logger = logging.getLogger(_LOGGER)
        self._handlers: list[logging.Handler] = []
        self._propagates = True
        self._thread: JoinableThread | None = None
        self._lost = 0

    def createLock(self) -> None:  # noqa: N802 - a method of logging
        """Make no lock: `handle` needs none."""
        self.lock = None

    def handle(self, record: logging.LogRecord) -> bool:
        """Pass a record on, by the thread. Any thread; takes no lock."""
        if os.getpid() != self._pid:
            self._pass_on(record)
            return True
        if self._queue.qsize() >= _MOST_RECORDS:
            self._lost += 1
            return False
        try:  # now: what the arguments refer to may change, and a traceback holds the frames of the function
            record.msg, record.args = record.getMessage(), None
            if record.exc_info is not None and record.exc_info[1] is not None:
                record.exc_text = "".join(traceback.format_exception(*record.exc_info)).rstrip("\n")
                record.exc_info = None
        except Exception as error:
            record.msg, record.args, record.exc_info = f"a message that cannot be formatted: {error!r}", None, None
        self._queue.put(record)
        return True

    def flush(self) -> None:
        """Wait until the messages of before are passed on, at most `patience_s`."""
        if self._thread is None or not self._thread.is_alive():
            return
        done = threading.Event()
        self._queue.put(done)
        done.wait(self._patience_s)

    def _run(self) -> None:
        while True:
            item = self._queue.get()
            if item is None:
                return
            if isinstance(item, threading.Event):
                item.set()
                continue
            self._pass_on(item)
            if self._lost:
                lost, self._lost = self._lost, 0
                item.levelno, item.levelname = logging.WARNING, "WARNING"
                item.msg, item.exc_text = (
                    f"{lost} messages were dropped: the handlers of {_LOGGER} did not take them",
                    None,
                )
                self._pass_on(item)

    def _pass_on(self, record: logging.LogRecord) -> None:
        """Call the handlers that the logger would call."""
        for handler in self._handlers:
            if record.levelno >= handler.level:
                handler.handle(record)
        parent = self._logger.parent
        if self._propagates and parent is not None:
            parent.callHandlers(record)

    def __enter__(self) -> DeferredLog:
        logger = self._logger
        if any(isinstance(handler, DeferredLog) for handler in logger.handlers):
            return self
        for name in [_LOGGER, *(name for name in list(logger.manager.loggerDict) if name.startswith(f"{_LOGGER}."))]:
            for level in _LEVELS:
                logging.getLogger(name).isEnabledFor(level)  # is cached: later it takes no lock
        self._handlers, self._propagates = logger.handlers, logger.propagate
        self._thread = JoinableThread(self._run, "inprocess-log")
        self._thread.start()
        logger.handlers, logger.propagate = [self], False
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        thread = self._thread
        if thread is None:
            return
        if self._logger.handlers == [self]:
            self._logger.handlers, self._logger.propagate = self._handlers, self._propagates
        self._thread = None
        if os.getpid() == self._pid:
            self._queue.put(None)
            thread.join(self._patience_s)
