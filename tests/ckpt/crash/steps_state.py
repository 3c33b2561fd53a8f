"""What the model of the steps of a root is about: a root as storage has it, and what must hold."""

from __future__ import annotations

import enum
from typing import NamedTuple


class Kind(enum.Enum):
    """The kind of storage that a root is in."""

    DIRECTORY = "directory"
    STORE = "store"


class Bug(enum.Enum):
    """Deliberate mistakes."""

    ADOPT_BEFORE_CLAIM = "an owner decides what is left before it claims the root"
    LOOK_BEFORE_INTENT = "the token is looked at before the intent is made, when the directory is there"
    NO_LOOK_AT_BEGIN = "a save begins without a look at the token"
    NO_LOOK_AT_PUBLISH = "a save is published without a look at the token"
    RECORD_BEFORE_DATA = "a save is published before all of its parts are there"
    NO_LOOK_AFTER_PUBLISH = "whoever creates the record of a step does not look whether its files are there"
    TAKE_IN_WITHOUT_LOOK = "the same of a copied step"
    TAKE_IN_TWICE = "a copied step is published beside the one that has its number"
    CHANGE_AT_ONCE = "a published step is changed by one rename or record"
    NO_LOOK_AFTER_MARK = "an owner goes on to change a step without a second look at the token"
    NO_UNDO = "an owner leaves steps alone that an earlier one has begun to change"
    IGNORE_PINS = "a step is removed without a look at pins"
    PINS_BEFORE_MARK = "a step is marked, and pins are not looked at again"
    PIN_WITHOUT_LOOK = "whoever pins a step does not look whether it is still there"
    BACK_UNSEEN = "a step is published again without a look at what later owners have published"
    BACK_SEEN_ONCE = "whoever publishes a step again does not look a second time"
    SUPERSEDE_BEFORE_ONLY = "an owner does not look for other steps again when it has published its own"
    SUPERSEDE_ONCE = "an owner whose change another one was faster than does not look again"


class Save(NamedTuple):
    """A save, the step it is of, the token of its owner, and the step that it continues.

    `version` is the number of its newest record, -1 without one; `by` the token of the owner that changes it, to `to`.
    `made`: its directory is there; `parts` are those of `ranks` ranks that are there.
    """

    step: int
    token: int
    continues: int = 0
    state: str = "none"
    version: int = -1
    to: str = ""
    by: int = 0
    made: bool = False
    intent: bool = False
    parts: frozenset[int] = frozenset()
    ranks: int = 1

    @property
    def is_decided(self) -> bool:
        return self.state != "none"

    @property
    def whole(self) -> bool:
        return self.intent and len(self.parts) == self.ranks

    @property
    def is_listed(self) -> bool:
        """Whether readers find the step. In a directory a step that is being changed has another name."""
        return self.state in ("published", "copied") or (self.state == "changing" and self.version >= 0)

    def is_late(self, token: int) -> bool:
        """Whether writers of an owner before that with `token` have put files of a save that never began."""
        return self.state == "none" and self.token < token and bool(self.parts) and not self.intent

    def without_files(self) -> Save:
        return self._replace(intent=False, parts=frozenset())


