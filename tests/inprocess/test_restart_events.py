"""`events.jsonl`: one line per restart, with everything one wants to know afterwards."""

from __future__ import annotations

import ctypes
import json
import os
import signal
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from inprocess import CallWrapper, Wrapper
from inprocess.attribution import Interruption, InterruptionRecord
from inprocess.fault_classes import ADVICE, FaultClass
from inprocess.restart_events import RestartEvents
from tests.inprocess.restarting import SHORT, outcome, seconds
from tests.support import rank_values


def read(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "events.jsonl").read_text().splitlines()]


def write(events: RestartEvents, iteration: int = 0) -> None:
    record = InterruptionRecord(1, Interruption.EXCEPTION, "ValueError: ü\n", "Traceback\n")
    events.restarted(
        iteration=iteration, records=[record], terminated_ranks={3, 1}, world_size=(4, 2), seconds={"total": 0.1234567}
    )


def test_a_line(tmp_path: Path) -> None:
    events = RestartEvents(str(tmp_path / "logs" / "rank_0.log"))
    began = time.time()
    write(events, 0)
    write(events, 1)
    first, second = read(tmp_path / "logs")
    assert began <= first.pop("time") <= time.time()
    assert first == {
        "event": "restart",
        "iteration": 0,
        "cause": {
            "rank": 1,
            "fault_class": "unknown",
            "text": "ValueError: ü",
            "advice": ADVICE[FaultClass.UNKNOWN],
            "evidence": [],
            "followed": [],
        },
        "reasons": [
            {
                "rank": 1,
                "interruption": "EXCEPTION",
                "summary": "ValueError: ü\n",
                "detail": "Traceback\n",
                "place": "",
                "fault_class": "unknown",
                "evidence": [],
            },
        ],
        "terminated_ranks": [1, 3],
        "world_size_before": 4,
        "world_size_after": 2,
        "seconds": {"total": 0.123457},
        "pause_s": 0.0,
        "flight_recorder": [],
    }
    assert second["iteration"] == 1


