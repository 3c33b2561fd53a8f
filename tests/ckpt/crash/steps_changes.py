"""An owner in the model of the steps of a root: how it publishes a save, and changes steps that are published."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

from tests.ckpt.crash.steps_state import Bug, Kind, Root

_FIRST = {
    "claim": "claims",
    "recover": "recovers",
    "decide": "lists_copied",
    "save": "begins",
    "remove": "begins_removal",
    "look": "looks",
}


class Owner(NamedTuple):
    """An owner: what it does next, and what it remembers.

    `place` is where it is in its program, `save` the save that it is about, `version` the number of the record of it
    that was read; `todo` are saves that it has listed, `seen` those whose step has another save; `back` is what it does
    when it has published a save, or published one again; `to` is what it changes a step to.
    """

    pc: str = ""
    place: int = 0
    token: int = 0
    is_restore: bool = False
    save: int = -1
    version: int = -1
    todo: tuple[int, ...] = ()
    seen: frozenset[int] = frozenset()
    back: str = ""
    to: str = ""

    def ended(self) -> Owner:
        return Owner("ended")


@dataclass(frozen=True)
class Changes:
    """The acts of one owner that are about published steps."""

    number: int
    program: tuple[tuple[str, int], ...]
    kind: Kind
    crashes: bool
    bugs: frozenset[Bug]
    last: bool

    @property
    def name(self) -> str:
        return "ABCD"[self.number]

    def first(self) -> Owner:
        """An owner that does not begin with a claim has the token 1."""
        own = not any(op in ("claim", "recover") for op, _ in self.program)
        return Owner(_FIRST[self.program[0][0]], token=1 if own else 2 if self.program[0][0] == "decide" else 0)

    def following(self, job: Owner) -> Owner:
        """The owner at the next part of its program."""
        place = job.place + 1
        while place < len(self.program) and self.program[place][0] == "supersede":
            place += 1
        if place == len(self.program):
            return job.ended()
        return Owner(_FIRST[self.program[place][0]], place, job.token, job.is_restore)

    def is_fenced(self, job: Owner, root: Root) -> bool:
        """Whether another owner is there. The claim of a restore is none, and is itself over with the next claim."""
        return root.top != job.token if job.is_restore else root.owner > job.token

    def of(self, job: Owner) -> int:
        """The save, or the step, that this part of the program is about."""
        return self.program[job.place][1]

    def given_up(self, job: Owner) -> Owner:
        """The owner when its save was decided by another one."""
        return job.ended()

    # -- publish -------------------------------------------------------------------------------------------------------

    def _publishes(self, job: Owner, root: Root) -> Iterator[tuple[str, Owner, Root]]:
        if not self.is_fenced(job, root) or Bug.NO_LOOK_AT_PUBLISH in self.bugs:
            then = "lists_records" if self.kind is Kind.STORE else "commits"
            yield "looks at the token", job._replace(pc=then), root
        else:
            yield "looks at the token: fenced", job.ended(), root

    def _lists_records(self, job: Owner, root: Root) -> Iterator[tuple[str, Owner, Root]]:
        save = root.saves[job.save]
        if save.is_decided:
            yield "lists the records: decided", self._published(job), self._told(job, root)
        elif root.is_listed(save.step):
            yield "lists the records: the step is there", *self._refused(job, root)
        else:
            yield "lists the records", job._replace(pc="commits"), root

    def _refused(self, job: Owner, root: Root) -> tuple[Owner, Root]:
        """Another save has the step. Only what an owner adopts may be refused, and what comes late."""
        if job.back:
            return job._replace(pc="abandons"), root
        again = self.lists_again(job, root)
        if again is not None:
            return again, root
        other = root.listed(root.saves[job.save].step)
        comes_late = other is not None and not root.saves[other].intent  # its process is about to withdraw it
        if not self.is_fenced(job, root) and not comes_late:
            root = root.wrong(f"save {job.save} of the newest owner is refused: another one is published as its step")
        return job.ended(), root

    def lists_again(self, job: Owner, root: Root) -> Owner | None:
        """The owner that moves steps of another branch aside a second time, which were put back meanwhile; or None."""
        other = root.named(root.saves[job.save].step) if self.kind is Kind.DIRECTORY else None
        is_earlier = other is not None and root.saves[other].token < job.token
        retries = ("supersede", 0) in self.program and Bug.SUPERSEDE_ONCE not in self.bugs
        return job._replace(pc="lists_others") if is_earlier and retries else None

    def _commits(self, job: Owner, root: Root) -> Iterator[tuple[str, Owner, Root]]:
        save = root.saves[job.save]
        if save.is_decided or (self.kind is Kind.DIRECTORY and not save.intent):
            yield f"finds save {job.save} decided", self._published(job), self._told(job, root)
        elif self.kind is Kind.DIRECTORY and root.named(save.step) is not None:
            yield "finds the name taken", *self._refused(job, root)
        else:
            after = root.decided(job.save, "published")
            if save.intent and not save.whole:
                after = after.wrong(f"save {job.save} is published without its files")
            keeps = self.kind is Kind.STORE and Bug.NO_LOOK_AFTER_PUBLISH not in self.bugs
            then = job._replace(pc="keeps") if keeps else self._published(job)
            yield f"publishes save {job.save}", then, after if keeps else self._told(job, after)

    def _keeps(self, job: Owner, root: Root) -> Iterator[tuple[str, Owner, Root]]:
        """The look whether the files of the step are there, after its record was created."""
        then = self._published(job)
        if root.saves[job.save].intent:
            yield "looks at the intent", then, self._told(job, root)
        else:
            yield "looks at the intent: it is gone", job._replace(pc="withdraws"), root

    def _withdraws(self, job: Owner, root: Root) -> Iterator[tuple[str, Owner, Root]]:
        there = root.saves[job.save].version >= 0
        after = root.changed(job.save, "removed") if there else root
        yield f"withdraws save {job.save}", self._published(job), after

    def _published(self, job: Owner) -> Owner:
        """The owner behind a commit: of a copied step, of an adopted save, or of its own."""
        if job.back in ("takes_in", "decides", "undoes"):
            return job._replace(pc=job.back, save=-1, version=-1, back="")
        if ("supersede", 0) in self.program and Bug.SUPERSEDE_BEFORE_ONLY not in self.bugs:
            return job._replace(pc="lists_others", back="done")
        return self.following(job)

    def _told(self, job: Owner, root: Root) -> Root:
        there = root.saves[job.save].is_listed and job.back == ""
        return root._replace(told=root.told | {job.save}) if there else root

    # -- supersede, remove ---------------------------------------------------------------------------------------------

    def _lists_others(self, job: Owner, root: Root) -> Iterator[tuple[str, Owner, Root]]:
        """The steps of earlier owners that are newer than the one which this save continues."""
        base = root.saves[job.save].continues
        others = [n for n, s in enumerate(root.saves) if s.is_listed and s.step > base and s.token < job.token]
        listed = job._replace(pc="supersedes", todo=tuple(others))
        if others or job.back:
            yield "lists other steps", listed, root
        else:
            yield from self._supersedes(listed, root)

    def _supersedes(self, job: Owner, root: Root) -> Iterator[tuple[str, Owner, Root]]:
        if not job.todo and job.back == "done":
            yield "has superseded all", self.following(job), root
        elif not job.todo:
            yield from self._publishes(job._replace(pc="publishes"), root)
        elif not self.is_fenced(job, root):
            then = "finds_other" if self.kind is Kind.STORE else "marks"
            yield "looks at the token", job._replace(pc=then, to="superseded"), root
        else:
            yield "looks at the token: fenced", job.ended(), root

    def _finds_other(self, job: Owner, root: Root) -> Iterator[tuple[str, Owner, Root]]:
        other = job.todo[0]
        if root.saves[other].is_listed:
            version = root.saves[other].version
            yield f"finds save {other}", job._replace(pc="marks", version=version), root
        else:
            yield f"does not find save {other}", job._replace(pc="supersedes", todo=job.todo[1:]), root

    def _begins_removal(self, job: Owner, root: Root) -> Iterator[tuple[str, Owner, Root]]:
        if self.is_fenced(job, root):
            yield "looks at the token: fenced", job.ended(), root
        else:
            yield "looks at the token", job._replace(pc="lists_steps"), root

    def _lists_steps(self, job: Owner, root: Root) -> Iterator[tuple[str, Owner, Root]]:
        number = root.listed(self.of(job))
        if number is None:
            yield "finds no step to remove", self.following(job), root
        else:
            listed = job._replace(pc="looks_at_readers", todo=(number,), version=root.saves[number].version)
            yield f"lists save {number}", listed, root

    def _looks_at_readers(self, job: Owner, root: Root) -> Iterator[tuple[str, Owner, Root]]:
        if job.todo[0] in root.leases:
            yield "looks at the readers: it is read", self.following(job), root
        else:
            yield "looks at the readers", job._replace(pc="looks_at_pins"), root

    def _looks_at_pins(self, job: Owner, root: Root) -> Iterator[tuple[str, Owner, Root]]:
        if self.of(job) in root.pins and Bug.IGNORE_PINS not in self.bugs:
            yield "looks at the pins: pinned", self.following(job), root
        else:
            yield "looks at the pins", job._replace(pc="marks", to="removed"), root

    # -- the change ----------------------------------------------------------------------------------------------------

    def _marks(self, job: Owner, root: Root) -> Iterator[tuple[str, Owner, Root]]:
        number: int | None = job.todo[0]
        assert number is not None
        step = root.saves[number].step
        if self.kind is Kind.DIRECTORY:
            number = root.named(step)  # whatever has the name now
        elif root.saves[number].version != job.version:
            number = None
        if number is None:
            yield f"does not find step {step}", self._lost(job), root
        elif Bug.CHANGE_AT_ONCE in self.bugs:
            yield f"changes save {number}", self._unmarked(job), root.let_go(number, job.to, job.token)
        else:
            marked = root.changed(number, "changing", job.to, job.token)
            if self.kind is Kind.DIRECTORY:
                marked = marked.with_save(number, marked.saves[number]._replace(version=-1))
            removes = job.to == "removed" and not self.bugs & {Bug.IGNORE_PINS, Bug.PINS_BEFORE_MARK}
            after = job._replace(pc="looks_again" if removes else "checks_again", save=number)
            yield f"marks save {number}", after._replace(version=marked.saves[number].version), marked

    def _lost(self, job: Owner) -> Owner:
        """The owner when another one has changed the step before: it looks again if that is in its way."""
        if self.kind is Kind.STORE and job.to == "superseded" and Bug.SUPERSEDE_ONCE not in self.bugs:
            return job._replace(pc="supersedes", version=-1)
        return self._unmarked(job)

    def _looks_again(self, job: Owner, root: Root) -> Iterator[tuple[str, Owner, Root]]:
        if self.of(job) in root.pins:
            yield "looks at the pins: pinned", job._replace(pc="looks_back", back="gives_up"), root
        else:
            yield "looks at the pins", job._replace(pc="checks_again"), root

    def _checks_again(self, job: Owner, root: Root) -> Iterator[tuple[str, Owner, Root]]:
        if not self.is_fenced(job, root) or Bug.NO_LOOK_AFTER_MARK in self.bugs:
            yield "looks at the token", job._replace(pc="changes"), root
        else:
            yield "looks at the token: fenced", job._replace(pc="looks_back", back="is_fenced"), root

    def _changes(self, job: Owner, root: Root) -> Iterator[tuple[str, Owner, Root]]:
        save = root.saves[job.save]
        if save.state != "changing" or save.version != job.version or save.by != job.token:
            yield f"does not find save {job.save}", self._lost(job), root
        else:
            yield f"changes save {job.save}", self._unmarked(job), root.let_go(job.save, job.to, job.token)

    def _unmarked(self, job: Owner) -> Owner:
        """The owner when a change is over."""
        if job.to == "removed":
            return self.following(job)
        return job._replace(pc="supersedes", todo=job.todo[1:], save=self.of(job), version=-1, to="")

    # -- publish again -------------------------------------------------------------------------------------------------

    def _looks_back(self, job: Owner, root: Root) -> Iterator[tuple[str, Owner, Root]]:
        save = root.saves[job.save]
        left = root.is_left(save.step, max(save.token, save.by))
        if left and Bug.BACK_UNSEEN not in self.bugs:
            yield "looks at the branch: it is left", job._replace(pc="puts_aside"), root
        else:
            yield "looks at the branch", job._replace(pc="puts_back"), root

    def _puts_back(self, job: Owner, root: Root) -> Iterator[tuple[str, Owner, Root]]:
        save = root.saves[job.save]
        directory = self.kind is Kind.DIRECTORY
        if save.state != "changing" or save.version != job.version:
            yield f"does not find save {job.save}", self._undone(job), root
        elif directory and root.named(save.step) is not None:
            yield "finds the name taken", job._replace(pc="puts_aside"), root
        else:
            after = root.changed(job.save, "published")
            looks = not self.bugs & {Bug.BACK_UNSEEN, Bug.BACK_SEEN_ONCE}
            seen = job._replace(pc="looks_after", version=after.saves[job.save].version)
            yield f"publishes save {job.save} again", seen if looks else self._undone(job), after

    def _looks_after(self, job: Owner, root: Root) -> Iterator[tuple[str, Owner, Root]]:
        save = root.saves[job.save]
        if root.is_left(save.step, max(save.token, save.by)):
            yield "looks at the branch: it is left", job._replace(pc="puts_aside"), root
        else:
            yield "looks at the branch", self._undone(job), root

    def _puts_aside(self, job: Owner, root: Root) -> Iterator[tuple[str, Owner, Root]]:
        save = root.saves[job.save]
        if self.kind is Kind.DIRECTORY and save.state == "published":  # whatever has the name now
            named = root.named(save.step)
            moved = root if named is None else root.let_go(named, "superseded", job.token)
            yield f"puts step {save.step} aside", self._undone(job), moved
        elif save.version != job.version or save.state not in ("changing", "published"):
            yield f"does not find save {job.save}", self._undone(job), root
        else:
            yield f"puts save {job.save} aside", self._undone(job), root.let_go(job.save, "superseded", job.token)

    def _undone(self, job: Owner) -> Owner:
        """The owner when it has published a step again."""
        if job.back == "undoes":
            return job._replace(pc="undoes", save=-1, version=-1)
        return job.ended() if job.back == "is_fenced" else self.following(job)
