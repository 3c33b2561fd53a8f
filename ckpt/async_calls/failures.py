"""The errors of calls that failed on other ranks, or were not done in time."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

from ckpt.errors import CheckpointError, CheckpointTimeoutError, WriterError
from ckpt.ranks.distributed import own_rank
from ckpt.ranks.failure import Failure

__all__ = ["failed_elsewhere", "not_closed", "not_done", "raised", "with_note"]

_Error = TypeVar("_Error", bound=Exception)


def failed_elsewhere(what: str, failures: Sequence[Failure]) -> CheckpointError:
    """Return the error of a call that failed on these ranks, for one on which it did not."""
    ranks, first = [failure.rank for failure in failures], failures[0]
    others = f" (of ranks {ranks})" if len(ranks) > 1 else ""
    return first.error(f"{what} failed on rank {first.rank}{others}: {first.text}", WriterError)


def not_done(first: int, last: int, timeout_s: float) -> CheckpointTimeoutError:
    """Return the error for calls that stay queued."""
    return CheckpointTimeoutError(
        f"background calls {first} to {last} are not done after {timeout_s:g} s, here or on another rank. They stay "
        "queued; wait again, or give them up with close(abort=True)",
        rank=own_rank(),
    )


def not_closed(first: int, last: int, timeout_s: float) -> CheckpointTimeoutError:
    """Return the error for calls that are given up because their queue is closed."""
    return CheckpointTimeoutError(
        f"background calls {first} to {last} are not done after {timeout_s:g} s, the time for closing their queue: "
        "they are given up, and their writers killed. Storage or a writer does not answer, or needs longer: then raise "
        "the timeout",
        rank=own_rank(),
    )


def with_note(error: _Error, finalize_error: Exception | None) -> _Error:
    """Add to an error that a finalize function has failed, too."""
    if finalize_error is not None:
        error.add_note(f"besides, a finalize function of an earlier call raised {finalize_error!r}")
    return error


def raised(error: Exception) -> None:
    """Raise an error: every failure of a call counts."""
    raise error
