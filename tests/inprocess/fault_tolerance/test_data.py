"""The values that rank, monitor and launcher tell each other."""

import os
import socket

import pytest

from inprocess.fault_tolerance import HeartbeatTimeouts, SectionTimeouts, WorkloadAction
from inprocess.monitor_process.messages import RankInfo
from tests.support import run_ranks


def test_the_rank_is_that_of_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "7")
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    assert RankInfo.get_for_current_rank() == RankInfo(7, -1, socket.gethostname(), os.getpid())
    monkeypatch.setenv("LOCAL_RANK", "3")
    assert RankInfo.get_for_current_rank().local_rank == 3
    monkeypatch.delenv("RANK")
    with pytest.raises(ValueError, match="RANK is not set"):
        RankInfo.get_for_current_rank()


def test_the_rank_is_that_of_the_process_group_if_there_is_one() -> None:
    def main(rank: int, world_size: int) -> int:
        os.environ["RANK"] = "99"
        return RankInfo.get_for_current_rank().global_rank

    assert [result.value for result in run_ranks(main, 2, init_process_group=True)] == [0, 1]


def test_when_limits_are_valid_and_when_they_were_learned() -> None:
    assert HeartbeatTimeouts(1.0, 2.0).are_valid
    assert not HeartbeatTimeouts(1.0, None).are_valid
    section = SectionTimeouts({"a": 1.0, "b": None}, 3.0, ["a"])
    assert section.calculated_sections == {"a"}
    assert not section.are_valid
    assert not section.were_calculated
    assert SectionTimeouts({"a": 1.0}, 3.0, ["a"], True).were_calculated
    assert not SectionTimeouts({"a": 1.0}, 3.0, ["a"], False).were_calculated
    assert SectionTimeouts({"a": 1.0}, 3.0).are_valid
    assert not SectionTimeouts({"a": 1.0}, None).are_valid


def test_actions_have_the_numbers_of_the_protocol() -> None:
    assert [(action.name, action.value) for action in WorkloadAction] == [
        ("Continue", 0),
        ("ExcludeThisNode", 1),
        ("ShutdownWorkload", 2),
    ]
