"""How a function running in a writer process tells the trainer how far it is."""

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
    """The context of the call that this thread is running, None outside a writer process (for instance in
    `AsyncRequest.execute_sync`).

    A function that starts threads hands them the context itself.
    """
    return _CURRENT.get()


class WriterContext:
    """Belongs to one call in a writer process; usable from any of its threads, ineffective once the call is over."""

    def __init__(
        self,
        index: int,
        advance: Callable[[], None],
        report: Callable[[dict[str, Any]], None],
        trainer_gone: Callable[[], bool],
        kept: dict[Hashable, Any],
    ) -> None:
        self.index = index
        self._advance = advance
        self._report = report
        self._trainer_gone = trainer_gone
        self._kept = kept
        self._lock = threading.Lock()
        self._over = False

    def trainer_gone(self) -> bool:
        """Whether nobody waits for this call any more: the trainer is dead, or has left its queue without draining it.

        A function that waits for others should do so for a short time only, then.
        """
        return self._trainer_gone()

    def keep(self, key: Hashable, make: Callable[[], _T]) -> _T:
        """Return what is kept under `key` as long as this process lives, made by `make` when it is first asked for."""
        if key not in self._kept:
            self._kept[key] = make()
        kept: _T = self._kept[key]
        return kept

    def progress(self) -> None:
        """Say that the call is alive; costs one store to shared memory. See `WriterConfig.writer_timeout_s`."""
        self._advance()

    def report(self, event: dict[str, Any]) -> None:
        """Send a small JSON-able dict to the trainer, in order; the trainer hands it to the call's `on_event`.

        Never waits for the trainer. ValueError if `event` is not JSON, or larger than about 100 KB.
        """
        with self._lock:
            if not self._over:
                self._report(event)

    @contextlib.contextmanager
    def entered(self) -> Iterator[None]:
        """Make this the current context; the loop runs the function inside."""
        token = _CURRENT.set(self)
        try:
            yield
        finally:
            _CURRENT.reset(token)
            with self._lock:
                self._over = True
