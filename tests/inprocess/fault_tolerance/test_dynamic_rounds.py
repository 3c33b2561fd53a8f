"""The rendezvous of launchers that come and go, each in a thread, with a connection of its own to the store."""

import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from datetime import timedelta

import pytest
from torch.distributed import TCPStore
from torch.distributed.elastic.rendezvous import (
    RendezvousClosedError,
    RendezvousGracefulExitError,
    RendezvousInfo,
    RendezvousTimeoutError,
)

from inprocess.fault_tolerance.launcher.bounded_store import BoundedStore
from inprocess.fault_tolerance.launcher.dynamic_rounds import DynamicRounds, RoundRules, this_node
from inprocess.fault_tolerance.launcher.round_state import RoundState
from inprocess.node_layout import NodeLayout
from inprocess.rank_assignment.node_choice import LauncherNode

RULES = RoundRules(nodes=3, block=1, join_timeout_s=30, alive_interval_s=0.5, silence_s=6, is_mended=True)
LIMIT_S = 50


class Nodes:
    """Launchers by name; `join` has them wait for a round."""

    def __init__(self) -> None:
        self._host = TCPStore("127.0.0.1", 0, is_master=True, timeout=timedelta(seconds=30))
        self._pool = ThreadPoolExecutor(64)
        self.rounds: dict[str, DynamicRounds] = {}
        self.segment, self.processes = "", 1  # of those that come from now on

    def join(self, names: str, rules: RoundRules = RULES) -> dict[str, Future[RendezvousInfo]]:
        for name in names:
            if name not in self.rounds:
                store = TCPStore("127.0.0.1", self._host.port, timeout=timedelta(seconds=30))
                node = replace(this_node(f"127.0.0.{ord(name)}", self.segment, self.processes), order=ord(name))
                self.rounds[name] = DynamicRounds(BoundedStore(store, LIMIT_S, lambda: False), "job", node, rules)
        return {name: self._pool.submit(self.rounds[name].next_rendezvous) for name in names}

    def begin(self, names: str) -> None:
        """These have passed their checks, and start their workers."""
        for name in names:
            meeting = self.rounds[name].meeting
            assert meeting is not None
            meeting.begin()

    def close(self) -> None:
        for each in self.rounds.values():
            each.shutdown()
        self._pool.shutdown()


@pytest.fixture
def nodes() -> Iterator[Nodes]:
    found = Nodes()
    yield found
    found.close()


def by_rank(joined: dict[str, Future[RendezvousInfo]], names: str) -> str:
    """The nodes of a round, by group rank, when these have joined it."""
    found = {name: joined[name].result(LIMIT_S) for name in names}
    assert {info.world_size for info in found.values()} == {len(names)}
    assert len({info.bootstrap_store_info.master_port for info in found.values()}) == 1  # type: ignore[union-attr]
    return "".join(sorted(names, key=lambda name: found[name].rank))


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + LIMIT_S
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_nodes_that_meet_again_have_the_same_ranks_and_spares_wait(nodes: Nodes) -> None:
    assert by_rank(nodes.join("cab"), "abc") == "abc"
    spares = nodes.join("AB")
    for _ in range(3):
        assert by_rank(nodes.join("bca"), "abc") == "abc"
    assert not any(each.done() for each in spares.values())
    nodes.rounds["b"].leave()
    assert by_rank(nodes.join("ca") | spares, "aAc") == "aAc"
    nodes.rounds["a"].shutdown()
    with pytest.raises(RendezvousGracefulExitError):
        spares["B"].result(LIMIT_S)
    late = nodes.join("b")["b"]
    with pytest.raises(RendezvousGracefulExitError):
        late.result(LIMIT_S)


def test_a_spare_asks_the_others_to_meet_again_when_one_is_silent(nodes: Nodes) -> None:
    by_rank(nodes.join("abc"), "abc")
    spare = nodes.join("d")
    meeting = nodes.rounds["a"].meeting
    assert meeting is not None
    nodes.rounds["b"]._heart.stop()
    wait_until(meeting.has_words)
    assert "node 1 (127.0.0.98)" in str(meeting.restart_reason())
    assert by_rank(nodes.join("ac") | spare, "adc") == "adc"
    nodes.rounds["b"]._heart.start()  # it was only stopped
    back = nodes.join("b")["b"]
    nodes.rounds["a"].leave()
    assert by_rank(nodes.join("dc") | {"b": back}, "bdc") == "bdc", "it has trained"


