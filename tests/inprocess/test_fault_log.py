"""The log of a fault: one full traceback of each distinct fault in the job, a line on each rank."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from inprocess import CallWrapper, Wrapper
from inprocess.attribution import Interruption, InterruptionRecord, distinct_faults, logged_by
from tests.inprocess.restarting import PATIENT, logged
from tests.support import rank_values

TRACEBACK = "Traceback (most recent call last)"


def _lines(failing: dict[int, str]) -> Any:
    """Return the program of a rank: these ranks raise once, after all are there; its lines but those for debugging."""

    def main(rank: int, world_size: int) -> list[str]:
        @Wrapper(**PATIENT, last_call_wait=PATIENT["soft_timeout"])  # until all have reported, also on a busy machine
        def train(call: CallWrapper) -> None:
            if call.iteration:
                return
            call.state.store.barrier([rank], "there", world_size, PATIENT["soft_timeout"])
            if rank in failing:
                _fail(failing[rank])
            call.state.store.get("never")

        with logged() as lines:
            train()
        return [line for line in lines if not line.startswith("DEBUG")]

    return main


def _fail(what: str) -> None:
    if what == "key":
        raise KeyError(what)
    raise ValueError(what)


def joined(lines: list[list[str]]) -> str:
    return "\n".join(line for each in lines for line in each)


def tracebacks(lines: list[list[str]]) -> list[int]:
    return [sum(line.count(TRACEBACK) for line in each) for each in lines]


def test_one_exception_is_shown_once_by_the_rank_that_raised_it() -> None:
    lines = rank_values(_lines({1: "value"}), 2)
    assert tracebacks(lines) == [0, 1], joined(lines)
    (own,) = [line for line in lines[1] if "failed" in line]
    assert "ValueError: value" in own
    assert "test_fault_log.py" in own, "where"
    for each in lines:
        assert sum("is interrupted: EXCEPTION on rank 1 (ValueError: value)" in line for line in each) == 1


def test_an_exception_on_all_ranks_is_shown_once() -> None:
    lines = rank_values(_lines(dict.fromkeys(range(3), "value")), 3)
    assert sum(tracebacks(lines)) == 1, joined(lines)
    assert all(sum("ValueError: value" in line for line in each) >= 1 for each in lines)


def test_each_of_two_mistakes_is_shown_once() -> None:
    """Unless the restart begins before a rank comes to its mistake."""
    lines = rank_values(_lines({0: "value", 1: "key", 2: "key"}), 3)
    shown = [line for each in lines for line in each if TRACEBACK in line]
    of_type = [sum(kind in line for line in shown) for kind in ("ValueError", "KeyError")]
    assert 1 <= sum(of_type) == len(shown), joined(lines)
    assert max(of_type) == 1, joined(lines)


def test_of_512_ranks_that_raise_one_has_details() -> None:
    place = "app/train.py:3 in step"
    records = [InterruptionRecord(r, Interruption.EXCEPTION, f"ValueError: {r}", place=place) for r in range(512)]
    assert distinct_faults(records) == records[:1]


def _record_of(rank: int, fails: Callable[[], object]) -> InterruptionRecord:
    try:
        fails()
    except RuntimeError as error:
        return InterruptionRecord.of_exception(error, rank, Interruption.EXCEPTION)
    raise AssertionError("it does not fail")


def _without_graph() -> None:
    torch.zeros(1).backward()


def test_mistakes_that_a_library_raises_at_one_place_are_told_apart() -> None:
    """Whatever fails in a backward pass is raised in one line of PyTorch."""
    loss = (torch.ones(1, requires_grad=True) ** 2).sum()
    loss.backward()
    records = [_record_of(rank, each) for rank, each in enumerate((_without_graph, loss.backward, _without_graph))]
    assert len({record.place.partition(",")[0] for record in records[:2]}) == 1, "they do not come from one line"
    assert distinct_faults(records) == records[:2]
    assert "in _engine_run_backward, called at inprocess/test_fault_log.py:" in records[0].place
    assert records[0].place.endswith("in _without_graph")
    assert records[0].fault == records[2].fault


def test_two_mistakes_with_one_message_and_one_caller_in_a_library_are_told_apart() -> None:
    def other() -> None:
        torch.zeros(1).backward()

    records = [_record_of(rank, each) for rank, each in enumerate((_without_graph, other))]
    assert distinct_faults(records) == records


def test_numbers_in_messages_do_not_tell_faults_apart() -> None:
    texts = [f"RuntimeError: tried {7**rank}.{rank} GiB at 0x{rank + 10:x}0, {'far ' * 150}" for rank in range(40)]
    records = [InterruptionRecord(rank, Interruption.EXCEPTION, text[:500]) for rank, text in enumerate(texts)]
    assert distinct_faults(records) == records[:1]


def test_consequences_and_a_flood_of_mistakes_are_left_out() -> None:
    lost = InterruptionRecord(0, Interruption.EXCEPTION, "RuntimeError: Connection closed by peer", place="a.py:1 in f")
    cause = InterruptionRecord(1, Interruption.EXCEPTION, "KeyError: 'x'", place="a.py:2 in f")
    killed = InterruptionRecord(2, Interruption.TERMINATED, "killed")
    other = InterruptionRecord(3, Interruption.EXCEPTION, "KeyError: 'y'", place="a.py:9 in g")
    assert distinct_faults([lost, cause, killed, other, cause]) == [cause, killed, other]
    assert distinct_faults([lost]) == [lost]
    many = [InterruptionRecord(r, Interruption.EXCEPTION, "KeyError: 'x'", place=f"a.py:{r}") for r in range(100)]
    assert len(distinct_faults(many)) == 16


def test_the_lowest_rank_that_is_left_speaks_for_one_that_is_gone() -> None:
    gone = InterruptionRecord(0, Interruption.HARD_TIMEOUT, "held the lock", "stacks")
    raised = InterruptionRecord(2, Interruption.EXCEPTION, "KeyError: 'x'", "traceback")
    hung = InterruptionRecord(0, Interruption.SOFT_TIMEOUT, "late", "stacks")
    records = (gone, raised, hung)
    assert [logged_by(each, records) for each in records] == [1, 2, 1]
