"""Which of the nodes that are present train, and with which group ranks."""

import random

import pytest

from inprocess.rank_assignment.node_choice import LauncherNode, choose_nodes


def nodes(text: str) -> list[LauncherNode]:
    """Nodes like "a1 a2 b1": the letter is the segment."""
    return [LauncherNode(name, name, segment=name[0]) for name in text.split()]


def chosen(present: str, earlier: str = "", trained: str = "", count: int = 4, size: int = 2) -> str | None:
    found = choose_nodes(nodes(present), nodes(earlier), {*earlier.split(), *trained.split()}, count, size)
    return None if found is None else " ".join(node.key for node in found)


@pytest.mark.parametrize(
    ("present", "expected"),
    [
        ("b2 a2 b1 a1", "a1 a2 b1 b2"),
        ("a1 b1 b2 c1 c2 d1", "b1 b2 c1 c2"),  # incomplete segments stay out
        ("a1 b1 c1 a2 c2 a3 a4", "a1 a2 a3 a4"),  # one domain, two blocks
        ("a1 a2 a3 b1 b2", "a1 a2 b1 b2"),
        ("a1 a2 a3 b1", None),
        ("a1 a2 b1 c1 d1", None),
    ],
)
def test_each_block_of_ranks_is_of_one_segment(present: str, expected: str | None) -> None:
    assert chosen(present) == expected


@pytest.mark.parametrize(
    ("present", "expected"),
    [
        ("a1 a2 b1 b2 c1 c2", "b1 b2 a1 a2"),  # nothing is lost
        ("a1 a2 a3 b1 b2 c1 c2", "b1 b2 a1 a2"),
        ("a2 a3 b1 b2 c1 c2", "b1 b2 a3 a2"),  # a spare of the segment takes the place
        ("a1 a2 b2 c1 c2", "c1 c2 a1 a2"),  # a spare segment takes the place of the segment
        ("a2 b2 c1 c2 d1 d2", "c1 c2 d1 d2"),
        ("a1 a2 b2 c1", None),
    ],
)
def test_segments_that_are_complete_keep_their_ranks(present: str, expected: str | None) -> None:
    assert chosen(present, earlier="b1 b2 a1 a2") == expected


@pytest.mark.parametrize(
    ("present", "trained", "expected"),
    [
        ("n1 n2 n3 n4", "", "n4 n1 n2"),
        ("n0 n1 n2 n3", "", "n0 n1 n2"),
        ("n0 n1 n2 n5", "n5", "n5 n1 n2"),  # it has trained, the other standby has not
        ("n0 n3 n5", "n5", "n5 n0 n3"),
    ],
)
def test_the_place_of_a_lost_node_is_filled_and_the_others_keep_theirs(
    present: str, trained: str, expected: str
) -> None:
    assert chosen(present, "n4 n1 n2", trained, count=3, size=1) == expected


def test_a_launcher_that_was_started_again_has_the_place_of_the_one_before() -> None:
    earlier = [LauncherNode(key, address) for key, address in (("1", "y"), ("2", "x"), ("3", "z"))]
    present = [LauncherNode("0", "a"), LauncherNode("2", "x"), LauncherNode("3", "z"), LauncherNode("9", "y")]
    found = choose_nodes(present, earlier, {"x", "y", "z"}, 3, 1)
    assert found is not None
    assert [node.key for node in found] == ["9", "2", "3"]


def test_nodes_are_in_the_order_of_the_scheduler() -> None:
    present = [LauncherNode("1", "z", order=2), LauncherNode("2", "a", order=10), LauncherNode("3", "b", order=0)]
    assert [node.key for node in choose_nodes(present, [], set(), 3, 1) or []] == ["3", "1", "2"]


def test_a_choice_is_found_whenever_there_is_one() -> None:
    rng = random.Random(7)
    earlier: list[LauncherNode] = []
    trained: set[str] = set()
    found_some = 0
    for _ in range(2000):
        size = rng.choice([1, 2, 3])
        count = size * rng.randint(1, 3)
        present = nodes(
            " ".join(f"{rng.choice('abcd')}{number}" for number in rng.sample(range(20), rng.randint(1, 14)))
        )
        earlier = earlier if len(earlier) == count and rng.random() < 0.9 else []
        found = choose_nodes(present, earlier, trained, count, size)
        segments = [node.segment for node in present]
        assert (found is not None) == (sum(segments.count(each) // size for each in set(segments)) >= count // size)
        if found is None:
            continue
        found_some += 1
        assert len({node.key for node in found}) == count
        assert {node.key for node in found} <= {node.key for node in present}
        for start in range(0, count, size):
            assert len({node.segment for node in found[start : start + size]}) == 1
            if earlier and all(node in present for node in earlier[start : start + size]):
                assert found[start : start + size] == earlier[start : start + size]
        earlier, trained = found, trained | {node.address for node in found}
    assert found_some > 500
