"""The time of a job by what it was for, compared with simulated jobs of which the truth is known."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.template import quick_python
from tests.tools.inspect_ckpt.commands import Commands
from tools.inspect_ckpt.goodput import KINDS, Goodput, goodput, read_events

Event = dict[str, Any]


def event(name: str, time: float, rank: int = 0, **fields: Any) -> Event:
    return {"event": name, "time": time, "rank": rank, **fields}


def staged(step: int, time: float, stall_s: float, rank: int = 0) -> Event:
    return event("SaveStaged", time, rank, step=step, bytes=1, wait_s=0.0, stage_s=stall_s, stall_s=stall_s)


def restored(step: int, time: float, seconds: float, rank: int = 0) -> Event:
    return event("Restored", time, rank, step=step, seconds=seconds)


def restarted(iteration: int, time: float, seconds: float) -> Event:
    return event("Restarted", time, iteration=iteration, seconds=seconds, cause="rank 1: boom")


def times(found: Goodput) -> dict[str, float]:
    names = ("training", "lost", "saving", "restarting", "restoring")
    return {name: pytest.approx(found.seconds(name)) for name in names if found.seconds(name)}


def test_a_fault_in_the_process() -> None:
    events = [
        event("SaveStarted", 100.0, step=1),
        staged(1, 101.0, 1.0),
        event("SavePublished", 103.0, step=1),
        restored(1, 113.0, 0.5),
        restarted(1, 113.5, 2.5),  # the fault was at 111
        event("SavePublished", 120.0, step=2),
    ]
    assert times(goodput(events)) == {"saving": 1.0, "lost": 10.0, "restarting": 2.0, "restoring": 0.5, "training": 6.5}


def test_a_new_process_counts_from_the_last_event_before_its_restore() -> None:
    events = [
        event("SaveStarted", 100.0, step=1),
        staged(1, 101.0, 1.0),
        event("SavePublished", 103.0, step=1),
        restored(1, 200.0, 10.0),
        staged(2, 211.0, 1.0),
    ]
    assert times(goodput(events)) == {
        "saving": 2.0,
        "lost": 2.0,
        "restarting": 87.0,
        "restoring": 10.0,
        "training": 10.0,
    }


def test_a_restart_from_scratch_loses_everything() -> None:
    events = [event("SaveStarted", 10.0, step=1), restarted(1, 21.0, 1.0), event("SaveStarted", 30.0, step=1)]
    assert times(goodput(events)) == {"lost": 10.0, "restarting": 1.0, "training": 9.0}


def test_the_slowest_rank_of_a_save_counts() -> None:
    events = [event("SaveStarted", 0.0, step=1), staged(1, 1.0, 1.0), staged(1, 3.0, 3.0, rank=1)]
    events.append(event("SavePublished", 10.0, step=1))
    assert times(goodput(events)) == {"saving": 3.0, "training": 7.0}


def test_a_step_that_is_saved_again_is_another_save() -> None:
    events = [event("SaveStarted", 0.0, step=1), staged(1, 1.0, 1.0)]  # rank 1 died before it had staged its part
    events += [restored(0, 10.0, 1.0), staged(1, 20.0, 5.0, rank=1), staged(1, 20.0, 4.0)]
    assert times(goodput(events))["saving"] == 6.0


def test_no_events_are_no_time() -> None:
    assert goodput([]).document() == dict.fromkeys(
        ["goodput", "goodput_with_pauses", "wall_s", *(f"{kind}_s" for kind in KINDS)], 0.0
    )


def closed(time: float, rank: int = 0, process: str = "") -> Event:
    return event("Closed", time, rank, process=process or f"first {rank}")


def ends_at(time: float, ranks: int = 2) -> list[Event]:
    """The events of a run that has published step 1, until shortly before its end."""
    begun = [event("SaveStarted", time - 20, rank, step=1) for rank in range(ranks)]
    saved = [staged(1, time - 19, 1.0, rank) for rank in range(ranks)]
    return [*begun, *saved, *(event("SavePublished", time - 2, rank, step=1) for rank in range(ranks))]


def again(time: float) -> list[Event]:
    """The next run begins with a restore that ends at this time, one rank later than the other."""
    return [restored(1, time, 1.0), restored(1, time + 0.5, 1.0, 1), staged(2, time + 10, 1.0)]


def test_a_pause_after_a_normal_end_is_not_running() -> None:
    events = [*ends_at(120.0), closed(119.0), closed(120.0, 1), *again(500.0)]
    found = goodput(events)
    assert times(found) == {"saving": 2.0, "restoring": 1.5, "training": 27.5}
    assert found.seconds("not_running") == pytest.approx(379.0)
    assert found.goodput == pytest.approx(27.5 / 31.0)
    assert found.goodput_with_pauses == pytest.approx(27.5 / 410.0)
    assert "with the pauses" in found.share


def test_a_pause_before_a_run_that_restores_nothing_is_not_running() -> None:
    events = [*ends_at(120.0), closed(120.0), closed(120.0, 1), event("SaveStarted", 520.0, step=1)]
    assert goodput(events).seconds("not_running") == pytest.approx(400.0)


def test_work_after_the_last_save_of_a_run_that_ended_is_lost() -> None:
    events = [*ends_at(120.0, 1), staged(2, 110.0, 1.0), closed(120.0), restored(1, 500.0, 1.0)]
    found = goodput(sorted(events, key=lambda each: each["time"]))
    assert found.seconds("lost") == pytest.approx(18.0)  # of 19 the second save stalled for 1
    assert found.seconds("not_running") == pytest.approx(379.0)


def test_a_rank_that_was_not_closed_has_died() -> None:
    events = [*ends_at(120.0), closed(120.0), *again(500.0)]
    found = goodput(events)
    assert found.seconds("restarting") == pytest.approx(379.0)
    assert found.seconds("not_running") == 0.0
    assert found.goodput == found.goodput_with_pauses


def test_a_run_that_goes_on_with_fewer_ranks_ends_with_those() -> None:
    events = [*ends_at(100.0), restarted(1, 110.0, 1.0), *ends_at(140.0, 1), closed(140.0), restored(1, 500.0, 1.0)]
    found = goodput(events)
    assert found.seconds("not_running") == pytest.approx(359.0)


@pytest.mark.parametrize("is_closed", [True, False])
def test_a_job_that_was_asked_to_stop_is_requeued(is_closed: bool) -> None:
    """With or without a `close`: a program may leave its block by an exit."""
    stop = [event("Stopped", 116.0, rank, step=1, cause="signal SIGTERM") for rank in range(2)]
    ends = [closed(120.0), closed(120.0, 1)] if is_closed else []
    events = [*ends_at(120.0), *stop, *ends, *again(500.0)]
    found = goodput(sorted(events, key=lambda each: each["time"]))
    assert found.seconds("requeued") == pytest.approx(379.0 if is_closed else 381.0)
    assert found.seconds("restarting") == found.seconds("not_running") == 0.0


def of(process: str, *events: Event) -> list[Event]:
    return [{**each, "process": process} for each in events]


def test_a_process_of_which_more_events_follow_has_not_ended() -> None:
    """It was killed later, in a save or after it: the time between is training."""
    run = of("a", *ends_at(120.0, 1), closed(120.0))
    other = event("SaveStarted", 1120.0, step=2), staged(2, 1121.0, 1.0)
    for later in (other[:1], other, (*other, closed(1130.0))):
        assert goodput([*run, *of("a", *later)]).seconds("not_running") == 0.0
        assert goodput([*run, *of("b", *later)]).seconds("not_running") == pytest.approx(1000.0)
        following = of("b", restored(1, 2000.0, 10.0), staged(2, 2100.0, 1.0))
        last = later[-1]["time"]
        expected = {"not_running": 1990.0 - last} if later[2:] else {"restarting": 1990.0 - last}
        found = goodput([*run, *of("a", *later), *following])
        assert {kind: found.seconds(kind) for kind in ("not_running", "restarting") if found.seconds(kind)} == {
            kind: pytest.approx(seconds) for kind, seconds in expected.items()
        }


@pytest.mark.parametrize("process", ["a", "b"])
def test_a_stop_ends_at_an_event_of_another_process(process: str) -> None:
    """Which may have restored with something else than a Checkpointer."""
    stop = of("a", *ends_at(120.0, 1), event("Stopped", 121.0, step=1, cause="signal SIGTERM"))
    found = goodput([*stop, *of(process, event("SaveStarted", 500.0, step=2))])
    assert found.seconds("requeued") == pytest.approx(0.0 if process == "a" else 379.0)


def test_what_is_loaded_before_a_restore_is_not_where_training_goes_on() -> None:
    """Such as weights of another run, by `ckpt.open` or an adapter: its step is none of this job."""
    crashed = of("a", event("SaveStarted", 100.0, step=1), staged(1, 101.0, 1.0), event("SavePublished", 103.0, step=1))
    loads = of("b", restored(5000, 200.0, 10.0), restored(1, 215.0, 4.0), staged(2, 221.0, 1.0))
    expected = {"saving": 2.0, "lost": 2.0, "restarting": 98.0, "restoring": 14.0, "training": 5.0}
    assert times(goodput([*crashed, *loads])) == expected
    stop = of("a", event("Stopped", 103.5, step=1, cause="signal SIGTERM"), closed(104.0))
    found = goodput([*crashed, *stop, *loads])  # the last save was waited for
    assert times(found) == {"saving": 2.0, "restarting": 11.0, "restoring": 14.0, "training": 8.0}
    assert found.seconds("requeued") == pytest.approx(86.0)


def test_what_is_loaded_when_all_is_saved_loses_nothing() -> None:
    """As by `Trainer.test(ckpt_path="best")`: nothing is trained again."""
    saves = [staged(1, 101.0, 1.0), staged(2, 111.0, 1.0), event("SavePublished", 112.0, step=2)]
    run = of("a", event("SaveStarted", 100.0, step=1), *saves, restored(1, 130.0, 2.0), event("Closed", 140.0))
    expected = {"saving": 2.0, "restoring": 2.0, "training": 36.0}
    assert times(goodput(run)) == expected
    back = of("a", event("SaveStarted", 150.0, step=3), staged(3, 151.0, 1.0))  # the program went back, and trained on
    assert goodput([*run[:-1], *back]).seconds("lost") == pytest.approx(10.0)


_PROGRAM = """
import os, signal, sys, time
import ckpt, torch
from ckpt.sinks import JsonLines

