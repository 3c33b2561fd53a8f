"""Phases of a restore that succeed on all ranks or fail on all, with the same kind of error."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from types import MappingProxyType
from typing import Protocol

from ckpt.errors import (
    CheckpointCorruptError,
    CheckpointError,
    CheckpointNotFoundError,
    CheckpointTimeoutError,
    CheckpointUnreachableError,
    FormatVersionError,
    StateError,
    StateMismatchError,
    StorageError,
)
from ckpt.planning.exchange import Gather

__all__ = ["Alone", "Group", "all_or_none", "error_class"]

_KINDS = MappingProxyType(
    {
        kind.__name__: kind
        for kind in (
            CheckpointCorruptError,
            CheckpointNotFoundError,
            CheckpointTimeoutError,
            CheckpointUnreachableError,
            FormatVersionError,
            StateError,
            StateMismatchError,
            StorageError,
        )
    }
)
"""The errors that keep their class when another rank raises them."""


class Group(Gather, Protocol):
    """The ranks of the job and their collectives. See `ckpt.ranks.Ranks`."""

    def maximum(self, payload: bytes) -> bytes:
        """Return the largest byte at each position of the payloads of all ranks, which have one size. Collective."""


class Alone:
    """A group of one rank, for a restore without communication."""

    def __init__(self, rank: int) -> None:
        self.rank = rank

    def __call__(self, payload: bytes) -> list[bytes]:
        return [payload]

    def maximum(self, payload: bytes) -> bytes:
        return payload


@contextmanager
def all_or_none(ranks: Gather, step: int, action: str) -> Iterator[None]:
    """Run a block that raises on all ranks if it raises on one, everywhere the same kind of error.

    The lowest rank that failed decides the kind. A rank that failed in the same way raises its own error. Collective,
    except for an exception that is no `Exception`, such as an interrupt: that leaves the block at once.
    """
    try:
        yield
    except Exception as error:
        _exchange(ranks, step, action, error)
        raise
    _exchange(ranks, step, action, None)


def _exchange(ranks: Gather, step: int, action: str, error: Exception | None) -> None:
    """Tell all ranks how the block ended. Raises if another rank failed and this one did not fail in that way."""
    own = b"" if error is None else json.dumps([type(error).__name__, str(error)]).encode()
    reports = ranks(own)
    if not any(reports):
        return
    rank, report = next((rank, report) for rank, report in enumerate(reports) if report)
    name, text = json.loads(report)
    if error is not None and type(error).__name__ == name:
        return
    message = f"rank {rank} could not {action} step {step}: {name}: {text}"
    raise error_class(name)(message, rank=rank, step=step) from error


def error_class(name: str) -> type[CheckpointError]:
    """Return the class for an error of another rank, given by the name of its class there."""
    return _KINDS.get(name, CheckpointError)
