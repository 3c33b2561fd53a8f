import pytest

from inprocess.fault_tolerance.timeouts_calc import TimeoutsCalc, TimeoutsCalcError
from inprocess.sections.timeouts import HeartbeatTimeouts, SectionTimeouts


def measured(step: float, *, gap: float = 0.1, times: int = 1, **options: float) -> TimeoutsCalc:
    calc = TimeoutsCalc(["step", "save"], start_time=0.0, **options)
    now = 0.0
    for _ in range(times):
        now += gap
        calc.update_on_section_open("step", now)
        now += step
        calc.update_on_section_close("step", now)
    return calc


def test_the_worked_case() -> None:
    configured = SectionTimeouts({"step": 10.0, "save": 60.0})
    first = measured(0.4).get_section_timeouts(["step"], False, configured)
    assert first.section == {"step": pytest.approx(2.0), "save": 60.0}
    assert first.calculated_sections == {"step"}
    second = measured(0.2).get_section_timeouts(["step"], False, first)
    assert second.section["step"] == pytest.approx(1.5)
    assert measured(0.2).get_section_timeouts(["step"], False, configured).section["step"] == pytest.approx(1.0)


def test_learning_again_does_not_lower_a_limit_within_a_process() -> None:
    calc = measured(0.4)
    first = calc.get_section_timeouts(["step"], False)
    calc.update_on_section_open("step", 10.0)
    calc.update_on_section_close("step", 10.1)
    assert calc.get_section_timeouts(["step"], False, first).section["step"] == pytest.approx(2.0)


def test_short_sections_get_the_floor() -> None:
    assert measured(0.001).get_section_timeouts(["step"], False).section["step"] == 1.0
    assert measured(0.01, floor=0.02).get_section_timeouts(["step"], False).section["step"] == pytest.approx(0.05)


def test_an_empty_selection_is_none_and_not_all() -> None:
    calc = TimeoutsCalc(["step"], start_time=0.0)
    assert calc.can_get_section_timeouts([], calc_out_of_section=False)
    assert not calc.can_get_section_timeouts([], calc_out_of_section=True)
    assert not calc.can_get_section_timeouts(None, calc_out_of_section=False)
    limits = calc.get_section_timeouts([], False, SectionTimeouts({"step": 3.0}, 4.0))
    assert (limits.section, limits.out_of_section, limits.calculated_sections) == ({"step": 3.0}, 4.0, set())


def test_a_selection_keeps_the_others() -> None:
    current = SectionTimeouts({"step": 7.0, "save": 8.0}, 9.0, {"save"})
    limits = measured(1.0).get_section_timeouts(["step"], True, current)
    assert limits.section == {"step": pytest.approx(5.0), "save": 8.0}
    assert limits.calculated_sections == {"step", "save"}
    assert limits.were_calculated
    with pytest.raises(TimeoutsCalcError, match="closed once"):
        measured(1.0).get_section_timeouts(["save"], False, current)
    with pytest.raises(TimeoutsCalcError, match="nonsense"):
        measured(1.0).get_section_timeouts(["nonsense"], False, current)


def test_wrong_events_are_errors() -> None:
    calc = TimeoutsCalc(["a"], start_time=0.0)
    with pytest.raises(TimeoutsCalcError, match="not open"):
        calc.update_on_section_close("a")
    for act in (calc.update_on_section_open, calc.update_on_section_close):
        with pytest.raises(TimeoutsCalcError, match="not in the configuration"):
            act("b")
    calc.update_on_section_open("a")
    with pytest.raises(TimeoutsCalcError, match="open already"):
        calc.update_on_section_open("a")
    calc.update_on_section_close_all()
    calc.update_on_section_close_all()
    assert not calc.open_sections


