"""Which rank holds whose replica."""

from collections import Counter
from itertools import chain

from hypothesis import given
from hypothesis import strategies as st

from ckpt.replication.replica import buddies

NODES = st.lists(st.integers(1, 9), min_size=2, max_size=9)


def places_of(sizes: list[int]) -> list[int]:
    return list(chain.from_iterable([node] * size for node, size in enumerate(sizes)))


@given(NODES, st.randoms(use_true_random=False))
def test_no_buddy_is_on_the_same_node_and_the_load_is_as_even_as_can_be(sizes: list[int], random: object) -> None:
    places = places_of(sizes)
    random.shuffle(places)  # type: ignore[attr-defined]
    found = buddies(places)
    load = Counter(found)
    for rank, buddy in enumerate(found):
        assert buddy is not None
        assert places[buddy] != places[rank]
    largest = max(sizes)
    others = len(places) - largest
    assert max(load.values()) == max(1, -(-largest // others))
    assert load.total() == len(places)


def test_nodes_of_one_size_form_a_ring() -> None:
    assert buddies(places_of([2, 2, 2])) == [2, 3, 4, 5, 0, 1]


def test_ranks_need_not_be_numbered_by_node() -> None:
    assert buddies(["a", "b", "a", "b"]) == [1, 0, 3, 2]


def test_uneven_nodes() -> None:
    assert buddies(places_of([3, 1])) == [3, 3, 3, 0]
    assert buddies(places_of([1, 2, 1])) == [2, 3, 0, 1]


def test_one_node_has_no_other() -> None:
    assert buddies(["a", "a"]) == [None, None]
    assert buddies(["a"]) == [None]
    assert buddies([]) == []
