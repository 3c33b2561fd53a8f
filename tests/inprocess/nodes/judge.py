"""Decide, from what a job has written and how its processes ended, whether it was one job all the time.

Pure: journals in, violations out. What a *stint* is: all steps of one process in one iteration. What a *group* is: all
stints with the same iteration, world size and members, where a step has found out its members itself, by an all-reduce.

TWO_JOBS            An iteration has two groups; or processes work in two groups at a time.
TWO_OF_ONE_RANK     Two processes work as the same rank at a time.
WITHOUT_SERVER      A process works or completes after it has been unable to reach the server for longer than it may.
HANG                A process neither makes a step nor ends for longer than it may, or has not ended in the end.
NOT_FINISHED        A process that no fault concerns has not completed the function.
LEFT_BEHIND         A process that a rank has started has outlived all ranks.
TWO_BRANCHES        A published step of the checkpoint root does not continue the one before it.

*At a time*: of two stints the younger begins when the survivors of a fault, who have noticed it, make their first step.
What the older does later than `noticed_s` after that is *late*. A process cannot know that it was left behind before
it tries something, and what its peers had sent by then can complete up to `buffered_steps` all-reduces, in a process
that was stopped or cut off even much later. More late steps than these need peers that answer: then it works.
"""

from __future__ import annotations

import enum
import itertools
import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from tests.inprocess.nodes.journal import Line


class Verdict(enum.Enum):
    """What can be wrong."""

    TWO_JOBS = "two jobs"
    TWO_OF_ONE_RANK = "two processes of one rank"
    WITHOUT_SERVER = "went on without the server"
    HANG = "hang"
    NOT_FINISHED = "not finished"
    LEFT_BEHIND = "left behind"
    TWO_BRANCHES = "two branches"


@dataclass(frozen=True)
class Violation:
    """What is wrong, with processes and times."""

    verdict: Verdict
    text: str

    def __str__(self) -> str:
        return f"{self.verdict.value}: {self.text}"


@dataclass(frozen=True)
class Limits:
    """Limits, in seconds.

    `quiet_s`: how long a process may make no step. `alone_s`: how long it may work without the server.
    """

    quiet_s: float
    alone_s: float
    noticed_s: float = 0.5
    buffered_steps: int = 2


@dataclass(frozen=True)
class End:
    """When a process ended, and its exit code or minus the signal."""

    time: float
    code: int


@dataclass(frozen=True)
class Apart:
    """These initial ranks could not reach the server from `begin` to `end`."""

    processes: frozenset[int]
    begin: float
    end: float = math.inf


@dataclass(frozen=True)
class Stopped:
    """This initial rank did not run from `begin` to `end`."""

    process: int
    begin: float
    end: float = math.inf


@dataclass(frozen=True)
class Published:
    """A published step of a checkpoint root, and the step and save that it says it continues."""

    step: int
    save: str
    continues: tuple[int, str] | None


@dataclass(frozen=True)
class Facts:
    """What is known of a job without asking it. `now` is when the observation ended; all times are of one clock.

    `ends` of initial ranks, as far as they have ended. `must_finish`: initial ranks that no fault concerns. `left`: by
    initial rank, the processes that are left after the end of all ranks.
    """

    started: float
    now: float
    processes: frozenset[int]
    ends: Mapping[int, End] = field(default_factory=dict)
    apart: Sequence[Apart] = ()
    stopped: Sequence[Stopped] = ()
    must_finish: frozenset[int] = frozenset()
    left: Mapping[int, Sequence[int]] = field(default_factory=dict)
    published: Sequence[Published] = ()


@dataclass(frozen=True, order=True)
class _Group:
    """`members` is -1 where steps do not know them."""

    iteration: int
    world_size: int
    members: int

    def __str__(self) -> str:
        whole = range(self.members.bit_length()) if self.members > 0 else ()
        names = [process for process in whole if self.members >> process & 1]
        members = f" (processes {names})" if names else ""
        return f"iteration {self.iteration} of {self.world_size} ranks{members}"


@dataclass(frozen=True)
class _Stint:
    """The steps of one process in one group; `times` in order."""

    pid: int
    process: int
    rank: int
    group: _Group
    times: tuple[float, ...]


def judge(lines: Iterable[Line], facts: Facts, limits: Limits) -> list[Violation]:
    """Return all violations, each once; an empty list if the job was one job, and ended in time."""
    ordered = sorted(lines, key=lambda line: line.time)
    stints = _stints(ordered)
    return [
        *_two_jobs(stints, facts.started, limits),
        *_two_of_one_rank(stints, facts.started, limits),
        *_without_server(ordered, facts, limits),
        *_hangs(ordered, facts, limits),
        *_not_finished(ordered, facts),
        *(Violation(Verdict.LEFT_BEHIND, f"of process {p}: {list(pids)}") for p, pids in facts.left.items()),
        *_two_branches(facts.published),
    ]


def _stints(lines: Iterable[Line]) -> list[_Stint]:
    times: dict[tuple[int, int, int, _Group], list[float]] = defaultdict(list)
    for line in lines:
        if line.event == "step":
            assert line.rank is not None, line
            assert line.world_size is not None, line
            group = _Group(line.iteration, line.world_size, -1 if line.members is None else line.members)
            times[line.pid, line.process, line.rank, group].append(line.time)
    return [_Stint(*key, times=tuple(its)) for key, its in times.items()]


