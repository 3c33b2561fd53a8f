"""More than one fault in one job."""

import time
from pathlib import Path

import pytest

from tests.inprocess.faults.checks import check_guarantees, ranks_in
from tests.inprocess.faults.events import wait_until
from tests.inprocess.faults.job import Job
from tests.inprocess.faults.nursery import Nursery
from tests.support.selection import FULL, full_only

_PROGRAMS = "tests.inprocess.faults.long_programs"
_RESTARTS = 100 if FULL else 20
_MEMORY_KB = 6 << 10  # four fifths of the restarts may cost this much
_MAPPINGS = 16  # arenas of malloc come and go
_CROWD = 64 if FULL else 14
_DEAD = [0, 1, 8, _CROWD - 4]


@pytest.mark.timeout(150)
def test_many_restarts_leave_nothing(nursery: Nursery, tmp_path: Path) -> None:
    world_size = 3
    with Job(nursery, tmp_path, f"{_PROGRAMS}:endure", [_RESTARTS], world_size) as job:
        job.wait(range(world_size), 120.0)
        for rank in range(world_size):
            early, late = (event.details for event in job.events(rank) if event.name == "holdings")
            last = job.events(rank)[-1]
            assert (last.name, last.details) == ("returned", {"value": world_size, "left": []})
            assert late["keys"] <= early["keys"] + _RESTARTS // 4, f"rank {rank}: {early} -> {late}"
            for kind in ("tasks", "threads", "fds"):
                assert late[kind] <= early[kind], f"rank {rank}: {kind} grew: {early} -> {late}"
            assert late["mappings"] <= early["mappings"] + _MAPPINGS, f"rank {rank}: {early} -> {late}"
            assert late["resident_kb"] <= early["resident_kb"] + _MEMORY_KB, f"rank {rank}: {early} -> {late}"
        events = job.all_events()
        check_guarantees(events)
        assert max(event.iteration for event in events) == _RESTARTS  # every new group could be connected
        job.check_no_process_left()


@pytest.mark.timeout(200)
def test_many_ranks(nursery: Nursery, tmp_path: Path) -> None:
    """One fails, then several die at once, the first among them."""
    living = [rank for rank in range(_CROWD) if rank not in _DEAD]
    with Job(nursery, tmp_path, f"{_PROGRAMS}:crowd", [_DEAD], _CROWD) as job:
        job.wait(range(_CROWD), 150.0)
        assert {job.exit_codes[rank] for rank in _DEAD} == {-9}
        for rank in living:
            last = job.events(rank)[-1]
            assert (last.name, last.details) == ("returned", {"value": len(living), "left": []})
        events = job.all_events()
        check_guarantees(events)
        sizes = {event.iteration: event.world_size for event in events if event.name == "initialize"}
        assert (sizes[0], sizes[1], sizes[max(sizes)]) == (_CROWD, _CROWD, len(living))
        final = [event for event in events if event.iteration == max(sizes)]
        assert ranks_in(final) == {process: number for number, process in enumerate(living)}
        job.check_no_process_left(20.0)


@pytest.mark.parametrize(
    ("when", "victims"),
    [
        ("function", "the host, twice"),
        ("restart", "rank 0, twice"),
        pytest.param("function", "rank 0, twice", marks=full_only),
        pytest.param("restart", "the host, twice", marks=full_only),
    ],
)
def test_the_process_that_hosts_the_store_dies_twice(nursery: Nursery, tmp_path: Path, when: str, victims: str) -> None:
    """The monitor process of rank 0, then the one that replaces it; or the host of the store, then the next host."""
    with Job(nursery, tmp_path, f"{_PROGRAMS}:serve", [when], 4) as job:
        try:
            waits = [tmp_path / f"waits-{rank}.mark" for rank in range(4)]
            wait_until(lambda: all(file.exists() for file in waits), "all ranks")
            job.replace_monitor(0)
            job.replace_monitor(0 if victims == "rank 0, twice" else 1)
            (tmp_path / "go.mark").touch()
            job.wait(range(4), 30.0)
            for rank in range(4):
                last = job.events(rank)[-1]
                assert (last.name, last.details) == ("returned", {"value": 10, "left": []})
            events = job.all_events()
            check_guarantees(events)
            assert max(event.iteration for event in events) == (1 if when == "restart" else 0)
            job.check_no_process_left()
        except AssertionError as error:
            raise AssertionError(f"{error}\n{job.describe()}") from error


def test_a_fault_is_reported_although_the_monitor_process_stands_still(nursery: Nursery, tmp_path: Path) -> None:
    """A rank can report its own failure without its monitor process."""
    with Job(nursery, tmp_path, f"{_PROGRAMS}:orphan", [], 3) as job:
        job.wait(range(3), 30.0)
        begun = time.monotonic()
        for rank in range(3):
            assert job.events(rank)[-1].details["value"] == 6
        check_guarantees(job.all_events())
        job.check_no_process_left()
        assert time.monotonic() - begun < 20