kind, root, file = sys.argv[1:]
ckpt.observe(JsonLines(file))
state = {"weights": torch.zeros(10)}


def save(step, folder):
    with ckpt.Checkpointer(f"{root}/{folder}") as checkpointer:
        checkpointer.save(state, step)


save(1, "one")
if kind == "beside":
    beside = ckpt.Checkpointer(f"{root}/beside")
    beside.save(state, 1)
save(2, "two")
if kind == "raises":
    raise KeyError(kind)
if kind == "killed":
    while not os.path.exists(file) or open(file).read().count("SavePublished") < 2:
        time.sleep(0.01)
    os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.parametrize("kind", ["ends", "killed", "raises", "beside"])
def test_only_a_process_whose_work_is_done_is_closed(kind: str, tmp_path: Path) -> None:
    """It has closed a Checkpointer for each save, as a save of Megatron does."""
    file = tmp_path / "events.jsonl"
    python = sys.executable if kind == "raises" else quick_python()  # the interpreter notes what ends it
    command = [python, "-c", _PROGRAM, kind, str(tmp_path), str(file)]
    code = subprocess.run(command, timeout=60, stderr=subprocess.PIPE, check=False).returncode
    assert code == {"ends": 0, "killed": -signal.SIGKILL, "raises": 1, "beside": 0}[kind]
    events = list(read_events([str(file)]).events)
    assert [each["event"] for each in events].count("Closed") == (kind == "ends")
    assert len({each["process"] for each in events}) == 1
    end = events[-1]["time"]
    found = goodput([*events, *of("next", restored(2, end + 1000.0, 1.0), event("SaveStarted", end + 1010.0, step=3))])
    assert found.seconds("not_running") == pytest.approx(999.0 if kind == "ends" else 0.0)
    assert found.seconds("restarting") == pytest.approx(0.0 if kind == "ends" else 999.0)