def _late(older: _Stint, begin: float, limits: Limits) -> list[float]:
    """The late steps of a stint beside one that has begun at `begin`, if there are more than buffers explain."""
    late = [time for time in older.times if time > begin + limits.noticed_s]
    return late if len(late) > limits.buffered_steps else []


def _two_jobs(stints: Sequence[_Stint], started: float, limits: Limits) -> Iterable[Violation]:
    by_group: dict[_Group, list[_Stint]] = defaultdict(list)
    for stint in stints:
        by_group[stint.group].append(stint)
    begins = {group: min(stint.times[0] for stint in its) for group, its in by_group.items()}
    for older, younger in itertools.combinations(sorted(begins, key=lambda group: (begins[group], group)), 2):
        begin = begins[younger]
        where = f"{older}, and from {begin - started:.2f} s on {younger}"
        if older.iteration == younger.iteration:
            yield Violation(Verdict.TWO_JOBS, f"{where}: one iteration has two groups")
        late = {
            stint.process: times[-1]
            for stint in by_group[older]
            if (times := _late(stint, begin, limits)) and stint.pid not in {other.pid for other in by_group[younger]}
        }
        if late:
            until = max(late.values()) - started
            yield Violation(
                Verdict.TWO_JOBS, f"{where}: processes {sorted(late)} of the first work until {until:.2f} s"
            )


def _two_of_one_rank(stints: Sequence[_Stint], started: float, limits: Limits) -> Iterable[Violation]:
    for one, other in itertools.combinations(stints, 2):
        older, younger = sorted((one, other), key=lambda stint: stint.times[0])
        if one.rank != other.rank or one.pid == other.pid:
            continue
        if late := _late(older, younger.times[0], limits):
            yield Violation(
                Verdict.TWO_OF_ONE_RANK,
                f"rank {older.rank} is process {older.process} ({older.group}) until {late[-1] - started:.2f} s, and "
                f"process {younger.process} ({younger.group}) from {younger.times[0] - started:.2f} s on",
            )


def _without_server(lines: Sequence[Line], facts: Facts, limits: Limits) -> Iterable[Violation]:
    """A process that does not run cannot leave either, so time while it is stopped does not count."""
    for apart in facts.apart:
        late: dict[int, list[Line]] = defaultdict(list)
        for line in lines:
            if line.process in apart.processes and line.event in ("step", "done") and apart.begin < line.time:
                alone = line.time - apart.begin - _stopped(facts, line.process, apart.begin, line.time)
                if line.time < apart.end and alone > limits.alone_s:
                    late[line.process].append(line)
        for process, its in sorted(late.items()):
            if len(its) > limits.buffered_steps or its[-1].event == "done":
                yield Violation(
                    Verdict.WITHOUT_SERVER,
                    f"process {process} cannot reach the server from {apart.begin - facts.started:.2f} s on, and works "
                    f"until {its[-1].time - facts.started:.2f} s",
                )


def _hangs(lines: Sequence[Line], facts: Facts, limits: Limits) -> Iterable[Violation]:
    seen: dict[int, list[float]] = {process: [facts.started] for process in facts.processes}
    for line in lines:
        if line.event in ("step", "done"):
            seen[line.process].append(line.time)
    for process, times in sorted(seen.items()):
        end = facts.ends.get(process)
        for before, after in itertools.pairwise([*times, end.time if end is not None else facts.now]):
            quiet = after - before - _stopped(facts, process, before, after)
            if quiet > limits.quiet_s:
                since = before - facts.started
                yield Violation(Verdict.HANG, f"process {process} makes no step for {quiet:.1f} s, since {since:.2f} s")
        if end is None:
            yield Violation(Verdict.HANG, f"process {process} still runs at {facts.now - facts.started:.2f} s")


def _stopped(facts: Facts, process: int, begin: float, end: float) -> float:
    """How much of a time a process was stopped, at most: stops that overlap count twice."""
    windows = [stop for stop in facts.stopped if stop.process == process]
    return sum(max(0.0, min(end, stop.end) - max(begin, stop.begin)) for stop in windows)


def _not_finished(lines: Sequence[Line], facts: Facts) -> Iterable[Violation]:
    done = {line.process for line in lines if line.event == "done"}
    for process in sorted(facts.must_finish - done):
        lasts = [line.event for line in lines if line.process == process][-1:] or ["nothing"]
        end = facts.ends.get(process)
        how = f"exit code {end.code} at {end.time - facts.started:.2f} s" if end is not None else "it runs"
        yield Violation(Verdict.NOT_FINISHED, f"process {process}, the last of which is {lasts[0]!r}; {how}")


def _two_branches(published: Sequence[Published]) -> Iterable[Violation]:
    """The oldest step may continue one that has been removed."""
    for before, after in itertools.pairwise(sorted(published, key=lambda its: its.step)):
        if after.continues != (before.step, before.save):
            yield Violation(
                Verdict.TWO_BRANCHES,
                f"step {after.step} ({after.save}) continues {after.continues}, and not step {before.step} "
                f"({before.save}), which is published",
            )
