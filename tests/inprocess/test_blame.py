"""A rank that hangs is blamed for it, not the rank that waits for it and is late first."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

import pytest

from inprocess import CallWrapper, Wrapper
from inprocess.attribution import Interruption, InterruptionRecord
from inprocess.blame import Position, blamed, position_of
from inprocess.bounded_waits import wait_until_set
from tests.inprocess.restarting import SHORT, seconds
from tests.support import rank_values


def late(rank: int) -> InterruptionRecord:
    return InterruptionRecord(rank, Interruption.SOFT_TIMEOUT, "no progress for 9 s")


def at(rank: int, waits: bool = False) -> Position:
    return Position.from_str(str(Position(rank, waits, "a.py in f", "a.py:7 in f")))


def test_who_is_in_no_collective_takes_the_place_of_those_that_wait_in_one() -> None:
    died = InterruptionRecord(9, Interruption.TERMINATED)
    first, second, rest = blamed([late(1), died, late(2)], [at(1, True), at(5), at(2, True), at(4)])
    assert (first, second, rest) == (late(5), late(4), died)
    assert first.place == "a.py in f"
    assert first.summary == "at a.py:7 in f, in no collective, while rank 1,2 waited in one: no progress for 9 s"


@pytest.mark.parametrize(
    ("positions", "left"),
    [
        ([], [1, 2]),
        ([at(1, True), at(2, True)], [1, 2]),  # all wait
        ([at(1), at(2, True), at(3)], [1]),  # one that was late is in no collective
        ([at(1), at(2), at(3)], [1, 2]),
        ([at(3)], [1, 2]),  # where they are is unknown
    ],
)
def test_who_is_late_and_in_no_collective_stays_blamed(positions: list[Position], left: list[int]) -> None:
    assert [record.rank for record in blamed([late(1), late(2)], positions)] == left


def test_who_looked_and_was_late_only_then_has_waited() -> None:
    assert [record.rank for record in blamed([late(1), late(2)], [at(1, True), at(5)], {2})] == [5]
    assert [record.rank for record in blamed([late(1), late(2)], [at(1, True), at(5)], set())] == [2]
    assert [record.rank for record in blamed([late(1), late(2)], [at(1), at(5)], {1, 2})] == [1]


@pytest.mark.parametrize("wait", [threading.Event.wait, wait_until_set])
def test_the_position_is_that_of_the_function_that_calls_the_standard_library_or_this_package(
    wait: Callable[[threading.Event, float], object],
) -> None:
    begun = threading.Event()
    end = threading.Event()

    def waits_here() -> None:
        begun.set()
        wait(end, 60)

    thread = threading.Thread(target=waits_here)
    thread.start()
    try:
        assert begun.wait(30)
        assert thread.ident is not None
        position = position_of(3, thread.ident)
    finally:
        end.set()
        thread.join()
    assert position is not None
    assert (position.rank, position.waits) == (3, False)
    assert position.function == f"inprocess/test_blame.py in {waits_here.__qualname__}"
    first = waits_here.__code__.co_firstlineno
    assert position.line in {
        f"inprocess/test_blame.py:{first + offset} in {waits_here.__qualname__}" for offset in (1, 2)
    }


def test_the_rank_in_the_users_code_is_blamed_not_the_one_that_waits_for_it() -> None:
    def main(rank: int, world_size: int) -> Any:
        import torch
        import torch.distributed as dist

        seen: list[Any] = []

        @Wrapper(**{**SHORT, **seconds(soft_timeout=4.0, last_call_wait=15.0)})
        def train(call: CallWrapper | None = None) -> Any:
            assert call is not None
            if call.iteration > 0:
                return [(r.rank, r.interruption.name, r.summary, r.place) for r in call.state.interruptions]
            dist.init_process_group("gloo")
            dist.all_reduce(torch.ones(1))
            if rank == 0:
                spins_in_the_users_code()
            dist.all_reduce(torch.ones(1))
            return None

        def spins_in_the_users_code() -> None:
            while True:  # executes bytecode, so it is not late itself
                time.sleep(0.01)

        return train(), seen

    for ((rank, kind, summary, place),), _ in rank_values(main, 3):
        assert (rank, kind) == (0, "SOFT_TIMEOUT"), (summary, place)
        assert "spins_in_the_users_code, in no collective, while rank " in summary
        assert "longer than soft_timeout=4 s" in summary
        assert "call.disable_hang_protection()" in summary
        assert place.startswith("inprocess/test_blame.py in ")
        assert place.endswith("spins_in_the_users_code")
