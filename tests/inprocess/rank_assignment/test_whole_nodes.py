"""Ranks by whole nodes: which node takes the place of a lost one, and that all processes find the same."""

import pytest

from inprocess.exception import RankDiscarded
from inprocess.node_layout import NodeLayout
from inprocess.rank_assignment import RankAssignmentCtx, WholeNodes
from inprocess.state import Mode, State

TWO = NodeLayout(2, (0, 0))


class Job:
    """All processes of a job, each with its own assignment and state, by initial rank."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, layout: NodeLayout) -> None:
        monkeypatch.setenv(*next(iter(layout.environment().items())))
        self.layout = layout
        self.size = layout.processes * len(layout.segments)
        self.members = list(range(self.size))  # by dense rank
        self._states = {rank: State(rank, self.size) for rank in self.members}
        self._hooks = {rank: WholeNodes() for rank in self.members}
        self._assign(set(), ())

    def node(self, node: int, segment: int = 0) -> list[int]:
        """The initial ranks of a node that joins."""
        first = self.layout.first_rank_of(node, segment)
        return list(range(first, first + self.layout.processes))

    def restart(self, *, lost: set[int], joined: tuple[int, ...] | list[int] = ()) -> list[int]:
        """The initial ranks of the active processes, by rank; `lost` and `joined` are initial ranks, too."""
        terminated = {rank for rank, initial in enumerate(self.members) if initial in lost}
        for number, initial in enumerate(joined):
            rank = len(self.members) + number
            state = State(initial, self.size)
            state.rank, state.world_size, state.mode = rank, len(self.members) + len(joined), Mode.INACTIVE
            self._states[initial], self._hooks[initial] = state, WholeNodes()
        for initial in self.members:
            self._states[initial].world_size += len(joined)
        self.members += joined
        return self._assign(terminated, tuple(self.members) if joined else ())

    def _assign(self, terminated: set[int], initial_ranks: tuple[int, ...]) -> list[int]:
        for rank in terminated:
            with pytest.raises(RankDiscarded):
                self._hooks[self.members[rank]](
                    RankAssignmentCtx(self._states[self.members[rank]], None, terminated, initial_ranks)
                )
        survivors = [initial for rank, initial in enumerate(self.members) if rank not in terminated]
        for initial in survivors:
            self._hooks[initial](RankAssignmentCtx(self._states[initial], None, set(terminated), initial_ranks))
        states = {initial: self._states[initial] for initial in survivors}
        (sizes,) = {(state.world_size, state.active_world_size) for state in states.values()}
        assert sizes[0] == len(survivors)
        self.members = sorted(survivors, key=lambda initial: states[initial].rank or 0)
        assert [states[initial].rank for initial in self.members] == list(range(sizes[0]))
        active = [initial for initial in self.members if states[initial].mode is Mode.ACTIVE]
        assert [states[initial].active_rank for initial in active] == list(range(sizes[1] or 0))
        return active


@pytest.mark.parametrize("lost_node", [0, 1])
def test_a_spare_node_has_the_ranks_of_a_lost_one_and_the_others_keep_theirs(
    monkeypatch: pytest.MonkeyPatch, lost_node: int
) -> None:
    job = Job(monkeypatch, TWO)
    lost = {2 * lost_node, 2 * lost_node + 1}
    expected = [0, 1, 2, 3]
    expected[2 * lost_node : 2 * lost_node + 2] = job.node(2)
    assert job.restart(lost=lost, joined=job.node(2)) == expected, "in one restart"


def test_a_spare_that_has_joined_waits_until_a_node_is_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    job = Job(monkeypatch, TWO)
    assert job.restart(lost=set(), joined=job.node(2)) == [0, 1, 2, 3]
    assert job.restart(lost={0, 1}) == [*job.node(2), 2, 3]
    assert job.restart(lost=set(), joined=job.node(3)) == [*job.node(2), 2, 3], "the lost node, which has come back"
    assert job.restart(lost={2, 3}) == [*job.node(2), *job.node(3)]


def test_a_node_that_has_lost_a_process_makes_room_until_that_is_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    job = Job(monkeypatch, TWO)
    assert job.restart(lost={3}, joined=job.node(2)) == [0, 1, *job.node(2)]
    again = 3 + job.layout.places
    assert job.restart(lost=set(), joined=[again]) == [0, 1, *job.node(2)]
    assert job.restart(lost={0, 1}) == [2, again, *job.node(2)]


def test_without_a_spare_the_others_go_on_and_what_comes_fills_the_gap(monkeypatch: pytest.MonkeyPatch) -> None:
    job = Job(monkeypatch, NodeLayout(2, (0, 0, 0)))
    assert job.restart(lost={2, 3}) == [0, 1, 4, 5]
    assert job.restart(lost={4}) == [0, 1, 5]
    half = job.node(3)[:1]
    assert job.restart(lost=set(), joined=half) == [0, 1, 5, *half]
    assert job.restart(lost=set(), joined=job.node(4)) == [0, 1, 5, *job.node(4)]
    assert job.restart(lost=set(), joined=job.node(3)[1:]) == [0, 1, *job.node(3), *job.node(4)]


def test_a_lost_process_of_which_nothing_is_known_leaves_a_gap(monkeypatch: pytest.MonkeyPatch) -> None:
    job = Job(monkeypatch, TWO)
    job.members[0] = job.members[1] = -1  # they have died before they published which they are
    for initial in (0, 1):
        job._states[-1], job._hooks[-1] = job._states[initial], job._hooks[initial]
    assert job.restart(lost={-1}, joined=job.node(2)) == [2, 3, *job.node(2)]


def test_the_nodes_of_a_block_are_of_one_segment(monkeypatch: pytest.MonkeyPatch) -> None:
    layout = NodeLayout(1, (0, 0, 1, 1), block=2)
    job = Job(monkeypatch, layout)
    spares = {segment: [*job.node(4 + segment, segment)] for segment in (0, 1, 2)}
    assert job.restart(lost={3}, joined=[*spares[0], *spares[1]]) == [0, 1, 2, *spares[1]], "of its segment"
    assert job.restart(lost={2}) == [0, 1, *spares[1]], "the one of another segment waits"
    two = [*spares[2], *job.node(7, 2)]
    assert job.restart(lost=set(), joined=two) == [0, 1, *two], "a whole block of another one"
    assert job.restart(lost={1}) == [0, *spares[0], *two]