def test_a_spare_counts_when_it_is_seen_to_run(nodes: Nodes) -> None:
    by_rank(nodes.join("abc"), "abc")
    nodes.join("d", replace(RULES, alive_interval_s=3600))
    asked = nodes.rounds["a"]
    wait_until(lambda: bool(asked._read().candidates))
    assert not asked.has_spare()
    assert not asked.has_spare(), "it may have died"
    nodes.rounds["b"]._heart.stop()
    time.sleep(RULES.alive_interval_s)  # it may be in a last beat
    again = nodes.rounds["c"]
    for rounds in (asked, again):
        assert not rounds.has_spare()
    nodes.rounds["d"]._heart._beat()
    time.sleep(2 * RULES.alive_interval_s)
    assert not again.has_spare(), "the place of one that has died is free, too"
    nodes.rounds["b"]._heart._beat()
    wait_until(again.has_spare)
    wait_until(asked.has_spare)
    nodes.rounds["d"].leave()
    assert not asked.has_spare()


def test_spares_join_the_round_that_runs_as_long_as_there_is_room(nodes: Nodes) -> None:
    rules = replace(RULES, most_nodes=5, is_mended=False)
    by_rank(nodes.join("abc", rules), "abc")
    nodes.begin("abc")
    nodes.segment = "other"
    late = {name: nodes.join(name, rules)[name] for name in "de"}
    found = {name: each.result(LIMIT_S) for name, each in late.items()}
    assert {info.world_size for info in found.values()} == {3}
    assert sorted(info.rank for info in found.values()) == [3, 4]
    for name, info in found.items():
        rounds = nodes.rounds[name]
        assert rounds.meeting is not None
        assert rounds.meeting.is_late
        assert rounds.layout() == NodeLayout(1, (0, 0, 0))
        assert rounds.first_rank() == NodeLayout(1, (0, 0, 0)).first_rank_of(info.rank, 1), "of another segment"

    waits = nodes.join("f", rules)["f"]
    wait_until(lambda: any(node.order == ord("f") for node in nodes.rounds["a"]._read().candidates))
    nodes.rounds["b"]._heart.stop()
    assert waits.result(LIMIT_S).rank == 5, "in the place of one that is silent"

    meeting = nodes.rounds["a"].meeting
    assert meeting is not None
    meeting.ask_restart("a test")
    again = nodes.join("g", rules) | nodes.join("f", rules)
    time.sleep(1)  # neither the one that was in the round nor one that was not joins it now
    assert not any(each.done() for each in again.values())
    assert by_rank(nodes.join("aced", rules), "acd") == "adc", "it comes before others that have not been in the round"


def test_a_spare_joins_when_all_first_nodes_have_begun(nodes: Nodes) -> None:
    """Until then they check their links: they do not answer, it may be minutes, and some may leave."""
    rules = replace(RULES, most_nodes=5, is_mended=False)
    by_rank(nodes.join("abc", rules), "abc")
    late = nodes.join("d", rules)["d"]
    wait_until(lambda: bool(nodes.rounds["a"]._read().candidates))
    nodes.begin("ab")
    time.sleep(1)
    assert not late.done()
    nodes.begin("c")
    assert late.result(LIMIT_S).rank == 3


def test_nodes_with_another_number_of_processes_do_not_join(nodes: Nodes) -> None:
    rules = replace(RULES, most_nodes=5, is_mended=False)
    by_rank(nodes.join("abc", rules), "abc")
    nodes.begin("abc")
    nodes.processes = 2
    waits = nodes.join("d", rules)["d"]
    wait_until(lambda: bool(nodes.rounds["a"]._read().candidates))
    time.sleep(1)
    assert not waits.done()


def test_the_table_has_the_workers_of_nodes_that_join(nodes: Nodes) -> None:
    rules = replace(RULES, most_nodes=4, is_mended=False)
    by_rank(nodes.join("abc", rules), "abc")
    nodes.begin("abc")
    late = nodes.join("d", rules)["d"]
    late.result(LIMIT_S)
    meetings = [rounds.meeting for rounds in nodes.rounds.values() if rounds.meeting is not None]
    with ThreadPoolExecutor(4) as pool:
        agreed = pool.map(lambda meeting: meeting.agree_on_cycle(7, 2, f"{meeting.node} says"), meetings)
        assert list(agreed) == [(7, ["0 says", "1 says", "2 says"])] * 4
    first, last = meetings[0], meetings[3]
    assert [first.table.left(), first.table.answering()] == [6, 4], "its workers are lost until they have joined"
    last.table.report(replace(last.table.own, lost=0))
    assert first.table.left() == last.table.left() == 8
    for meeting in meetings[:3]:
        assert last.table.has_work()
        meeting.report_done()
    assert not first.all_done()
    last.table.report(replace(last.table.own, lost=2))
    assert not last.table.has_work(), "the others are done"
    first.table.give_up(3)
    assert first.all_done()
    assert first.table.answering() == 3


