"""The judge finds what it must find in journals that are written here, and nothing in those of a good job."""

from collections.abc import Iterable, Sequence
from dataclasses import replace

import pytest

from tests.inprocess.nodes.journal import Line
from tests.inprocess.nodes.judge import Apart, End, Facts, Limits, Published, Stopped, Verdict, judge

LIMITS = Limits(quiet_s=25.0, alone_s=4.0)
IMPATIENT = replace(LIMITS, quiet_s=10.0)
ALL = frozenset(range(4))


def steps(
    process: int, begin: float, end: float, iteration: int = 0, rank: int | None = None, members: Iterable[int] = ALL
) -> list[Line]:
    """A step each tenth of a second; the last one just before `end`."""
    its = list(members)
    number = its.index(process) if rank is None else rank
    mask = sum(1 << member for member in its)
    count = round((end - begin) * 10)
    times = [begin + step / 10 for step in range(count)]
    return [Line(time, 1000 + process, process, "step", iteration, number, len(its), mask) for time in times]


def done(process: int, time: float) -> list[Line]:
    return [Line(time, 1000 + process, process, "done")]


def facts(ends: Sequence[float] = (20.0,) * 4, **more: object) -> Facts:
    its = {process: End(time, 0) for process, time in enumerate(ends)}
    return replace(Facts(started=0.0, now=30.0, processes=ALL, ends=its), **more)  # type: ignore[arg-type]


def verdicts(lines: Iterable[Line], about: Facts) -> set[Verdict]:
    return {violation.verdict for violation in judge(lines, about, LIMITS)}


def good_restart() -> list[Line]:
    """Process 3 is lost after 5 s; the others go on after 8 s, and complete."""
    survivors = [0, 1, 2]
    return [
        *(line for process in ALL for line in steps(process, 1.0, 5.0)),
        *(line for process in survivors for line in steps(process, 8.0, 19.0, 1, members=survivors)),
        *(line for process in survivors for line in done(process, 19.5)),
    ]


def split_brain() -> list[Line]:
    """Two halves, which lose each other after 5 s and both go on after 8 s."""
    return [
        *(line for process in ALL for line in steps(process, 1.0, 5.0)),
        *(line for half in ([0, 1], [2, 3]) for process in half for line in steps(process, 8.0, 19.0, 1, members=half)),
    ]


def test_a_good_restart_has_no_violation() -> None:
    about = facts((20.0, 20.0, 20.0, 5.0), must_finish=frozenset({0, 1, 2}), apart=[Apart(frozenset({3}), 5.0)])
    assert judge(good_restart(), about, LIMITS) == []


def test_a_planted_split_brain_is_found() -> None:
    violations = judge(split_brain(), facts(), LIMITS)
    assert {violation.verdict for violation in violations} == {Verdict.TWO_JOBS, Verdict.TWO_OF_ONE_RANK}
    assert any("rank 0 is process 0" in violation.text and "process 2" in violation.text for violation in violations)


def test_a_split_brain_is_found_without_members() -> None:
    lines = [replace(line, members=None) for line in split_brain()]
    assert Verdict.TWO_OF_ONE_RANK in verdicts(lines, facts())


def test_halves_that_work_one_after_the_other_are_two_jobs() -> None:
    lines = [
        *(line for process in ALL for line in steps(process, 1.0, 5.0)),
        *(line for process in (0, 1) for line in steps(process, 8.0, 9.0, 1, members=[0, 1])),
        *(line for process in (2, 3) for line in steps(process, 12.0, 13.0, 1, members=[2, 3])),
    ]
    assert verdicts(lines, facts()) == {Verdict.TWO_JOBS}


def test_an_old_iteration_beside_a_new_one_is_found() -> None:
    """Processes 2 and 3 have not noticed that the others have gone on without them."""
    lines = [
        *(line for process in (0, 1) for line in steps(process, 1.0, 5.0)),
        *(line for process in (2, 3) for line in steps(process, 1.0, 12.0)),
        *(line for process in (0, 1) for line in steps(process, 8.0, 19.0, 1, members=[0, 1])),
    ]
    violations = judge(lines, facts(), LIMITS)
    assert [violation.verdict for violation in violations] == [Verdict.TWO_JOBS]
    assert "processes [2, 3] of the first work until 11.90 s" in violations[0].text


