"""Faults that come back: a mistake in the program ends the job, what makes progress goes on."""

from __future__ import annotations

import threading
import time
from typing import Any

import pytest

from inprocess import CallWrapper, Wrapper, repetition
from inprocess.attribution import Interruption, InterruptionRecord
from inprocess.exception import RepeatedFault
from inprocess.repetition import FaultBounds, FaultHistory, FaultLimits, fault_names
from tests.inprocess.restarting import SHORT, UNBOUNDED, outcome, seconds
from tests.support import rank_values

LIMITS = FaultLimits(max_same_faults=3, max_faults_per_hour=5, max_backoff_s=6.0)


def after(*steps: tuple[list[str], dict[str, int]], every_s: float = 1.0) -> FaultHistory:
    history = FaultHistory()
    for names, progress in steps:
        history = FaultHistory.from_json(history.after(names, progress, every_s).to_json())
    return history


def test_the_same_fault_three_times() -> None:
    assert LIMITS.exceeded_by(after((["a"], {}), (["b", "a"], {}))) is None
    reason = LIMITS.exceeded_by(after((["a"], {}), (["b"], {}), (["a", "b"], {}), (["a"], {})))
    assert reason is not None
    assert "ended 3 iterations, without progress between them: a. " in reason
    assert "max_same_faults=3 of inprocess.Wrapper" in reason


@pytest.mark.parametrize("kind", ["step", "pings"])
def test_progress_makes_the_history_empty(kind: str) -> None:
    fault = ["a"]
    assert LIMITS.exceeded_by(after((fault, {kind: 5}), (fault, {kind: 5}), (fault, {kind: 6}))) is None
    assert LIMITS.exceeded_by(after((fault, {kind: 5}), (fault, {kind: 4}), (fault, {kind: 5}))) is not None
    assert LIMITS.exceeded_by(after((fault, {kind: 5}), (fault, {}), (fault, {}))) is not None
    assert LIMITS.pause_s(after((fault, {kind: 5}), (fault, {kind: 5}), (fault, {kind: 6}))) == 0


def test_faults_that_are_hours_apart_without_any_step_known() -> None:
    faults: list[tuple[list[str], dict[str, int]]] = 9 * [(["a"], {"pings": 7})]
    assert LIMITS.exceeded_by(after(*faults, every_s=3601.0)) is None
    assert LIMITS.pause_s(after(*faults, every_s=3601.0)) == 0
    assert LIMITS.exceeded_by(after(*faults[:3], every_s=3599.0)) is not None
    at_one_step: list[tuple[list[str], dict[str, int]]] = 3 * [(["a"], {"step": 7})]
    assert LIMITS.exceeded_by(after(*at_one_step, every_s=9000.0)) is not None


def test_different_faults_are_delayed_and_bounded_per_hour() -> None:
    faults: list[tuple[list[str], dict[str, int]]] = [([str(number)], {}) for number in range(7)]
    assert [LIMITS.pause_s(after(*faults[:number])) for number in range(7)] == [0, 0, 1, 2, 4, 6, 6]
    assert LIMITS.exceeded_by(after(*faults[:5])) is None
    assert "max_faults_per_hour=5 of inprocess.Wrapper" in (LIMITS.exceeded_by(after(*faults[:6])) or "")
    assert LIMITS.exceeded_by(after(*faults, every_s=1000.0)) is None
    unlimited = FaultLimits(None, None, 0.0)
    assert unlimited.exceeded_by(after(*faults, *faults, *faults, *faults)) is None
    assert unlimited.pause_s(after(*faults)) == 0


def test_a_restart_without_a_fault_of_the_program_is_at_once() -> None:
    """Such as one that takes in processes, or follows a death. The hour goes on meanwhile."""
    several = after((["a"], {}), (["b"], {}), (["c"], {}))
    assert LIMITS.pause_s(several) == 2
    joined, death = several.after_joining(1.0), several.after([], {}, 1.0)
    assert LIMITS.pause_s(joined) == LIMITS.pause_s(death) == 0
    assert LIMITS.exceeded_by(joined) is None
    assert LIMITS.pause_s(joined.after(["d"], {}, 1.0)) == 4
    assert LIMITS.pause_s(several.after_joining(1800.0).after(["d"], {}, 1790.0)) == 4
    later = several.after_joining(1800.0).after(["a"], {}, 1801.0)
    assert LIMITS.pause_s(later) == 0
    assert later.counts == {"a": 1}
    many = after(*5 * [(["x"], {"step": 1})]).after([], {}, 1.0)
    assert "faults have ended 6 iterations within an hour" in (LIMITS.exceeded_by(many) or "")  # deaths count there


def test_names_of_faults() -> None:
    raised = InterruptionRecord(1, Interruption.EXCEPTION, "ValueError: 17", place="a.py:3 in f")
    same = InterruptionRecord(5, Interruption.EXCEPTION, "ValueError: 18", place="a.py:3 in f")
    lost = InterruptionRecord(2, Interruption.EXCEPTION, "RuntimeError: Connection closed by peer", place="b.py:3 in g")
    hangs = InterruptionRecord(3, Interruption.SOFT_TIMEOUT, "no progress", place="a.py in h")
    died = InterruptionRecord(4, Interruption.TERMINATED, "died")
    assert fault_names([lost, raised, same, hangs, died]) == ["ValueError at a.py:3 in f", "SOFT_TIMEOUT at a.py in h"]
    assert fault_names([lost]) == ["RuntimeError at b.py:3 in g"]
    assert fault_names([lost, died, InterruptionRecord(9, Interruption.EXCEPTION)]) == []


