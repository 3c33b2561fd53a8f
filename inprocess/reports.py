"""Reports of the ranks and their monitor processes in one iteration: faults, hangs, positions, progress, heartbeats.

Reports are appended or overwritten, and more may follow; what follows from them is decided in `agreement`.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import replace

from inprocess.attribution import Interruption, InterruptionRecord, distinct_faults
from inprocess.blame import Position
from inprocess.coordination.namespace import PrefixView
from inprocess.coordination.verbs import VerbCall, in_bytes
from inprocess.coordination.wire import Op
from inprocess.reasons import parse_records

__all__ = ["Reports", "heartbeat_key"]

_log = logging.getLogger(__name__)
_RECORDS = "records"
_HAS_HANG = "has_hang"
_POSITIONS, _WITH_POSITION, _LOOKED = "positions", "with_position", "looked"
_ACTIVE = "active_world_size"  # in each iteration; and in the whole store that of the first, never deleted
_MOST_STACKS = 8  # of ranks that were not late themselves


class Reports:
    """The reports in the `store` of an iteration. Every method may be called from any thread."""

    def __init__(self, store: PrefixView) -> None:
        self.store = store

    def report(self, record: InterruptionRecord) -> None:
        """Report a fault, with its details where they are read."""
        self.store.perform_all(self._reporting(record))

    def _reporting(self, record: InterruptionRecord) -> list[VerbCall]:
        """Return the requests that report a fault, in the order in which they must be applied."""
        values = {_detail_key(record): record.detail} if record.detail else {}
        if record.interruption is Interruption.SOFT_TIMEOUT:
            values |= {_hang_key(record.rank): record.summary, _HAS_HANG: "1"}
        line = f"{replace(record, detail='')}\n"
        calls = [VerbCall(Op.SET, (key,), (in_bytes(value),)) for key, value in values.items()]
        return [*calls, VerbCall(Op.APPEND, (_RECORDS,), (in_bytes(line),))]

    def records(self) -> tuple[InterruptionRecord, ...]:
        """Return the faults reported so far, without details; more may follow."""
        return parse_records(self._lines_of(_RECORDS))

    def has_hang(self) -> bool:
        """Return whether it is reported that any rank hangs."""
        return self.store.check([_HAS_HANG])

    def report_position(self, rank: int, position: Position | None, stacks: str) -> None:
        """Report where a rank is when a hang is reported, before it arrives at the last call; None: it only waits.

        Not all ranks send stacks.
        """
        if position is not None:
            if self.store.arrive(_WITH_POSITION, str(rank)) <= _MOST_STACKS:
                self.report_stacks(rank, stacks)
            self.store.append(_POSITIONS, f"{position}\n")
        self.store.arrive(_LOOKED, str(rank))  # last: without a position it says that the rank waits

    def report_stacks(self, rank: int, stacks: str) -> None:
        """Report the stacks of a rank that hangs, unless its monitor process has, at the moment when it was late."""
        self._decide(_detail_key(InterruptionRecord(rank, Interruption.SOFT_TIMEOUT)), stacks)

    def reported_hang(self, rank: int) -> InterruptionRecord | None:
        """Return the report that this rank hangs, if there is one; it does not contain the stacks."""
        summary = self._peek(_hang_key(rank))
        if summary is None:
            return None
        return InterruptionRecord(rank, Interruption.SOFT_TIMEOUT, summary.decode(errors="replace"))

    def _with_details(self, records: Sequence[InterruptionRecord]) -> tuple[InterruptionRecord, ...]:
        """Return the records, one of each distinct fault with its details."""
        detailed = {
            record: replace(record, detail=self.store.get(_detail_key(record)).decode(errors="replace"))
            for record in distinct_faults(records)
            if self.store.check([_detail_key(record)])
        }
        return tuple(detailed.get(record, record) for record in records)

    def _positions(self) -> tuple[list[Position], set[int]]:
        """Return where ranks are in a hang, and which ranks have looked where they are."""
        # Before the positions: one that is reported meanwhile must not be missing of a rank that has looked.
        looked = {int(rank) for rank in self.store.members(_LOOKED)}
        positions = []
        for line in self._lines_of(_POSITIONS):
            try:
                positions.append(Position.from_str(line))
            except ValueError as error:  # such as a line cut short; the hang itself is among the records
                _log.warning("a report of where a rank is during a hang is left out: %s", error)
        return positions, looked

    def report_active_size(self, size: int) -> None:
        """Report how many ranks are active in this iteration. For rank 0; the first report of the job is kept."""
        self.store.base_store.compare_set(_ACTIVE, "", str(size))
        self.store.set(_ACTIVE, str(size))

    def active_sizes(self) -> tuple[int, int] | None:
        """Return how many ranks are active, and were in the first iteration; None as long as rank 0 has not begun."""
        size = self._peek(_ACTIVE)
        return None if size is None else (int(size), int(self.store.base_store.get(_ACTIVE)))

    def report_progress(self, progress: Mapping[str, int]) -> None:
        """Report how far this process has come, before it arrives at the end. The largest of each kind counts."""
        for kind, number in progress.items():
            found = ""
            while number > int(found or 0):
                found = self.store.compare_set(_progress_key(kind), found, str(number)).decode()

    def _progress(self, kind: str) -> int:
        return int(self._peek(_progress_key(kind)) or 0)

    def heartbeat_of(self, rank: int) -> bytes:
        """Return the heartbeat of a rank, which changes as long as the rank lives; empty if there is none yet."""
        return self._peek(heartbeat_key(rank)) or b""

    def _decide(self, key: str, value: str) -> str:
        """Write a value unless there is one; return the one that counts."""
        return self.store.compare_set(key, "", value).decode()

    def _peek(self, key: str) -> bytes | None:
        """Return a value if there is one now."""
        return self.store.get(key) if self.store.check([key]) else None

    def _lines_of(self, key: str) -> list[str]:
        return (self._peek(key) or b"").decode(errors="replace").splitlines()


def heartbeat_key(rank: int) -> str:
    """Return the key in the store of an iteration at which the monitor process of a rank writes its heartbeat."""
    return f"heartbeat/{rank}"


def _detail_key(record: InterruptionRecord) -> str:
    return f"detail/{record.rank}/{record.interruption.name}"


def _progress_key(kind: str) -> str:
    return f"progress/{kind}"


def _hang_key(rank: int) -> str:
    return f"hangs/{rank}"
