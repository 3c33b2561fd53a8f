"""What must hold between the events of all ranks of a job, whatever failed: the guarantees of the restart protocol."""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Iterable, Sequence

from tests.inprocess.faults.events import Event

_OF_AN_ITERATION = (
    "initialize",
    "health check",
    "function",
    "function ends",
    "abort",
    "finalize",
    "finalize ends",
    "second health check",
    "second health check ends",
)
_ORDER_ON_A_RANK = ("initialize", "function", "function ends", "finalize", "finalize ends", "second health check")


def check_guarantees(events: Sequence[Event]) -> None:
    """AssertionError if something happened in the wrong order, on one rank or across ranks."""
    by_iteration: dict[int, list[Event]] = defaultdict(list)
    for event in events:
        by_iteration[event.iteration].append(event)
    by_iteration.pop(-1, None)
    for iteration, there in by_iteration.items():
        check_numbering(there)
        _check_ranks(there)
        _check_assignment(there)
        _check_next(there, by_iteration.get(iteration + 1, []))


def check_numbering(events: Iterable[Event]) -> None:
    """G3: in one iteration all ranks know the same size, and their numbers are different and in the same order."""
    initialized = [event for event in events if event.name == "initialize"]
    sizes = {event.world_size for event in initialized if event.world_size is not None}
    assert len(sizes) <= 1, f"different world sizes: {initialized}"
    numbers = ranks_in(initialized)
    assert len(numbers) == len(initialized), f"a rank initialized twice: {initialized}"
    in_order = [rank for _, rank in sorted(numbers.items())]
    assert in_order == sorted(set(in_order)), f"numbers not in the order of the ranks: {numbers}"
    assert all(0 <= rank < max(sizes, default=0) for rank in in_order), numbers


def ranks_in(events: Iterable[Event]) -> dict[int, int]:
    """Return the number of each process that has begun the iteration."""
    return {event.process: event.rank for event in events if event.name == "initialize" and event.rank is not None}


def _check_ranks(events: Sequence[Event]) -> None:
    """G1 on each rank, G6 and G7: abort, then unwinding, then `finalize`, without process groups and old keys."""
    for _, its in itertools.groupby(sorted(events, key=lambda e: (e.process, e.time)), key=lambda e: e.process):
        times = {event.name: event.time for event in its}
        own = [event for event in events if event.name in times]
        order = [times[name] for name in _ORDER_ON_A_RANK if name in times]
        assert order == sorted(order), f"wrong order: {times}"
        if "finalize" in times:
            assert times["abort"] < times["finalize"], f"finalize before abort: {times}"
        for event in own:
            assert not event.details.get("has_group"), f"a process group survived until {event}"
            assert not event.details.get("stale"), f"the store shows old keys: {event}"


def _check_assignment(events: Sequence[Event]) -> None:
    """G2 and G3: all numbering comes after all cleaning up, and begins with the same terminated ranks everywhere."""
    after = [event for event in events if event.name == "assign"]
    if not after:
        return
    first = min(event.time for event in after)
    late = [event for event in events if event.name in _OF_AN_ITERATION and event.time > first]
    assert not late, f"numbering began at {first}, before {late}"
    assert len({tuple(event.details["terminated"]) for event in after}) == 1, f"different terminated ranks: {after}"


def _check_next(events: Sequence[Event], following: Sequence[Event]) -> None:
    """G1 and G4 across ranks, and G5: a rank that begins the next iteration has finished this one."""
    begun = [event for event in following if event.name in _OF_AN_ITERATION]
    if not begun:
        return
    first = min(begun, key=lambda e: e.time)
    late = [event for event in events if event.name in _OF_AN_ITERATION and event.time > first.time]
    assert not late, f"{first} came before {late}"
    finished = {event.process for event in events if event.name == "finalize ends"}
    strangers = {event.process for event in begun} - finished
    assert not strangers, f"ranks {strangers} are in an iteration without having finished the one before"
