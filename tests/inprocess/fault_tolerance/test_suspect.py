"""Which rank the others wait for: by numbers alone, and with real ranks."""

import json
import os
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from inprocess import CallWrapper, Wrapper
from inprocess.fault_tolerance import FaultToleranceConfig, RankMonitorClient
from inprocess.monitor_process import messages
from inprocess.sections.report import Standing, Suspect, in_collective, root_suspect
from tests.inprocess.fault_tolerance.launching import Job
from tests.inprocess.fault_tolerance.test_with_wrapper import PATIENT, hang
from tests.inprocess.fault_tolerance.workers import Node, Worker
from tests.inprocess.restarting import seconds
from tests.support import rank_values


def stands(rank: int, moved_at: float, *sections: str, iteration: int | None = None, seen_at: float = 99.0) -> Standing:
    return Standing(rank, iteration, sections, moved_at, seen_at, "host", 1000.0)


def test_the_rank_whose_last_event_is_the_earliest() -> None:
    ranks = [stands(0, 5.0, "step"), stands(1, 2.0, "checkpoint"), stands(2, 5.2, "step", "sum")]
    expected = Suspect(1, "in 'checkpoint', its last event 3.000 s before those of all others, which are in 'step'")
    for own in ranks:  # whoever is late first
        assert root_suspect(own, [other for other in ranks if other is not own]) == expected


def test_the_rank_that_is_missing_from_the_section_of_the_others() -> None:
    ranks = [stands(0, 5.0, "step", "all_reduce"), stands(1, 4.5, "step"), stands(2, 5.0, "step", "all_reduce")]
    found = root_suspect(ranks[0], ranks[1:])
    assert found is not None
    assert found.rank == 1
    assert found.why.endswith("others, which are in 'all_reduce'")


def test_the_rank_that_is_not_in_the_collective_of_the_others() -> None:
    waiting, working = (replace(stands(rank, 5.0, "step"), waits=rank == 0) for rank in range(2))
    assert root_suspect(waiting, [working]) == root_suspect(working, [waiting])
    found = root_suspect(waiting, [working])
    assert found == Suspect(1, "in 'step', and not in the collective that all others wait in")
    assert root_suspect(waiting, [replace(waiting, rank=2)]) is None
    assert root_suspect(waiting, [replace(working, waits=None)]) is None
    assert root_suspect(working, [waiting, replace(working, rank=2)]) is None
    assert in_collective("") is None
    assert in_collective('File "x.py"') is False
    assert in_collective('File "/torch/distributed/distributed_c10d.py"') is True


def test_the_rank_in_an_earlier_iteration_whatever_the_clocks_say() -> None:
    ranks = [stands(0, 5.0, "step", iteration=8), stands(1, 9.0, iteration=7), stands(2, 5.0, "step", iteration=8)]
    assert root_suspect(ranks[0], ranks[1:]) == Suspect(1, "outside all sections of iteration 7, while others are in 8")


@pytest.mark.parametrize("moved_at", [(5.0, 5.05), (5.0, 5.2, 5.5), (5.0,)])
def test_without_a_clear_difference_there_is_no_suspect(moved_at: tuple[float, ...]) -> None:
    ranks = [stands(rank, at, "step") for rank, at in enumerate(moved_at)]
    assert root_suspect(ranks[-1], ranks[:-1]) is None


def test_what_was_seen_too_early_says_nothing() -> None:
    late = stands(0, 5.0, "step")
    assert root_suspect(late, [stands(1, 1.0, "checkpoint", seen_at=4.9)]) is None
    assert root_suspect(late, [stands(1, 1.0, "checkpoint", seen_at=5.0)]) is not None


def test_hosts_are_compared_by_the_wall_clock() -> None:
    here = stands(0, 5.0, "step")
    there = replace(stands(1, 503.0, "step", seen_at=600.0), clock="another", wall_s=500.0)  # 1003, and here 1005
    found = root_suspect(here, [there])
    assert found is not None
    assert found.rank == 1


def test_it_is_told_in_json() -> None:
    standing = stands(1, 2.0, "a", iteration=3)
    assert Standing.from_json(json.loads(json.dumps(standing.to_json()))) == standing
    for wrong in ({}, 3, {**standing.to_json(), "sections": None}, {**standing.to_json(), "rank": "x"}):
        with pytest.raises(ValueError, match=r"."):
            Standing.from_json(wrong)  # type: ignore[arg-type]


def test_three_ranks_whose_monitors_ask_each_other(tmp_path: Path) -> None:
    """Rank 2 does not come to the iteration that the others are in; rank 0 is late first, a fourth monitor is dead."""
    paths = [str(tmp_path / f"{rank}.sock") for rank in range(4)]
    with Node(tmp_path) as node:
        workers: list[Worker] = []
        for rank, limit in enumerate((0.5, 60.0, 60.0)):
            node.path = paths[rank]
            node.monitor(rank_section_timeouts={"step": limit}, peers=[p for p in paths if p != paths[rank]])
            worker = node.worker(
                """
                client.init_workload_monitoring()
                client.set_iteration(7)
                client.start_section("step")
                say("there")
                wait()
                client.end_section("step")
                client.set_iteration(8)
                client.start_section("step")
                say("there")
                wait()
                """
                if rank != 0
                else """
                client.init_workload_monitoring()
                client.set_iteration(8)
                say("there")
                wait()
                client.start_section("step")
                wait()
                """,
                RANK=str(rank),
            )
            workers.append(worker)
            assert worker.line() == "there"
        workers[1].go()
        assert workers[1].line() == "there"
        workers[0].go()
        assert workers[0].wait() == -9
        (report,) = node.reports()
        assert report["rank"] == 0
        assert report["root_suspect"] == {"rank": 2, "why": "in 'step' of iteration 7, while others are in 8"}
        assert report["compared_ranks"] == [0, 1, 2]
        assert re.search("root suspect: rank 2, in 'step' of iteration 7", node.log())
        assert all(worker.process.poll() is None for worker in workers[1:])


