"""Deadlines and when to look at them, with a clock of the test's own: the wall clock plays no part anywhere."""

import time

import pytest

from inprocess.fault_tolerance.config import FaultToleranceConfig
from inprocess.fault_tolerance.recorder import Recorder
from inprocess.sections.board import Board
from inprocess.sections.board_reader import Activity, Limits, read_board
from inprocess.sections.deadlines import AlarmAction, SectionWatch, deadlines
from inprocess.sections.gate import SectionGate
from inprocess.sections.making import make_board

NS = 1_000_000_000


class Rank:
    """A recorder, a watch and one clock for both."""

    def __init__(self, grace_s: float | None = None, **settings: object) -> None:
        import os

        self.now = 1000 * NS
        self.alive = False
        self.board, fd = make_board(FaultToleranceConfig.from_kwargs(False, **settings))
        os.close(fd)
        self.board.begin(0, self.now)
        self.recorder = Recorder(self.board, 5.0, clock_ns=lambda: self.now)
        self.watch = SectionWatch(self.board, grace_s=grace_s, is_alive=lambda _: self.alive)

    def after(self, seconds: float) -> AlarmAction | None:
        """Let time pass, as the loop of a monitor would: it looks when it is due."""
        end = self.now + round(seconds * NS)
        looks = 0
        if self.watch.next_look_s is None and (alarm := self.watch.look(self.now)) is not None:
            return alarm.action
        while self.watch.next_look_s is not None and self.watch.next_look_s * NS <= end:
            self.now = max(self.now + 1, round(self.watch.next_look_s * NS))
            alarm = self.watch.look(self.now)
            looks += 1
            assert looks < 10_000
            if alarm is not None:
                return alarm.action
        self.now = end
        return None


def test_any_overdue_section_counts_whatever_the_others_do() -> None:
    activity = Activity(0.0, 0.0, open={"late": 1.0, "well": 9.0})
    found = deadlines(activity, Limits(sections={"late": 2.0, "well": 100.0}))
    assert [(d.section, d.at) for d in found] == [("late", 3.0), ("well", 109.0)]


def test_null_means_never() -> None:
    assert not deadlines(Activity(0.0, 0.0, open={"a": 0.0}), Limits(sections={"a": None}, out_of_section=1.0))
    assert Limits(sections={"a": None}).shortest is None
    rank = Rank(rank_section_timeouts={"a": None})
    rank.recorder.open("a")
    assert rank.after(10_000.0) is None


def test_heartbeats() -> None:
    limits = Limits(initial_beat=10.0, beat=2.0)
    assert [d.at for d in deadlines(Activity(1.0, 1.0), limits)] == [11.0]
    assert [d.at for d in deadlines(Activity(1.0, 1.0, last_beat=5.0), limits)] == [7.0]


def test_outside_needs_no_section_called_step() -> None:
    limits = Limits(out_of_section=3.0, sections={"a": 1.0})
    assert [d.at for d in deadlines(Activity(0.0, 4.0), limits)] == [7.0]


def test_a_warmup_without_limit_watches_nothing_before_the_first_step() -> None:
    limits = Limits(out_of_section=3.0, sections={"step": 1.0, "warmup": None}, num_warmup_iterations=2)
    assert not deadlines(Activity(0.0, 0.0), limits)
    assert not deadlines(Activity(0.0, 0.0, open={"step": 1.0}, step_age=1), limits)
    assert [d.at for d in deadlines(Activity(0.0, 0.0, open={"step": 1.0}, step_age=2), limits)] == [2.0]
    assert [d.at for d in deadlines(Activity(0.0, 4.0, step_age=0), limits)] == [7.0]


