"""The agreement of ranks on their background calls: which are settled on all of them, why one failed; errors."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

from ckpt.errors import CheckpointError, CheckpointTimeoutError, WriterError
from ckpt.ranks.collectives import Ranks
from ckpt.ranks.failure import Failure
from ckpt.ranks.group import own_rank


class SettledCalls:
    """The calls that are known to be settled on all ranks.

    All methods are for when torch.distributed is initialized. Ranks count their calls from the last `restart`, not from
    the first call of a process: one that replaced another during the job has a new queue.
    """

    def __init__(self, ranks: Ranks) -> None:
        self._ranks = ranks
        self._first = 0
        self._agreed = 0

    def restart(self, first: int) -> None:
        """Count from the call with the index `first`: none is scheduled on any rank."""
        self._first = self._agreed = first

    def count_left(self, end: int) -> int:
        """Return how many calls below this index are not known to be settled on all ranks.

        It is the same on all ranks that schedule the same calls, also if some ranks have finalized their own calls
        alone, and others have not.
        """
        return end - self._agreed

    def decide(self, settled: int, failed: int) -> tuple[int, int]:
        """Return the index up to which calls are settled on all ranks, and the first that failed on one of them.

        One all_reduce. Follow it by `note`.
        """
        self._ranks.doing = "background calls"
        least = self._ranks.minimum(settled - self._first, failed - self._first)
        return least[0] + self._first, least[1] + self._first

    def note(self, end: int) -> None:
        """Remember that all calls below this index are settled on all ranks, and all ranks know of their failures."""
        self._agreed = end

    def exchange(self, failure: Failure | None) -> list[Failure]:
        """Return the failures of a call on all ranks. Collective."""
        return exchange_failures(failure, self._ranks)


def exchange_failures(failure: Failure | None, ranks: Ranks) -> list[Failure]:
    """Return the failures of all ranks, in their order: a few KB of each that has one.

    Collective. CheckpointTimeoutError, naming the missing ranks, if not all arrive in time.
    """
    ranks.doing = "a background call, which some of them may have failed"
    told = ranks.outcomes(b"" if failure is None else failure)
    return [each for each in told if isinstance(each, Failure)]


# -- errors of calls ---------------------------------------------------------------------------------------------------


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