@pytest.mark.parametrize(("late_steps", "found"), [(2, False), (3, True)])
def test_steps_that_buffers_explain_are_no_work(late_steps: int, found: bool) -> None:
    """Process 3 was stopped, and goes on at 14 s."""
    lines = [*good_restart(), *steps(3, 14.0, 14.0 + late_steps / 10)]
    assert bool(verdicts(lines, facts())) is found


def test_what_a_process_does_before_the_others_go_on_is_no_violation() -> None:
    lines = [*good_restart(), *steps(3, 5.0, 8.4)]
    assert judge(lines, facts(), LIMITS) == []


def test_two_processes_with_one_number_in_one_group_are_found() -> None:
    lines = [*steps(0, 1.0, 5.0), *steps(1, 1.0, 5.0, rank=0)]
    assert verdicts(lines, facts()) == {Verdict.TWO_OF_ONE_RANK}


def test_who_has_left_may_be_replaced() -> None:
    """Process 3 becomes rank 0 after process 0 has ended."""
    lines = [*steps(0, 1.0, 5.0), *steps(3, 5.1, 9.0, 1, rank=0, members=[1, 2, 3])]
    assert judge(lines, facts(), LIMITS) == []


def test_who_works_without_the_server_is_found() -> None:
    """The two others are lost, and the server with them; these should have left."""
    lines = [line for process in (2, 3) for line in steps(process, 8.0, 11.0, 1, members=[2, 3])]
    apart = Apart(frozenset({2, 3}), 5.0)
    assert verdicts(lines, facts(apart=[apart])) == {Verdict.WITHOUT_SERVER}
    assert verdicts([line for line in lines if line.time < 9.35], facts(apart=[apart])) == {Verdict.WITHOUT_SERVER}
    assert verdicts([line for line in lines if line.time < 9.25], facts(apart=[apart])) == set()
    assert verdicts(lines, facts(apart=[replace(apart, end=7.5)])) == set()
    assert verdicts(lines, facts(apart=[apart], stopped=[Stopped(2, 5.0, 7.5), Stopped(3, 5.0, 7.5)])) == set()
    assert verdicts(done(2, 9.5), facts(apart=[apart])) == {Verdict.WITHOUT_SERVER}


def test_a_hang_is_found() -> None:
    about = facts((20.0, 20.0, 20.0, 17.0))
    violations = judge(good_restart(), about, IMPATIENT)
    assert [str(violation) for violation in violations] == ["hang: process 3 makes no step for 12.1 s, since 4.90 s"]
    assert judge(good_restart(), replace(about, stopped=[Stopped(3, 6.0, 9.0)]), IMPATIENT) == []


def test_a_process_that_has_written_nothing_hangs() -> None:
    violations = judge([], facts((9.0, 9.0, 9.0, 11.0)), IMPATIENT)
    assert [str(violation) for violation in violations] == ["hang: process 3 makes no step for 11.0 s, since 0.00 s"]


def test_a_process_that_has_not_ended_is_found() -> None:
    lines = steps(0, 1.0, 29.0)
    violations = judge(lines, facts(ends=()), LIMITS)
    assert "hang: process 0 still runs at 30.00 s" in [str(violation) for violation in violations]


def test_a_survivor_that_does_not_complete_is_found() -> None:
    about = facts((20.0, 20.0, 20.0, 5.0), must_finish=ALL)
    violations = judge(good_restart(), about, LIMITS)
    assert [str(v) for v in violations] == [
        "not finished: process 3, the last of which is 'step'; exit code 0 at 5.00 s"
    ]


def test_a_process_that_is_left_behind_is_found() -> None:
    assert verdicts([], facts((1.0,) * 4, left={2: [4711]})) == {Verdict.LEFT_BEHIND}


def test_the_published_steps_form_one_branch() -> None:
    branch = [Published(10, "b", (5, "a")), Published(20, "c", (10, "b")), Published(25, "d", (20, "c"))]
    ended = facts((1.0,) * 4)
    assert verdicts([], replace(ended, published=branch)) == set()
    other_way = [*branch, Published(30, "e", (20, "c"))]
    assert verdicts([], replace(ended, published=other_way)) == {Verdict.TWO_BRANCHES}
    again = [replace(branch[0], save="x"), *branch[1:]]
    assert verdicts([], replace(ended, published=again)) == {Verdict.TWO_BRANCHES}
