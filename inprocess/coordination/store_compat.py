"""The logical contents of nvidia_resiliency_ext's `StoreMixin`, for programs that use them. The wrapper does not.

What the wrapper agrees on is in `inprocess.agreement`.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from datetime import timedelta
from typing import Any

from inprocess.attribution import InterruptionRecord
from inprocess.coordination.rank_verbs import RankVerbs
from inprocess.exception import StoreTimeoutError

_INTERRUPTED = "interrupted"
_RECORDS = "interruption_records"
_LOCKED_RECORDS = "interruption_records_locked"
_COMPLETED = "completed"
_TERMINATED = "terminated_ranks"


class CompatibleVerbs(RankVerbs):
    """A store with the flags, lists and values of ranks that `StoreMixin` is known for."""

    # Interruption

    def record_interrupted(self, records: Iterable[InterruptionRecord]) -> None:
        """Report faults: list the records, then set the flag. After the lock, records are no longer listed."""
        text = "".join(f"{record}\n" for record in records)
        if text:
            self.append(_RECORDS, text)
        self.set(_INTERRUPTED, "1")

    def is_interrupted(self) -> bool:
        """Return whether a fault was reported."""
        return self.check([_INTERRUPTED])

    def wait_for_interrupted(self, timeout: timedelta) -> bool:
        """Wait until a fault is reported; return False if none is in time."""
        return self._appears(_INTERRUPTED, timeout)

    def lock_interruption_records(self) -> None:
        """Fix the list of records. The first call counts: all ranks read the same list afterwards."""
        self.compare_set(_LOCKED_RECORDS, "", self._text(_RECORDS) or "\n")

    def get_interruption_records(self) -> tuple[InterruptionRecord, ...]:
        """Return the records, each once, in the order of the reports; once locked, those that were there then."""
        text = self._text(_LOCKED_RECORDS) or self._text(_RECORDS)
        return tuple(dict.fromkeys(InterruptionRecord.from_str(line) for line in text.splitlines() if line))

    # Completion

    def record_completed(self) -> None:
        """Report that the wrapped function has returned."""
        self.set(_COMPLETED, "1")

    def is_completed(self) -> bool:
        """Return whether the function has returned on a rank."""
        return self.check([_COMPLETED])

    def wait_for_completed(self, timeout: timedelta) -> bool:
        """Wait until the function has returned on a rank; return False if it has not in time."""
        return self._appears(_COMPLETED, timeout)

    # Ranks

    def record_terminated_ranks(self, ranks: Iterable[int]) -> None:
        """Report that these ranks take no further part. Must come before arriving for them at a barrier."""
        text = "".join(f"{rank}\n" for rank in ranks)
        if text:
            self.append(_TERMINATED, text)

    def get_terminated_ranks(self) -> frozenset[int]:
        """Return all ranks recorded so far."""
        return frozenset(int(line) for line in self._text(_TERMINATED).split())

    def set_initial_rank(self, rank: int, initial_rank: int) -> None:
        """Publish the initial rank of the process that has this rank."""
        self.set(f"initial_rank/{rank}", str(initial_rank))

    def get_initial_rank(self, rank: int) -> int:
        """Return a published initial rank; waits for it. StoreTimeoutError after the timeout of the store."""
        return int(self._gather([f"initial_rank/{rank}"])[0])

    def get_initial_ranks(self, ranks: Sequence[int]) -> list[int]:
        """Return the initial ranks of these ranks, in their order; waits for them."""
        return [int(text) for text in self._gather([f"initial_rank/{rank}" for rank in ranks])]

    def send_heartbeat(self, rank: int, text: str) -> None:
        """Overwrite the heartbeat of a rank. Any text that differs from the last one is a sign of life."""
        self.set(f"heartbeat/{rank}", text)

    def get_heartbeat(self, rank: int) -> str | None:
        """Return the last heartbeat of a rank; None if it sent none."""
        return self._text(f"heartbeat/{rank}") or None

    def get_heartbeats(self, ranks: Iterable[int]) -> dict[int, str | None]:
        """Return the last heartbeat of each of these ranks; None for one that sent none."""
        return {rank: self.get_heartbeat(rank) for rank in ranks}

    def send_state(self, state: Mapping[str, Any], rank: int, name: str = "") -> None:
        """Publish the state of a rank, of JSON types. `name` distinguishes states sent for several purposes."""
        self.set(f"state/{name}/{rank}", json.dumps(state))

    def get_states(self, ranks: Sequence[int], name: str = "") -> list[Any]:
        """Return the states of these ranks, in their order; waits for them."""
        return [json.loads(text) for text in self._gather([f"state/{name}/{rank}" for rank in ranks])]

    def _appears(self, key: str, timeout: timedelta) -> bool:
        try:
            self.wait([key], timeout)
        except StoreTimeoutError:
            return False
        return True

    def _text(self, key: str) -> str:
        return self.get(key).decode() if self.check([key]) else ""