def test_without_log_file_there_are_no_events(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    write(RestartEvents(None))
    assert list(tmp_path.iterdir()) == []


def test_a_disk_that_does_not_take_it_stops_nobody(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "file").touch()
    write(RestartEvents(str(tmp_path / "file" / "log")))
    assert "cannot write" in caplog.text


def test_writers_do_not_mix(tmp_path: Path) -> None:
    def work() -> None:
        events = RestartEvents(str(tmp_path / "log"))
        for iteration in range(50):
            write(events, iteration)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(event["iteration"] for event in read(tmp_path)) == sorted([*range(50)] * 4)


def test_the_end_of_a_job_whose_faults_come_back_is_a_line(tmp_path: Path) -> None:
    def main(rank: int, world_size: int) -> Any:
        @Wrapper(monitor_process_logfile=tmp_path / "rank_{rank}.log", max_same_faults=2)
        def train() -> None:
            raise ValueError("again")

        return outcome(train)

    ((kind, text, _),) = rank_values(main, 1)
    assert (kind, text) == ("ValueError", "again")
    first, last = read(tmp_path)
    assert (first["event"], first["iteration"], first["pause_s"]) == ("restart", 0, 0.0)
    assert (last["event"], last["iteration"]) == ("gave_up", 1)
    assert "the same fault has ended 2 iterations" in last["why"]
    assert last["reasons"][0]["summary"] == "ValueError: again"


def test_each_restart_of_a_job_is_one_line(tmp_path: Path) -> None:
    """An exception, a hang in a sleep, a death. The reasons reach all ranks, too."""

    def main(rank: int, world_size: int) -> Any:
        reasons = []

        @Wrapper(monitor_process_logfile=tmp_path / "rank_{rank}.log", **SHORT)
        def train(call: CallWrapper | None = None) -> Any:
            assert call is not None
            reasons.append([(record.rank, record.interruption.name) for record in call.state.interruptions])
            if call.iteration == 0 and rank == 1:
                raise ValueError("the fault")
            if call.iteration == 1 and rank == 1:
                time.sleep(60)
            if call.iteration == 2 and rank == 1:
                os.kill(os.getpid(), signal.SIGKILL)
            while call.iteration < 3:
                time.sleep(0.05)
            return call.iteration

        return train(), reasons

    result, _ = rank_values(main, 2, returncodes={1: -signal.SIGKILL})
    assert result == (3, [[], [(1, "EXCEPTION")], [(1, "SOFT_TIMEOUT")], [(1, "TERMINATED")]])
    exception, hang, death = read(tmp_path)
    assert [event["iteration"] for event in (exception, hang, death)] == [0, 1, 2]
    (reason,) = exception["reasons"]
    assert reason["summary"] == "ValueError: the fault"
    assert "in train" in reason["detail"]
    assert 'raise ValueError("the fault")' in reason["detail"]
    (reason,) = hang["reasons"]
    assert reason["summary"].startswith("no progress for ")
    assert "Thread MainThread" in reason["detail"]
    assert "time.sleep(60)" in reason["detail"]
    (reason,) = death["reasons"]
    assert "initial rank 1" in reason["summary"]
    assert death["terminated_ranks"] == [1]
    assert [(event["world_size_before"], event["world_size_after"]) for event in (exception, hang, death)] == [
        (2, 2),
        (2, 2),
        (2, 1),
    ]
    for event in (exception, hang, death):
        times = event["seconds"]
        assert {"outcome", "last_call", "aborted", "thrown", "finalize", "health", "barrier", "total"} <= times.keys()
        assert all(value >= 0 for value in times.values())
        assert sum(times.values()) - times["total"] <= times["total"] + 1e-3
    logs = [(tmp_path / f"rank_{rank}.log").read_text() for rank in (0, 1)]
    assert all(log.count("monitor_process") > 2 for log in logs)


def test_a_rank_that_holds_the_interpreter_is_killed_and_its_stacks_are_kept(tmp_path: Path) -> None:
    def main(rank: int, world_size: int) -> Any:
        limits = {
            **SHORT,
            **seconds(soft_timeout=2.5, hard_timeout=3.5, termination_grace_time=0.1, last_call_wait=30.0),
        }

        @Wrapper(monitor_process_logfile=tmp_path / "rank_{rank}.log", **limits)
        def train(call: CallWrapper | None = None) -> Any:
            assert call is not None
            if rank == 1:
                holds_the_interpreter_for_ever()
            while call.iteration == 0:
                time.sleep(0.05)
            return [(r.rank, r.interruption.name, r.detail) for r in call.state.interruptions]

        def holds_the_interpreter_for_ever() -> None:
            while True:
                ctypes.PyDLL(None).sleep(1000)

        return outcome(train)

    reasons, _ = rank_values(main, 2, returncodes={1: -signal.SIGTERM})
    assert [reason[:2] for reason in reasons][:2] == [(1, "SOFT_TIMEOUT"), (1, "HARD_TIMEOUT")]
    assert "in holds_the_interpreter_for_ever" in reasons[1][2]
    (event,) = read(tmp_path)
    assert "in holds_the_interpreter_for_ever" in event["reasons"][1]["detail"]
    assert event["terminated_ranks"] == [1]


def test_every_rank_sees_where_a_rank_hangs_that_holds_the_interpreter_and_lets_go(tmp_path: Path) -> None:
    """At the soft limit: the rank is restarted with the others, not killed."""

    def main(rank: int, world_size: int) -> Any:
        limits = {**SHORT, **seconds(soft_timeout=2.5, hard_timeout=20.0)}

        @Wrapper(monitor_process_logfile=tmp_path / "rank_{rank}.log", **limits)
        def train(call: CallWrapper | None = None) -> Any:
            assert call is not None
            if rank == 1 and call.iteration == 0:
                holds_the_interpreter()
            while call.iteration == 0:
                time.sleep(0.05)
            return [(r.rank, r.interruption.name, r.detail) for r in call.state.interruptions]

        def holds_the_interpreter() -> None:
            ctypes.PyDLL(None).sleep(4)

        return train()

    for ((rank, kind, detail),) in rank_values(main, 2):
        assert (rank, kind) == (1, "SOFT_TIMEOUT")
        assert "holds_the_interpreter" in detail