# -- against a simulation ----------------------------------------------------------------------------------------------


@dataclass
class Job:
    """A job of some ranks that all do the same; keeps its own account of what the time was for."""

    ranks: int
    now: float = 1000.0
    events: list[Event] = field(default_factory=list)
    truth: dict[str, float] = field(
        default_factory=lambda: dict.fromkeys(("training", "lost", "saving", "restarting", "restoring"), 0.0)
    )
    at_risk: float = 0.0  # training since the newest published step was staged or restored
    unpublished: float = 0.0  # of this, until the newest step was staged that is not published yet
    silent: float = 0.0  # training since the last event
    published: int | None = None
    pending: int | None = None
    step: int = 0
    iteration: int = 0

    def tell(self, make: Any, *arguments: Any) -> None:
        for rank in range(self.ranks):
            self.events.append({**make(*arguments), "rank": rank})
        self.silent = 0.0

    def train(self, seconds: float) -> None:
        self.now += seconds
        self.at_risk += seconds
        self.silent += seconds

    def save(self, stall_s: float) -> None:
        self.step += 1
        self.tell(lambda: event("SaveStarted", self.now, step=self.step))
        self.now += stall_s
        self.truth["saving"] += stall_s
        self.tell(staged, self.step, self.now, stall_s)
        self.pending, self.unpublished = self.step, self.at_risk

    def publish(self) -> None:
        if self.pending is not None:
            self.tell(lambda: event("SavePublished", self.now, step=self.pending))
            self.truth["training"] += self.unpublished
            self.at_risk -= self.unpublished
            self.published, self.pending, self.unpublished = self.pending, None, 0.0

    def restart(self, restart_s: float, restore_s: float) -> None:
        """An exception on some rank, and a restart in the processes. What is not published is given up."""
        begin = self.now
        self.truth["lost"] += self.at_risk
        self.now += restart_s
        self.truth["restarting"] += restart_s
        self._restored(restore_s)
        self.iteration += 1
        self.tell(restarted, self.iteration, self.now, self.now - begin)

    def kill(self, down_s: float, restore_s: float) -> None:
        """All processes die, and are started again. What they did after the last event is known to nobody."""
        if self.published is None:
            return
        self.truth["lost"] += self.at_risk - self.silent
        self.truth["restarting"] += self.silent + down_s
        self.now += down_s
        self._restored(restore_s)

    def _restored(self, restore_s: float) -> None:
        self.at_risk, self.pending, self.unpublished = 0.0, None, 0.0
        if self.published is not None:
            self.now += restore_s
            self.truth["restoring"] += restore_s
            self.tell(restored, self.published, self.now, restore_s)
            self.step = self.published

    def end(self) -> None:
        self.save(0.25)
        self.publish()
        self.truth["training"] += self.at_risk