def test_a_store_that_is_lost_has_no_spare(nodes: Nodes) -> None:
    """The loss is noticed elsewhere: a job on one node does without the store."""
    by_rank(nodes.join("abc"), "abc")
    nodes.rounds["a"]._bounded._lost = "it has not answered"
    assert not nodes.rounds["a"].has_spare()


def test_a_job_that_is_over_is_deserted_when_the_last_node_knows_it(nodes: Nodes) -> None:
    by_rank(nodes.join("abc"), "abc")
    spare = nodes.join("d")["d"]
    wait_until(lambda: bool(nodes.rounds["a"]._read().candidates))
    for name in "abc":
        assert not nodes.rounds["a"].is_deserted()
        nodes.rounds[name].shutdown()
    with pytest.raises(RendezvousGracefulExitError):
        spare.result(LIMIT_S)
    assert nodes.rounds["a"].is_deserted()


def test_nodes_of_a_round_without_others_are_told_that_it_is_over(nodes: Nodes) -> None:
    """They may have been stopped together, and go on."""
    by_rank(nodes.join("abc"), "abc")
    meeting = nodes.rounds["a"].meeting
    assert meeting is not None
    for name in "abc":
        nodes.rounds[name]._heart.stop()
    assert by_rank(nodes.join("def"), "def") == "def"
    assert meeting.has_words()


def test_a_change_by_a_node_that_has_died_at_once_is_seen(nodes: Nodes) -> None:
    """It has changed the state, and not counted the change."""
    rules = replace(RULES, silence_s=1)
    joined = nodes.join("ab", rules)
    store = nodes.rounds["a"]._store
    wait_until(lambda: store.check(["state"]) and len(RoundState.from_json(store.get("state")).candidates) == 2)
    text = store.get("state").decode()
    members = sorted(
        [*RoundState.from_json(text).candidates, LauncherNode("c", "127.0.0.9", order=999)],
        key=lambda node: node.sort_key,
    )
    begun = RoundState.from_json(text).begin(members).to_json()
    assert store.compare_set("state", text, begun).decode() == begun
    assert {joined[name].result(20).rank for name in "ab"} == {0, 1}


def test_no_round_without_enough_nodes(nodes: Nodes) -> None:
    joined = nodes.join("ab", replace(RULES, join_timeout_s=1))
    for each in joined.values():
        with pytest.raises(RendezvousTimeoutError):
            each.result(LIMIT_S)


def test_a_node_that_comes_again_while_another_ends_the_job_is_no_spare(nodes: Nodes) -> None:
    by_rank(nodes.join("abc"), "abc")
    again = nodes.join("a")["a"]
    nodes.rounds["b"].shutdown()
    with pytest.raises(RendezvousClosedError):
        again.result(LIMIT_S)


def test_the_number_of_the_cycle_outlives_its_nodes(nodes: Nodes) -> None:
    by_rank(nodes.join("abc"), "abc")
    for cycle in (0, 2, 1):
        threads = [
            threading.Thread(target=nodes.rounds[name].record_cycle, args=(cycle,), daemon=True) for name in "abc"
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(LIMIT_S)
    assert {nodes.rounds[name].least_cycle() for name in "abc"} == {3}


def test_many_nodes_at_once(nodes: Nodes) -> None:
    names = "".join(chr(ord("a") + number) for number in range(24))
    rules = replace(RULES, nodes=20)
    joined = nodes.join(names, rules)
    for _ in range(2):
        deadline = time.monotonic() + LIMIT_S
        while sum(each.done() for each in joined.values()) < 20:
            assert time.monotonic() < deadline
            time.sleep(0.02)
        trains = "".join(name for name in names if joined[name].done())
        assert sorted(by_rank(joined, trains)) == sorted(trains)
        joined |= nodes.join(trains, rules)


def test_a_state_is_read_as_it_was_written() -> None:
    state = RoundState().with_candidate(LauncherNode("1", "x", 7, "rack", 3)).with_candidate(LauncherNode("2", "y"))
    state = state.begin([state.candidates[1]])
    assert RoundState.from_json(state.to_json()) == state
    assert (state.number, [node.key for node in state.candidates], state.trained) == (1, ["1"], {"y"})
