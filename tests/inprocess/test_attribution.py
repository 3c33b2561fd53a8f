"""Records of faults, and the sentence made of them."""

from __future__ import annotations

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from inprocess.attribution import Interruption, InterruptionRecord, compact_ranks, format_interruptions


def test_the_kinds() -> None:
    assert {kind.name for kind in Interruption} == {
        "EXCEPTION",
        "BASE_EXCEPTION",
        "SOFT_TIMEOUT",
        "HARD_TIMEOUT",
        "TERMINATED",
        "UNRESPONSIVE",
        "MONITOR_PROCESS_EXCEPTION",
        "NEWCOMER",
    }


@given(
    st.builds(InterruptionRecord, st.integers(-9, 9), st.sampled_from(Interruption), st.text(), st.text(max_size=200))
)
def test_a_record_is_one_line_and_can_be_read_again(record: InterruptionRecord) -> None:
    text = str(record)
    assert len(text.splitlines()) == 1
    read = InterruptionRecord.from_str(text)
    assert dataclasses.asdict(read) == dataclasses.asdict(record)


def test_records_do_not_change_and_compare_by_rank_and_kind() -> None:
    record = InterruptionRecord(1, Interruption.EXCEPTION, "summary", "detail")
    with pytest.raises(dataclasses.FrozenInstanceError):
        record.rank = 2  # type: ignore[misc]
    assert record == InterruptionRecord(1, Interruption.EXCEPTION)
    assert (
        len({record, InterruptionRecord(1, Interruption.EXCEPTION), InterruptionRecord(1, Interruption.TERMINATED)})
        == 2
    )


@pytest.mark.parametrize("text", ["", "{", "[]", "3", '{"rank": 1}', '{"rank": 1, "interruption": "BAD"}', "null"])
def test_what_is_no_record(text: str) -> None:
    with pytest.raises(ValueError):  # noqa: PT011 - of json, too
        InterruptionRecord.from_str(text)


@pytest.mark.parametrize(
    ("ranks", "short", "verbose"),
    [
        ([], "", ""),
        ([5], "5", "5"),
        ([3, 1, 2, 2], "1,2,3", "1-3"),
        (range(8), "0,1,2,3,4,5,6,7", "0-7"),
        ([*range(8), 9, 11, 12], "0,1,2,3,4,5,6,7 and 3 more", "0-7,9,11-12"),
    ],
)
def test_ranks_in_few_words(ranks: list[int], short: str, verbose: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("INPROCESS_VERBOSE_RANKS", raising=False)
    assert compact_ranks(ranks) == short
    monkeypatch.setenv("INPROCESS_VERBOSE_RANKS", "0")
    assert compact_ranks(ranks) == short
    monkeypatch.setenv("INPROCESS_VERBOSE_RANKS", "1")
    assert compact_ranks(ranks) == verbose


def test_the_sentence() -> None:
    records = [
        InterruptionRecord(3, Interruption.TERMINATED),
        InterruptionRecord(2, Interruption.EXCEPTION),
        InterruptionRecord(1, Interruption.EXCEPTION, "ValueError: x"),
        InterruptionRecord(0, Interruption.TERMINATED),
    ]
    assert format_interruptions(records) == "TERMINATED on rank 0,3; EXCEPTION on rank 1,2 (ValueError: x)"
    assert format_interruptions([]) == "unknown reason"
