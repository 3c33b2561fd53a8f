"""Which nodes are blamed for slow and broken transfers between pairs."""

import math
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from inprocess.node_health.link_verdict import LinkVerdict, Pair, judge, next_pairs

_FACTOR = 3.0
_MOST_STAGES = 8


def measure(
    nodes: int,
    *,
    broken: set[int] = frozenset(),
    slow: set[int] = frozenset(),
    apart: set[Pair] = frozenset(),
    seed: int = 0,
) -> tuple[dict[Pair, float], int]:
    """Transfer as the nodes do; the times, and the number of stages."""
    noise = random.Random(seed)
    times: dict[Pair, float] = {}
    for stage in range(100):
        pairs = next_pairs(nodes, times, _FACTOR)
        if not pairs:
            return times, stage
        together = [node for pair in pairs for node in pair]
        assert len(together) == len(set(together)), "a node is in two pairs of a stage"
        assert times.keys().isdisjoint(pairs), "a pair comes a second time"
        for pair in pairs:
            is_lost = pair in apart or not broken.isdisjoint(pair)
            times[pair] = math.inf if is_lost else noise.uniform(0.1, 0.2) * (1 if slow.isdisjoint(pair) else 10)
    raise AssertionError("it does not end")


def verdict(nodes: int, times: dict[Pair, float]) -> LinkVerdict:
    return judge(nodes, times, _FACTOR)


@given(st.data())
def test_bad_nodes_are_blamed_and_no_others(data: st.DataObject) -> None:
    """Less than half of the nodes are bad, so that two are sound at least."""
    nodes = data.draw(st.integers(3, 12))
    bad = data.draw(st.sets(st.integers(0, nodes - 1), max_size=(nodes - 1) // 2))
    broken = data.draw(st.sets(st.sampled_from(sorted(bad)))) if bad else set()
    times, stages = measure(nodes, broken=broken, slow=bad - broken, seed=data.draw(st.integers(0, 1000)))
    found = verdict(nodes, times)
    assert (set(found.broken), set(found.slow), found.unclear, found.apart) == (broken, bad - broken, (), ())
    assert stages <= _MOST_STAGES
    assert bad or stages <= 3, "with sound nodes only the ring is measured"


@given(st.integers(2, 10), st.dictionaries(st.tuples(st.integers(0, 9), st.integers(0, 9)), st.floats(0, 9)))
def test_whatever_was_measured_sound_nodes_are_not_blamed(nodes: int, given_times: dict[Pair, float]) -> None:
    times = {(a, b): time_s for (a, b), time_s in given_times.items() if a < b < nodes}
    found = verdict(nodes, times)
    for node in (*found.broken, *found.slow):
        own = [time_s for pair, time_s in times.items() if node in pair]
        assert min(own) > _FACTOR * found.reference_s
    assert len({*found.broken, *found.slow, *found.unclear}) <= nodes


def test_neighbours_in_the_ring_transfer_first() -> None:
    times: dict[Pair, float] = {}
    stages = []
    while pairs := next_pairs(4, times, _FACTOR):
        stages.append(pairs)
        times |= dict.fromkeys(pairs, 1.0)
    assert stages == [[(0, 1), (2, 3)], [(1, 2), (0, 3)]]
    assert measure(5)[1] == 3
    assert measure(2)[1] == 1
    assert measure(1) == ({}, 0)


@pytest.mark.parametrize("bad", range(3))
def test_one_of_three_nodes(bad: int) -> None:
    assert verdict(3, measure(3, broken={bad})[0]).broken == (bad,)
    assert verdict(3, measure(3, slow={bad})[0]).slow == (bad,)


def test_of_two_nodes_none_is_blamed() -> None:
    assert verdict(2, {(0, 1): 5.0}) == LinkVerdict(5.0)
    assert verdict(2, {(0, 1): math.inf}) == LinkVerdict(math.inf, unclear=(0, 1))


def test_where_no_transfer_works_none_is_blamed() -> None:
    times, stages = measure(5, broken={0, 1, 2, 3})
    assert verdict(5, times).unclear == (0, 1, 2, 3, 4)
    assert stages <= _MOST_STAGES


def test_a_link_between_two_sound_nodes_is_told_apart() -> None:
    times, _ = measure(6, apart={(2, 3)})
    assert verdict(6, times) == LinkVerdict(verdict(6, times).reference_s, apart=((2, 3),))


def test_nodes_that_are_all_broken_but_two_are_found() -> None:
    times, _ = measure(4, broken={1, 3})
    assert verdict(4, times).broken == (1, 3)


def test_noise_of_milliseconds_is_not_slow() -> None:
    assert verdict(3, {(0, 1): 0.001, (1, 2): 0.005, (0, 2): 0.005}).slow == ()


def test_the_slowest_node_comes_first() -> None:
    times = {(0, 1): 0.1, (2, 3): 0.1, (0, 4): 1.0, (1, 4): 1.0, (0, 5): 2.0, (1, 5): 2.0}
    assert verdict(6, times).slow == (5, 4)