def test_the_place_is_that_of_the_innermost_frame() -> None:
    def fails(number: int) -> None:
        raise ValueError(number)

    places = []
    for number in range(2):
        try:
            fails(number)
        except ValueError as error:
            places.append(InterruptionRecord.of_exception(error, number, Interruption.EXCEPTION).place)
    line = fails.__code__.co_firstlineno + 1
    assert places == 2 * [f"inprocess/test_repetition.py:{line} in {fails.__qualname__}"]


def test_who_has_no_exception_of_its_own_raises_another_with_the_report() -> None:
    record = InterruptionRecord(4, Interruption.EXCEPTION, "ValueError: x", "Traceback ...")
    bounds = FaultBounds(LIMITS, after((["a"], {}), (["a"], {})))
    noted: list[str] = []
    bounds.raise_if_exceeded(None, [record], noted.append)
    assert noted == []
    bounds.history = after((["a"], {}), (["a"], {}), (["a"], {}))
    own = ValueError("x")
    with pytest.raises(ValueError, match="x") as raised:
        bounds.raise_if_exceeded(own, [record], noted.append)
    assert raised.value is own
    assert own.__notes__[0].startswith("The job ends: the same fault has ended 3 iterations")
    with pytest.raises(RepeatedFault, match=r"EXCEPTION on rank 4 \(ValueError: x\); the job ends: the same") as caught:
        bounds.raise_if_exceeded(None, [record], noted.append)
    assert caught.value.__notes__ == ["EXCEPTION on rank 4:\nTraceback ..."]
    assert len(noted) == 2


# -- on real ranks -----------------------------------------------------------------------------------------------------


def test_a_mistake_in_the_program_ends_the_job_with_its_exception() -> None:
    def main(rank: int, world_size: int) -> Any:
        ran = []

        @Wrapper()
        def train(call: CallWrapper | None = None) -> None:
            assert call is not None
            ran.append(call.iteration)
            if rank == call.iteration % 2:  # on whichever rank
                raise KeyError(f"missing_{call.iteration}")
            threading.Event().wait(60)

        begin = time.monotonic()
        return outcome(train), ran, time.monotonic() - begin

    (first, ran, took_s), (second, other_ran, _) = rank_values(main, 2)
    assert ran == other_ran == [0, 1, 2]
    assert first[:2] == ("KeyError", "'missing_2'")
    assert second[0] == "RepeatedFault"
    assert "EXCEPTION on rank 0 (KeyError: 'missing_2'); the job ends: the same fault has ended 3" in second[1]
    assert "in test_a_mistake_in_the_program_ends_the_job_with_its_exception.<locals>.main.<locals>.train" in second[1]
    assert took_s > 1  # before the third iteration


def test_what_makes_progress_goes_on_at_once() -> None:
    def main(rank: int, world_size: int) -> Any:
        @Wrapper()
        def train(call: CallWrapper | None = None) -> int:
            assert call is not None
            if rank == 0:
                call.report_step(call.iteration + 1)
            if call.iteration < 6 and rank == 1:
                raise ValueError("a fault of each step")
            while call.iteration < 6:
                time.sleep(0.01)
            return call.iteration

        return train()

    assert rank_values(main, 2) == [6, 6]


def test_an_iteration_of_more_than_an_hour_is_progress_by_the_time_that_has_passed() -> None:
    """Whatever the clocks of the hosts show: here they jump by two hours back and forth."""

    def main(rank: int, world_size: int, hour_s: float) -> Any:
        repetition._HOUR_S = hour_s
        shown = time.time

        @Wrapper(**{**UNBOUNDED, "max_same_faults": 2})
        def train(call: CallWrapper | None = None) -> int:
            assert call is not None
            time.time = lambda: shown() + 7200 * (call.iteration % 2)
            if rank == 0 and call.iteration < 3:
                time.sleep(1.2)
                raise ValueError("again")
            while call.iteration < 3:
                time.sleep(0.01)
            return call.iteration

        return outcome(train)

    assert rank_values(main, 2, 0.5) == [3, 3]
    (kind, text, _), (_, other, _) = rank_values(main, 2, 3600.0)
    assert (kind, text) == ("ValueError", "again")
    assert "the same fault has ended 2 iterations" in other


def test_a_hang_that_comes_back_ends_the_job() -> None:
    def main(rank: int, world_size: int) -> Any:
        @Wrapper(**{**SHORT, **seconds(soft_timeout=1.5)}, max_same_faults=2)
        def train() -> None:
            if rank == 0:
                threading.Event().wait(60)
            while True:
                time.sleep(0.05)

        return outcome(train)

    for kind, text, _ in rank_values(main, 2):
        assert kind == "RepeatedFault"
        assert "SOFT_TIMEOUT at inprocess/test_repetition.py in test_a_hang_that_comes_back" in text


def test_without_limits_it_goes_on_and_on() -> None:
    def main(rank: int, world_size: int) -> Any:
        @Wrapper(**UNBOUNDED)
        def train(call: CallWrapper | None = None) -> int:
            assert call is not None
            if call.iteration < 25:
                raise ValueError("again")
            return call.iteration

        return train()

    assert rank_values(main, 1) == [25]
