"""What the model of the ownership protocol is about: a root as storage has it, and what must always be true of it."""

from __future__ import annotations

import enum
from collections.abc import Iterator
from typing import NamedTuple


class Bug(enum.Enum):
    """Deliberate mistakes."""

    ADOPT_WITHOUT_CLAIM = "a restore decides about pending saves of a dead owner without claiming the root"
    CLAIM_ON_AN_OLD_VIEW = "a restore claims whatever token comes next, not that after the owner it has looked up"
    NO_LOOK_AT_PUBLISH = "the coordinator renames without looking at the token"
    LOOK_BEFORE_MAKING = "the coordinator looks at the token before it makes directory and intent, not after"
    VERIFY_BEFORE_READING = "a reader looks at intent.json before it reads, not after"
    OVERWRITE_WITH_INTENT = "files of a removed step are written over while its intent.json is still there"
    FENCED_WRITER_ABANDONS = "a writer that sees a newer token abandons its save"
    DECIDE_EVERYTHING = "an owner decides about pending saves of later owners, too"
    SUPERSEDE_FIRST = "an owner moves newer steps aside before it has a save to put in their place"
    REMOVE_UNSEEN = "retention deletes what it has moved without another look at the token"


class Place(enum.IntEnum):
    """Where a directory is."""

    NOWHERE = 0
    PENDING = 1
    PUBLISHED = 2
    ABANDONED = 3  # by a restore, or by a fenced writer
    GIVEN_UP = 4  # by its own trainer, by an owner that goes on from an older step, or because its step is there
    ASIDE = 5  # in .superseded
    MOVED = 6  # on its way out, or aside: renamed to a name from which nothing deletes
    RETIRED = 7  # may be taken by a save, which writes over its files
    DELETED = 8


class Life(enum.IntEnum):
    """What the leases of an owner say, when they are right."""

    GONE = 0
    FINISHING = 1
    ACTIVE = 2


class Save(NamedTuple):
    """What the name and the intent of a save say. `token` is that of the owner it is of."""

    step: int
    token: int
    job: int


class Dir(NamedTuple):
    """A directory with the files of one save, or of several in turn.

    `intent` is the save that its intent.json names, -1 without one; `files` are the saves whose bytes the file of each
    rank has; `parts` are the ranks whose part is there; `mover` is the token of the owner that moved it out of the way.
    """

    place: Place = Place.NOWHERE
    save: int = -1
    intent: int = -1
    files: tuple[int, ...] = ()
    parts: frozenset[int] = frozenset()
    mover: int = 0

    @property
    def complete(self) -> bool:
        return self.intent == self.save and len(self.parts) == len(self.files)


class Root(NamedTuple):
    """What all processes share. `top` is the highest token and `owner` the job that has it, -1 after a release.

    Not part of any file: `started` is the number of jobs that have started (they are all alike, so the first is always
    number 0), `lives` is what leases say of each job, `stalled` are the live jobs whose leases have expired
    once, `settled` is the highest token whose owner relies on what it has found, `told` are the saves that a trainer
    believes published, unless removed by retention or superseded. `problem` is a mistake that an act has made.
    """

    dirs: tuple[Dir, ...]
    saves: tuple[Save, ...]
    lives: tuple[Life, ...]
    started: int = 0
    top: int = 0
    owner: int = -1
    stalled: frozenset[int] = frozenset()
    settled: int = 0
    told: frozenset[int] = frozenset()
    problem: str = ""

    def having(self, place: Place) -> Iterator[tuple[int, Dir]]:
        """The directories in a place, with their numbers."""
        return ((number, d) for number, d in enumerate(self.dirs) if d.place is place)

    def published(self) -> dict[int, int]:
        """The published steps, and the directory of each."""
        return {self.saves[d.save].step: number for number, d in self.having(Place.PUBLISHED)}

    def is_alive(self, job: int) -> bool:
        """Whether anything of the job lives; -1 is no job."""
        return job >= 0 and self.lives[job] is not Life.GONE

    def pending_of(self, save: int) -> int | None:
        """The directory of a pending save."""
        return next((number for number, d in self.having(Place.PENDING) if d.save == save), None)

    def misplaced(self) -> list[int]:
        """Directories that an earlier owner has moved out of the way, without a look at the token since."""
        return [number for number, d in self.having(Place.MOVED) if d.mover < self.top]

    def with_dir(self, number: int, d: Dir) -> Root:
        return self._replace(dirs=(*self.dirs[:number], d, *self.dirs[number + 1 :]))

    def moved(self, number: int, place: Place, mover: int = 0) -> Root:
        """Renamed. What is never read again has no content."""
        d = self.dirs[number]._replace(place=place, mover=mover)
        if place in (Place.ABANDONED, Place.GIVEN_UP, Place.DELETED):
            d = d._replace(intent=-1, files=(-1,) * len(d.files), parts=frozenset())
        return self.with_dir(number, d)

    def put_back(self, number: int) -> Root:
        """Under its name again, unless that is taken meanwhile."""
        save = self.dirs[number].save
        if self.saves[save].step in self.published():
            return self.moved(number, Place.ASIDE)._replace(told=self.told - {save})
        return self.moved(number, Place.PUBLISHED)

    def wrong(self, problem: str) -> Root:
        return self._replace(problem=self.problem or problem)

    def publish(self, number: int, adopter: int | None = None) -> Root:
        """The commit, by the save's own job or by a later owner with the token `adopter`."""
        d = self.dirs[number]
        token = self.saves[d.save].token
        after = self.moved(number, Place.PUBLISHED)
        if d.files != (d.save,) * len(d.files) or not d.complete:
            after = after.wrong(f"save {d.save} is published with the files {d.files} and the parts {set(d.parts)}")
        if token < self.settled:
            after = after.wrong(
                f"save {d.save} of token {token} is published after the owner {self.settled} has relied on there being "
                "no more"
            )
        if adopter is not None and adopter <= token:
            after = after.wrong(f"save {d.save} of token {token} is adopted with the token {adopter}")
        return after


def check(root: Root) -> str | None:
    """Return the violated invariants."""
    if root.problem:
        return root.problem
    steps: dict[int, int] = {}
    moved = {d.save for _, d in root.having(Place.MOVED)}
    intact = {root.dirs[n].save for place in (Place.PUBLISHED, Place.MOVED, Place.ASIDE) for n, _ in root.having(place)}
    for save in root.told:
        if save not in intact:
            return f"save {save} was told to be published, and is neither there nor removed by a later owner"
        step = root.saves[save].step
        if save in moved:
            continue  # its owner, or the next one, finds that the step is another one by then
        if step in steps:
            return f"the saves {save} and {steps[step]} were both told to be published as step {step}"
        steps[step] = save
    numbers = [root.saves[d.save].step for _, d in root.having(Place.PUBLISHED)]
    if len(numbers) != len(set(numbers)):
        return f"two directories have the name of one step: {numbers}"
    places = (Place.PUBLISHED, Place.PENDING, Place.ASIDE, Place.MOVED)
    if not any(d.complete for place in places for _, d in root.having(place)):
        return "no whole step is left"
    return None


def check_without_crashes(root: Root) -> str | None:
    """Like `check`; also, there is a step, or one about to be: a complete save, or one that will be put back.

    Not if a writer dies between its last two renames, or if a third job claims the root between them. It has moved
    steps aside then, and does not publish its own.
    """
    there = any(d.complete for place in (Place.PUBLISHED, Place.PENDING) for _, d in root.having(place))
    if not there and not any(root.having(Place.MOVED)):
        return "no step is left that a start could find"
    return check(root)
