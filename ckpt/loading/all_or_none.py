"""Phases that end on all ranks in the same way."""

from __future__ import annotations

import json
from typing import Any, Protocol

from ckpt.errors import (
    CheckpointCorruptError,
    CheckpointError,
    CheckpointNotFoundError,
    CheckpointTimeoutError,
    FormatVersionError,
    StateError,
    StateMismatchError,
    StorageError,
)

__all__ = ["Alone", "Gather", "Together", "error_of"]


class Together:
    """A phase that fails on all ranks if it fails on one, everywhere with the same kind of error.

    The first rank that failed decides the kind; a rank that failed in that way raises its own error.
    """

    def __init__(self, ranks: Gather, step: int, what: str) -> None:
        self._ranks = ranks
        self._step = step
        self._what = what

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: Any) -> None:
        if error is not None and not isinstance(error, Exception):
            return
        own = b"" if error is None else json.dumps([type(error).__name__, str(error)]).encode()
        reports = self._ranks(own)
        if not any(reports):
            return
        rank, report = next((rank, report) for rank, report in enumerate(reports) if report)
        name, text = json.loads(report)
        if error is not None and type(error).__name__ == name:
            return
        message = f"rank {rank} could not {self._what} step {self._step}: {name}: {text}"
        raise error_of(name)(message, rank=rank, step=self._step) from error


def error_of(name: str) -> type[CheckpointError]:
    """The class of the error that another rank told by its name."""
    return _SAID.get(name, CheckpointError)


_SAID: dict[str, type[CheckpointError]] = {
    kind.__name__: kind
    for kind in (
        CheckpointCorruptError,
        CheckpointNotFoundError,
        CheckpointTimeoutError,
        FormatVersionError,
        StateError,
        StateMismatchError,
        StorageError,
    )
}


class Gather(Protocol):
    """The ranks that restore together; see `ckpt.ranks.Ranks`."""

    @property
    def rank(self) -> int: ...
    def __call__(self, payload: bytes) -> list[bytes]: ...


class Alone:
    """One rank that restores what is its own without a word to the others."""

    def __init__(self, rank: int) -> None:
        self.rank = rank

    def __call__(self, payload: bytes) -> list[bytes]:
        return [payload]
