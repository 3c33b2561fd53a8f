"""The reason of a restart as text: the records of all faults, which one process writes and all ranks read."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence

from inprocess.attribution import Interruption, InterruptionRecord, parse_ranks, rank_ranges

__all__ = ["format_reason", "parse_reason", "parse_records"]

_MOST_COMPLETE_RECORDS = 64  # of further records only the rank and the kind


def format_reason(records: Sequence[InterruptionRecord]) -> str:
    """Return the reason as text: the first records as they are; of the others the ranks of each kind."""
    others: dict[str, list[int]] = {}
    lines = []
    for number, record in enumerate(records):
        if number < _MOST_COMPLETE_RECORDS or record.detail:
            lines.append(str(record))
        else:
            others.setdefault(record.interruption.name, []).append(record.rank)
    return "\n".join([json.dumps({kind: rank_ranges(ranks) for kind, ranks in others.items()}), *lines])


def parse_reason(text: str) -> tuple[InterruptionRecord, ...]:
    others, *lines = text.splitlines()
    complete = parse_records(lines)
    ranges = json.loads(others).items()
    return complete + tuple(
        InterruptionRecord(rank, Interruption[kind]) for kind, ranks in ranges for rank in parse_ranks(ranks)
    )


def parse_records(lines: Iterable[str]) -> tuple[InterruptionRecord, ...]:
    """Return one record of each fault: the first report, or the first that has details."""
    records: dict[InterruptionRecord, InterruptionRecord] = {}
    for line in lines:
        try:
            record = InterruptionRecord.from_str(line)
        except ValueError:
            continue  # a line cut short: its writer died
        if record not in records or not records[record].detail:
            records[record] = record
    return tuple(records.values())
