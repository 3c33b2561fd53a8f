"""Ranks that the others wait for at a barrier: those that make progress are waited for, the others are given up.

Each monitor process writes into its heartbeat how long its rank has been silent: without bytecode of the main thread,
or without pings, as for the time limits of hangs; not at all while hang protection is disabled. Deaths and lost nodes
are noticed by monitor processes, whoever waits.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

from inprocess.agreement import Agreement
from inprocess.attribution import Interruption, InterruptionRecord, compact_ranks

__all__ = ["AbsentRanks", "silent_note"]

_log = logging.getLogger(__name__)
_SILENT = "silent="


def silent_note(silent_s: float) -> str:
    """Return the part of a heartbeat that says how long the rank has been silent."""
    return f"{_SILENT}{silent_s:.1f}"


def _silence_in(heartbeat: bytes) -> float:
    """Return how long a rank has been silent, by its heartbeat; 0 if that does not say it."""
    for word in heartbeat.decode(errors="replace").split(" ", 2)[1:2]:
        if word.startswith(_SILENT):
            return float(word.removeprefix(_SILENT))
    return 0.0


class AbsentRanks:
    """The ranks for which this one waits at a barrier. Give `look` to the wait as `on_late`.

    The wait was limited to `limit_s`, by the option of the wrapper called `option`. A rank is given up when it has been
    silent for as long, but not before `soft_s`; and in any case after `most` times the limit (None: never).
    """

    def __init__(self, agreement: Agreement, option: str, limit_s: float, soft_s: float, most: int | None) -> None:
        self._agreement = agreement
        self._option = option
        self._limit_s = limit_s
        self._longest_silence_s = max(limit_s, soft_s)
        self._most = most

    def look(self, ranks: Sequence[int], waited_s: float) -> None:
        """Give up those of the absent ranks that make no progress, after this one has waited for so long."""
        is_last = self._most is not None and waited_s >= self._most * self._limit_s
        limit = f"{self._option}={self._limit_s:g} s"
        records = []
        for rank in ranks:
            silent_s = _silence_in(self._agreement.heartbeat_of(rank))
            if silent_s >= self._longest_silence_s or is_last:
                summary = f"absent, and no progress for {silent_s:.0f} s, when others had waited for {waited_s:.0f} s"
                records.append(InterruptionRecord(rank, Interruption.UNRESPONSIVE, f"{summary} ({limit})"))
        if records:
            _log.error("rank %s is given up: %s", compact_ranks(r.rank for r in records), records[0].summary)
            self._agreement.give_up(records)
        elif ranks:
            _log.warning(
                "waiting for rank %s for %.0f s, which is longer than %s: it still makes progress",
                compact_ranks(ranks),
                waited_s,
                limit,
            )
