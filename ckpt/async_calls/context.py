"""How a function in a writer process reports to the trainer."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Hashable, Iterator
from contextvars import ContextVar
from typing import Any, TypeVar

__all__ = ["WriterContext", "current"]

_T = TypeVar("_T")
_CURRENT: ContextVar[WriterContext | None] = ContextVar("ckpt_writer_context", default=None)


def current() -> WriterContext | None:
    """Return the context of the call that this thread runs; None in the trainer (`AsyncRequest.execute_sync`).

    A function that starts threads must pass the context to them.
    """
    return _CURRENT.get()


class WriterContext:
    """The context of one call in a writer process. For any of its threads; has no effect once the call is over."""

    def __init__(
        self,
        index: int,
        advance: Callable[[], None],
        report: Callable[[dict[str, Any]], None],
        trainer_left: Callable[[], bool],
        kept: dict[Hashable, Any],
        nudges: Callable[[], int] = lambda: 0,
    ) -> None:
        self.index = index
        self._advance = advance
        self._report = report
        self._trainer_left = trainer_left
        self._kept = kept
        self._nudges = nudges
        self._lock = threading.Lock()
        self._over = False

    def trainer_left(self) -> bool:
        """Whether the trainer has closed the connection: it is dead, or dropped its queue without waiting for calls.

        A function that waits for other processes should then do so for a short time only.
        """
        return self._trainer_left()

    def keep(self, key: Hashable, make: Callable[[], _T]) -> _T:
        """Return the object for `key`, made by `make` at first use and kept as long as this process lives.

        If it has a method `close`, that is called when the trainer is done with this writer and all calls have run.
        """
        if key not in self._kept:
            self._kept[key] = make()
        kept: _T = self._kept[key]
        return kept

    def nudges(self) -> int:
        """Return a counter that the trainer advances to say: look now at what you wait for. One load from memory."""
        return self._nudges()

    def progress(self) -> None:
        """Show that the call makes progress, by one store to shared memory. See `WriterConfig.writer_timeout_s`."""
        self._advance()

    def report(self, event: dict[str, Any]) -> None:
        """Send a small dict of JSON values to the trainer, in order; the trainer calls `on_event` with it.

        Never waits for the trainer. ValueError if `event` is not JSON, or larger than about 100 KB.
        """
        with self._lock:
            if not self._over:
                self._report(event)

    @contextlib.contextmanager
    def entered(self) -> Iterator[None]:
        """Make this the current context while the function runs."""
        token = _CURRENT.set(self)
        try:
            yield
        finally:
            _CURRENT.reset(token)
            with self._lock:
                self._over = True