def test_the_warmup_limit_holds_for_the_first_iterations() -> None:
    rank = Rank(rank_section_timeouts={"step": 1.0, "warmup": 5.0}, num_warmup_iterations=2)
    for limit in (5.0, 5.0, 1.0):
        rank.recorder.open("step")
        assert [d.limit for d in deadlines(*_looked(rank.board, rank.now))] == [limit]
        rank.recorder.close("step")
    known = Rank(rank_section_timeouts={"step": 1.0, "warmup": 5.0}, num_warmup_iterations=2)
    for iteration, limit in ((7, 5.0), (8, 5.0), (8, 5.0), (9, 1.0)):  # 8 is done twice
        known.recorder.set_iteration(iteration)
        known.recorder.open("step")
        assert [d.limit for d in deadlines(*_looked(known.board, known.now))] == [limit]
        known.recorder.close("step")


def _looked(board: Board, now: int) -> tuple[Activity, Limits]:
    reading = read_board(board, now)
    return reading.activity, reading.limits


def test_what_opens_unseen_is_late_in_time() -> None:
    """The rank wakes nobody: a short section opens while the monitor sleeps towards the deadline of a long one."""
    rank = Rank(rank_section_timeouts={"long": 600.0, "short": 0.3})
    rank.recorder.open("long")
    assert rank.after(100.05) is None
    rank.recorder.close("long")
    rank.recorder.open("short")
    opened = rank.now
    assert rank.after(10.0) is AlarmAction.KILL
    assert 0.3 <= (rank.now - opened) / NS <= 0.31


def test_a_change_of_limits_holds_for_what_is_open() -> None:
    rank = Rank(rank_section_timeouts={"a": 100.0})
    rank.recorder.open("a")
    assert rank.after(10.0) is None
    beats, sections = rank.board.limits()
    rank.recorder.set_limits(beats, type(sections)({"a": 11.0}))
    rank.watch.look(rank.now)  # as after every message
    assert rank.after(0.99) is None
    assert rank.after(0.02) is AlarmAction.KILL


def test_a_rank_that_stays_late_is_killed_again_at_each_check() -> None:
    rank = Rank(rank_section_timeouts={"a": 1.0})
    rank.recorder.open("a")
    assert rank.after(1.01) is AlarmAction.KILL
    for _ in range(3):  # SectionWatch(repeat_s=5.0)
        assert rank.after(4.98) is None
        assert rank.after(0.03) is AlarmAction.KILL
    rank.recorder.close("a")
    assert rank.after(100.0) is None


def test_limits_start_again_after_a_suspension_of_the_monitor() -> None:
    rank = Rank(rank_section_timeouts={"short": 10.0, "long": 100.0, "none": None})
    for name in ("short", "long", "none"):
        rank.recorder.open(name)
    assert rank.after(9.0) is None
    rank.now += 20 * NS
    rank.watch.note_suspension(20.0)
    assert rank.watch.look(rank.now) is None
    assert rank.after(9.9) is None
    rank.now += 2 * NS
    rank.watch.note_suspension(2.0)  # too short for these limits
    alarm = rank.watch.look(rank.now)
    assert alarm is not None
    assert [deadline.section for deadline in alarm.overdue] == ["short"]
    rank.recorder.close("short")
    assert rank.after(100.0 - 11.9 - 0.1) is None
    assert rank.after(0.2) is AlarmAction.KILL


def test_the_wall_clock_plays_no_part(monkeypatch: pytest.MonkeyPatch) -> None:
    def stepped() -> float:
        raise AssertionError("the wall clock was asked")

    monkeypatch.setattr(time, "time", stepped)
    rank = Rank(rank_section_timeouts={"a": 1.0}, rank_heartbeat_timeout=60.0)
    rank.recorder.beat()
    with_background = rank.recorder.begin_in_background("a", rank.now)
    rank.recorder.open("a")
    assert rank.after(2.0) is AlarmAction.KILL
    rank.recorder.close("a")
    rank.recorder.end_in_background(with_background, 1.0)
    assert rank.recorder.calc.can_get_section_timeouts(["a"], False)


