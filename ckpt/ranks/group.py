"""The interface of the ranks of a job, and phases that succeed on all ranks or fail on all, with one kind of error."""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import MappingProxyType

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

__all__ = ["Alone", "Group", "Phase", "all_or_none", "error_class"]

_FINE, _FAILED = b"+", b"-"

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


class Group(ABC):
    """The ranks of a job as one of them sees them, and their collectives, of bytes. By default: one rank."""

    def __init__(self, rank: int = 0, world_size: int = 1) -> None:
        self._rank, self._world_size = rank, world_size

    @property
    def rank(self) -> int:
        """The rank of this process, from 0."""
        return self._rank

    @property
    def world_size(self) -> int:
        """The number of ranks."""
        return self._world_size

    @abstractmethod
    def __call__(self, payload: bytes) -> list[bytes]:
        """Give every rank the payloads of all ranks, by rank. Collective."""

    def maximum(self, payload: bytes) -> bytes:
        """Return the largest byte at each position of the payloads of all ranks, which have one size. Collective."""
        return bytes(map(max, zip(*self(payload), strict=True)))


class Alone(Group):
    """A group of one rank, for a restore without communication. `rank` is that among all ranks of the job."""

    def __init__(self, rank: int) -> None:
        super().__init__(rank)

    def __call__(self, payload: bytes) -> list[bytes]:
        return [payload]


@dataclass(slots=True)
class Phase:
    """What a rank does, for messages; what it tells the others at the end, and then what all have told, by rank."""

    action: str
    told: bytes = b""
    answers: list[bytes] = field(default_factory=list)


@contextmanager
def all_or_none(ranks: Group, step: int, action: str) -> Iterator[Phase]:
    """Run a block that raises on all ranks if it raises on one, everywhere the same kind of error.

    The lowest rank that failed decides the kind. A rank that failed in the same way raises its own error. Collective,
    one all-gather, except for an exception that is no `Exception`, such as an interrupt: that leaves the block at once.
    """
    phase = Phase(action)
    try:
        yield phase
    except Exception as error:
        _exchange(ranks, step, phase, error)
        raise
    _exchange(ranks, step, phase, None)


def _exchange(ranks: Group, step: int, phase: Phase, error: Exception | None) -> None:
    """Tell all ranks how the block ended. Raises if another rank failed and this one did not fail in that way."""
    failure = None if error is None else json.dumps([phase.action, type(error).__name__, str(error)]).encode()
    reports = ranks(_FINE + phase.told if failure is None else _FAILED + failure)
    failed = next((rank for rank, report in enumerate(reports) if report.startswith(_FAILED)), None)
    if failed is None:
        phase.answers = [report[len(_FINE) :] for report in reports]
        return
    action, name, text = json.loads(reports[failed][len(_FAILED) :])
    if error is not None and type(error).__name__ == name:
        return
    message = f"rank {failed} could not {action} step {step}: {name}: {text}"
    raise error_class(name)(message, rank=failed, step=step) from error


def error_class(name: str) -> type[CheckpointError]:
    """Return the class for an error of another rank, given by the name of its class there."""
    return _KINDS.get(name, CheckpointError)
