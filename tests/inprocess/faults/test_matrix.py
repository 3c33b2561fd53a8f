"""Every way to fail, at every point of the protocol, on every position of the rank; see `matrix`.

`make test` runs the cells that represent the others, `make test-faults` all. One cell by itself:

    TESTS=full pytest tests/inprocess/faults/test_matrix.py -k sigkill/finalize/0
"""

from pathlib import Path

import pytest

from tests.inprocess.faults.checks import check_guarantees, check_numbering, ranks_in
from tests.inprocess.faults.events import Event
from tests.inprocess.faults.job import Job
from tests.inprocess.faults.matrix import CELLS, FROM_OUTSIDE, WORLD_SIZE, Cell, Fate, Kind, Point, selected
from tests.inprocess.faults.nursery import Nursery
from tests.inprocess.faults.program import (
    BARRIER_TIMEOUT_S,
    HARD_TIMEOUT_S,
    HEARTBEAT_TIMEOUT_S,
    SOFT_TIMEOUT_S,
    STRIKE_SIGNAL,
)
from tests.inprocess.faults.strike import EXIT_CODE

_PROGRAM = "tests.inprocess.faults.program:run_cell"
_LOADED_S = 8.0  # a restart itself takes a fraction of a second; this machine may have other things to do
_JOB_TIMEOUT_S = 40.0
_BARRIERS = {Point.ITERATION_BARRIER: "0/iteration_barrier", Point.COMPLETION_BARRIER: "0/completion"}
_EXIT_CODES = {  # of a rank that dies
    Kind.SIGKILL: {-9},
    Kind.BOTH_KILLED: {-9},
    Kind.SIGTERM: {-15},
    Kind.OS_EXIT: {EXIT_CODE},
    Kind.SEGFAULT: {-11},
}
_BY_THE_MONITOR = {-15, -9}  # asked to end, or killed after the grace time
_ERRORS = {Kind.EXCEPTION: "Fault", Kind.BASE_EXCEPTION: "BaseFault", Kind.SYSTEM_EXIT: "SystemExit"}


@pytest.mark.parametrize("cell", selected(), ids=str)
def test_cell(cell: Cell, nursery: Nursery, tmp_path: Path) -> None:
    with Job(nursery, tmp_path, _PROGRAM, [str(cell)], WORLD_SIZE) as job:
        try:
            _play(cell, job)
            for rank in range(WORLD_SIZE):
                _check_end(cell, job, rank)
            events = job.all_events()
            check_guarantees(events)
            _check_recovery(cell, events)
            job.check_no_process_left()
        except AssertionError as error:
            raise AssertionError(f"{error}\n{job.describe()}") from error


def _play(cell: Cell, job: Job) -> None:
    """Until all ranks have ended."""
    if cell.point in FROM_OUTSIDE:
        job.wait_members(_BARRIERS[cell.point], cell.victims)
        for rank in cell.victims:
            job.kill(rank, STRIKE_SIGNAL)
    hanging = cell.victims if cell.fate is Fate.HANGS else ()
    job.wait([rank for rank in range(WORLD_SIZE) if rank not in hanging], _JOB_TIMEOUT_S)
    for rank in hanging:
        job.kill(rank)
    job.wait(hanging, 5.0)


def _check_end(cell: Cell, job: Job, rank: int) -> None:
    """The rank ended as it must, with the right result, and left nothing in its process."""
    last = job.events(rank)[-1]
    is_victim = rank in cell.victims
    code = job.exit_codes[rank]
    if is_victim and cell.fate is Fate.HANGS:
        assert code == -9
    elif is_victim and cell.fate is Fate.DIES:
        assert code in _EXIT_CODES.get(cell.kind, _BY_THE_MONITOR)
    elif is_victim and cell.fate is Fate.LEAVES:
        _check_raised(last, {_error_of(cell)})
    elif cell.ends_the_job:
        _check_raised(last, {"BarrierTimeout", "StoreError"} if 0 in cell.victims else {"BarrierTimeout"})
    else:
        assert last.name == "returned", f"rank {rank}: {last}"
        assert last.details["value"] == sum(survivor + 1 for survivor in cell.survivors), f"rank {rank}: {last}"
    if last.name in ("returned", "raised"):
        assert code == 0
        assert last.details["left"] == [], f"rank {rank} left something behind"


def _error_of(cell: Cell) -> str:
    if cell.kind is Kind.EXCEPTION and cell.point is Point.SECOND_HEALTH_CHECK:
        return "HealthCheckError"
    return _ERRORS[cell.kind]


def _check_raised(last: Event, types: set[str]) -> None:
    assert last.name == "raised", last
    assert last.details["type"] in types, last


def _check_recovery(cell: Cell, events: list[Event]) -> None:
    """Only the survivors ran the last iteration, and it began in time."""
    strikes = [event.time for event in events if event.name == "strike"]
    assert len(strikes) == len(cell.victims), f"{len(strikes)} faults instead of {len(cell.victims)}"
    if cell.ends_the_job:
        gave_up = max(event.time for event in events if event.name == "raised")
        assert gave_up - strikes[0] < BARRIER_TIMEOUT_S + _LOADED_S
        return
    last = max(event.iteration for event in events)
    assert last in cell.last_iterations, f"completed in iteration {last}, not in {set(cell.last_iterations)}"
    final = [event for event in events if event.iteration == last]
    check_numbering(final)
    assert ranks_in(final) == {process: number for number, process in enumerate(cell.survivors)}
    assert {event.world_size for event in final if event.name == "initialize"} == {len(cell.survivors)}
    if last > 0 and cell.kind is not Kind.MONITOR_KILLED:
        begun = max(event.time for event in final if event.name == "initialize")
        assert begun - strikes[0] < _detection_s(cell) + _LOADED_S


def _detection_s(cell: Cell) -> float:
    """How long it takes, by the settings, until the others know."""
    if cell.kind is Kind.BOTH_KILLED:
        return 1.5 * HEARTBEAT_TIMEOUT_S
    if cell.kind in (Kind.HANG, Kind.GLOO_HANG) and cell.fate is Fate.GOES_ON:
        return SOFT_TIMEOUT_S
    if cell.fate is Fate.DIES and cell.kind not in _EXIT_CODES:
        return HARD_TIMEOUT_S
    return 0.0


def test_the_matrix_is_whole() -> None:
    assert len(set(map(str, CELLS))) == len(CELLS)
    for point in Point:
        kinds = {cell.kind for cell in CELLS if cell.point is point}
        assert set(Kind) - kinds <= {Kind.GLOO_HANG}
    for kind in Kind:
        assert any(0 in cell.victims and len(cell.victims) == 1 for cell in CELLS if cell.kind is kind)
    chosen = selected()
    assert {cell.kind for cell in chosen} == set(Kind)
    assert {cell.point for cell in chosen} == set(Point)