def test_the_ladder() -> None:
    rank = Rank(grace_s=2.0, rank_section_timeouts={"a": 1.0})
    rank.recorder.open("a")
    start = rank.now
    assert rank.after(5.0) is AlarmAction.RESTART
    assert (rank.now - start) / NS == pytest.approx(1.0, abs=0.01)
    assert rank.after(5.0) is AlarmAction.KILL
    assert (rank.now - start) / NS == pytest.approx(3.0, abs=0.01)


def test_the_ladder_ends_with_what_was_late() -> None:
    rank = Rank(grace_s=2.0, rank_section_timeouts={"a": 1.0, "b": None})
    rank.recorder.open("a")
    assert rank.after(5.0) is AlarmAction.RESTART
    rank.recorder.close("a")
    rank.recorder.open("b")
    assert rank.after(50.0) is None


def test_a_monitor_that_looks_late_still_restarts_first_and_gives_the_rank_its_time() -> None:
    rank = Rank(grace_s=2.0, rank_section_timeouts={"a": 1.0})
    rank.recorder.open("a")
    rank.now += 100 * NS
    assert rank.after(0.1) is AlarmAction.RESTART
    assert rank.after(1.9) is None
    assert rank.after(0.2) is AlarmAction.KILL


def test_a_rank_that_executes_bytecode_may_be_slow() -> None:
    rank = Rank(grace_s=2.0, rank_section_timeouts={"a": 1.0})
    rank.alive = True
    rank.recorder.open("a")
    assert rank.after(20.0) is None
    rank.alive = False
    assert rank.after(0.3) is AlarmAction.RESTART


def test_a_restart_begins_anew_and_drops_what_is_old() -> None:
    rank = Rank(grace_s=2.0, rank_section_timeouts={"a": 1.0, "b": 1.0}, rank_out_of_section_timeout=3.0)
    beats, sections = rank.board.limits()
    rank.recorder.set_limits(beats, type(sections)({"a": 1.5, "b": 1.0}, 3.0, {"a"}))
    rank.recorder.open("a")
    assert rank.after(5.0) is AlarmAction.RESTART
    rank.board.drop_events()  # unwinding
    assert rank.recorder.close("a") is False
    assert rank.recorder.open("b") is False
    rank.board.stop_counting()
    assert rank.after(1000.0) is None
    rank.board.begin(1, rank.now)
    assert rank.after(2.9) is None
    assert rank.recorder.close("a") is False  # of the iteration before
    assert rank.recorder.open("a") is True
    assert rank.board.limits()[1].section["a"] == 1.5
    assert rank.after(1.4) is None
    assert rank.recorder.close("a") is True
    assert rank.after(2.9) is None
    assert rank.after(0.2) is AlarmAction.RESTART
    assert read_board(rank.board, rank.now).restart_index == 1


def test_a_hang_before_the_first_event_after_a_restart_is_seen() -> None:
    rank = Rank(rank_section_timeouts={"a": 1.0}, rank_out_of_section_timeout=3.0)
    rank.recorder.open("a")
    rank.board.stop_counting()
    rank.board.begin(1, rank.now)
    assert rank.after(2.9) is None
    assert rank.after(0.2) is AlarmAction.KILL


def test_a_new_client_takes_over_after_a_restart() -> None:
    rank = Rank(rank_section_timeouts={"a": 1.0})
    assert rank.board.has_live_client()
    rank.board.stop_counting()
    rank.board.begin(1, rank.now)
    assert not rank.board.has_live_client()
    fresh = Recorder(rank.board, 5.0, clock_ns=lambda: rank.now)
    assert fresh.open("a")
    assert rank.recorder.close("a") is False  # dropped
    assert "a" in read_board(rank.board, rank.now).activity.open


def test_a_frozen_clock_stands_still() -> None:
    rank = Rank(rank_section_timeouts={"a": 1.0})
    rank.recorder.open("a")
    assert rank.after(0.9) is None
    rank.board.freeze(rank.now)
    assert rank.after(500.0) is None
    rank.board.thaw(rank.now)
    thawed = rank.now
    assert rank.after(5.0) is AlarmAction.KILL
    assert (rank.now - thawed) / NS == pytest.approx(0.1, abs=0.02)


