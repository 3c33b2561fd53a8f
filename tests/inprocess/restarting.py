"""What ranks of the wrapper tests share: short timeouts, hooks that write down their calls, a log in memory."""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

from inprocess.state import FrozenState


def seconds(**values: float) -> dict[str, timedelta]:
    return {name: timedelta(seconds=value) for name, value in values.items()}


# A hang is noticed after 2.5 s, and no sooner, so that a busy machine is not taken for one.
SHORT = seconds(
    soft_timeout=2.5,
    hard_timeout=20.0,
    progress_watchdog_interval=0.2,
    monitor_thread_interval=0.2,
    monitor_process_interval=0.2,
)

# For tests without a hang.
PATIENT = {**SHORT, **seconds(soft_timeout=30.0, hard_timeout=40.0)}

# For jobs with many faults and no steps: as many as they have, and at once.
UNBOUNDED: dict[str, Any] = {"max_same_faults": None, "max_faults_per_hour": None, **seconds(max_backoff=0)}


class Calls:
    """Hooks that write down when and with what they are called."""

    def __init__(self) -> None:
        self.made: list[tuple[Any, ...]] = []

    def current(self, name: str) -> Callable[[FrozenState], FrozenState]:
        def hook(state: FrozenState) -> FrozenState:
            error = None if state.fn_exception is None else str(state.fn_exception)
            reasons = tuple((record.rank, record.interruption.name) for record in state.interruptions)
            on_main = threading.current_thread() is threading.main_thread()
            self.made.append((name, state.iteration, state.rank, error, reasons, on_main))
            return state

        return hook

    def classic(self, name: str) -> Callable[..., tuple[FrozenState, BaseException | None]]:
        def hook(state: FrozenState, train_ex: BaseException | None) -> tuple[FrozenState, BaseException | None]:
            self.made.append((name, state.iteration, None if train_ex is None else str(train_ex)))
            return state, train_ex

        return hook


class _Lines(logging.Handler):
    def __init__(self, lines: list[str]) -> None:
        super().__init__(logging.DEBUG)
        self._lines = lines

    def emit(self, record: logging.LogRecord) -> None:
        self._lines.append(f"{record.levelname} {record.getMessage()}")


@contextmanager
def logged() -> Iterator[list[str]]:
    """The lines that `inprocess` logs meanwhile, down to DEBUG."""
    lines: list[str] = []
    handler, logger = _Lines(lines), logging.getLogger("inprocess")
    level = logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.DEBUG)
    try:
        yield lines
    finally:
        logger.removeHandler(handler)
        logger.setLevel(level)


def numbers() -> tuple[str | None, str | None]:
    """What the environment says: RANK and WORLD_SIZE."""
    return os.environ.get("RANK"), os.environ.get("WORLD_SIZE")


def outcome(call: Callable[[], Any]) -> Any:
    """What it returns, or the exception it raises as (type, text, type of the cause)."""
    try:
        return call()
    except BaseException as error:
        return type(error).__name__, str(error), type(error.__cause__).__name__