def test_monitors_that_ask_each_other_at_once_answer(tmp_path: Path) -> None:
    """Both ranks are late by the time their monitors look: they were stopped until then."""
    paths = [str(tmp_path / f"{rank}.sock") for rank in range(2)]
    with Node(tmp_path) as node:
        for rank in range(2):
            node.path = paths[rank]
            node.monitor(rank_section_timeouts={"step": 0.5}, peers=[paths[1 - rank]])
        workers = []
        for rank in range(2):
            node.path = paths[rank]
            workers.append(
                node.worker(
                    f"""
                    client.init_workload_monitoring()
                    client.set_iteration({rank})
                    say("there")
                    wait()
                    client.start_section("step")
                    wait()
                    """,
                    RANK=str(rank),
                )
            )
        for worker in workers:
            assert worker.line() == "there"
        for worker in workers:
            worker.go()
        assert [worker.wait() for worker in workers] == [-9, -9]
        reports = node.reports()
        assert {report["rank"] for report in reports} == {0, 1}
        named = [report["root_suspect"] for report in reports if "root_suspect" in report]
        assert named, "who was late first could ask the other"
        assert all(suspect["rank"] == 0 for suspect in named)


def test_a_stuck_monitor_delays_nobody(tmp_path: Path) -> None:
    paths = [str(tmp_path / f"{rank}.sock") for rank in range(2)]
    with Node(tmp_path) as node:
        node.path = paths[1]
        stuck = node.monitor()
        os.kill(stuck.pid, 19)
        node.path = paths[0]
        node.monitor(rank_section_timeouts={"step": 0.5}, peers=[paths[1]])
        worker = node.worker("""
            client.init_workload_monitoring()
            client.start_section("step")
            wait()
        """)
        assert worker.wait() == -9
        (report,) = node.reports()
        assert "root_suspect" not in report
        os.kill(stuck.pid, 18)


def test_a_launcher_names_the_rank_that_hangs(job: Job) -> None:
    script = """
        client = monitored()
        if cycle == 0:
            client.set_iteration(5 + (rank != 1))
            others("there")
            client.start_section("step")
            hang()
    """
    launcher = job.one_node(script, "--ft-rank-section-timeouts=step:2", ranks=3)
    assert launcher.wait() == 0
    assert "root suspect: rank 1, " in launcher.log()
    assert '"cycle": 0' in launcher.log()


def test_a_launcher_names_the_rank_that_is_missing_from_a_collective(job: Job) -> None:
    script = """
        exec(compile("def all_reduce(): threading.Event().wait()", "torch/distributed/distributed_c10d.py", "exec"))
        client = monitored()
        if cycle == 0:
            others("there")
            client.start_section("step")
            hang() if rank == 1 else all_reduce()
    """
    launcher = job.one_node(script, "--ft-rank-section-timeouts=step:2", ranks=2)
    assert launcher.wait() == 0
    assert "root suspect: rank 1, in 'step', and not in the collective" in launcher.log()


def test_a_monitor_that_watches_nobody_says_so(node: Node) -> None:
    from inprocess.ipc import unix_sockets
    from inprocess.ipc.packets import receive, send
    from inprocess.monitor_process.messages import CODEC

    node.monitor()
    with unix_sockets.connect(node.path, 10.0) as end:
        send(end, CODEC, messages.QueryStanding())
        assert receive(end, CODEC).message == messages.Ok({})


def test_the_wrapper_names_the_rank_that_hangs() -> None:
    """Rank 2 hangs in "save"; the others are in "step" of the next iteration, and rank 0 is late first."""

    def meet(store: Any, name: str, rank: int, ranks: int) -> None:
        store.arrive(name, str(rank))
        while len(store.members(name)) < ranks:
            pass

    def main(rank: int, world_size: int) -> Any:
        limits = {"step": 2.0 if rank == 0 else 60.0, "save": 60.0}
        often = seconds(heartbeat_interval=0.1)

        @Wrapper(sections=FaultToleranceConfig(rank_section_timeouts=limits), **{**PATIENT, **often})
        def train(call: CallWrapper | None = None) -> Any:
            assert call is not None
            if call.iteration == 0:
                client = RankMonitorClient()
                client.init_workload_monitoring()
                client.set_iteration(3)
                client.start_section("save")
                meet(call.state.store, "saving", rank, world_size)
                if rank != 2:
                    client.end_section("save")
                    client.set_iteration(4)
                    meet(call.state.store, "stepping", rank, 2)  # rank 1 is there before rank 0 can be late
                    client.start_section("step")
                hang()
            return [(r.rank, r.interruption.name, r.detail) for r in call.state.interruptions]

        return train()

    for found in rank_values(main, 3):
        assert len(found) == 1, found
        ((rank, kind, report),) = found
        assert (rank, kind) == (0, "SOFT_TIMEOUT")
        assert '"root_suspect": {"rank": 2, "why": "in \'save\' of iteration 3, while others are in 4"}' in report
        assert '"compared_ranks": [0, 1, 2]' in report