def test_gaps_are_between_the_last_close_and_the_next_open() -> None:
    calc = TimeoutsCalc(["a", "b"], start_time=0.0, safety_factor=2.0, floor=0.0)
    calc.update_on_section_open("a", 1.0)
    calc.update_on_section_open("b", 2.0)  # overlap: A(B)A, then B alone
    calc.update_on_section_close("a", 20.0)
    calc.update_on_section_close("b", 30.0)
    calc.update_on_section_open("a", 33.0)
    limits = calc.get_section_timeouts(["b"])
    assert limits.out_of_section == pytest.approx(6.0)
    calc.update_on_running_gap(99.0)  # a is open: there is no gap
    assert calc.get_section_timeouts(["b"]).out_of_section == pytest.approx(6.0)
    calc.update_on_section_close("a", 34.0)
    calc.update_on_running_gap(44.0)
    assert calc.get_section_timeouts(["b"]).out_of_section == pytest.approx(20.0)


def test_what_an_exception_ends_is_not_learned_from() -> None:
    calc = TimeoutsCalc(["a"], start_time=0.0)
    calc.update_on_section_open("a", 1.0)
    calc.update_on_section_close("a", 100.0, learn=False)
    assert not calc.can_get_section_timeouts(["a"], False)


def test_heartbeats() -> None:
    calc = TimeoutsCalc(start_time=0.0, safety_factor=2.0)
    calc.update_on_heartbeat(3.0)
    assert not calc.can_get_hb_timeouts()
    with pytest.raises(TimeoutsCalcError):
        calc.get_hb_timeouts()
    calc.update_on_heartbeat(4.0)
    learned = calc.get_hb_timeouts(HeartbeatTimeouts(60.0, 30.0))
    assert learned == HeartbeatTimeouts(6.0, 2.0, were_calculated=True)
    assert calc.get_hb_timeouts(HeartbeatTimeouts(8.0, 4.0, True)) == HeartbeatTimeouts(7.0, 3.0, True)
    late = TimeoutsCalc(start_time=0.0)
    late.reset_start_time(100.0)
    late.update_on_heartbeat(101.0)
    late.update_on_heartbeat(102.0)
    assert late.get_hb_timeouts().initial == pytest.approx(5.0)


def test_one_outlier_among_many_neither_sets_the_factor_nor_stays_for_ever() -> None:
    calc = measured(0.4, times=1024, safety_factor=5.0)
    now = 10_000.0
    calc.update_on_section_open("step", now)
    calc.update_on_section_close("step", now + 30)
    for _ in range(63):
        calc.update_on_section_open("step", now + 40)
        calc.update_on_section_close("step", now + 40.4)
    assert calc.get_section_timeouts(["step"], False).section["step"] == pytest.approx(30.0)  # not 150, not below
    for _ in range(64 * 32):
        calc.update_on_section_open("step", now + 40)
        calc.update_on_section_close("step", now + 40.4)
    assert calc.get_section_timeouts(["step"], False).section["step"] == pytest.approx(2.0)


def test_synchronizing_needs_a_process_group() -> None:
    with pytest.raises(TimeoutsCalcError, match="no process group"):
        TimeoutsCalc().synchronize_all()


def test_agreeing_is_the_maximum_of_all_ranks() -> None:
    slow, fast = measured(2.0), measured(0.4)
    for calc in (slow, fast):
        calc.agree([measured(2.0).measured(), measured(0.4).measured()])
    assert slow.get_section_timeouts(["step"]) == fast.get_section_timeouts(["step"])
    assert fast.get_section_timeouts(["step"]).section["step"] == pytest.approx(10.0)


def test_the_warmup_limit_needs_no_section_of_that_name() -> None:
    calc = TimeoutsCalc(["step", "warmup"], start_time=0.0)
    calc.update_on_section_open("step", 1.0)
    calc.update_on_section_close("step", 2.0)
    assert calc.can_get_section_timeouts()
    assert calc.get_section_timeouts(current=SectionTimeouts({"step": 9.0, "warmup": 90.0})).section["warmup"] == 90.0
