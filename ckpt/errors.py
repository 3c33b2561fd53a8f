"""The errors of `ckpt`.

Every error says what happened, where (rank, step, tensor, file) and what to do next. All derive from `CheckpointError`,
so a training loop that should survive a failed save needs one ``except`` clause. Those for which Python has a class of
its own derive from that, too, because programs written for files catch it.
"""

from __future__ import annotations

import errno as numbers

__all__ = [
    "CheckpointCorruptError",
    "CheckpointError",
    "CheckpointExistsError",
    "CheckpointNotFoundError",
    "CheckpointTimeoutError",
    "CheckpointUnreachableError",
    "ConversionError",
    "FencedError",
    "FormatVersionError",
    "RemoteTraceback",
    "SaveAbandonedError",
    "StateError",
    "StateMismatchError",
    "StorageError",
    "WriterError",
]


class CheckpointError(Exception):
    """Base of all errors raised by `ckpt`.

    `rank` and `step` are set where they are known. `finalized` holds the call indices that were finalized by the very
    call that raised this error, so that a caller that catches it loses nothing.
    """

    def __init__(self, message: str, *, rank: int | None = None, step: int | None = None) -> None:
        super().__init__(message)
        self.rank = rank
        self.step = step
        self.finalized: list[int] = []


class StateError(CheckpointError):
    """The state cannot be stored, or an object in it does not load what a checkpoint has.

    It cannot be stored if a leaf has an unknown type, or if ranks contradict each other.
    """


class StateMismatchError(CheckpointError):
    """The state passed to a restore does not fit the checkpoint: missing, unexpected or differently shaped names."""


class CheckpointCorruptError(CheckpointError):
    """Bytes of a published checkpoint are missing, or differ from those that were written."""


class CheckpointNotFoundError(CheckpointError, FileNotFoundError):
    """There is no published checkpoint at this step or path."""

    errno = numbers.ENOENT


class CheckpointUnreachableError(CheckpointError):
    """Files of a published checkpoint are neither on the disk of this node nor in the mirror."""


class CheckpointExistsError(CheckpointError, FileExistsError):
    """The step is already published. Nothing was written over."""

    errno = numbers.EEXIST


class FormatVersionError(CheckpointError):
    """The checkpoint was written in a newer format than this version can read."""


class StorageError(CheckpointError):
    """An operation of the file system failed: not there, not a directory, not writable, full."""


class ConversionError(CheckpointError):
    """A file of another format is not what was expected, or one of two formats cannot hold what the other has."""


class CheckpointTimeoutError(CheckpointError, TimeoutError):
    """A wait reached its deadline."""

    errno = numbers.ETIMEDOUT


class WriterError(CheckpointError):
    """A background call failed: its function raised, or its writer process died or made no progress."""


class SaveAbandonedError(CheckpointError):
    """A pending save was given up, on all ranks, and can never be published."""


class FencedError(CheckpointError):
    """A job that started later owns the checkpoint root: this one can publish nothing there any more; stop it."""


class RemoteTraceback(Exception):
    """Carries the text of a traceback from another process as the ``__cause__`` of an error."""

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self.text = text

    def __str__(self) -> str:
        return "\n" + self.text