class Root(NamedTuple):
    """What all processes share.

    `top` is the newest token, `owner` the newest that is not of a restore; `pins` are steps, `leases` saves that are
    read.

    Not part of any file: `running` are the owners that have not ended, and `crashed` says whether one has died; `told`
    are the saves that a trainer believes published, until an owner lets them go; `pinned` the saves that a pinner
    believes pinned; `settled` is the highest token whose owner relies on what it has found, and `relied` the saves
    that this one has found.
    """

    saves: tuple[Save, ...]
    running: tuple[bool, ...] = ()
    top: int = 1
    owner: int = 1
    leases: frozenset[int] = frozenset()
    pins: frozenset[int] = frozenset()
    told: frozenset[int] = frozenset()
    pinned: frozenset[int] = frozenset()
    settled: int = 0
    relied: frozenset[int] = frozenset()
    crashed: bool = False
    problem: str = ""

    def with_save(self, number: int, save: Save) -> Root:
        return self._replace(saves=(*self.saves[:number], save, *self.saves[number + 1 :]))

    def ended(self, number: int) -> Root:
        return self._replace(running=(*self.running[:number], False, *self.running[number + 1 :]))

    def wrong(self, problem: str) -> Root:
        return self._replace(problem=self.problem or problem)

    def listed(self, step: int) -> int | None:
        """The save that readers find as a step: of two that of the later owner, and none that is only copied."""
        found = [(s.state != "copied", s.token, n) for n, s in enumerate(self.saves) if s.step == step and s.is_listed]
        return max(found)[2] if found else None

    def is_listed(self, step: int) -> bool:
        return any(save.step == step and save.is_listed and save.state != "copied" for save in self.saves)

    def named(self, step: int) -> int | None:
        """The save whose directory has the name of a step, or else that which was copied as it."""
        found = [(s.state == "published", n) for n, s in enumerate(self.saves) if s.step == step]
        found = [each for each in found if self.saves[each[1]].state in ("published", "copied")]
        return max(found)[1] if found else None

    def pending(self, token: int) -> list[int]:
        """The undecided saves of owners before that with `token`."""
        return [
            n
            for n, save in enumerate(self.saves)
            if save.state == "none" and (save.made or save.intent) and save.token < token
        ]

    def decided(self, number: int, state: str) -> Root:
        """The first decision about a save."""
        save = self.saves[number]
        after = self.with_save(number, save._replace(state=state, version=0, made=True))
        if state == "published" and save.token < self.settled and save.intent and save.state == "none":
            after = after.wrong(f"save {number} is published after the owner {self.settled} has decided all")
        return after

    def changed(self, number: int, state: str, to: str = "", by: int = 0) -> Root:
        """The next decision about a published step."""
        save = self.saves[number]
        return self.with_save(number, save._replace(state=state, version=save.version + 1, to=to, by=by))

    def let_go(self, number: int, state: str, token: int) -> Root:
        """A published step is removed or superseded, for good, by the owner with `token`."""
        after = self.changed(number, state)._replace(told=self.told - {number})
        if number in self.pinned and state == "removed":
            after = after.wrong(f"step {self.saves[number].step} is removed, and was told to be pinned")
        if number in self.relied and token < self.settled and state == "removed":
            after = after.wrong(f"save {number} is removed after the owner {self.settled} has found it")
        return after

    def settled_by(self, token: int) -> Root:
        """An owner has decided everything, and relies on the steps that it finds."""
        found = frozenset(n for n, save in enumerate(self.saves) if save.is_listed)
        return self._replace(settled=max(self.settled, token), relied=found if token >= self.settled else self.relied)

    def is_left(self, step: int, token: int) -> bool:
        """Whether an owner after that with `token` has published steps of a branch without this step."""
        later = [save for save in self.saves if save.is_listed and save.state != "copied" and save.token > token]
        return any(save.step <= step or save.continues < step for save in later)

    def what_is_wrong(self) -> str:
        """Say what is wrong when all owners have ended, and the last one has decided what they left."""
        steps = [save.step for save in self.saves if save.is_listed and save.state != "copied"]
        if len(steps) != len(set(steps)):
            return f"two saves are published as one step: {steps}"
        for number, save in enumerate(self.saves):
            if save.state == "changing":
                return f"save {number} is being changed, by an owner that has ended"
            if save.is_listed and not save.whole:
                return f"save {number} is published without its files"
            if save.state == "none" and (save.intent or save.parts):
                return f"save {number} is undecided"
            if not self.crashed and save.is_listed and self.is_left(save.step, save.token):
                return f"save {number} is published, and a later owner has left its branch"
            if number in self.told and save.state not in ("published", "superseded"):
                return f"save {number} was told to be published, and is {save.state}"
        return ""


def check(root: Root) -> str | None:
    """Return the violated invariants."""
    return root.problem or None