def test_what_was_learned_leaves_out_frozen_time() -> None:
    rank = Rank(rank_section_timeouts={"a": None})
    rank.recorder.open("a")
    rank.board.freeze(rank.now)
    rank.now += 100 * NS
    rank.board.thaw(rank.now)
    rank.now += NS
    rank.recorder.close("a")
    assert rank.recorder.calc.get_section_timeouts(["a"], False).section["a"] == pytest.approx(5.0)


def test_a_writer_that_stops_in_the_middle_is_read() -> None:
    rank = Rank(rank_section_timeouts={"a": 1.0})
    rank.recorder.open("a")
    rank.board.words[1] += 1  # odd: in the middle of an event
    assert rank.after(2.0) is AlarmAction.KILL


def test_a_gate_without_settings_does_nothing() -> None:
    gate = SectionGate(None)
    gate.begin(0)
    gate.freeze()
    gate.thaw()
    gate.interrupt()
    gate.leave()
    gate.close()
    assert gate.fd is None


def _background(rank: Rank) -> dict[str, float]:
    return {name: round(at, 6) for name, at in read_board(rank.board, rank.now).activity.background.items()}


def test_what_goes_on_in_the_background_is_neither_open_nor_the_end_of_a_gap() -> None:
    rank = Rank(rank_section_timeouts={"write": 1.0, "step": 9.0}, rank_out_of_section_timeout=3.0)
    recorder = rank.recorder
    recorder.open("step")
    recorder.close("step")
    key = recorder.begin_in_background("write", rank.now)
    assert rank.after(2.0) is None  # nobody but the rank acts on it
    assert recorder.left_in_background(key) == -1.0
    assert recorder.open_sections == ()
    recorder.end_in_background(key, 1.5)
    assert rank.after(0.99) is None
    assert rank.after(0.02) is AlarmAction.KILL  # 3 s after "step", whatever was in between
    assert _background(rank) == {}


def test_several_go_on_at_once_and_each_is_learned_from() -> None:
    rank = Rank(rank_section_timeouts={"write": 60.0})
    recorder = rank.recorder
    first = recorder.begin_in_background("write", rank.now)
    rank.after(1.0)
    second = recorder.begin_in_background("write", rank.now)
    assert _background(rank) == {"write": 1000.0}
    rank.after(1.0)
    recorder.end_in_background(first, 2.0)
    assert _background(rank) == {"write": 1001.0}
    recorder.end_in_background(first, 50.0)  # a second time
    recorder.end_in_background(second, None)
    assert recorder.calc.get_section_timeouts(None, False).section == {"write": 10.0}


def test_a_change_of_limits_and_a_frozen_clock_hold_for_the_background() -> None:
    rank = Rank(rank_section_timeouts={"write": None})
    key = rank.recorder.begin_in_background("write", rank.now)
    assert rank.recorder.left_in_background(key) is None
    beats, sections = rank.board.limits()
    rank.recorder.set_limits(beats, type(sections)({"write": 5.0}))
    rank.now += 2 * NS
    rank.board.freeze(rank.now)
    rank.now += 100 * NS
    assert rank.recorder.left_in_background(key) == 3.0
    rank.board.thaw(rank.now)
    rank.recorder.end_in_background(key, 102.0)
    assert rank.recorder.calc.get_section_timeouts(None, False).section == {"write": 10.0}


def test_a_restart_forgets_the_background() -> None:
    rank = Rank(rank_section_timeouts={"write": 1.0})
    key = rank.recorder.begin_in_background("write", rank.now)
    rank.now += 5 * NS
    rank.board.drop_events()
    assert rank.recorder.left_in_background(key) is None
    assert rank.recorder.begin_in_background("write", rank.now) is None
    rank.board.begin(1, rank.now)
    assert rank.recorder.left_in_background(key) is None
    rank.recorder.end_in_background(key, 5.0)
    assert _background(rank) == {}
    assert not rank.recorder.calc.can_get_section_timeouts(["write"], False)