_SECONDS = st.integers(1, 4000).map(lambda number: number / 8)
_ACTIONS = st.one_of(
    st.tuples(st.just("train"), _SECONDS),
    st.tuples(st.just("save"), _SECONDS),
    st.tuples(st.just("publish")),
    st.tuples(st.just("restart"), _SECONDS, _SECONDS),
    st.tuples(st.just("kill"), _SECONDS, _SECONDS),
)


@settings(max_examples=300, deadline=None)
@given(st.integers(1, 3), st.lists(_ACTIONS, max_size=30), st.randoms(use_true_random=False))
def test_goodput_is_that_of_the_simulated_job(ranks: int, actions: list[Any], random: Any) -> None:
    job = Job(ranks)
    job.save(1.0)
    for action, *arguments in actions:
        getattr(job, action)(*arguments)
        job.train(0.125)  # no two things at the same moment
    job.end()
    random.shuffle(job.events)
    events = sorted(job.events, key=lambda each: float(each["time"]))
    found = goodput(events)
    assert found.wall_s == pytest.approx(job.now - 1000.0)
    assert {name: found.seconds(name) for name in job.truth} == pytest.approx(job.truth)
    assert found.goodput == pytest.approx(job.truth["training"] / found.wall_s)


# -- files and the command ---------------------------------------------------------------------------------------------


def test_lines_that_are_no_events_are_counted(tmp_path: Path) -> None:
    file = tmp_path / "events.jsonl"
    good = [json.dumps(staged(1, 5.0, 1.0)), json.dumps(event("Other", 6.0))]
    bad = [
        '{"event": "SaveStaged", "time": 1.0, "ra',
        "[1]",
        '{"event": "SaveStaged", "time": 1.0, "rank": 0}',
        "[" * 99999,
    ]
    bad += ['{"event": "X", "time": NaN, "rank": 0}', '{"event": ["X"], "time": 1, "rank": 0}']
    file.write_text("\n".join([*bad, *good, ""]))
    found = read_events([str(file)])
    assert [each["event"] for each in found.events] == ["SaveStaged", "Other"]
    assert found.skipped == len(bad)


def test_the_command_prints_a_table_or_json(run: Commands, saved: dict[str, Path], tmp_path: Path) -> None:
    file = tmp_path / "events.jsonl"
    chosen = {"policy": "Optimal(mtbf=None)", "interval_s": 120.0, "cost_s": 0.6, "mtbf_s": 3600.0, "faults": 2}
    lines = [event("SaveStarted", 10.0, step=1), staged(1, 12.0, 2.0), event("SavePublished", 20.0, step=1)]
    lines.append(event("PaceChanged", 15.0, **chosen))
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    text = run("report", saved["two"], "--goodput", "--events", file)
    assert "80.0%" in text
    assert "by Optimal(mtbf=None)" in text
    assert "0.50%" in text  # of training goes into saves
    assert "1.67%" in text  # is destroyed
    document = run.json("report", saved["two"], "--goodput", "--events", file)
    assert document["goodput"] == pytest.approx(0.8)
    assert document["saving_s"] == pytest.approx(2.0)
    assert "--events" in run.refused("report", saved["two"], "--goodput")
    empty = tmp_path / "empty"
    empty.touch()
    assert "no events" in run.refused("report", saved["two"], "--goodput", "--events", empty)
